"""The filter for secrets: forms that must go, look-alikes that must stay; and that no output holds what was planted.

Secrets are planted in a machine, a record and a log; each output of the product is searched for each form. One output
is the support bundle: a bounded file that replays.
"""

import base64
import copy
import gzip
import json
import os
import sys
import time
from pathlib import Path

import pytest
import yaml
from rigs.agents import bearer, list_readable_paths, tokens
from rigs.command import python, topoflight
from rigs.recorded import path_of
from rigs.results import RUN
from rigs.tables import data_of, each_row
from rigs.waiting import eventually
from scanned import scan
from starlette.testclient import TestClient

from agent.base import result_store
from agent.cli import bundle
from agent.cli.bundle import MAX_FILE_BYTES, Files, pack_bundle, unpack_bundle
from agent.cluster.nodes import make_record, to_resource
from agent.http.server import create
from agent.http.state import State
from agent.jobs import launch
from contracts import run_record
from contracts.redaction import redact, without_secrets
from planner.lint.documents import Text
from probes.host.recording import RecordedHost, RecordingHost, load, load_all
from probes.scanner import dumps, pack_archive
from probes.wire import RecordingError

# Built from parts, so that no scanner of this repository takes them for real ones.
MIXED = "aB3" + "dE5fG7hJ9k" * 4
FORMS = {
    "openai": "sk-" + MIXED, "openai project": "sk-proj-" + MIXED, "gitlab": "glpat-" + MIXED[:20],
    "slack": "xoxb-" + "1234567890-" + MIXED[:12], "npm": "npm_" + MIXED[:36], "google": "AIza" + MIXED[:35],
    "github": "ghp_" + MIXED[:36], "fine-grained": "github_pat_" + MIXED[:30], "hub": "hf_" + MIXED[:34],
    "aws": "AKIA" + "Z" * 16, "jwt": "eyJ" + "hbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl",
    "docker": "dckr_pat_" + MIXED[:24], "nvidia": "nvapi-" + MIXED, "stripe": "sk_live_" + MIXED[:24],
}  # fmt: skip
S = "hunter2hunter2"
ROWS = yaml.safe_load(Path(__file__).with_name("redaction.yaml").read_text(encoding="utf-8").replace("{S}", S))
TEXTS = ROWS["texts"]


def test_every_form_of_a_secret_is_left_out_and_look_alikes_stay() -> None:
    rows = [(text, S) for text in TEXTS] + [(f"a line with {form} in it", form) for form in FORMS.values()]
    leaked = [text for text, secret in rows
              if secret in redact(text) or secret in json.dumps(without_secrets({"log": [Text(text)]}))]  # fmt: skip
    changed = [(text, redact(text)) for text in ROWS["harmless"] if redact(text) != text]
    assert not leaked, leaked
    assert not changed, changed
    assert [text for text in TEXTS if redact(redact(text)) != redact(text)] == []


def test_names_count_for_the_values_beside_them() -> None:
    """Members of a mapping, variables of a manifest, options in a list of arguments; numbers and the rest stay."""
    document = ROWS["document"]
    made = without_secrets(document)
    assert S not in json.dumps(made)
    for name in ("max_tokens", "token", "secretName", "valueFrom"):
        assert made[name] == document[name], name
    assert made["args"][2:] == ["--steps", "8"] and made["env"][1] == {"name": "NCCL_DEBUG", "value": "INFO"}


@each_row("part", ["a", "=", "a=", '"', "-", "name:", "token", 'password="', "x ", "eyJ", "a://", "\\",
                                  "authorization:", "-u a", "-a ", "name: x\n"])  # fmt: skip
def test_no_text_takes_long(part: str) -> None:
    """Time grows with the length, not with its square: ten times the text takes far less than a hundred times."""
    times = []
    for letters in (5_000, 50_000):
        text = part * (letters // len(part))
        began = time.process_time()
        redact(text)
        times.append(time.process_time() - began)
    assert times[1] < 40 * max(times[0], 0.005), times


SECRETS = [*FORMS.values(), S]
PLANTED = " ".join([f"WANDB_API_KEY={S}", f"--password {S}", f"https://bob:{S}@proxy:3128/", *FORMS.values()])
NETWORKS = ("NCCL_NET_PLUGIN", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_TOPO_FILE", "CUDA_VISIBLE_DEVICES")


def machine() -> RecordedHost:
    """A recorded host whose environment, kernel log, names and errors hold every form."""
    content = copy.deepcopy(json.loads(path_of().read_text()))
    answers = content["answers"]
    answers["environment"] = {"": {**answers.get("environment", {}).get("", {}), "HF_TOKEN": S, "NOTE": PLANTED,
                                   **dict.fromkeys(NETWORKS, PLANTED)}}  # fmt: skip
    for word in list(answers.get("kernel_log", {})) or ["NVRM"]:
        answers.setdefault("kernel_log", {})[word] = [f"NVRM: Xid (PCI:0000:1a:00): 79, {PLANTED}"]
    for symbol in ("nvmlDeviceGetName", "nvmlSystemGetDriverVersion"):
        for key in answers["nvml"].get(symbol, {}):
            answers["nvml"][symbol][key] = f"NVIDIA H100 {PLANTED}"
    answers.setdefault("read_text", {})["/sys/class/dmi/id/product_name"] = PLANTED
    answers["read_text"]["/proc/cmdline"] = PLANTED
    return RecordedHost(content)


RECORD: dict = {
    **RUN, "status": "failed", "exit_code": 1, "reason": f"died: {PLANTED}", "notes": [PLANTED, "a note"],
    "environment": {"HF_TOKEN": S, "X": PLANTED},
}  # fmt: skip
LOG = f"""node-a:100:100 [0] NCCL INFO NCCL_NET_PLUGIN set by environment to {PLANTED}
node-a:100:100 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.1<0> {PLANTED}
node-a:100:100 [0] NCCL WARN socketStartConnect: Connect to 10.0.0.2<1> failed : {PLANTED}
[rank0]: RuntimeError: CUDA out of memory {PLANTED}
Traceback (most recent call last):
ValueError: {PLANTED}
"""


@pytest.fixture
def outputs(tmp_path, caplog):
    """Every output by name."""
    host, state_folder = machine(), tmp_path / "state"
    state_folder.mkdir()
    (state_folder / result_store.RUNS_FOLDER).mkdir()
    of_another_writer = state_folder / result_store.RUNS_FOLDER / "20261101T100000-0.json"
    of_another_writer.write_text(json.dumps(RECORD))
    snapshot = scan(host)
    found = {"record as read": run_record.dumps(run_record.record_of(RECORD)), "last error": run_record.raised(LOG)}
    state = State(lambda: (snapshot,), interval_seconds=3600, folder=state_folder)
    client = TestClient(create(state, tokens=tokens(tmp_path)))
    with client:
        eventually(lambda: client.get("/readyz").status_code == 200, "the first scan is done")
        for path in (*list_readable_paths(client), "/recommendations?format=shell", "/openapi.json"):
            answer = client.get(path)
            assert answer.status_code == (404 if path == "/measurements" else 200), (path, answer.text[:200])
            found[path] = answer.text
        for name, path, body in (
            ("record", "/runs", {**RECORD, "started_at": "2026-11-01T10:00:01Z"}),
            ("wrong record", "/runs", {**RECORD, "status": PLANTED}),
            ("gate", "/preflight", {"require": [PLANTED[:128]]}),
        ):  # fmt: skip
            found[name] = client.post(path, json=body, headers=bearer()).text
        for name, params in (
            ("model", {"model": PLANTED[:200]}),
            ("unknown", {PLANTED: "x"}),
            ("format", {"format": FORMS["npm"][:32]}),
        ):
            found[f"error: {name}"] = client.get("/recommendations", params=params).text
        found["runs posted"] = client.get("/runs").text
    record = make_record(state.view, name="node-a")
    found["NodeTopology"] = json.dumps(to_resource(record))
    found["facts of the NodeTopology"] = gzip.decompress(base64.b64decode(record.facts or "")).decode()
    recorder = RecordingHost(host)
    scan(recorder)  # type: ignore[arg-type]
    recording = pack_archive(recorder.identity(), recorder.answers, "")
    found["recording"] = dumps(recording)
    made = bundle.collect_host(scan(machine()), machine().content, state=state_folder)
    packed = pack_bundle({"node-a": made})
    found["bundle"] = json.dumps(
        {k: {n: d.decode(errors="replace") for n, d in v.items()} for k, v in unpack_bundle(packed).items()}
    )
    (tmp_path / "log").write_text(LOG)
    (tmp_path / "host.json").write_text(dumps(machine().content))
    (tmp_path / "run").mkdir()
    (tmp_path / "run/run.json").write_text(json.dumps(RECORD))
    for words in ("why LOG", "why RUN", "evidence LOG", "lint-env LOG", "scan -v --host HOST", "preflight --host HOST",
                  "preflight -o json --host HOST", "recommend --host HOST"):  # fmt: skip
        places = {"LOG": tmp_path / "log", "RUN": tmp_path / "run", "HOST": tmp_path / "host.json"}
        found[words] = topoflight(*(places.get(word, word) for word in words.split())).output
    yield found


def test_no_output_holds_a_secret(outputs: dict[str, str]) -> None:
    leaked = {name: sorted({s[:8] for s in SECRETS if s in text}) for name, text in outputs.items()}
    assert not any(leaked.values()), "\n".join(f"{n}: {f}" for n, f in leaked.items() if f)
    assert all(outputs.values()), [name for name, text in outputs.items() if not text]


def test_what_a_job_printed_last_is_told_without_its_secrets(tmp_path: Path) -> None:
    """A report and the gate's findings quote it."""
    words = [sys.executable, "-c", f"print({LOG!r}); raise SystemExit(1)"]
    done = launch.run(words, dict(os.environ), tmp_path, 60, lambda _line: None)
    told = "\n".join((done.ending, *done.last_lines))
    assert "ValueError" in done.ending and "NCCL WARN" in told
    assert [s for s in SECRETS if s in told] == []


def test_no_line_of_the_log_holds_a_secret() -> None:
    """Of the agent and of its worker process: the message, its arguments and a traceback."""
    done = python(f"""
import logging
from agent.base import log_to_stderr
log_to_stderr(2)
try:
    raise ValueError({PLANTED!r})
except ValueError:
    logging.getLogger("x").exception("message %s", {PLANTED!r})
""")
    assert "ValueError" in done.stderr and "message" in done.stderr, done.stderr
    assert [s for s in SECRETS if s in done.stderr] == []


SOUND, SICK = path_of(), path_of("sick-h100-dead-hca")
SEEDED = f"{PLANTED}\nkept: a harmless line"
TABLES = data_of(__file__, "bundle_tables.yaml")


def host(state: Path, machine: Path = SOUND) -> Files:
    return bundle.collect_host(scan(load(machine)), load(machine).content, state=state)


def test_a_bundle_replays_as_its_recordings(tmp_path: Path) -> None:
    path = tmp_path / "bundle.zip"
    state = tmp_path / "state"
    for file in (state / "bench.json", state / "runs" / "f.json"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text('{"note": "kept: a harmless line"}')
    whole = host(state)
    stored = {"state/bench.json", "state/runs/f.json"}
    assert set(whole) == {"recording.json", "findings.json", "versions.json"} | stored
    assert sum(b"a harmless line" in data for data in whole.values()) == 2
    path.write_bytes(pack_bundle({"a": whole, "b": host(tmp_path, SICK)}))
    done = topoflight("preflight", "-q", "--host", path)
    assert done.exit_code == 3 and "rdma.port.down" in done.output and "hgx-h100-sick-hca" in done.output
    assert [scan(each).outcomes["rdma"].facts for each in load_all(path)] == [
        scan(load(machine)).outcomes["rdma"].facts for machine in (SOUND, SICK)
    ]  # type: ignore[union-attr]


@each_row("content", [b"", b"PK\3\4", b"no zip at all", pack_bundle({"n": {"note.txt": b"x"}})])
def test_what_is_no_bundle_is_named(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "b.zip"
    path.write_bytes(content)
    with pytest.raises(RecordingError, match=r"b\.zip"):
        load_all(path)
    assert topoflight("scan", "--host", path).exit_code == 2


def test_files_are_bounded() -> None:
    files = {"state/bench.json": b"x" * (MAX_FILE_BYTES + 1)}
    assert len(unpack_bundle(pack_bundle({"n": files}))["n"]["state/bench.json"]) == MAX_FILE_BYTES


# kubectl on PATH, which answers by the table that its test has written next to it.
KUBECTL = f"""#!{sys.executable}
import json, pathlib, sys
here = pathlib.Path(__file__).parent
said = f" {{' '.join(sys.argv[1:])}} "
row = next((row for row in json.loads((here / "answers").read_text()) if row["when"] in said), {{"document": ""}})
if "refusal" in row:
    sys.exit(row["refusal"])
told = (here / row["file"]).read_bytes() if "file" in row else json.dumps(row["document"]).encode()
sys.stdout.buffer.write(told)
"""


def test_a_cluster_by_kubectl(tmp_path: Path) -> None:
    """Through kubectl as a stand-in on PATH: what is refused is said, secrets of logs are left out."""
    for name, text in (("agent.log", SEEDED), ("answers", json.dumps(TABLES["kubectl"]))):
        (tmp_path / name).write_text(text)
    (tmp_path / "inner.zip").write_bytes(pack_bundle({"n1": host(tmp_path)}))
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(KUBECTL)
    kubectl.chmod(0o755)
    done = topoflight("bundle", "--cluster", "-f", tmp_path / "all.zip", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.exit_code == 0, done.stderr
    assert "from 1 host; no answer from n2" in done.stderr
    found = unpack_bundle((tmp_path / "all.zip").read_bytes())
    assert set(found) == {"cluster", "n1", "n2"} and "recording.json" in found["n1"]
    assert b"Forbidden" in found["n2"]["error.txt"] and b"forbidden" in found["cluster"]["nodetopologies.json.txt"]
    assert b"a harmless line" in found["n2"]["log.txt"]
    assert not any(secret.encode() in data for secret in SECRETS for files in found.values() for data in files.values())
    assert (
        b"violates PodSecurity" in found["cluster"]["events.json"]
        and "agent-x" in found["cluster"]["pods.json"].decode()
    )
    assert (tmp_path / "all.zip").stat().st_mode & 0o077 == 0
