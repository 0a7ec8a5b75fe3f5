"""What a live host keeps between two scans; recordings of hosts: what goes in, what comes out, what is refused."""

import ctypes
import errno
import gzip
import json
import os
import random
import shutil
import socket
import struct
from collections import deque
from pathlib import Path
from typing import cast

import pytest
from rigs.command import interpreter
from rigs.recorded import path_of
from rigs.tables import each_row, rows_of
from scanned import scan

from probes.api import Absent, Snapshot
from probes.host.live import MAX_LINES, LiveHost, append_new_lines
from probes.host.protocol import GpuHandle, Host, NvmlError
from probes.host.recording import RecordedHost, RecordingHost, load
from probes.pci.read import parse_config
from probes.registry import ALL
from probes.scanner import Scanner, dumps, pack_archive
from probes.wire import KIND, SCHEMA_VERSION, RecordingError, outcome_to_json

GPU = "/sys/bus/pci/devices/0000:1b:00.0"


def _plug(root: Path, device: str, bridge: str = "0000:00:01.0") -> None:
    """Put a device below a bridge, as sysfs shows it."""
    place = root / f"sys/devices/pci0000:00/{bridge}/0000:1b:00.0"
    place.mkdir(parents=True)
    for name, text in (("class", "0x030200"), ("device", device), ("current_link_width", "16")):
        (place / name).write_text(f"{text}\n")
    link = root / GPU.lstrip("/")
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(os.path.relpath(place, link.parent))


def test_what_changes_is_seen_by_the_next_scan(tmp_path: Path) -> None:
    """A narrower link, another device in the slot, another bridge above it. Within one scan a file stays as it was."""
    _plug(tmp_path, "0x2330")
    host = LiveHost(str(tmp_path))
    host.begin_scan()
    assert [host.read_text(f"{GPU}/{name}") for name in ("device", "current_link_width")] == ["0x2330\n", "16\n"]
    assert host.resolve(GPU).endswith("/0000:00:01.0/0000:1b:00.0")

    (tmp_path / GPU.lstrip("/") / "current_link_width").write_text("8\n")
    assert host.read_text(f"{GPU}/current_link_width") == "16\n", "two probes see the same"
    host.begin_scan()
    assert host.read_text(f"{GPU}/current_link_width") == "8\n"

    # The old folder is moved aside, so that the new one cannot get its inode number.
    old = tmp_path / "sys/devices/pci0000:00/0000:00:01.0"
    old.rename(tmp_path / "aside")
    _plug(tmp_path, "0x2331")
    host.begin_scan()
    assert host.read_text(f"{GPU}/device") == "0x2331\n"

    shutil.rmtree(old)
    _plug(tmp_path, "0x2331", bridge="0000:00:03.0")
    host.begin_scan()
    assert host.resolve(GPU).endswith("/0000:00:03.0/0000:1b:00.0")
    assert host.read_text(f"{GPU}/class") == "0x030200\n"

    shutil.rmtree(tmp_path / "sys/devices")
    host.begin_scan()
    with pytest.raises(FileNotFoundError):
        host.read_text(f"{GPU}/device")


def test_configuration_space_is_read_again_where_it_may_change(tmp_path: Path) -> None:
    """ACS that is turned on, a device that is lost and comes back, another device in the slot."""
    _plug(tmp_path, "0x2330")
    file = tmp_path / GPU.lstrip("/") / "config"
    space = bytearray(4096)
    struct.pack_into("<I", space, 0x100, 0x000D | 1 << 16)  # ACS; its control is at 0x106
    file.write_bytes(space)
    host = LiveHost(str(tmp_path))

    def seen(*facts: str) -> tuple[object, ...]:
        host.begin_scan()
        read = parse_config(host.read_bytes(f"{GPU}/config", 4096))
        return tuple(read.get(fact) for fact in facts)

    def write(offset: int, value: bytes) -> None:
        with file.open("r+b") as device:
            device.seek(offset)
            device.write(value)

    assert seen("acs_redirects") == (False,)
    write(0x106, b"\x04")
    assert seen("acs_redirects") == (True,)
    write(0, b"\xff" * 4096)
    assert seen("lost") == (True,)
    write(0, bytes(space))
    assert seen("lost", "acs_redirects") == (None, False)
    file.parent.resolve().rename(tmp_path / "aside")
    _plug(tmp_path, "0x2331")
    file.write_bytes(bytes(64))
    assert seen("acs_redirects") == (None,)


def _in_root(root: Path, path: str) -> str | int:
    """Where the kernel itself says that a path of this root leads, or its errno: openat2(2), RESOLVE_IN_ROOT."""
    libc, folder = ctypes.CDLL(None, use_errno=True), os.open(root, os.O_PATH)
    how = struct.pack("=QQQ", os.O_PATH | os.O_CLOEXEC, 0, 0x10)
    descriptor, number = -1, errno.EAGAIN
    while descriptor < 0 and number == errno.EAGAIN:  # a rename or mount anywhere on the host: the caller tries again
        descriptor = libc.syscall(437, folder, path.encode(), how, len(how))
        number = ctypes.get_errno()
    os.close(folder)
    if descriptor < 0:
        return number
    found = str(Path(f"/proc/self/fd/{descriptor}").readlink())
    os.close(descriptor)
    return "/" + os.path.relpath(found, root) if found != str(root) else "/"


def test_links_lead_where_the_kernel_says_and_never_out_of_the_root(tmp_path: Path) -> None:
    """A thicket of folders and links of every form: the answer does not depend on what was asked before."""
    choice = random.Random(7)
    folders = [tmp_path]
    for number in range(30):
        folders.append(choice.choice(folders) / f"d{number}")
        folders[-1].mkdir()
    links: list[Path] = []
    for number in range(60):
        link, target = choice.choice(folders) / f"l{number}", choice.choice([*folders, *links[-3:]])
        up, inside = os.path.relpath(target.parent, link.parent), "/" + os.path.relpath(target, tmp_path)
        forms = (inside, f"{up}/{target.name}", f"{up}/./{target.name}/../{target.name}", f"../{target.name}")
        link.symlink_to(forms[number % 4])  # the last leads nowhere, mostly
        links.append(link)
    links += [tmp_path / "around", tmp_path / "out"]
    links[-2].symlink_to("around")
    links[-1].symlink_to("../" * 40 + "d0")
    below = [f"/{os.path.relpath(link, tmp_path)}/{name}" for link in links for name in ("", ".", "..", "d3", "l5")]
    asked = [*("/" + os.path.relpath(path, tmp_path) for path in (*folders, *links)), *below]
    if isinstance(_in_root(tmp_path, "/"), int):
        pytest.skip("this kernel has no openat2")
    choice.shuffle(asked)
    host, known = LiveHost(str(tmp_path)), 0
    for turn, path in enumerate(asked):
        if turn == len(asked) // 4:
            host.begin_scan()
        expected = _in_root(tmp_path, path)
        try:
            found: str | int | None = host.resolve(path)
        except OSError as error:
            found = error.errno
        assert found == expected, path
        known += isinstance(found, str)
    assert known > 100
    assert host.resolve("/out") == "/d0"


def test_lines_of_the_kernel_log_outlive_it() -> None:
    """Lines that newer ones have overwritten stay, each once, and of all lines the newest."""
    log: deque[str] = deque(maxlen=MAX_LINES)
    lines = [f"<4>[  {number}.0] NVRM: Xid (PCI:0000:1c:00): 31, pid={number}" for number in range(MAX_LINES + 1)]
    for shown in (lines[:2], lines[1:3], lines[2:], lines[2:]):
        append_new_lines(log, shown)
    assert list(log) == lines[1:]


def test_a_kernel_log_that_may_not_be_read_is_an_error() -> None:
    """And not an empty log."""
    try:
        found = LiveHost().kernel_log("no line of any kernel has these words in it")
    except OSError as error:
        assert error.filename == "kernel log" or "kernel log" in str(error)
    else:
        assert found == ()


@pytest.mark.parametrize(("environment", "named"), rows_of(__file__)("pods")())
def test_a_pod_is_called_by_its_node(environment: dict[str, str], named: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod's own host name changes with every pod; outside a cluster NODE_NAME means nothing."""
    for name in ("NODE_NAME", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert LiveHost().identity()["hostname"] == ("gpu-07" if named else socket.gethostname())


def test_the_path_of_the_networks_annotation_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOPOFLIGHT_NETWORK_STATUS", "/etc/podinfo/network-status")
    monkeypatch.setenv("TOPOFLIGHT_NETWORK_STATUS_TOKEN", "x")
    environment = LiveHost().environment()
    assert environment["TOPOFLIGHT_NETWORK_STATUS"] == "/etc/podinfo/network-status"
    assert "TOPOFLIGHT_NETWORK_STATUS_TOKEN" not in environment


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
