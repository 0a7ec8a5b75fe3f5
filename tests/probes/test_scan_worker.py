"""The scan: outcomes, the child process and its ends, and outcomes as JSON."""

import json
import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import cattrs
import psutil
import pytest
from rigs.command import python
from rigs.recorded import NAMES, PATHS, findings, path_of, snapshot
from rigs.tables import each_row, rows_of
from rigs.waiting import eventually
from scanned import scan

from contracts.finding import Status
from probes import registry, scanner as scanning
from probes.api import Absent, Failed, Ok, Snapshot, UnavailableError
from probes.host.live import LiveHost
from probes.host.protocol import Host
from probes.host.recording import load
from probes.registry import ALL, BY_NAME
from probes.scanner import Scanner
from probes.wire import OutcomeError, RecordingError, outcome_from_json, outcome_to_json
from probes.worker import reader, run

rows = rows_of(__file__)


def test_what_a_probe_does_becomes_an_outcome() -> None:
    """Absent is not failed, and no error leaves the scan."""

    def absent(_host: Host) -> None:
        raise UnavailableError("no such thing here")

    def broken(_host: Host) -> None:
        raise ZeroDivisionError("by zero")

    host = LiveHost()
    assert isinstance(run(absent, host), Absent)
    outcome = run(broken, host)
    assert isinstance(outcome, Failed)
    assert outcome.error == "ZeroDivisionError: by zero"
    assert run(lambda _host: 5, host).seconds >= 0


def test_every_code_and_metric_carries_its_probes_name() -> None:
    """And no two probes have one name."""
    assert len({probe.name for probe in ALL}) == len(ALL)
    for probe in ALL:
        assert all(code.startswith(f"{probe.name}.") and code.count(".") == 2 for code in probe.codes), probe.name
        assert all(metric.name.startswith(f"{probe.name}_") for metric in probe.metrics), probe.name


OF_THE_CHILD = {"pynvml", "pyroute2", "pyverbs", "psutil", "torch", "probes.host", "probes.worker",
                *(f"probes.{probe.name}.read" for probe in ALL)}  # fmt: skip
CONVERTERS = {"cattrs", "attr", "pyroute2", "asyncio", "ssl"}  # the child is resident on every node


@each_row(("modules", "absent"), [("probes.scanner, probes.registry", OF_THE_CHILD), ("probes.worker", CONVERTERS)])
def test_resident_processes_import_neither_bindings_nor_converters(modules: str, absent: set[str]) -> None:
    assert not absent.intersection(python(f"import sys, {modules}; print(*sys.modules)").stdout.split())


def test_every_folder_of_a_probe_has_a_reader() -> None:
    """The registry and the child name the same probes, each for its folder."""
    folders = {path.parent.name for path in Path(registry.__file__).parent.glob("*/read.py")}
    assert {probe.name for probe in ALL} == folders
    assert all(reader(probe.name).__annotations__["return"] == probe.facts.__name__ for probe in ALL)


@each_row("name", NAMES)
def test_every_recorded_machine_is_read_judged_and_written(name: str) -> None:
    """No probe fails, findings are whole and have codes that `explain` knows, and outcomes come back from JSON."""
    assert len(load(path_of(name)).content["source"]) > 40, "each file says where its facts come from"
    for finding in findings(snapshot(name)):
        assert finding.code in BY_NAME[finding.code.partition(".")[0]].codes, finding
        assert finding.message and finding.evidence, finding
        assert finding.remedy or finding.status is Status.INFO, finding
    for probe, outcome in snapshot(name).outcomes.items():
        assert not isinstance(outcome, Failed), (probe, outcome)
        plain = outcome_to_json(outcome)
        assert outcome_from_json(BY_NAME[probe], json.loads(json.dumps(plain))) == outcome
        if isinstance(outcome, Ok):
            assert json.dumps(plain["facts"]) == json.dumps(cattrs.unstructure(outcome.facts))


# The child ---------------------------------------------------------------------------------------------------------


def _child(scanner: Scanner) -> psutil.Process:
    scanner.scan()
    return psutil.Process(scanner.child_pid or 0)


def wait_for_end(process: psutil.Process) -> None:
    eventually(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE, "the child has ended")


def test_the_child_is_kept_between_scans_and_gone_after_close() -> None:
    """One start, many scans."""
    scanner = Scanner(probes=(BY_NAME["limits"],))
    child = _child(scanner)
    assert _child(scanner).pid == child.pid
    scanner.close()
    wait_for_end(child)


def test_a_killed_child_costs_at_most_one_probe() -> None:
    """Something else ends it between two scans (the OOM killer): the scan after that is whole again."""
    with Scanner(probes=(BY_NAME["limits"], BY_NAME["hostinfo"])) as scanner:
        child = _child(scanner)
        os.kill(child.pid, signal.SIGKILL)
        wait_for_end(child)
        broken = scanner.scan()
        assert isinstance(broken.outcomes["limits"], Failed)
        assert "SIGKILL" in broken.outcomes["limits"].error
        assert isinstance(broken.outcomes["hostinfo"], Ok)
        assert all(isinstance(outcome, Ok) for outcome in scanner.scan().outcomes.values())


LIMITS, HOSTINFO = BY_NAME["limits"], BY_NAME["hostinfo"]


def _starts_nothing(scanner: Scanner, words: str) -> None:
    for outcome in scanner.scan().outcomes.values():
        assert isinstance(outcome, Failed)
        assert "does not start" in outcome.error and words in outcome.error


@pytest.mark.parametrize(
    ("code", "words"),
    [("print('hello')", "not JSON"), ("import os; os._exit(3)", "exit code 3"), ("print('{}')", "did not say")],
)
def test_a_child_that_cannot_start_fails_every_probe_once(code, words, tmp_path, monkeypatch):
    """A broken Python installation is said in words, and a fixed one works again."""
    (tmp_path / "sitecustomize.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with Scanner(probes=(LIMITS, HOSTINFO)) as scanner:
        _starts_nothing(scanner, words)
        (tmp_path / "sitecustomize.py").unlink()
        assert all(isinstance(outcome, Ok) for outcome in scanner.scan().outcomes.values())


def test_a_child_that_the_system_refuses_fails_the_probes_and_not_the_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    """No program, no thread (as with a limit of processes) or no file is left."""

    def no_thread(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with Scanner(probes=(LIMITS, HOSTINFO)) as scanner:
        with monkeypatch.context() as changed:
            changed.setattr(sys, "executable", "/nowhere/python")
            _starts_nothing(scanner, "FileNotFoundError")
        with monkeypatch.context() as changed:
            changed.setattr(threading.Thread, "start", no_thread)
            _starts_nothing(scanner, "can't start new thread")
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limit[1]))  # those that are open stay open
        try:
            _starts_nothing(scanner, "Too many open files")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        assert all(isinstance(outcome, Ok) for outcome in scanner.scan().outcomes.values())


@pytest.mark.parametrize("stopped", [False, True])
def test_no_child_outlives_a_parent_that_is_killed(stopped: bool) -> None:
    """Even one that cannot say goodbye; a child that is stopped does not see that its pipe has closed."""
    code = (
        "from probes.registry import ALL; from probes.scanner import Scanner; import time\n"
        "s = Scanner(probes=ALL); s.scan(); print(s.child_pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        child = psutil.Process(int(parent.stdout.readline()))
        if stopped:
            child.suspend()
        parent.kill()
        wait_for_end(child)


def test_recordings_are_replayed_in_a_child_that_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a scan in this process reads them. A file that is no recording is named, and a dead child replaced."""

    def facts(found: Snapshot) -> dict:
        return {name: getattr(outcome, "facts", None) for name, outcome in found.outcomes.items()}

    def child() -> int:
        return scanning._replayers[os.getpid()].process.pid

    (tmp_path / "none.json").write_text("{}")
    monkeypatch.chdir(PATHS[0].parent)
    (found,) = scanning.replay(Path(PATHS[0].name), ALL)
    expected = scan(load(PATHS[0]))
    assert (found.hostname, found.taken_at_seconds) == (expected.hostname, expected.taken_at_seconds)
    assert facts(found) == facts(expected)
    first = child()
    monkeypatch.chdir(tmp_path)
    for name in ("none.json", "absent.json"):
        with pytest.raises(RecordingError, match=name):
            scanning.replay(Path(name), ALL)
    (found,) = scanning.replay(PATHS[0], (BY_NAME["limits"],))
    assert list(found.outcomes) == ["limits"]
    assert child() == first
    os.kill(first, signal.SIGKILL)
    scanning._replayers[os.getpid()].process.wait()
    stop = threading.Event()
    assert len(scanning.replay(PATHS[1], ALL, stop)) == 1
    assert child() != first
    for name in ("/dev/fd", "/proc/self/fd"):  # of this process, as `--host /dev/stdin` is
        with PATHS[1].open() as stream:
            assert len(scanning.replay(Path(f"{name}/{stream.fileno()}"), ALL)) == 1
    psutil.Process(child()).suspend()
    monkeypatch.setattr(scanning, "REPLAY_SECONDS", 60.0)
    threading.Timer(0.2, stop.set).start()
    assert scanning.replay(PATHS[1], ALL, stop) == ()  # also from a child that does not answer
    with os.fdopen(os.pipe()[0]) as pipe, pytest.raises(RecordingError, match=f"^/dev/fd/{pipe.fileno()}: a pipe"):
        scanning.replay(Path(f"/dev/fd/{pipe.fileno()}"), ALL)
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert len(scanning.replay(PATHS[1], ALL)) == 1  # a whole path needs no current folder


def test_threads_may_share_a_scanner() -> None:
    """The agent scans from a pool of threads; a thread that ends must not take the child along."""
    results: list = []
    with Scanner(probes=(BY_NAME["limits"],)) as scanner:
        for _ in range(2):
            threads = [threading.Thread(target=lambda: results.append(scanner.scan())) for _ in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    assert [type(s.outcomes["limits"]) for s in results] == [Ok] * 6


# Outcomes as JSON -------------------------------------------------------------------------------------------------


def test_a_fact_without_a_plain_form_is_named() -> None:
    """Nothing is lost silently."""
    with pytest.raises(TypeError, match="bytes"):
        json.dumps(outcome_to_json(Ok(facts=b"raw", seconds=0.0)))


def test_unknown_fields_are_left_out() -> None:
    """What a newer child says more does no harm."""
    data = outcome_to_json(snapshot().outcomes["limits"])
    data["facts"]["field_of_next_year"] = 1
    assert isinstance(outcome_from_json(BY_NAME["limits"], data), Ok)


@each_row(("outcome", "words"), rows("outcomes"))
def test_an_outcome_that_does_not_fit_says_where(outcome, words: str) -> None:
    """The probe's name and the field."""
    with pytest.raises(OutcomeError, match="'limits'") as caught:
        outcome_from_json(BY_NAME["limits"], outcome)
    assert words in str(caught.value)
