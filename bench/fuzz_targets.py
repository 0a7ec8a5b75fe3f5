"""What the fuzzer feeds, and what each reader may answer: a result, or the project's own error.

A target takes bytes. Half of the inputs go to the reader as they are; the others are steps that change a whole, valid
document (`changed`), so that what lies behind the first check is reached too. Nothing here needs the fuzzer itself:
tests/hostile replays what it once found through the same functions.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import pickle
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MACHINES = ROOT / "tests" / "machines"
DIGITS = 5000  # more than int() takes from text

ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 7, 2**31, 2**63, 10**30, -(10**400), 0.5, -0.0, 1e308, float("inf"), float("nan"),
    "", "0", "-1", "nan", "²", "x", "eth0", "mlx5_0", "0000:1b:00.0", "NCCL_DEBUG", "..", "../../etc/passwd", "\0",
    "\ud800", "a\nb: c", "<script>", "{{ 7*7 }}", "$(id)", "9" * DIGITS, "x" * 20_000, [], {}, [[]], [None],
    {"": None}, [{}], {"name": 1}, {"$errno": "ENOENT"}, {"$errno": "²"}, {"$nvml": "GPU_IS_LOST"}, {"$nvml": 7},
    [1, 2], ["a", "b"], [1e400, "NaN"], [[["x"]]],
)  # fmt: skip
"""Values that readers of plain data stumble over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One reader: `run` takes the input; `errors` are its own; `seeds` are where the fuzzer starts."""

    run: Callable[[bytes], object]
    errors: tuple[type[Exception], ...]
    seeds: Callable[[], list[bytes]]


class _Steps:
    """Bytes as a source of decisions; without end, as zeros."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def take(self, below: int) -> int:
        size = 1 if below <= 256 else 2
        raw, self._at = self._data[self._at : self._at + size], self._at + size
        return int.from_bytes(raw, "big") % below if below else 0

    def more(self) -> bool:
        return self._at < len(self._data)

    def text(self) -> str:
        length = self.take(64)
        raw, self._at = self._data[self._at : self._at + length], self._at + length
        return raw.decode("utf-8", errors="replace")


def changed(document: Any, data: bytes) -> Any:
    """The document with up to eight members replaced, renamed, doubled or taken out."""
    steps = _Steps(data)
    for _ in range(8):
        if not steps.more():
            break
        document = _changed(document, steps, 0)
    return document


def _changed(node: Any, steps: _Steps, depth: int) -> Any:
    if not isinstance(node, dict | list) or not node or depth > 12:
        return _value(steps)
    act = steps.take(16)
    names = list(node) if isinstance(node, dict) else list(range(len(node)))
    name = names[steps.take(len(names))]
    copy = dict(node) if isinstance(node, dict) else list(node)
    if act == 0:
        return _value(steps)
    if act == 1:
        del copy[name]
    elif act == 2 and isinstance(copy, list):
        copy.insert(name, copy[name])
    elif act == 2:
        copy[steps.text()] = copy.pop(name)
    elif act == 3 and isinstance(copy, list):
        copy.append(_value(steps))
    elif act == 3:
        copy[steps.text()] = _value(steps)
    else:
        copy[name] = _changed(copy[name], steps, depth + 1)
    return copy


def _value(steps: _Steps) -> Any:
    choice = steps.take(len(ODD) + 8)
    return ODD[choice] if choice < len(ODD) else steps.text()


def _json(whole: Callable[[], Any], data: bytes) -> bytes:
    """The input as it is, or a changed document, by the first byte."""
    if data[:1] and data[0] % 2:
        return data[1:]
    return _dumps(changed(whole(), data[1:]))


def _dumps(value: Any) -> bytes:
    import sys

    sys.set_int_max_str_digits(0)  # for writing only: what is written is to be longer than what may be read
    try:
        return json.dumps(value).encode("utf-8", "surrogatepass")
    finally:
        sys.set_int_max_str_digits(4300)


class _Scratch:
    """One file in memory, for readers that open files."""

    def __init__(self) -> None:
        shm = Path("/dev/shm")  # noqa: S108 - a file that is rewritten thousands of times a second
        self._folder = tempfile.TemporaryDirectory(prefix="topoflight-fuzz-", dir=shm if shm.is_dir() else None)

    def file(self, name: str, data: bytes) -> Path:
        path = Path(self._folder.name) / name
        path.write_bytes(data)
        return path


_scratch = cache(_Scratch)

# --- documents to start from


@cache
def _recording(name: str) -> Any:
    return json.loads((MACHINES / f"{name}.json").read_text())


_SMALL = ("titan-rtx-2x-nv2", "cpu-only-vm", "sick-l40s-x4", "r760xa-2xA40-bf3", "aws-p4d-8xA100-4efa")


@cache
def _snapshot() -> Any:
    from probes.host.recording import RecordedHost
    from probes.scan import scan
    from probes.wire import to_json

    return to_json(scan(RecordedHost(_recording("r760xa-2xA40-bf3"))))


@cache
def _report() -> Any:
    from agent.base.documents import document
    from agent.checks.view import look
    from probes.host.recording import RecordedHost
    from probes.scan import scan

    view = look((scan(RecordedHost(_recording("titan-rtx-2x-nv2"))),))
    return document({"schema_version": 1, "checks": view.checks, "verdict": view.verdict})


CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "num_hidden_layers": 32, "intermediate_size": 14336, "vocab_size": 128256,
    "head_dim": 128, "max_position_embeddings": 131072, "tie_word_embeddings": False,
    "sliding_window": None, "attention_bias": False, "auto_map": {"AutoModelForCausalLM": "modeling_evil.Evil"},
    "trust_remote_code": True, "rope_scaling": {"factor": 8.0, "rope_type": "llama3"},
    "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
STATUS = [
    {"name": "ovn-kubernetes", "interface": "eth0", "ips": ["10.128.2.14"], "mac": "0a:58:0a:80:02:0e",
     "default": True, "dns": {}},
    {"name": "default/roce-rail0", "interface": "net1", "ips": ["192.168.100.4"], "mtu": 9000, "dns": {},
     "device-info": {"type": "pci", "version": "1.1.0",
                     "pci": {"pci-address": "0000:1a:00.2", "rdma-device": "mlx5_4"}}},
]  # fmt: skip
CALIBRATION = {
    "schema_version": 1, "device": "CPU", "precision": "fp32", "gemm_flops_per_second": 1e11,
    "layer": {"hidden": 256, "ffn": 688, "heads": 8, "kv_heads": 4, "tokens": 512, "sequence": 256,
              "forward_seconds": 0.01, "backward_seconds": 0.02, "method": "lora"},
    "links": [{"op": "all_gather", "ranks": 2, "hosts": 1, "alpha_seconds": 1e-4, "busbw_bytes_per_second": 1e9}],
    "taken_at_seconds": 1.7e9, "versions": [["torch", "2.13.0"]],
}  # fmt: skip
FLIGHT = {
    "status": "finished", "reason": None, "steps_done": 20, "measured": {"step_seconds": 0.1, "memory_bytes": 1e9},
    "loss": {"first": 5.0, "last": 2.0}, "forecast": {"step_seconds": {"low": 0.1, "mid": 0.2, "high": 0.3}},
    "layout": {"family": "FSDP", "effective": {"placements": {"dp_shard:S(0)": 97}, "world_size": 2}},
    "communication": {"exposed_share": 0.2}, "adapter": "/out", "started_at": "2026-01-01T00:00:00Z",
    "model": {"name": "tiny"},
}  # fmt: skip
PLAN = {
    "layout": {"world_size": 8, "dp_shard": 4, "tp": 2, "micro_batch": 2, "stage_layers": [], "precision": "bf16"},
    "forecast": {}, "environment": {"NCCL_DEBUG": "INFO"}, "config": {"max_length": 64, "layout": {"dp_shard": 4}},
    "transport": {"network": "IB"}, "notes": ["fsdp: full_shard"],
}  # fmt: skip
JOB = {
    "model_name_or_path": "random:tiny-llama", "use_peft": True, "lora_r": 8, "learning_rate": "2e-4", "max_steps": 5,
    "fsdp": "full_shard auto_wrap", "fsdp_config": {"backward_prefetch": "backward_pre"}, "report_to": ["tensorboard"],
    "trust_remote_code": False, "layout": {"dp_shard": 2}, "gradient_checkpointing": True,
}  # fmt: skip
POD = {
    "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "train"},
    "spec": {"containers": [{"name": "worker", "command": ["bash", "-c", "NCCL_DEBUG=INFO torchrun x.py"], "env": [
        {"name": "NCCL_IB_HCA", "value": "mlx5_0:1"}, {"name": "NCCL_SOCKET_IFNAME", "value": "eth0"},
        {"name": "NCCL_BUFFSIZE", "value": 4194304}, {"name": "HF_TOKEN", "value": "secret"}]}]},
    "data": {"NCCL_DEBUG": "WARN"},
}  # fmt: skip
BOMB = b"a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\nspec: {env: [{name: NCCL_DEBUG, value: *c}], <<: *a}\n"
ENVIRONMENT = (
    b"NCCL_IB_HCA=^=mlx5_0:1,mlx5_2\nNCCL_SOCKET_IFNAME=^docker0,lo\nNCCL_ALGO=Tree;allreduce:ring\n"
    b"NCCL_BUFFSIZE=0x400000\nNCCL_PROTO=^LL128\nNCCL_IB_GID_INDEX=3\nNCCL_NET_GDR_LEVEL=SYS\nNCCL_DEBUG=INFO\n"
    b"NCCL_SOCKET_NTHREADS=8\nNCCL_NSOCKS_PERTHREAD=16\nNCCL_IB_TC=106\nTORCH_NCCL_BLOCKING_WAIT=1\nNCCL_IB_HBA=x\n"
    b"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True,max_split_size_mb:128\nGLOO_SOCKET_IFNAME=eth0\n"
)
NCCL_LOG = (
    b"node0:101:101 [0] NCCL INFO NCCL version 2.27.7+cuda12.9\n"
    b"node0:101:140 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/RoCE [1]mlx5_1:1/RoCE [RO]; OOB eth0:10.0.0.1<0>\n"
    b"node0:101:140 [0] NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0/GDRDMA\n"
    b"node0:101:140 [0] NCCL INFO Channel 01/0 : 8[0] -> 0[0] [receive] via NET/Socket/0\n"
    b"node0:101:140 [0] NCCL INFO Channel 00 : 0[0] -> 1[1] via P2P/CUMEM/read\n"
    b"node0:101:140 [0] NCCL INFO NCCL_IB_HCA set by environment to mlx5_0\n"
    b"node0:101:140 [0] NCCL INFO comm 0x55 rank 0 nranks 16 cudaDev 0 nvmlDev 0 busId 1b000 - Init COMPLETE\n"
    b"node0:101:140 [0] misc/socket.cc:58 NCCL WARN socketPollConnect: connect returned Connection refused\n"
)
XML = (
    b'<system version="1"><cpu numaid="0" affinity="ff" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="143">'
    b'<pci busid="0000:1a:00.0" class="0x060400" vendor="0x1000" device="0xc030" link_speed="32.0 GT/s PCIe" '
    b'link_width="16"><pci busid="0000:1b:00.0" class="0x030200" vendor="0x10de" device="0x2330" '
    b'link_speed="32.0 GT/s PCIe" link_width="16"><gpu dev="0" sm="90" rank="0" gdr="1"><nvlink '
    b'target="ffff:ff:ff" count="18" tclass="0x068000"/></gpu></pci><pci busid="0000:1c:00.0" class="0x020700" '
    b'vendor="0x15b3" device="0x1021"><nic><net name="mlx5_0" dev="0" speed="400000" port="1" gdr="1"/></nic></pci>'
    b"</pci></cpu></system>"
)
ENTITIES = (
    b'<?xml version="1.0"?><!DOCTYPE s [<!ENTITY a "aaaaaaaa"><!ENTITY b "&a;&a;&a;&a;"><!ENTITY x SYSTEM '
    b'"file:///etc/passwd">]><system><cpu numaid="&b;">&x;</cpu></system>'
)
JOB_END = (
    b"n1:77:80 [0] NCCL INFO comm 0x1 rank 0 nranks 16 cudaDev 0 busId 1b000 commId 0xa - Init START\n"
    b"n1:99:99 [0] NCCL INFO comm 0x2 rank 0 nranks 16 cudaDev 0 busId 1b000 commId 0xb - Init START\n"
    b"RuntimeError: NCCL error\nLast error:\nNET/IB : Requested properties for vNic 8, only 8 vNics have been created\n"
    b"n1:99 NCCL DIAG [INFO] net bw: same-nic rank 3 (n1): 2.1 Gbit/s, >30% off median 3.5 Gbit/s in comm 0x7\n"
    b"Traceback (most recent call last):\nValueError: x\nsrun: error: n1: task 0: Exited with exit code 137\n"
)
TOPO = (
    b"\tGPU0\tGPU1\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n"
    b"GPU0\t X \tNV18\tPIX\tSYS\t0-55,112-167\t0\t\tN/A\nGPU1\tNV18\t X \tNODE\tSYS\t0-55\t0\t\tN/A\n"
    b"NIC0\tPIX\tNODE\t X \tSYS\nNIC1\tSYS\tSYS\tSYS\t X \n\nLegend:\n\n  X    = Self\n\nNIC Legend:\n\n"
    b"  NIC0: mlx5_0\n  NIC1: mlx5_1\n"
)

# --- readers


def nccl_log(data: bytes) -> object:
    """Evidence from a training log, judged: as one file, and in two halves, the later packed."""
    from collectives.nccl_log import evidence

    read = evidence.read_file(io.BytesIO(data))
    evidence.exit_code(read)
    half = len(data) // 2
    halves = evidence.read_files([io.BytesIO(data[:half]), io.BytesIO(gzip.compress(data[half:], 1))])
    evidence.exit_code(halves)
    return json.dumps([evidence.to_json(read), evidence.to_json(halves)])


def topo_text(data: bytes) -> object:
    """`nvidia-smi topo -m`, drawn again."""
    from topology.formats.matrix import render
    from topology.formats.text import parse
    from topology.render import json_document

    node = parse(data.decode("utf-8", errors="replace"))
    render(node)
    return json.dumps(json_document(node), allow_nan=False)


def topo_xml(data: bytes) -> object:
    """NCCL's topology XML."""
    from topology.formats.xml import parse
    from topology.render import json_document

    return json.dumps(json_document(parse(data.decode("utf-8", errors="replace"))), allow_nan=False)


def model_config(data: bytes) -> object:
    """A model's config.json, by both ways to it."""
    from agent.advice.request import Request, model_of
    from agent.base.inputs import RequestError
    from planner.forecast.models import load_model

    path = _scratch().file("config.json", _json(lambda: CONFIG, data))
    with contextlib.suppress(RequestError):
        model_of(Request.of(model=str(path)))
    return load_model(str(path))


def job_config(data: bytes) -> object:
    """The fine-tune job's YAML."""
    from contracts.job_config import read_config

    return read_config(_scratch().file("job.yaml", _json(lambda: JOB, data)))


def job_plan(data: bytes) -> object:
    """plan.json of the fine-tune job."""
    from contracts.job_plan import read

    return read(_scratch().file("plan.json", _json(lambda: PLAN, data)))


def environment(data: bytes) -> object:
    """An environment of every kind, linted."""
    from planner.lint.environment import lint
    from planner.lint.sources import KINDS, read_environment

    kind = (None, *KINDS)[data[0] % (len(KINDS) + 1)] if data else None
    found = read_environment(data[1:].decode("utf-8", errors="replace"), kind)
    return [lint(each.environment, source=each.source) for each in found]


def manifest(data: bytes) -> object:
    """A manifest's environments, linted against each release."""
    from planner.lint.environment import lint
    from planner.lint.sources import read_environment

    found = read_environment(_json(lambda: POD, data).decode("utf-8", errors="replace"), "yaml")
    return [lint(each.environment, source=each.source, nccl_version=(2, 27, 7)) for each in found]


def recording(data: bytes) -> object:
    """A recording from the file to the answer over HTTP: scan, topology, checks, metrics, JSON."""
    from agent.base.documents import document
    from agent.checks.view import look
    from agent.metrics import families as metrics
    from probes.host.recording import load
    from probes.scan import scan
    from probes.wire import dumps, loads

    name = _SMALL[data[1] % len(_SMALL)] if len(data) > 1 else _SMALL[0]
    host = load(_scratch().file("recording.json", _json(lambda: _recording(name), data[:1] + data[2:])))
    snapshot = scan(host)
    loads(dumps(snapshot))
    view = look((snapshot,))
    metrics.exposition(view, "")
    return document({"checks": view.checks, "snapshots": view.snapshots, "topologies": view.topologies})


def snapshot(data: bytes) -> object:
    """A snapshot from another process."""
    from probes.wire import dumps, loads

    return dumps(loads(_json(_snapshot, data)))


def network_status(data: bytes) -> object:
    """The network-status annotation, bare or in a file of annotations."""
    from probes.interfaces.read import annotation, parse_network_status

    text = _json(lambda: STATUS, data).decode("utf-8", errors="replace")
    found = annotation(f"k8s.v1.cni.cncf.io/network-status={text}")
    annotation(text)
    return parse_network_status(found or text)


def baseline(data: bytes) -> object:
    """A baseline: a report, or a recording."""
    from agent.checks.baseline import read, regressions

    held = read(_scratch().file("report.json", _json(_report, data)))
    return regressions((), held.statuses)


def machine(data: bytes) -> object:
    """A node's machine as the API server hands it out, its graph built, joined with others and shown."""
    return _records_shown({"machine": json.loads(_json(_machine, data))})


def _records_shown(status: dict[str, Any]) -> str:
    from agent.cluster.nodes import Fleet, from_resource
    from agent.http.cluster import topology_document

    about = {"verdict": "pass", "scannedAt": "2255-01-01T00:00:00Z", "agentVersion": "1"}
    found = {"a": {**about, **status}, "b": {**about, "machine": _machine()}}
    fleet = Fleet()
    fleet.set(from_resource({"metadata": {"name": name}, "status": one}) for name, one in found.items())
    for record in fleet.records():
        fleet.snapshot(record)
    return json.dumps(topology_document(fleet, now=9e9), allow_nan=False)


@cache
def _machine() -> Any:
    from agent.cluster.node_facts import pack
    from probes.host.recording import RecordedHost
    from probes.scan import scan

    found, _ = pack(scan(RecordedHost(_recording("titan-rtx-2x-nv2"))))
    assert found is not None  # noqa: S101 - a small machine
    return found


@cache
def _view() -> Any:
    from agent.checks.view import look
    from probes.host.recording import RecordedHost
    from probes.scan import scan

    return look((scan(RecordedHost(_recording("titan-rtx-2x-nv2"))),))


def _served(**more: Any) -> object:
    """What the agent makes of it: metrics, page, JSON."""
    from agent.base.documents import document
    from agent.checks.measured import with_bench
    from agent.checks.view import look
    from agent.metrics import families as metrics
    from agent.pages import render as pages

    bench, at_seconds = more.pop("bench", None), more.pop("bench_at_seconds", None)
    view = with_bench(look(_view().snapshots, **more), bench, at_seconds)
    metrics.exposition(view, "")
    pages.node_page(view, None, "", trouble=None)
    return document({"bench": view.bench, "flights": view.flights, "checks": view.checks})


@cache
def _bench() -> Any:
    from collectives.bench.results import BenchResult, Latency, Measurement, Straggler, result_to_json
    from collectives.nccl_log.transport import ChannelCount, Evidence

    made = Measurement(
        op="all_gather", backend="nccl", ranks=(0, 1), hosts=("a", "b"), bytes=1 << 20, iteration_seconds=(0.01,),
        median_seconds=0.01, spread_ratio=0.02, algbw_bytes_per_second=2e10, busbw_bytes_per_second=1e10,
        expected_busbw_bytes_per_second=4e10, verified=True,
    )  # fmt: skip
    evidence = Evidence(
        inter_node_transport="IB", gdrdma="partial", send=ChannelCount(total=16, gdrdma=12), transports={"NET/IB/0": 4}
    )
    result = BenchResult(
        measurements=(made,), world_size=2, backend="nccl", hosts=("a", "b"), environment={}, versions={},
        started_at_seconds=1.79e9, seconds=30.0, evidence=evidence,
        latencies=(Latency(op="all_gather", alpha_seconds=2e-5, beta_bytes_per_second=4e10, points=11),),
        stragglers=(Straggler(rank=1, host="b", late_seconds=0.1, iterations=20, share=0.9),),
    )  # fmt: skip
    return json.loads(json.dumps(result_to_json(result)))


def bench_result(data: bytes) -> object:
    """A benchmark's kept result, as the agent finds and shows it."""
    from collectives.bench.results import result_from_json

    return _served(bench=result_from_json(json.loads(_json(_bench, data))), bench_at_seconds=1.8e9)


def calibration(data: bytes) -> object:
    """A calibration file, and a forecast with it."""
    from agent.advice.advise import answer
    from agent.advice.request import Request
    from planner.forecast.calibration import dump_calibration, load_calibration

    path = _scratch().file("calibration.json", _json(lambda: CALIBRATION, data))
    dump_calibration(load_calibration(path))
    return answer(Request.of(model="tiny", calibration=path, ranks_per_node=2), (_no_gpu(),))


@cache
def _no_gpu() -> Any:
    from probes.host.recording import RecordedHost
    from probes.scan import scan

    return scan(RecordedHost(_recording("cpu-only-vm")))


def flight(data: bytes) -> object:
    """A fine-tune job's record, as launch and the agent read and show it."""
    from contracts.run_record import compare, read

    record = read(_scratch().file("flight.json", _json(lambda: FLIGHT, data)))
    return record.placements, compare(record), _served(flights=(record,))


def words(data: bytes) -> object:
    """Small notations of the command line and the form: layouts, versions, histograms, numbers."""
    from agent.advice.request import histogram_of
    from agent.base.inputs import parse_version
    from agent.http.questions import question
    from contracts.layout import Layout, values_of

    text = data[1:].decode("utf-8", errors="replace")
    match data[0] % 4 if data else 0:
        case 0:
            return Layout(world_size=8, **values_of(text))
        case 1:
            return parse_version(text)
        case 2:
            return histogram_of(text)
        case _:
            return question(dict.fromkeys(("model", "machine", "nodes", "sequence_length", "global_batch"), text))


def pci_config(data: bytes) -> object:
    """PCI configuration space."""
    from probes.pci.read import parse_config

    return parse_config(data[:4096])


def token_file(data: bytes) -> object:
    """The file of bearer tokens."""
    from agent.http.access import read_tokens

    path = _scratch().file("tokens", data)
    path.chmod(0o600)
    return read_tokens(path)


def _own(module: str, *names: str) -> tuple[type[Exception], ...]:
    import importlib

    return tuple(getattr(importlib.import_module(module), name) for name in names)


def _with_steps(*plain: bytes) -> Callable[[], list[bytes]]:
    """Plain texts, marked as such, and a few changes of the whole document."""
    made = [b"\1" + text for text in plain] + [b"\0"] + [bytes([0, *range(i, i + 40, 3)]) for i in range(0, 240, 24)]
    return lambda: made


def _kinds(text: bytes) -> list[bytes]:
    return [bytes([kind]) + text for kind in range(7)]


TRACE: dict[str, Any] = {
    "version": "2.10", "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}, "pg_status": {},
    "entries": [{
        "record_id": 1, "process_group": ["0", "default_pg"], "collective_seq_id": 1, "p2p_seq_id": 0,
        "profiling_name": "nccl:all_reduce", "time_created_ns": 10**18, "input_sizes": [[8]], "input_dtypes": ["Float"],
        "state": "started", "time_discovered_completed_ns": None, "retired": False, "is_p2p": False,
        "frames": [{"name": "step", "filename": "/job/train.py", "line": 31}],
    }],
}  # fmt: skip
RAS: dict[str, Any] = {
    "nccl_version": "2.28.7", "communicators": [{
        "hash": "0x1", "secondary_hash": "0x2:0x3", "size": 2, "ranks": [{
            "rank": 0, "host": "10.0.0.4", "pid": 7, "nvml_dev": 0, "status": {"init_state": 0, "async_error": 0},
            "collective_counts": {"AllReduce": 4}}],
        "missing_ranks": [{"rank": 1, "host": "10.0.0.5", "pid": 8, "status": {"unresponsive": True}}]}],
    "ras": {"timeouts_count": 0},
}  # fmt: skip
RAS_TEXT = """Communicators... (0.00s)
    0         1         1         8         8         8   RUNNING  MISMATCH
#0-0 (27a079b828ff1a75) MISMATCH
  Communicator ranks have different AllReduce operation counts
  7 ranks have launched up to operation 41
  Rank 5 has launched up to operation 40 -- GPU 5 managed by process 4705 on node 10.0.0.4
"""
WATCHDOG = (
    b"[Rank 7] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=78, OpType=BROADCAST, NumelIn=56, "
    b"NumelOut=56, Timeout(ms)=600000)\n[PG 0 (default_pg) Rank 7] last enqueued NCCL work: 79, last completed NCCL "
    b"work: 77."
)
WATCHED = (
    b"[rank5]:[E1] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=6, OpType=COALESCED, NumelIn="
    b"5, NumelOut=5, Timeout(ms)=6)\n[rank5]:[E1] [PG ID 2 PG GUID 9 Rank 1] failure detected by watchdog at work "
    b"sequence id: 6 PG status: last enqueued work: 8, last completed work: 5\n"
    b"[rank3]: torch.OutOfMemoryError: CUDA out of memory\n"
    b"[Rank 0]: Ranks 3, 5 failed to pass monitoredBarrier in 30000 ms\nRank 1 is running collective: "
    b"CollectiveFingerPrint(SequenceNumber=5, OpType=REDUCE, TensorShape=[2, 5], T"
)


def flight_recorder(data: bytes) -> object:
    """A dump, and the rules on it."""
    from collectives.traces import calls
    from planner import why

    steps = data[1:] if data[:1] == b"\1" else b""
    raw = json.dumps(changed(TRACE, steps)).encode() if steps else data
    trace = calls.read(raw, rank=0)
    return why.judge(why.Seen(traces={0: trace, 1: trace}, world=2))


def ras_answer(data: bytes) -> object:
    """RAS's answer, and who is behind in it."""
    from collectives.traces import ras

    raw = json.dumps(changed(RAS, data[1:])).encode() if data[:1] == b"\1" else data
    return [ras.behind(comm) for comm in ras.read(raw).comms]


def trace_lines(data: bytes) -> object:
    """Lines of a log."""
    from collectives.traces import watchdog
    from planner import why

    lines = data.decode("utf-8", errors="replace").splitlines()
    report = watchdog.read(lines)
    seen = why.Seen(reported={"watchdog": report.traces}, errors=report.errors, late=report.late, clash=report.clash,
                    hung=report.hung, lost=report.lost, world=max(report.traces, default=0) + 1)  # fmt: skip
    return why.judge(seen)


def rank_state(data: bytes) -> object:
    """A rank's own file, and the rules on it."""
    from contracts import rank_state as states
    from planner import why

    document = {"rank": 1, "pid": 7, "phase": "data", "samples": {"data": 3}, "groups": {"0": [0, 1]}, "written": 1.5}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state_rank_1.json"
        path.write_bytes(json.dumps(changed(document, data[1:])).encode() if data[:1] == b"\1" else data)
        state = states.read(path)
    return why.judge(why.Seen(states={1: state, 0: state}, world=2, now=2.0))


def targets() -> Mapping[str, Target]:
    """Every target by name."""
    lints = _own("planner.lint.sources", "EnvironmentTextError")
    jobs, records = _own("contracts.job_config", "ConfigError"), _own("probes.host.recording", "RecordingError")
    gates, flights = _own("agent.checks.verdict", "GateError"), _own("contracts.run_record", "RecordError")
    lay = (*_own("contracts.layout", "LayoutError"), *_own("agent.advice.advise", "RequestError"))
    dumped = json.dumps
    return {
        "nccl_log": Target(
            run=nccl_log,
            errors=_own("collectives.nccl_log.reader", "LogFileError"),
            seeds=lambda: [NCCL_LOG, NCCL_LOG[:200], NCCL_LOG * 3, gzip.compress(NCCL_LOG), NCCL_LOG + JOB_END],
        ),
        "topo_text": Target(run=topo_text, errors=_own("topology.formats", "TopologyFileError"), seeds=lambda: [TOPO]),
        "topo_xml": Target(
            run=topo_xml, errors=_own("topology.formats", "TopologyFileError"), seeds=lambda: [XML, ENTITIES]
        ),
        "model_config": Target(
            run=model_config,
            errors=_own("planner.forecast.models", "ModelError"),
            seeds=_with_steps(dumped(CONFIG).encode()),
        ),
        "job_config": Target(
            run=job_config, errors=jobs, seeds=_with_steps((ROOT / "contracts/default.yaml").read_bytes(), BOMB)
        ),
        "job_plan": Target(run=job_plan, errors=jobs, seeds=_with_steps(dumped(PLAN).encode())),
        "environment": Target(
            run=environment, errors=lints, seeds=lambda: [*_kinds(ENVIRONMENT), *_kinds(BOMB), *_kinds(NCCL_LOG)]
        ),
        "manifest": Target(run=manifest, errors=lints, seeds=_with_steps(dumped(POD).encode(), BOMB)),
        "recording": Target(
            run=recording, errors=records, seeds=_with_steps(b"\0" + b'{"kind": "topoflight-recording"}')
        ),
        "snapshot": Target(run=snapshot, errors=_own("probes.wire", "SnapshotError"), seeds=_with_steps(b"{}")),
        "network_status": Target(
            run=network_status, errors=(ValueError,), seeds=_with_steps(dumped(STATUS).encode(), dumped("[]").encode())
        ),
        "baseline": Target(run=baseline, errors=gates, seeds=_with_steps(b'{"checks": []}')),
        "machine": Target(run=machine, errors=(ValueError,), seeds=_with_steps(b"{}")),
        "bench_result": Target(run=bench_result, errors=(ValueError,), seeds=_with_steps(b"{}")),
        "calibration": Target(
            run=calibration,
            errors=(*_own("planner.forecast.calibration", "CalibrationError"), *lay),
            seeds=_with_steps(b"{}"),
        ),
        "flight": Target(run=flight, errors=flights, seeds=_with_steps(b"{}")),
        "words": Target(
            run=words,
            errors=lay,
            seeds=lambda: [b"\0dp_shard=4,tp=2", b"\x012.27.7+cuda12", b"\x0264:9,512:1", b"\x0312"],
        ),
        "flight_recorder": Target(
            run=flight_recorder,
            errors=_own("collectives.traces.calls", "TraceError"),
            seeds=lambda: [dumped(TRACE).encode(), pickle.dumps(TRACE, protocol=2), pickle.dumps(TRACE, protocol=4)],
        ),
        "ras": Target(
            run=ras_answer,
            errors=_own("collectives.traces.ras", "RasError"),
            seeds=lambda: [dumped(RAS).encode(), RAS_TEXT.encode()],
        ),
        "trace_lines": Target(run=trace_lines, errors=(), seeds=lambda: [b"{}", WATCHDOG, WATCHED]),
        "rank_state": Target(
            run=rank_state, errors=_own("contracts.rank_state", "StateError"), seeds=_with_steps(b'{"rank": 1}')
        ),
        "pci_config": Target(run=pci_config, errors=(), seeds=lambda: [bytes(range(256)) * 16, b"\xff" * 256]),
        "token_file": Target(run=token_file, errors=(ValueError,), seeds=lambda: [b"# x\n" + b"a" * 32 + b"\n"]),
    }


def check(target: Target, data: bytes) -> None:
    """Feed one input; anything but a result or the reader's own error comes out of here."""
    try:
        target.run(data)
    except target.errors as error:
        _plain(error)


def _plain(error: Exception) -> None:
    text = str(error)
    if not text or re.fullmatch(r"\s*", text):
        raise AssertionError(f"{type(error).__name__} without a word")
