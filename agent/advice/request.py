"""A request to the planner: hosts or machine, model, run, and settings of the job."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent.base import raise_as
from agent.base.options import RequestError, read_snapshots
from contracts.job_config import ConfigError, parse_layout_text, read_file, read_mapping
from planner.forecast import machines, models
from planner.forecast.specs import ModelSpec, PlanError, TrainSpec, check_histogram
from planner.nccl_env.situation import with_plugin
from planner.recommend import MeasuredStep
from probes.api import Snapshot
from probes.registry import ALL
from topology.build import build
from topology.cluster import join
from topology.graph import ClusterTopology

if TYPE_CHECKING:
    from collectives.bench.results import Measurement

_OF_RUN = {one.name: one.default for one in fields(TrainSpec)}
_MAX_PRICE = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request: the machine, the run and the job's settings. Without a model, only the environment is recommended.

    User options are declared in agent/base/question.toml; its fields are members of this class or of TrainSpec.
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
    unmeasured: str = ""  # reason that the data set's rows were not measured; empty if they were
    price: str | None = None  # per node-hour: a number, or a YAML file with a number for each machine
    hours: float | None = None  # duration of the whole run; gives the number of steps
    ranks_per_node: int | None = None
    nccl_version: str | None = None
    bench_file: Path | None = None
    calibration: Path | None = None
    measured_step: tuple[str, float] | None = None  # layout as text, seconds
    shape: ModelSpec | None = None  # of the model, if read from its hub
    allow_files: bool = True  # whether `model` may be a file name; False over HTTP
    config: Path | None = None  # YAML file with settings of the job
    file_settings: Mapping[str, Any] = field(default_factory=dict)  # its content
    overrides: tuple[str, ...] = ()  # NAME=VALUE: settings of the job that replace those of the file

    @classmethod
    def of(cls, **options: Any) -> Request:
        """Create a request from options named like members here or in TrainSpec, and `lengths`; ignore others.

        Raises RequestError if the file of `config` or `lengths` is invalid.
        """
        request = cls().changed(**options)
        return request if request.config is None else request.with_config(request.config)

    def with_config(self, path: Path) -> Request:
        """Return a copy with the settings in this file. Raises RequestError that names the file."""
        with raise_as(RequestError, ConfigError, "--config "):
            return replace(self, config=path, file_settings=read_file(path))

    def changed(self, **options: Any) -> Request:
        """Return a copy with these options; None leaves a TrainSpec member that cannot be None unchanged.

        Raises RequestError if `lengths` cannot be parsed.
        """
        run = {name: value for name, value in options.items()
               if name in _OF_RUN and (value is not None or _OF_RUN[name] is None)}  # fmt: skip
        if "lengths" in options:
            run["length_histogram"] = parse_histogram(options["lengths"])
        members = {field.name for field in fields(self)} & options.keys()
        return replace(self, train=replace(self.train, **run), **{name: options[name] for name in members - {"train"}})

    def with_settings(self, *settings: str) -> Request:
        """Return a copy with more settings of the job, which replace those before them."""
        return replace(self, overrides=(*self.overrides, *settings))

    def read_hosts(self) -> tuple[Snapshot, ...]:
        """Scan this host, or read the recordings of the hosts; empty for a machine of the catalogue."""
        return () if self.machine else read_snapshots(self.hosts, ALL, root=self.root)

    def model_spec(self) -> ModelSpec | None:
        """Return the requested model: a known name, or a config.json if files are allowed. Raises ModelError."""
        if self.model is None or self.shape is not None:
            return self.shape
        path = Path(self.model)
        if self.allow_files and (path.suffix == ".json" or os.path.isdir(path)):
            with raise_as(RequestError, models.ModelError, "--model "):
                return models.read_model_file(path)
        return models.model_named(self.model)

    def required_model(self) -> ModelSpec:
        """Return the requested model. Raises RequestError if none is requested."""
        if (model := self.model_spec()) is None:
            raise RequestError("--model: name the model")
        return model

    def count_rows(self) -> int | None:
        """Return the number of rows in the data: the given number, else the sum of the length histogram."""
        if self.rows is not None:
            return self.rows
        return sum(count for _, count in self.train.length_histogram) or None

    def node_hour_price(self) -> float | None:
        """Return the price of a node-hour: the given number, or this machine's price in the given file; else None."""
        if self.price is None:
            return None
        prices = read_prices(self.price, files=self.allow_files)
        if isinstance(prices, float):
            return prices
        name = machines.machine(self.machine).name if self.machine else ""
        if name and name not in prices:
            raise RequestError(f"--price {self.price}: no price of {name}; it has {', '.join(prices) or 'none'}")
        return prices.get(name)

    def measurements(self) -> tuple[Measurement, ...]:
        """Return the measurements of the benchmark result that the request names; empty if it names none."""
        if self.bench_file is None:
            return ()
        from collectives.bench.results import read_result

        with raise_as(RequestError, (OSError, ValueError), f"--bench {self.bench_file}: "):
            return read_result(self.bench_file).measurements

    def measured_layout(self) -> MeasuredStep | None:
        """Return the measured step given in the request. Raises ConfigError if its layout is invalid."""
        if self.measured_step is None:
            return None
        text, seconds = self.measured_step
        return parse_layout_text(text), seconds

    def ranks(self, cluster: ClusterTopology) -> int | None:
        """Return the requested ranks per node, else two gloo ranks for a host without GPUs, else None: one per GPU."""
        has_gpus = self.machine or any(node.gpus for node in cluster.nodes)
        return self.ranks_per_node or (None if has_gpus else 2)

    def cluster(self, snapshots: Sequence[Snapshot]) -> ClusterTopology:
        """Return the requested cluster, with the named network."""
        cluster = self._build_nodes(snapshots)
        if self.network is not None:
            return machines.over_network(cluster, self.network, self.transport)
        if self.transport is not None:
            raise RequestError(f"transport {self.transport}: requires the rate of the network too, for example 100G")
        return cluster

    def _build_nodes(self, snapshots: Sequence[Snapshot]) -> ClusterTopology:
        """Return the nodes: a catalogue machine, one host repeated, or the given hosts.

        Raises MachineError if a node has fewer GPUs than the ranks to run on it.
        """
        ranks = self.ranks_per_node
        if self.machine:
            return machines.cluster(self.machine, self.nodes or 1, gpus_per_node=ranks)
        nodes = [build(snapshot) for snapshot in snapshots]
        if ranks is not None:
            nodes = [machines.with_gpus(node, ranks) if node.gpus else node for node in nodes]
        if self.nodes and self.nodes != len(nodes):
            if len(nodes) != 1:
                raise RequestError(f"--nodes {self.nodes} with {len(nodes)} hosts: give one host, or as many as nodes")
            nodes = [replace(nodes[0], hostname=f"{nodes[0].hostname}-{i}") for i in range(self.nodes)]
        return with_plugin(join(nodes), snapshots)


def parse_histogram(text: str | None) -> tuple[tuple[int, int], ...]:
    """Parse "64:900,512:100" as a length histogram. Raises RequestError that names the invalid part."""
    if not text:
        return ()
    rows = []
    for word in text.split(","):
        length, _, count = word.partition(":")
        if not (length.isdecimal() and count.isdecimal() and len(length) < 8 and len(count) < 12):
            raise RequestError(f"lengths={word!r}: must be TOKENS:ROWS, both whole numbers")
        rows.append((int(length), int(count)))
    with raise_as(RequestError, PlanError):
        return check_histogram(tuple(sorted(rows)))


def read_prices(text: str, *, files: bool) -> float | dict[str, float]:
    """Parse "98.32" as a number, and a YAML file as one price for each catalogue machine that it names."""
    with contextlib.suppress(ValueError):
        return _check_price("price", float(text))
    if not files:
        raise RequestError(f"price={text[:40]!r}: must be a number, of a node-hour")
    if not os.path.isfile(text):
        raise RequestError(f"price={text[:40]!r}: must be a number, or an existing YAML file with a number per machine")
    with raise_as(RequestError, ConfigError, "--price "):
        raw = read_mapping(Path(text), once=True)
    prices = {}
    for name, value in raw.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise RequestError(f"--price {text}: {name}: must be a number, of a node-hour")
        with raise_as(RequestError, machines.MachineError, f"--price {text}: "):
            prices[machines.machine(str(name)).name] = _check_price(str(name), float(value))
    return prices


def _check_price(name: str, value: float) -> float:
    if not 0.0 <= value <= _MAX_PRICE:
        raise RequestError(f"{name}={value:g}: must be from 0 to {_MAX_PRICE:g}")
    return value
