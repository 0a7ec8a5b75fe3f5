"""The scan: outcomes, the child process and its ends, and snapshots as JSON."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import cattrs
import psutil
import pytest
from rigs.command import python
from rigs.found import findings
from rigs.tables import each_row

from contracts.finding import Finding, Status
from probes.api import Absent, Failed, Ok, Probe, UnavailableError
from probes.host.live import LiveHost
from probes.host.protocol import Host
from probes.host.recording import load
from probes.limits.probe import LimitsFacts
from probes.registry import ALL, BY_NAME
from probes.scan import run, scan
from probes.scanner import Scanner
from probes.wire import SnapshotError, dumps, from_json, loads, outcome_from_json, outcome_to_json, to_json

MACHINES = Path(__file__).parent.parent / "machines"
RECORDINGS = sorted(MACHINES.glob("*.json"))


def _probe(read: Any) -> Probe[Any]:
    return Probe(name="limits", facts=LimitsFacts, read=read, check=lambda _facts: ())


def test_what_a_probe_does_becomes_an_outcome() -> None:
    """Absent is not failed, and no error leaves the scan."""

    def absent(_host: Host) -> None:
        raise UnavailableError("no such thing here")

    def broken(_host: Host) -> None:
        raise ZeroDivisionError("by zero")

    host = LiveHost()
    assert isinstance(run(_probe(absent), host), Absent)
    outcome = run(_probe(broken), host)
    assert isinstance(outcome, Failed)
    assert outcome.error == "ZeroDivisionError: by zero"
    assert run(_probe(lambda _host: 5), host).seconds >= 0


def test_every_code_and_metric_carries_its_probes_name() -> None:
    """And no two probes have one name."""
    assert len({probe.name for probe in ALL}) == len(ALL)
    for probe in ALL:
        assert all(code.startswith(f"{probe.name}.") and code.count(".") == 2 for code in probe.codes), probe.name
        assert all(metric.name.startswith(f"{probe.name}_") for metric in probe.metrics), probe.name


@each_row(
    ("modules", "absent"),
    [
        ("probes.scanner, probes.wire", {"pynvml", "pyroute2", "pyverbs", "psutil", "torch"}),  # they are the child's
        ("probes.worker", {"cattrs", "attr", "pyroute2", "asyncio", "ssl"}),  # it is resident on every node
    ],
)
def test_resident_processes_import_neither_bindings_nor_converters(modules: str, absent: set[str]) -> None:
    assert not absent.intersection(python(f"import sys, {modules}; print(*sys.modules)").stdout.split())


def test_a_live_scan_answers_with_every_probe() -> None:
    """On whatever machine this runs; nothing fails, and the facts have the declared types."""
    with Scanner() as scanner:
        snapshot = scanner.scan()
    assert list(snapshot.outcomes) == [probe.name for probe in ALL]
    for name, outcome in snapshot.outcomes.items():
        assert not isinstance(outcome, Failed), (name, outcome)
        if isinstance(outcome, Ok):
            assert type(outcome.facts) is BY_NAME[name].facts


def test_findings_use_declared_codes_only_and_samples_declared_families() -> None:
    """What `explain` and the dashboards know is what the checks return."""
    for path in RECORDINGS:
        snapshot = scan(load(path))
        for finding in findings(snapshot):
            probe = BY_NAME[finding.code.partition(".")[0]]
            assert finding.code in probe.codes, (path.name, finding)
            assert finding.message
            assert finding.evidence, (path.name, finding)
            assert finding.remedy or finding.status is Status.INFO, (path.name, finding)
        for name, outcome in snapshot.outcomes.items():
            families = {metric.name: metric for metric in BY_NAME[name].metrics}
            for sample in BY_NAME[name].samples(outcome.facts) if isinstance(outcome, Ok) else ():
                assert len(sample.labels) == len(families[sample.metric].labels), (path.name, sample)


def test_a_failed_probe_is_an_unknown_finding() -> None:
    """The gate can require a probe."""
    snapshot = scan(load(RECORDINGS[0]), [_probe(lambda _host: 1 / 0)])
    assert [(f.code, f.status) for f in findings(snapshot)] == [("limits.probe.failed", Status.UNKNOWN)]
    assert isinstance(findings(snapshot)[0], Finding)


# The child ---------------------------------------------------------------------------------------------------------


def _child(scanner: Scanner) -> psutil.Process:
    scanner.scan()
    return psutil.Process(scanner.child_pid or 0)


def _gone(process: psutil.Process, seconds: float = 60.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


def test_the_child_is_kept_between_scans_and_gone_after_close() -> None:
    """One start, many scans."""
    scanner = Scanner(probes=(BY_NAME["limits"],))
    child = _child(scanner)
    assert _child(scanner).pid == child.pid
    scanner.close()
    assert _gone(child)


def test_a_killed_child_costs_at_most_one_probe() -> None:
    """Something else ends it between two scans (the OOM killer): the scan after that is whole again."""
    with Scanner(probes=(BY_NAME["limits"], BY_NAME["hostinfo"])) as scanner:
        child = _child(scanner)
        os.kill(child.pid, signal.SIGKILL)
        assert _gone(child)
        broken = scanner.scan()
        assert isinstance(broken.outcomes["limits"], Failed)
        assert "SIGKILL" in broken.outcomes["limits"].error
        assert isinstance(broken.outcomes["hostinfo"], Ok)
        assert all(isinstance(outcome, Ok) for outcome in scanner.scan().outcomes.values())


def test_a_stopped_child_is_replaced() -> None:
    """SIGSTOP stands for a process that hangs without taking a signal's default action."""
    hurried = replace(BY_NAME["limits"], timeout_seconds=3.0)  # of the one that will hang; the other has its own time
    with Scanner(probes=(hurried, BY_NAME["hostinfo"])) as scanner:
        child = _child(scanner)
        child.suspend()
        outcomes = scanner.scan().outcomes
        assert isinstance(outcomes["limits"], Failed)
        assert "no answer after" in outcomes["limits"].error
        assert isinstance(outcomes["hostinfo"], Ok)
        assert _gone(child)


LIMITS, HOSTINFO = BY_NAME["limits"], BY_NAME["hostinfo"]


def _starts_nothing(scanner: Scanner, words: str) -> None:
    for outcome in scanner.scan().outcomes.values():
        assert isinstance(outcome, Failed)
        assert "does not start" in outcome.error and words in outcome.error


@pytest.mark.parametrize(
    ("code", "words"),
    [("print('hello')", "not JSON"), ("import os; os._exit(3)", "exit code 3"), ("print('{}')", "did not say")],
)
def test_a_child_that_cannot_start_fails_every_probe_once(
    code: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broken Python installation is said in words, and a fixed one works again."""
    (tmp_path / "sitecustomize.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with Scanner(probes=(LIMITS, HOSTINFO)) as scanner:
        _starts_nothing(scanner, words)
        (tmp_path / "sitecustomize.py").unlink()
        assert all(isinstance(outcome, Ok) for outcome in scanner.scan().outcomes.values())


def test_a_child_that_the_system_refuses_fails_the_probes_and_not_the_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process, no memory or no file is left: Popen raises OSError."""
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with Scanner(probes=(LIMITS, HOSTINFO)) as scanner:
        _starts_nothing(scanner, "FileNotFoundError")
        monkeypatch.undo()
        assert all(isinstance(outcome, Ok) for outcome in scanner.scan().outcomes.values())


@pytest.mark.parametrize("stopped", [False, True])
def test_no_child_outlives_a_parent_that_is_killed(stopped: bool) -> None:
    """Even one that cannot say goodbye; a child that is stopped does not see that its pipe has closed."""
    code = (
        "from probes.scanner import Scanner; import time\n"
        "s = Scanner(); s.scan(); print(s.child_pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        child = psutil.Process(int(parent.stdout.readline()))
        if stopped:
            child.suspend()
        parent.kill()
        assert _gone(child)


def test_threads_may_share_a_scanner() -> None:
    """The agent scans from a pool of threads; a thread that ends must not take the child along."""
    results: list[Any] = []
    with Scanner(probes=(BY_NAME["limits"],)) as scanner:
        for _ in range(2):
            threads = [threading.Thread(target=lambda: results.append(scanner.scan())) for _ in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    assert [type(s.outcomes["limits"]) for s in results] == [Ok] * 6


def test_a_users_mistake_is_named() -> None:
    """Root and timeout."""
    with pytest.raises(NotADirectoryError, match="nowhere"):
        Scanner("/nowhere/at/all")
    with pytest.raises(ValueError, match=r"timeout_seconds is -1"):
        Scanner(timeout_seconds=-1)


def test_paths_stay_below_the_root(tmp_path: Path) -> None:
    """Links that point up or to absolute paths are followed inside the root, loops end."""
    (tmp_path / "sys").mkdir()
    (tmp_path / "secret").write_text("inside\n")
    (tmp_path / "sys/absolute").symlink_to("/secret")
    (tmp_path / "sys/up").symlink_to("../../../../secret")
    (tmp_path / "sys/loop").symlink_to("loop")
    host = LiveHost(str(tmp_path))
    assert host.read_text("/sys/absolute") == "inside\n"
    assert host.read_text("/sys/up") == "inside\n"
    assert host.resolve("/sys/up") == "/secret"
    assert host.exists("/sys/loop") is False
    with pytest.raises(OSError, match="symbolic links"):
        host.read_text("/sys/loop")
    with pytest.raises(FileNotFoundError):
        host.read_text("/etc/hostname")


# Snapshots as JSON -------------------------------------------------------------------------------------------------


@each_row("path", RECORDINGS, ids=lambda path: path.stem)
def test_the_same_as_the_converter_and_back(path: Path) -> None:
    snapshot = scan(load(path))
    assert loads(dumps(snapshot)) == snapshot
    for name, outcome in snapshot.outcomes.items():
        plain = outcome_to_json(outcome)
        assert outcome_from_json(name, json.loads(json.dumps(plain))) == outcome
        if isinstance(outcome, Ok):
            assert json.dumps(plain["facts"]) == json.dumps(cattrs.unstructure(outcome.facts))


def test_a_fact_without_a_plain_form_is_named() -> None:
    """Nothing is lost silently."""
    with pytest.raises(TypeError, match="bytes"):
        outcome_to_json(Ok(facts=b"raw", seconds=0.0))


def test_unknown_fields_are_left_out_and_newer_schemas_refused() -> None:
    """A newer agent's extra field does no harm; a newer meaning does."""
    data = to_json(scan(load(RECORDINGS[0])))
    data["outcomes"]["limits"]["facts"]["field_of_next_year"] = 1
    assert isinstance(from_json(data).outcomes["limits"], Ok)
    data["outcomes"]["quantum"] = {"status": "ok", "facts": {}, "seconds": 0.1}
    assert isinstance(from_json(data).outcomes["quantum"], Failed)
    data["schema_version"] = 99
    with pytest.raises(SnapshotError, match="99"):
        from_json(data)


@each_row(
    ("outcome", "words"),
    [
        ({}, "status"),
        ({"status": "maybe"}, "allowed"),
        ({"status": "ok"}, "facts"),
        ({"status": "ok", "facts": {}}, "uid"),
        ({"status": "ok", "facts": {"whose": "me", "uid": "root"}}, "uid"),
        ({"status": "absent"}, "why"),
        (None, "outcome of probe"),
    ],
)
def test_an_outcome_that_does_not_fit_says_where(outcome: Any, words: str) -> None:
    """The probe's name and the field."""
    with pytest.raises(SnapshotError, match="'limits'") as caught:
        outcome_from_json("limits", outcome)
    assert words in str(caught.value)


@each_row("text", ["", "{", "[]", "3", '{"outcomes": 3}', "[" * 100_000])
def test_text_that_is_no_snapshot_is_refused(text: str) -> None:
    """One error type for all of it."""
    with pytest.raises(SnapshotError):
        loads(text)
