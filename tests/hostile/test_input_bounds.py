"""Size and depth are bounded for each input, with the reader's own error. The fuzzer.

The inputs that once broke a reader were found by the fuzzer, at random, or by reading the code.
"""

import gzip
import io
import json
import os
import re
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import fuzz_targets
import pytest
from click.testing import CliRunner
from fuzz_targets import _dumps as dumped, check, targets
from rigs.command import process, python
from rigs.tables import ROOT, data_of, each_row, rows_of

from agent.advice.request import Request
from agent.base.options import InputError, RequestError, read_input
from agent.checks.baseline import read_baseline
from agent.checks.verdict import GateError
from agent.cli.bundle import BundleError, unpack_bundle
from agent.cli.main import cli
from collectives.bench.results import MAX_RESULT_BYTES, read_result
from collectives.traces import watchdog
from collectives.traces.rank_files import RankFileError, read as read_trace, read_state
from collectives.traces.ras import RasError, read as read_ras
from contracts import bounded, run_record
from contracts.bounded import ArchiveError, TooLargeError, open_regular, zip_files
from contracts.host_list import HostListError, expand_host_list
from contracts.job_config import ConfigError, read_file, read_mapping, read_plan
from contracts.plain import PlainError, loads as plain
from planner.forecast.calibration import CalibrationError, load_calibration
from planner.forecast.models import ModelError, read_model_file
from planner.lint.script import EnvironmentTextError
from planner.lint.sources import read_text
from planner.slurm import ScriptError, wrap_script
from probes.host.recording import load, load_all
from probes.interfaces.read import parse_network_status
from probes.wire import RecordingError
from topology.formats import TopologyFileError
from topology.formats.text import parse as parse_text
from topology.formats.xml import parse as parse_xml

tables = rows_of(__file__)
MIB = 1 << 20
DEEP = b"[" * 100_000
JUST_TOO_DEEP = b"[" * 900 + b"]" * 900  # which Python's own reader still takes
DEEP_XML = b"<system>" * 100 + b"</system>" * 100


def text(reader: Callable[[str], object]) -> Callable[[Path], object]:
    return lambda path: reader(path.read_text(encoding="utf-8"))


# what is read, its reader, its error, and what must be refused
BOUNDS: list[tuple[str, Callable[[Path], object], type[Exception], tuple[bytes, ...]]] = [
    ("plain JSON", text(plain), PlainError, (DEEP, JUST_TOO_DEEP)),
    ("recording", load, RecordingError, (b" " * (33 * MIB), gzip.compress(b" " * (33 * MIB)), DEEP, JUST_TOO_DEEP)),
    ("network-status", text(parse_network_status), ValueError, (DEEP,)),
    ("baseline", read_baseline, GateError, (b" " * (33 * MIB), DEEP, JUST_TOO_DEEP)),
    ("run's record", run_record.read, run_record.RecordError, (b" " * (33 * MIB), DEEP)),
    ("a verb's input", lambda path: read_input(str(path), 1000, hint=""), InputError, (b" " * 1001,)),
    ("stored result", read_result, ValueError, (b" " * (MAX_RESULT_BYTES + 1), DEEP, JUST_TOO_DEEP)),
    ("config.json", read_model_file, ModelError, (b" " * (2 * MIB), DEEP, JUST_TOO_DEEP)),
    ("--model FILE", lambda path: Request(model=str(path)).model_spec(), RequestError, (b" " * (2 * MIB), DEEP)),
    ("job settings", read_mapping, ConfigError, (b" " * (2 * MIB), DEEP, b"a: &a x\n" + b"b: *a\n" * 20)),
    ("job plan", read_plan, ConfigError, (b" " * (2 * MIB), DEEP)),
    ("calibration", load_calibration, CalibrationError, (b" " * (9 * MIB), DEEP, JUST_TOO_DEEP)),
    ("environment", text(read_text), EnvironmentTextError, (b"#" * (9 * MIB),)),
    ("manifest", text(lambda raw: read_text(raw, "yaml").environments), EnvironmentTextError, (
        b"#" * (2 * MIB), b"[" * 5000, b"[" * 100 + b"]" * 100, b"a: &a x\nb: [" + b"*a, " * 2000 + b"]",
        b"a: &a {k: [" + b"v, " * 1000 + b"]}\nb:\n  <<: [" + b"*a, " * 200 + b"]",
    )),
    ("flight recorder", lambda path: read_trace(path.read_bytes(), rank=0), RankFileError, (
        DEEP, b"]r\xff\xff\xff\xff", b"\x8b\xff\xff\xff\x7f", b"cos\nsystem\n(X\x02\0\0\0lstR.", b"(" * 1000,
        b"\x96" + b"\xff\xff\xff\xff\x0f\0\0\0", b"\x80\x04\x95" + b"\xff" * 7 + b"\x7f.",
        b"}" + b")" + b"\x85" * 900_000 + b"Ns.", b"}]Ns.", b"]q\x00}h\x00Ns.", b"0.", b"\x8d" + b"\xff" * 8,
        b"", b"\x80\x02", b"\x80\x02}", b"X\xff\xff\xff\xffx", b"}]a.", b"\x80\x02]q\x00h\x00a.", b"e.", b"u.",
    )),
    ("host list", text(expand_host_list), HostListError, (b"n[1-999999999]", b"n[1-9999]" * 9, b"n[" * 100_000)),
    ("batch script", text(lambda raw: wrap_script(raw, (), python="python", has_log=True)), ScriptError, (
        b"#!/bin/bash\n" + b"$(" * 100_000, b"#!/bin/bash\n#SBATCH \"" + b"x" * MIB, b"\0" * MIB,
    )),
    ("RAS", lambda path: read_ras(path.read_bytes()), RasError, (b'{"communicators": ' + DEEP, b"x" * MIB)),
    ("rank's file", read_state, RankFileError, (b" " * (2 * MIB), DEEP, JUST_TOO_DEEP)),
    ("topo -m", text(parse_text), TopologyFileError, (b"x" * (17 * MIB),)),
    ("NCCL XML", text(parse_xml), TopologyFileError, (
        b" " * (17 * MIB), DEEP_XML, b"<system>" + b"<cpu/>" * 300_000 + b"</system>",
        b'<!DOCTYPE s [<!ENTITY a "b">]><system>&a;</system>',
        b'<!DOCTYPE s SYSTEM "file:///etc/passwd"><system/>', b'<!DOCTYPE s [<!ENTITY % p SYSTEM "http://x/">%p;]><system/>',
    )),
]  # fmt: skip


@each_row(("what", "reader", "error", "refused"), BOUNDS, ids=[row[0] for row in BOUNDS])
def test_too_much_is_refused_by_name(what, reader, error, refused, tmp_path):
    """Too large, too deep, too many: the reader's own error, with words in it."""
    path = tmp_path / ("config.json" if "config" in what else "input.json")
    for content in refused:
        path.write_bytes(content)
        with pytest.raises(error) as caught:
            reader(path)
        assert str(caught.value).strip(), (what, content[:40])
        assert len(str(caught.value)) < 2000, (what, content[:40])


def test_blank_lines_cost_time_in_proportion() -> None:
    """A pattern that searches for a line from each blank line before it took minutes."""
    began = time.process_time()
    read_text("ENV NCCL_DEBUG=INFO \\\n" + "\n" * 100_000, "dockerfile")
    assert time.process_time() - began < 3.0


def test_lines_that_are_joined_cost_time_in_proportion() -> None:
    """A line is joined with the next one while it looks cut within a call, so a log may join all its lines."""
    began = time.process_time()
    watchdog.read(["WorkNCCL(SeqNum=1"] * 5_000)
    assert time.process_time() - began < 3.0


@pytest.mark.long
def test_a_pickle_costs_bounded_time_and_memory() -> None:
    """Whatever is in it: one byte may make a dict, and asks for 600 MiB in a file of 8 MB."""
    python("""
import re, resource, time
resource.setrlimit(resource.RLIMIT_CPU, (200, 200))
from collectives.traces import watchdog
from collectives.traces.rank_files import RankFileError, unpickle
def peak():  # MiB of this program; ru_maxrss would begin at the peak of the process that started it
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) >> 10
before = peak()
for raw in (b"}" * 7_600_000, b"]" + b"(e" * 4_000_000, b"}" + b"K\\x01Ns" * 2_000_000, b")" + b"\\x85" * 4_000_000):
    began = time.process_time()
    try:
        unpickle(raw)
    except RankFileError as error:
        grown = peak() - before
        print(raw[:2], round(time.process_time() - began, 1), grown, error)
        assert grown < 300 and "more than" in str(error), (grown, error)
    else:
        raise AssertionError(raw[:9])
""")


def zip_of(*files: tuple[str, bytes], kind: int = zipfile.ZIP_DEFLATED) -> bytes:
    """An archive of these files."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", kind) as archive:
        for name, content in files:
            archive.writestr(name, content)
    return made.getvalue()


def test_an_archive_costs_no_more_than_its_files(tmp_path: Path) -> None:
    """Bombs, damage and entries without end are refused; a bundle gives files of its hosts only."""
    file = ("h/recording.json", b"{}")
    plain_zip, large = zip_of(file), ("h/recording.json", bytes(40 * MIB))
    entry = plain_zip.index(b"PK\1\2")
    refused = {
        "no archive": b"x" * 2048, "nothing": b"", "cut": plain_zip[:-30], "large file": zip_of(large),
        "damaged": zip_of(file, kind=zipfile.ZIP_STORED).replace(b"{}", b"{x"),
        "lzma": zip_of(file, kind=zipfile.ZIP_LZMA), "entries": b"PK\1\2" * (1 << 17) + plain_zip,
        "locked": plain_zip[: entry + 8] + b"\1" + plain_zip[entry + 9 :],
    }  # fmt: skip
    wrong = []
    for what, raw in refused.items():
        try:
            list(zip_files(raw, 512 * MIB, 32 * MIB, lambda name: name.endswith("recording.json")))
            wrong.append(what)
        except (ArchiveError, TooLargeError):
            pass
        (tmp_path / "b.zip").write_bytes(raw)
        with pytest.raises(RecordingError):
            load_all(tmp_path / "b.zip")
    assert not wrong
    with pytest.raises(TooLargeError):  # together
        list(zip_files(zip_of(file, ("i/recording.json", b"{}")), 3, 32 * MIB, bool))
    found = unpack_bundle(zip_of(file, ("h/../x", b"1"), ("h/d/", b""), ("../h/recording.json", b"2")))
    assert found["h"]["recording.json"] == b"{}" and not any(".." in name for files in found.values() for name in files)
    with pytest.raises(BundleError):
        unpack_bundle(b"x" * 2048)


def test_a_pipe_or_a_device_given_as_a_file_is_refused_at_once(tmp_path: Path) -> None:
    """Opening a pipe waits for its writer; reading /dev/zero never ends. Standard input is the way for a pipe."""
    machine = ROOT / "tests/machines/titan-rtx-2x-nv2.json"
    os.mkfifo(pipe := tmp_path / "pipe.json", 0o600)
    (link := tmp_path / "link.json").symlink_to("/dev/zero")
    verbs = tables("readers")()
    rows = [[word.format(name, machine) for word in row.split()] for row in verbs for name in (pipe, link)]
    code = """
import json, sys
from click.testing import CliRunner
from agent.cli.main import cli
for row in json.loads(sys.stdin.read()):
    done = CliRunner().invoke(cli, row)
    said = done.output + repr(done.exception)
    fine = done.exit_code in (2, 3, 5) and "regular file" in said
    print("" if fine else f"{row}: {done.exit_code} {said[-300:]}", flush=True)
print("end")
"""
    assert python(code, given=json.dumps(rows)).stdout.split() == ["end"]
    with pytest.raises(OSError, match="regular files"):
        open_regular(pipe)
    given = process("lint-env", "-", given="NCCL_DEBUG=INFO\n")
    assert given.returncode in (0, 3), given.stdout + given.stderr


def test_the_bound_is_the_last_size_that_is_read(tmp_path: Path) -> None:
    """One byte more is refused; the error says how much is read, of a file that no memory would hold too."""
    path, endless = tmp_path / "file", tmp_path / "endless"
    path.write_bytes(b"12345")
    endless.touch()
    os.truncate(endless, 1 << 40)  # sparse
    assert bounded.read(path, 5) == bounded.rest(io.BytesIO(b"12345"), 5) == b"12345"
    for file in (path, endless):
        with pytest.raises(TooLargeError, match="larger than 4 bytes"):
            bounded.read(file, 4)
    path.write_text("\u00e9")
    assert bounded.read_text(path, 2) == "\u00e9"


def test_every_reader_of_the_fuzzer_has_its_bound_here_or_needs_none() -> None:
    """A new target is thought about."""
    assert set(targets()) == set(tables("bounded")()) | set(tables("flat")())


ROWS = data_of(__file__, "test_input_bounds.yaml")
VALID: dict[str, Callable] = {
    "machine": fuzz_targets._machine, "bench_result": lambda: fuzz_targets.document_of("bench"), "outcome": dict,
    "run": lambda: fuzz_targets.document_of("run"), "recording": lambda: fuzz_targets._recording("titan-rtx-2x-nv2"),
}  # fmt: skip


def encoded(text: str) -> bytes:
    return re.sub(r'"?9\{(\d+)\}"?', lambda found: "9" * int(found[1]), text).encode()


def document(target: str, changes: dict) -> bytes:
    valid = VALID[target]()
    if target == "recording":
        return b"\1\0" + dumped({**valid, "answers": {**valid["answers"], **changes}})
    return b"\1" + encoded(dumped({**valid, **changes}).decode())


def aliases(first: str, form: str, behind: str) -> bytes:
    """YAML whose aliases expand to a billion times the first."""
    levels = (f"a{i + 1}: &a{i + 1} {form % ', '.join([f'*a{i}'] * 40)}\n" for i in range(8))
    return f"\1a0: &a0 {first}\n{''.join(levels)}{behind}".encode()


FOUND = {what: (target, encoded(text)) for what, (target, text) in ROWS["texts"].items()}
FOUND |= {what: (target, document(target, changes)) for what, (target, changes) in ROWS["documents"].items()}
FOUND |= {what: (target, aliases(*made)) for what, (target, *made) in ROWS["aliases"].items()}


@each_row("name", FOUND)
def test_an_input_that_once_broke_a_reader_is_read_or_refused(name: str) -> None:
    """A result, or the reader's own error; anything else comes out of here."""
    target, data = FOUND[name]
    check(targets()[target], data)


@each_row("name", sorted(targets()))
def test_every_reader_takes_what_the_fuzzer_starts_from(name: str) -> None:
    """The seeds themselves: a reader that refuses all of them is fuzzed at its first line only."""
    refused = 0
    for seed in targets()[name].seeds:
        try:
            targets()[name].run(seed)
        except targets()[name].errors:
            refused += 1
    assert refused < len(targets()[name].seeds)


@each_row("words", ROWS["too_long"])
def test_a_name_that_no_file_can_have_is_no_file(words: str) -> None:
    """pathlib raises OSError where a name is too long."""
    done = CliRunner().invoke(cli, words.format(name="x" * 300).split())
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception


def test_a_file_that_settings_name_may_have_no_possible_name(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(f"deepspeed: {'x' * 300}\n")
    assert read_file(tmp_path / "job.yaml") == {"deepspeed": "x" * 300}


RUNS = 3_000  # some 40 s of CPU


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_no_input_of_the_fuzzer_breaks_a_reader() -> None:
    """Only where atheris has a wheel. The same inputs in each run; `make fuzz` looks for others."""
    if sys.platform != "linux" or os.uname().machine != "x86_64" or sys.version_info >= (3, 14):
        pytest.skip("atheris has no wheel for this interpreter")
    words = [sys.executable, str(ROOT / "bench/fuzz.py"), "--runs", str(RUNS)]
    done = subprocess.run(words, capture_output=True, text=True, errors="replace", check=False, timeout=1100)
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-4000:]
    assert int(done.stdout.split(" inputs")[0].split()[-1]) >= RUNS, done.stdout
