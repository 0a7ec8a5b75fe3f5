"""A request to the planner: hosts or machine, model, and run."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent.base.options import InputError, RequestError
from contracts.job_config import ConfigError, read_mapping
from contracts.layout import values_of
from contracts.tables import read_texts
from planner.forecast import machines, models
from planner.forecast.machines import with_gpus
from planner.forecast.models import hub_id
from planner.forecast.specs import LengthsError, ModelSpec, TrainSpec, check_histogram
from planner.recommend import MeasuredStep
from probes.api import Snapshot
from topology.build import build
from topology.cluster import join
from topology.graph import ClusterTopology

if TYPE_CHECKING:
    from collectives.bench.results import Measurement


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request: the machine and the run. Without a model, only the environment is recommended.

    User options are declared in contracts/question.toml; its fields are members of this class or of TrainSpec.
    """

    hosts: tuple[Path, ...] = ()
    root: str = "/"
    machine: str | None = None
    nodes: int | None = None
    network: str | None = None  # "100G": rate of the network between nodes, overrides their own
    transport: str | None = None  # "rdma" or "tcp", for that network
    model: str | None = None
    train: TrainSpec = field(default_factory=TrainSpec)  # `steps` is the number of steps of the whole run
    tokens: int | None = None  # of the whole run, alternative to steps
    epochs: float | None = None  # of the whole run, alternative to steps: passes over the rows
    rows: int | None = None  # in the data set
    unmeasured: str = ""  # why the data set's rows were not measured
    price: str | None = None  # per node-hour: a number, or a YAML file with a number for each machine
    hours: float | None = None  # duration of the whole run; gives the number of steps
    ranks_per_node: int | None = None
    nccl_version: str | None = None
    bench_file: Path | None = None
    calibration: Path | None = None
    measured_step: tuple[str, float] | None = None  # layout as text, seconds
    shape: ModelSpec | None = None  # of the model, if read from its hub
    allow_files: bool = True  # whether `model` may be a file name; False over HTTP

    @classmethod
    def of(cls, **options: Any) -> Request:
        """Create a request from options named like members here or in TrainSpec, and `lengths`; ignore others."""
        return cls().changed(**options)

    def changed(self, **options: Any) -> Request:
        """Return a copy with these options; None leaves a TrainSpec member that cannot be None unchanged.

        Raises RequestError if `lengths` cannot be parsed.
        """
        run = {name: value for name, value in options.items()
               if name in _OF_RUN and (value is not None or _OF_RUN[name] is None)}  # fmt: skip
        if "lengths" in options:
            run["length_histogram"] = histogram_of(options["lengths"])
        own = {one.name for one in fields(self)} & options.keys()
        return replace(self, train=replace(self.train, **run), **{name: options[name] for name in own - {"train"}})


_OF_RUN = {one.name: one.default for one in fields(TrainSpec)}


def model_of(request: Request) -> ModelSpec | None:
    """Return the requested model: a known name, or a config.json if files are allowed."""
    if request.model is None or request.shape is not None:
        return request.shape
    path = Path(request.model)
    if request.allow_files and (path.suffix == ".json" or os.path.isdir(path)):
        try:
            return models.model_from_file(path)
        except models.ModelError as error:
            raise RequestError(f"--model {error}") from None
    try:
        return models.model_named(request.model)
    except models.ModelError as error:
        raise RequestError(str(error)) from None


def histogram_of(text: str | None) -> tuple[tuple[int, int], ...]:
    """Parse "64:900,512:100" as a length histogram. Raises RequestError that names the invalid part."""
    if not text:
        return ()
    rows = []
    for word in text.split(","):
        length, _, count = word.partition(":")
        if not (length.isdecimal() and count.isdecimal() and len(length) < 8 and len(count) < 12):
            raise RequestError(f"lengths={word!r}: must be TOKENS:ROWS, both whole numbers")
        rows.append((int(length), int(count)))
    try:
        return check_histogram(tuple(sorted(rows)))
    except LengthsError as error:
        raise RequestError(str(error)) from None


def rows_of(request: Request) -> int | None:
    """Return the number of rows in the data: the given number, else the sum of the length histogram."""
    if request.rows is not None:
        return request.rows
    return sum(count for _, count in request.train.length_histogram) or None


texts = read_texts(__file__, "texts.toml")
_MOST_PRICE = 1e9


def price_of(request: Request) -> float | None:
    """Return the price of a node-hour: the given number, or this machine's price in the given file; else None."""
    if request.price is None:
        return None
    prices = prices_of(request.price, files=request.allow_files)
    if isinstance(prices, float):
        return prices
    name = machines.machine(request.machine).name if request.machine else ""
    if name and name not in prices:
        raise RequestError(f"--price {request.price}: no price of {name}; it has {', '.join(prices) or 'none'}")
    return prices.get(name)


def prices_of(text: str, *, files: bool) -> float | dict[str, float]:
    """Parse "98.32" as a number, and a YAML file as one price for each catalogue machine that it names."""
    with contextlib.suppress(ValueError):
        return _price("price", float(text))
    if not files:
        raise RequestError(f"price={text[:40]!r}: must be a number, of a node-hour")
    try:
        raw = read_mapping(Path(text), once=True)
    except ConfigError as error:
        raise RequestError(f"--price {error}") from None
    found = {}
    for name, value in raw.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise RequestError(f"--price {text}: {name}: must be a number, of a node-hour")
        try:
            found[machines.machine(str(name)).name] = _price(str(name), float(value))
        except machines.MachineError as error:
            raise RequestError(f"--price {text}: {error}") from None
    return found


def _price(name: str, value: float) -> float:
    if not 0.0 <= value <= _MOST_PRICE:
        raise RequestError(f"{name}={value:g}: must be from 0 to {_MOST_PRICE:g}")
    return value


def measurements_of(request: Request) -> tuple[Measurement, ...]:
    """Return the measurements of the benchmark result that the request names; empty if it names none."""
    if request.bench_file is None:
        return ()
    from collectives.bench.results import read_result

    try:
        return read_result(request.bench_file).measurements
    except (OSError, ValueError) as error:
        raise RequestError(f"--bench {request.bench_file}: {error}") from None


def measured_step(request: Request) -> MeasuredStep | None:
    """Return the measured step given in the request. Raises LayoutError if its layout is invalid."""
    if request.measured_step is None:
        return None
    text, seconds = request.measured_step
    return values_of(text), seconds


def spans_nodes(request: Request, cluster: ClusterTopology) -> bool | None:
    """Return whether the job spans nodes; None for one node without a requested number: more can be added later."""
    return len(cluster.nodes) > 1 or (None if request.nodes is None else False)


def default_ranks(request: Request, cluster: ClusterTopology) -> int | None:
    """Return two gloo ranks for a host without GPUs, so that a layout exists; else one rank per GPU."""
    return None if request.machine or any(node.gpus for node in cluster.nodes) else 2


def cluster_of(request: Request, snapshots: Sequence[Snapshot], ranks: int | None = None) -> ClusterTopology:
    """Return the requested cluster, with the named network."""
    found = _nodes_of(request, snapshots, ranks)
    if request.network is not None:
        return machines.over_network(found, request.network, request.transport)
    if request.transport is not None:
        raise RequestError(f"transport {request.transport}: requires the rate of the network too, for example 100G")
    return found


def _nodes_of(request: Request, snapshots: Sequence[Snapshot], ranks: int | None) -> ClusterTopology:
    """Return the nodes: a catalogue machine, one host repeated, or the given hosts.

    `ranks` is the number of GPUs to use per node. Raises ValueError if a node has fewer GPUs.
    """
    if request.machine:
        return machines.cluster(request.machine, request.nodes or 1, gpus_per_node=ranks)
    nodes = [build(snapshot) for snapshot in snapshots]
    if ranks is not None:
        nodes = [with_gpus(node, ranks) if node.gpus else node for node in nodes]
    if request.nodes and request.nodes != len(nodes):
        if len(nodes) != 1:
            raise RequestError(f"--nodes {request.nodes} with {len(nodes)} hosts: give one host, or as many as nodes")
        nodes = [replace(nodes[0], hostname=f"{nodes[0].hostname}-{i}") for i in range(request.nodes)]
    return join(nodes)


# A child process counts the rows of the data set and measures them with the model's tokenizer, because this process
# must not import transformers. If the data or tokenizer is not available, the rows are unknown and the advice says why.

TIMEOUT_SECONDS = 120.0  # a data set may have to be downloaded first; a hub may not answer
EPOCHS = 3.0  # default of the job (contracts/default.yaml)
WRONG_DATA = 3  # exit code of finetune.rows if the rows are invalid, not the tokenizer or hub
_NAMES = (
    "dataset_name", "dataset_revision", "dataset_config", "dataset_train_split", "dataset_text_field", "dataset_rows",
    "tokenizer_name", "tokenizer_revision", "model_name_or_path", "model_revision", "chat_template",
    "completion_only_loss",
)  # fmt: skip


def with_rows(request: Request, settings: Mapping[str, Any]) -> Request:
    """Add the row lengths of the data set in the job's settings to the question, unless the user has given lengths.

    Data that the job generates is not measured. If the tokenizer is unknown or the data set cannot be read here, the
    question gets the reason. Raises InputError if rows on this host are invalid.
    """
    name = settings.get("dataset_name")
    if not isinstance(name, str) or name.startswith("synthetic:") or request.train.length_histogram:
        return request

    def words(why: str) -> str:
        return texts("unmeasured_rows", name=name, why=why, length=request.train.sequence_length)

    if name.startswith(("/", ".", "~")) and not os.path.exists(Path(name).expanduser()):
        return replace(request, unmeasured=words("not on this host"))
    named_settings = {key: settings[key] for key in _NAMES if settings.get(key) is not None}
    if "model_name_or_path" not in named_settings and "tokenizer_name" not in named_settings:
        tokenizer = hub_id(request.model) if request.model else None
        if tokenizer is None:
            why = f"no tokenizer of {request.model or 'the model'} is known"
            return replace(request, unmeasured=words(why))
        named_settings["tokenizer_name"] = tokenizer
    try:
        found = json.loads(ask_trainer("finetune.rows", text=json.dumps(named_settings)))
    except LookupError as error:
        return replace(request, unmeasured=words(str(error)))
    if not found["histogram"]:
        return replace(request.changed(rows=request.rows or found["rows"]), unmeasured=words(found["why"]))
    lengths = ",".join(f"{tokens}:{rows}" for tokens, rows in found["histogram"])
    return request.changed(lengths=lengths, rows=request.rows or found["rows"])


def for_whole_run(request: Request, settings: Mapping[str, Any]) -> Request:
    """Set the length of the run as in the job's settings: the number of steps, else epochs if the rows are known."""
    if settings.get("max_steps"):
        return request.changed(steps=settings["max_steps"])
    if rows_of(request) is None:
        return request
    return replace(request, epochs=float(settings.get("num_train_epochs") or EPOCHS))


def ask_trainer(module: str, *words: str, text: str = "") -> str:
    """Return the last line that a module of the trainer prints, in a child process.

    Raises LookupError if the child fails, InputError if it says that the rows are invalid.
    """
    command = [sys.executable, "-P", "-m", module, *words]
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise LookupError(f"no answer within {TIMEOUT_SECONDS:.0f} s") from None
    if done.returncode == WRONG_DATA:
        raise InputError(done.stderr.strip()[-600:])
    lines = (done.stderr if done.returncode else done.stdout).strip().splitlines()
    if done.returncode or not lines:
        raise LookupError(lines[-1][:800] if lines else f"exit code {done.returncode}")
    return lines[-1]
