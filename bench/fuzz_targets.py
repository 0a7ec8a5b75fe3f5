"""The targets of the fuzzer: one function for each reader, which must return a result or raise one of its own errors.

The input of a target is bytes. Half of the inputs of a JSON reader are passed to it unchanged. The other half describe
changes of a valid document (`changed`), so that the code behind the first validation is reached as well. This module
does not need atheris: tests/hostile passes inputs that were once found to the same functions.
"""

from __future__ import annotations

import base64
import contextlib
import gzip
import io
import json
import pickle
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from agent import metrics
from agent.advice.advise import RequestError, advise
from agent.advice.request import Request, parse_histogram
from agent.base.options import parse_version
from agent.base.output import to_document
from agent.checks.baseline import compare_with_baseline, read_baseline
from agent.checks.measured import with_bench
from agent.checks.verdict import GateError
from agent.checks.view import build_view
from agent.cluster.nodes import Fleet, make_row, pack_facts
from agent.http import pages
from agent.http.access import read_tokens
from agent.http.worker import read_form
from collectives.bench.results import BenchResult, read_as
from collectives.nccl_log import evidence
from collectives.nccl_log.reader import LogFileError
from collectives.traces import rank_files, ras, watchdog
from contracts import plain, run_record as records
from contracts.job_config import ConfigError, parse_layout_text, read_config, read_plan
from contracts.layout import Layout, LayoutError
from planner import why
from planner.forecast.calibration import CalibrationError, load_calibration
from planner.forecast.models import ModelError, read_model_file
from planner.lint.environment import lint
from planner.lint.script import EnvironmentTextError
from planner.lint.sources import KINDS, read_text
from planner.slurm import ScriptError, wrap_script
from probes.host.recording import RecordedHost, load
from probes.interfaces.read import find_annotation, parse_network_status
from probes.pci.read import parse_config
from probes.registry import ALL, BY_NAME
from probes.wire import RecordingError, outcome_from_json, outcome_to_json
from probes.worker import scan
from topology.cluster import join
from topology.formats import TopologyFileError
from topology.formats.text import parse as parse_matrix
from topology.formats.xml import parse as parse_xml
from topology.render import json_document, render_matrix

ROOT = Path(__file__).resolve().parent.parent
MACHINES = ROOT / "tests" / "machines"
SEEDS = Path(__file__).with_name("fuzz_seeds")  # a valid input for each reader, and some that once broke one
DIGITS = 5000  # more digits than int() accepts in a text

ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 7, 2**31, 2**63, 10**30, -(10**400), 0.5, -0.0, 1e308, float("inf"), float("nan"),
    "", "0", "-1", "nan", "²", "x", "eth0", "mlx5_0", "0000:1b:00.0", "NCCL_DEBUG", "..", "../../etc/passwd", "\0",
    "\ud800", "a\nb: c", "<script>", "{{ 7*7 }}", "$(id)", "9" * DIGITS, "x" * 20_000, [], {}, [[]], [None],
    {"": None}, [{}], {"name": 1}, {"$errno": "ENOENT"}, {"$errno": "²"}, {"$nvml": "GPU_IS_LOST"}, {"$nvml": 7},
    [1, 2], ["a", "b"], [1e400, "NaN"], [[["x"]]],
)  # fmt: skip
"""Values that have caused errors in readers of JSON and YAML."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One reader: `run` is called with the input, `errors` are expected exceptions, `seeds` are the first inputs."""

    run: Callable[[bytes], object]
    errors: tuple[type[Exception], ...]
    seeds: Sequence[bytes]


_TARGETS: dict[str, Target] = {}
_Run = Callable[[bytes], object]


def reads(*seeds: bytes, errors: tuple[type[Exception], ...] = (), stepped: bool = False) -> Callable[[_Run], _Run]:
    """Register a function as a target. With `stepped`, some changes of its document are seeds as well."""

    def register(run: _Run) -> _Run:
        inputs = list(seeds)
        if stepped:
            inputs = [b"\1" + text for text in seeds] + [b"\0"]
            inputs += [bytes([0, *range(i, i + 40, 3)]) for i in range(0, 240, 24)]
        _TARGETS[run.__name__] = Target(run=run, errors=errors, seeds=inputs)
        return run

    return register


def targets() -> Mapping[str, Target]:
    """Return every target by name."""
    return _TARGETS


class _Steps:
    """Read decisions from bytes. After the last byte every number is zero."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def number(self, below: int) -> int:
        size = 1 if below <= 256 else 2
        raw, self._at = self._data[self._at : self._at + size], self._at + size
        return int.from_bytes(raw, "big") % below if below else 0

    def has_more(self) -> bool:
        return self._at < len(self._data)

    def text(self) -> str:
        length = self.number(64)
        raw, self._at = self._data[self._at : self._at + length], self._at + length
        return raw.decode("utf-8", errors="replace")


def changed(document: Any, data: bytes) -> Any:
    """Return the document with up to eight members replaced, renamed, duplicated or removed."""
    steps = _Steps(data)
    for _ in range(8):
        if not steps.has_more():
            break
        document = _changed(document, steps, 0)
    return document


def _changed(node: Any, steps: _Steps, depth: int) -> Any:
    if not isinstance(node, dict | list) or not node or depth > 12:
        return _value(steps)
    action = steps.number(16)
    names = list(node) if isinstance(node, dict) else list(range(len(node)))
    name = names[steps.number(len(names))]
    copy = dict(node) if isinstance(node, dict) else list(node)
    if action == 0:
        return _value(steps)
    if action == 1:
        del copy[name]
    elif action == 2 and isinstance(copy, list):
        copy.insert(name, copy[name])
    elif action == 2:
        copy[steps.text()] = copy.pop(name)
    elif action == 3 and isinstance(copy, list):
        copy.append(_value(steps))
    elif action == 3:
        copy[steps.text()] = _value(steps)
    else:
        copy[name] = _changed(copy[name], steps, depth + 1)
    return copy


def _value(steps: _Steps) -> Any:
    choice = steps.number(len(ODD) + 8)
    return ODD[choice] if choice < len(ODD) else steps.text()


def _json(valid: Callable[[], Any], data: bytes) -> bytes:
    """Return the input without its first byte if that byte is odd, else a changed valid document."""
    if data[:1] and data[0] % 2:
        return data[1:]
    return _dumps(changed(valid(), data[1:]))


def _dumps(value: Any) -> bytes:
    sys.set_int_max_str_digits(0)  # only while writing: the text may have more digits than a reader accepts
    try:
        return json.dumps(value).encode("utf-8", "surrogatepass")
    finally:
        sys.set_int_max_str_digits(4300)


@cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    """A folder in memory for readers that open files, because a file is rewritten thousands of times a second."""
    shm = Path("/dev/shm")  # noqa: S108
    return tempfile.TemporaryDirectory(prefix="topoflight-fuzz-", dir=shm if shm.is_dir() else None)


def _file(name: str, data: bytes) -> Path:
    path = Path(_scratch().name) / name
    path.write_bytes(data)
    return path


# --- valid documents


def seed(name: str) -> bytes:
    """Read a file of fuzz_seeds."""
    return (SEEDS / name).read_bytes()


@cache
def document_of(name: str) -> Any:
    """Read a JSON document of fuzz_seeds."""
    return json.loads(seed(f"{name}.json"))


@cache
def _recording(name: str) -> Any:
    return json.loads((MACHINES / f"{name}.json").read_text())


@cache
def _scanned(name: str = "titan-rtx-2x-nv2") -> Any:
    return scan(RecordedHost(_recording(name)), ALL)


_SMALL = ("titan-rtx-2x-nv2", "cpu-only-vm", "sick-l40s-x4", "r760xa-2xA40-bf3", "aws-p4d-8xA100-4efa")


@cache
def _outcomes() -> Any:
    return {name: outcome_to_json(outcome) for name, outcome in _scanned("r760xa-2xA40-bf3").outcomes.items()}


@cache
def _view() -> Any:
    return build_view((_scanned(),))


@cache
def _report() -> Any:
    return to_document({"schema_version": 1, "checks": _view().checks, "verdict": _view().verdict})


@cache
def _machine() -> Any:
    packed = pack_facts(_scanned())
    assert packed is not None  # noqa: S101 - a small machine
    return json.loads(gzip.decompress(base64.b64decode(packed)))


NCCL_LOG, ALIASES, ENVIRONMENT, LAYOUT_ERRORS = (
    seed("nccl.log"), seed("aliases.yaml"), seed("environment.env"), (ConfigError, LayoutError, RequestError),
)  # fmt: skip

# --- readers


def _text(data: bytes) -> str:
    return data.decode("utf-8", errors="replace")


@reads(
    NCCL_LOG, NCCL_LOG[:200], NCCL_LOG * 3, gzip.compress(NCCL_LOG), NCCL_LOG + seed("job_end.log"),
    errors=(LogFileError,),
)  # fmt: skip
def nccl_log(data: bytes) -> object:
    """Evidence and verdict from a training log: as one file, and as two halves, the second compressed."""
    result = evidence.read_files([io.BytesIO(data)])
    evidence.exit_code(result)
    half = len(data) // 2
    halves = evidence.read_files([io.BytesIO(data[:half]), io.BytesIO(gzip.compress(data[half:], 1))])
    evidence.exit_code(halves)
    return json.dumps([plain.write(result), plain.write(halves)])


@reads(seed("topo.txt"), errors=(TopologyFileError,))
def topo_text(data: bytes) -> object:
    """The output of `nvidia-smi topo -m`, read and rendered."""
    node = parse_matrix(_text(data))
    render_matrix(node)
    return json.dumps(json_document(node), allow_nan=False)


@reads(seed("topology.xml"), seed("entities.xml"), errors=(TopologyFileError,))
def topo_xml(data: bytes) -> object:
    """NCCL's topology XML."""
    return json.dumps(json_document(parse_xml(_text(data))), allow_nan=False)


@reads(b"#!/bin/bash\n#SBATCH -N 2\nexport A=1\nif x; then\n  srun torchrun t.py\nfi\n", errors=(ScriptError,))
def batch_script(data: bytes) -> object:
    """A batch script for Slurm, wrapped. The result must contain every line of the script."""
    text = _text(data)
    wrapped, notes = wrap_script(text, (), python="python", has_log=True)
    lines = iter(wrapped.split("\n"))
    assert all(line in lines for line in text.split("\n")), "a line is lost"  # noqa: S101 - a finding of the fuzzer
    return notes


@reads(seed("config.json"), errors=(ModelError,), stepped=True)
def model_config(data: bytes) -> object:
    """A model's config.json, through both functions that read it."""
    path = _file("config.json", _json(lambda: document_of("config"), data))
    with contextlib.suppress(RequestError):
        Request.of(model=str(path)).model_spec()
    return read_model_file(path)


@reads((ROOT / "contracts/default.yaml").read_bytes(), ALIASES, errors=(ConfigError,), stepped=True)
def job_config(data: bytes) -> object:
    """The settings file of the fine-tune job (YAML)."""
    return read_config(_file("job.yaml", _json(lambda: document_of("job"), data)))


@reads(seed("plan.json"), errors=(ConfigError,), stepped=True)
def job_plan(data: bytes) -> object:
    """The plan of the fine-tune job (plan.json)."""
    return read_plan(_file("plan.json", _json(lambda: document_of("plan"), data)))


@reads(
    *(bytes([kind]) + text for text in (ENVIRONMENT, ALIASES, NCCL_LOG) for kind in range(7)),
    errors=(EnvironmentTextError,),
)
def environment(data: bytes) -> object:
    """Environment variables in every kind of text, checked by the rules of lint-env."""
    kind = (None, *KINDS)[data[0] % (len(KINDS) + 1)] if data else None
    environments = read_text(_text(data[1:]), kind).environments
    return [lint(each) for each in environments]


@reads(seed("pod.json"), ALIASES, errors=(EnvironmentTextError,), stepped=True)
def manifest(data: bytes) -> object:
    """Environment variables in a manifest, checked for NCCL 2.27.7."""
    environments = read_text(_text(_json(lambda: document_of("pod"), data)), "yaml").environments
    return [lint(each, nccl_version=(2, 27, 7)) for each in environments]


@reads(b"\0" + b'{"kind": "topoflight-recording"}', errors=(RecordingError,), stepped=True)
def recording(data: bytes) -> object:
    """A recording, from the file to the JSON documents: scan, topology, checks, metrics."""
    name = _SMALL[data[1] % len(_SMALL)] if len(data) > 1 else _SMALL[0]
    host = load(_file("recording.json", _json(lambda: _recording(name), data[:1] + data[2:])))
    snapshot = scan(host, ALL)
    view = build_view((snapshot,))
    metrics.expose(view, "")
    return to_document({"checks": view.checks, "snapshots": view.snapshots, "topologies": view.topologies})


@reads(b"{}", errors=(ValueError, RecursionError), stepped=True)
def outcome(data: bytes) -> object:
    """The outcome of each probe, as the child process that scans a host sends it."""
    sent = json.loads(_json(_outcomes, data))
    return [outcome_from_json(BY_NAME[name], sent[name]) for name in BY_NAME if isinstance(sent, dict) and name in sent]


@reads(seed("network_status.json"), b'"[]"', errors=(ValueError,), stepped=True)
def network_status(data: bytes) -> object:
    """The network-status annotation, by itself and in a file of annotations."""
    text = _text(_json(lambda: document_of("network_status"), data))
    annotation = find_annotation(f"k8s.v1.cni.cncf.io/network-status={text}")
    find_annotation(text)
    return parse_network_status(annotation or text)


@reads(b'{"checks": []}', errors=(GateError,), stepped=True)
def baseline(data: bytes) -> object:
    """A baseline: a report, or a recording."""
    result = read_baseline(_file("report.json", _json(_report, data)))
    return compare_with_baseline((), result.statuses)


@reads(b"{}", errors=(ValueError,), stepped=True)
def machine(data: bytes) -> object:
    """The facts in a NodeTopology of the API server: the graph is built, joined with another node's and written."""
    about = {"verdict": "pass", "scannedAt": "2255-01-01T00:00:00Z", "agentVersion": "1"}
    fleet, items = Fleet(), []
    for name, text in (("a", _json(_machine, data)), ("b", _dumps(_machine()))):
        facts = base64.b64encode(gzip.compress(text)).decode()
        items.append({"metadata": {"name": name}, "status": {**about, "facts": facts}})
    fleet.replace(items)
    for record in fleet.records():
        fleet.snapshot(record)
    join([node for record in fleet.records() if (node := fleet.topology(record))])
    return json.dumps([make_row(record, 0.0) for record in fleet.records()], allow_nan=False)


def _served(bench: Any = None, bench_at_seconds: float | None = None, **members: Any) -> object:
    """Write the metrics, the page and the JSON document of the agent."""
    view = with_bench(build_view(_view().snapshots, **members), bench, bench_at_seconds)
    metrics.expose(view, "")
    pages.render_node_page(view, None, "", trouble=None)
    return to_document({"bench": view.bench, "runs": view.runs, "checks": view.checks})


@reads(b"{}", errors=(ValueError,), stepped=True)
def bench_result(data: bytes) -> object:
    """The saved result of a benchmark, which the agent reads and shows."""
    return _served(
        bench=read_as(json.loads(_json(lambda: document_of("bench"), data)), BenchResult), bench_at_seconds=1.8e9
    )


@reads(b"{}", errors=(CalibrationError, *LAYOUT_ERRORS), stepped=True)
def calibration(data: bytes) -> object:
    """A calibration file, and a recommendation with it."""
    path = _file("calibration.json", _json(lambda: document_of("calibration"), data))
    json.dumps(plain.write(load_calibration(path)))
    return advise(Request.of(model="tiny", calibration=path, ranks_per_node=2), (_scanned("cpu-only-vm"),))


@reads(b"{}", errors=(records.RecordError,), stepped=True)
def run(data: bytes) -> object:
    """The record of a run (run.json), which `launch` and the agent read and show."""
    record = records.read(_file("run.json", _json(lambda: document_of("run"), data)))
    return record.placements, records.compare(record), _served(runs=(record,))


@reads(b"\0dp_shard=4,tp=2", b"\x012.27.7+cuda12", b"\x0264:9,512:1", b"\x0312", errors=LAYOUT_ERRORS)
def words(data: bytes) -> object:
    """Short texts of the command line and of the form: layouts, versions, histograms, numbers."""
    text = _text(data[1:])
    match data[0] % 4 if data else 0:
        case 0:
            return Layout(world_size=8, **parse_layout_text(text))
        case 1:
            return parse_version(text)
        case 2:
            return parse_histogram(text)
        case _:
            return read_form(dict.fromkeys(("model", "machine", "nodes", "sequence_length", "global_batch"), text))


@reads(bytes(range(256)) * 16, b"\xff" * 256)
def pci_config(data: bytes) -> object:
    """PCI configuration space."""
    return parse_config(data[:4096])


@reads(b"# x\n" + b"a" * 32 + b"\n", errors=(ValueError,))
def token_file(data: bytes) -> object:
    """A file of bearer tokens."""
    path = _file("tokens", data)
    path.chmod(0o600)
    return read_tokens(path)


@reads(
    seed("trace.json"), *(pickle.dumps(document_of("trace"), protocol=one) for one in (2, 4)),
    errors=(rank_files.RankFileError,), stepped=True,
)  # fmt: skip
def flight_recorder(data: bytes) -> object:
    """A dump of PyTorch's Flight Recorder, and the verdict of `why` on it."""
    trace = rank_files.read(_json(lambda: document_of("trace"), data), rank=0)
    return why.judge(why.RunFacts(traces={0: trace, 1: trace}, world=2))


@reads(seed("ras.json"), seed("ras.txt"), errors=(ras.RasError,), stepped=True)
def ras_answer(data: bytes) -> object:
    """The response of NCCL RAS, and the ranks that are behind in it."""
    report = ras.read(_json(lambda: document_of("ras"), data))
    return [ras.find_laggards(comm) for comm in report.comms]


@reads(b"{}", seed("watchdog.log"), seed("watched.log"))
def trace_lines(data: bytes) -> object:
    """Lines of PyTorch's watchdog in a log, and the verdict of `why` on them."""
    report = watchdog.read(_text(data).splitlines())
    return why.judge(why.RunFacts(log=report, world=max(report.traces, default=0) + 1))


@reads(b'{"rank": 1}', errors=(rank_files.RankFileError,), stepped=True)
def rank_state(data: bytes) -> object:
    """The state file of a rank, and the verdict of `why` on it."""
    valid = {"rank": 1, "pid": 7, "phase": "data", "samples": {"data": 3}, "groups": {"0": [0, 1]}, "written": 1.5}
    state = rank_files.read_state(_file("state_rank_1.json", _json(lambda: valid, data)))
    return why.judge(why.RunFacts(states={1: state, 0: state}, world=2, now=2.0))


def check(target: Target, data: bytes) -> None:
    """Call the target with one input. Raises every exception except the reader's own errors."""
    try:
        target.run(data)
    except target.errors as error:
        if not str(error).strip():
            raise AssertionError(f"{type(error).__name__} without a message") from error
