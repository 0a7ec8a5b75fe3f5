"""The support bundle: one bounded file without secrets, that replays."""

import json
import os
import sys
from pathlib import Path

import pytest
import yaml
from rigs.command import topoflight
from rigs.recorded import path_of
from rigs.tables import each_row
from scanned import scan
from test_secrets import PLANTED, SECRETS

from agent.cli import bundle
from agent.cli.bundle import MOST_FILE_BYTES, Files, pack_bundle, unpack_bundle
from probes.host.recording import load, load_all
from probes.wire import RecordingError

SOUND, SICK = path_of(), path_of("sick-h100-dead-hca")
SEEDED = f"{PLANTED}\nkept: a harmless line"
TABLES = yaml.safe_load(Path(__file__).with_name("bundle_tables.yaml").read_text(encoding="utf-8"))


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
    files = {"state/bench.json": b"x" * (MOST_FILE_BYTES + 1)}
    assert len(unpack_bundle(pack_bundle({"n": files}))["n"]["state/bench.json"]) == MOST_FILE_BYTES


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
    assert "no answer from n2" in done.stderr
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
