"""Recordings: what goes in, what comes out, and what is refused."""

import errno
import gzip
import json
from pathlib import Path
from typing import cast

import pytest
from rigs.command import interpreter
from rigs.recorded import path_of
from rigs.tables import each_row
from scanned import scan

from probes.api import Absent, Snapshot
from probes.host.live import LiveHost
from probes.host.protocol import GpuHandle, Host, NvmlError
from probes.host.recording import RecordedHost, RecordingHost, load
from probes.registry import ALL
from probes.scanner import Scanner, dumps, pack_archive
from probes.wire import KIND, SCHEMA_VERSION, RecordingError, outcome_to_json


def _recorder(root: Path) -> tuple[Host, RecordingHost]:
    recorder = RecordingHost(LiveHost(str(root)))
    return cast("Host", recorder), recorder


def outcomes_of(found: Snapshot) -> dict:
    """Every outcome as plain data, by probe."""
    return {name: outcome_to_json(outcome) for name, outcome in found.outcomes.items()}


@pytest.mark.long
def test_the_built_recordings_are_what_the_builder_writes() -> None:
    """Edit the builder, not the files."""
    done = interpreter("tests/machines/build.py", "--check")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_recording_answers_as_the_host_did(tmp_path: Path) -> None:
    """Answers and errors alike, through the file and back."""
    (tmp_path / "sys").mkdir()
    (tmp_path / "sys/value").write_text("7\n")
    (tmp_path / "sys/link").symlink_to("/sys/value")
    (tmp_path / "sys/config").write_bytes(b"\x01\x02" + bytes(100))
    host, recorder = _recorder(tmp_path)
    questions: list[tuple[str, tuple]] = [
        ("read_text", ("/sys/value",)), ("read_text", ("/sys/missing",)), ("read_text", ("/sys",)),
        ("read_bytes", ("/sys/config", 64)), ("list_dir", ("/sys",)), ("exists", ("/sys/none",)),
        ("resolve", ("/sys/link",)), ("limit", ("memlock",)), ("statvfs", ("/sys",)), ("cpu", ()), ("identity", ()),
        ("nvml", ("nvmlDeviceGetCount",)), ("nvml", ("nvmlDeviceGetName", GpuHandle(0))), ("verbs", ("version",)),
        ("netlink", ("links",)), ("usable", ("/sys/value",)), ("environment", ()), ("kernel_log", ("no such word",)),
    ]  # fmt: skip
    live = [_answer(host, method, arguments) for method, arguments in questions]
    path = tmp_path / "host.json"
    path.write_text(dumps(pack_archive(recorder.answers["identity"][""], recorder.answers, "test")), encoding="utf-8")
    recorded = load(path)
    assert [_answer(recorded, method, arguments) for method, arguments in questions] == live
    assert live[1] == ("FileNotFoundError", errno.ENOENT)
    assert live[2] == ("IsADirectoryError", errno.EISDIR)
    assert live[3] == b"\x01\x02" + bytes(62)
    assert live[6] == "/sys/value"


def _answer(host, method: str, arguments: tuple):
    try:
        return getattr(host, method)(*arguments)
    except NvmlError as error:
        return type(error).__name__, error.code, error.name
    except OSError as error:
        return type(error).__name__, error.errno
    except ImportError as error:
        return "ImportError", str(error)


def test_what_was_never_asked_is_not_there() -> None:
    """A newer probe on an older recording sees a host without the thing, not a crash; only its bus is unknown."""
    host = RecordedHost({"hostname": "old", "captured_at": 1.0, "answers": {}})
    for method, arguments in [
        ("read_text", ("/sys/new",)), ("read_bytes", ("/sys/new", 4)), ("list_dir", ("/sys",)), ("resolve", ("/sys",)),
        ("statvfs", ("/",)), ("limit", ("memlock",)), ("netlink", ("links",)),
        ("verbs", ("version",)), ("usable", ("/dev/x",)), ("kernel_log", ("NVRM",)),
    ]:  # fmt: skip
        assert _answer(host, method, arguments) == ("FileNotFoundError", errno.ENOENT)
    assert host.exists("/sys/new") is False
    assert host.environment() == {}
    assert host.cpu() == {}
    assert host.identity() == {"hostname": "old", "time": 1.0}
    assert _answer(host, "nvml", ("nvmlDeviceGetCount",))[2] == "LIBRARY_NOT_FOUND"
    some = RecordedHost({"hostname": "old", "captured_at": 1.0, "answers": {"nvml": {"nvmlDeviceGetCount": {"": 1}}}})
    assert _answer(some, "nvml", ("nvmlDeviceGetNew", GpuHandle(0)))[2] == "NOT_SUPPORTED"
    outcomes = outcomes_of(scan(host))
    failed = {name: o["error"] for name, o in outcomes.items() if o["status"] == "failed"}
    assert list(failed) == ["pci"]  # what is on it may be anything: nothing that rests on it may pass
    assert "not in the recording" in failed["pci"]


def test_secrets_stay_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By name in the environment, by pair in every text; what NCCL needs stays."""
    monkeypatch.setenv("NCCL_IB_PKEY", "1")
    monkeypatch.setenv("NVIDIA_API_KEY", "nvapi-hidden")
    monkeypatch.setenv("UCX_AUTH_TOKEN", "hidden")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cmdline").write_text("ro iommu=pt join_token=hidden db.password=hidden quiet\n")
    (tmp_path / "proc/note").write_text('{"annotation": "{\\"apiKey\\": \\"hidden\\", \\"ips\\": [\\"10.0.0.1\\"]}"}\n')
    host, recorder = _recorder(tmp_path)
    host.environment()
    host.read_text("/proc/cmdline")
    host.read_text("/proc/note")
    text = dumps(pack_archive(host.identity(), recorder.answers, ""))
    assert "hidden" not in text
    assert "NCCL_IB_PKEY" in text
    assert "iommu=pt" in text
    assert "quiet" in text
    assert "10.0.0.1" in text


@each_row(
    ("content", "words"),
    [(b"", "it is empty"), (b"{", "not JSON"), (b"[]", KIND), (b'{"kind": "pod"}', KIND),
     (b"\x1f\x8b\x08broken", "gzip"), (b"[" * 100_000, "levels deep"),
     *((json.dumps({"kind": KIND, "schema_version": 1, **members}).encode(), words) for members, words in [
         ({"schema_version": SCHEMA_VERSION + 1}, f"reads 1 to {SCHEMA_VERSION}"),
         ({"schema_version": "1"}, "schema_version is '1'"), ({"answers": []}, '"answers"'),
         ({"answers": {}, "hostname": 3}, '"hostname"'),
         ({"answers": {"nvml": {"x": 1}}, "hostname": "a", "captured_at": 1}, "answers.nvml")])],
)  # fmt: skip
def test_a_file_that_is_no_recording_is_refused_by_name(content: bytes, words: str, tmp_path: Path) -> None:
    """The message names the file and what is allowed."""
    path = tmp_path / "node17.json"
    path.write_bytes(content)
    with pytest.raises(RecordingError, match="node17") as caught:
        load(path)
    assert words in str(caught.value)


def test_gzip_is_read_like_plain_and_a_missing_file_is_a_missing_file(tmp_path: Path) -> None:
    """Whatever the file is called; the system's own error says it best."""
    path = tmp_path / "packed.json"
    path.write_bytes(gzip.compress(path_of().read_bytes()))
    assert load(path).identity() == load(path_of()).identity()
    with pytest.raises(FileNotFoundError, match="none"):
        load(tmp_path / "none.json")


def test_this_machine_is_captured_and_replayed(tmp_path: Path) -> None:
    """`topoflight capture` end to end: every probe answers, and the replay finds what the live scan found."""
    with Scanner(probes=ALL) as scanner:
        snapshot, archive = scanner.capture()
    assert list(snapshot.outcomes) == [probe.name for probe in ALL]
    for probe in ALL:
        outcome = snapshot.outcomes[probe.name]
        assert isinstance(outcome, Absent) or type(outcome.facts) is probe.facts, outcome
    path = tmp_path / "me.json"
    path.write_text(dumps(archive), encoding="utf-8")
    live, replayed = outcomes_of(snapshot), outcomes_of(scan(load(path)))
    assert {n: o.get("facts") for n, o in replayed.items()} == {n: o.get("facts") for n, o in live.items()}
    assert snapshot.hostname == archive["hostname"]
