"""Every form a channel line has had, and what each proves; whole verdicts of short logs and of the corpus's."""

import json
from dataclasses import fields

import pytest
from evidence_rows import rows
from rich.console import Console
from rigs.logs import read
from rigs.tables import corpus_folder, each_row, golden_rows

from agent.cli.evidence import print_evidence
from collectives.nccl_log import evidence
from collectives.nccl_log.codes import CODES
from collectives.nccl_log.transport import ChannelCount, Evidence
from contracts import plain

HEAD = "gpu-a:101:131 [0] NCCL INFO "


# line, transport, direction, with GDRDMA
@each_row("prefix", rows("prefixes"))
@each_row(("line", "transport", "direction", "gdrdma"), rows("network_forms"))
def test_network_forms(prefix: str, line: str, transport: str, direction: str, gdrdma: bool) -> None:
    """Transport, direction and tag are read behind every launcher's prefix."""
    verdict = read([f"{prefix}{HEAD}{line}\n"])
    assert verdict.transports == {transport: 1}
    assert getattr(verdict, direction) == ChannelCount(total=1, gdrdma=int(gdrdma))
    assert verdict.gdrdma == ("on" if gdrdma else "off")
    assert verdict.intra_node_transport is None


@each_row(("line", "transport"), rows("local_forms"))
def test_forms_within_a_node(line: str, transport: str) -> None:
    """GPUDirect RDMA does not apply; P2P is called P2P, not NVLink."""
    verdict = read([f"{HEAD}{line}\n"])
    assert (verdict.intra_node_transport, verdict.inter_node_transport) == (transport, None)
    assert verdict.gdrdma == "none"
    assert evidence.exit_code(verdict) == evidence.PASS


@each_row(("network", "name"), rows("network_names"))
def test_names_between_nodes(network: str, name: str) -> None:
    """The same name from channel lines and from the line that selects the network."""
    channel = read([f"{HEAD}Channel 00/0 : 0[0] -> 1[0] [send] via NET/{network}/0\n"])
    selected = read([f"{HEAD}Using network {network}\n"])
    assert channel.inter_node_transport == selected.inter_node_transport == name
    assert selected.gdrdma == "none"


@each_row(("text", "version"), rows("versions"))
def test_versions(text: str, version: str) -> None:
    """Printed bare, at INFO, by RCCL, and glued to a neighbour."""
    verdict = read([text + "\n"])
    assert verdict.nccl_version == version
    assert verdict.library == ("rccl" if "RCCL" in version else "nccl")
    with (out := Console()).capture() as printed:
        print_evidence(out, verdict)
    assert f"library        {verdict.library} {version.removeprefix('RCCL ')}" in printed.get()


@each_row(("version", "distance", "name"), rows("distances"))
def test_distances_are_decoded_by_version(version: str, distance: int, name: str) -> None:
    """The path enumeration changed: the same number is another path."""
    disabled = f"{HEAD}GPU Direct RDMA Disabled for GPU 1b000 / HCA 0 (distance {distance} > 4), read 1"
    verdict = read([f"NCCL version {version}+cuda12.9", disabled])
    assert verdict.gdr_paths[0].startswith(f"disabled: {name} where ")
    assert verdict.gdrdma == "none"


SOCKETS = rows("over_sockets")


@each_row(("before", "behind"), rows("wrappings"))
def test_what_a_collector_wraps_around_a_line_is_no_part_of_its_value(before: str, behind: str) -> None:
    """Values at the end of a line are read without the quote, the table edge or the count that follow."""
    verdict = read([f"{before}{line}{behind}\n" for line in SOCKETS])
    assert verdict.network == "Socket"
    assert verdict.nccl_version == "2.7.6+cudaCUDA_MAJOR.CUDA_MINOR"
    assert verdict.environment["NCCL_P2P_DISABLE"] == "1"
    assert verdict.environment["NCCL_NET"] == "AWS Libfabric"
    assert {problem.code for problem in verdict.problems} == {"socket_fallback", "p2p_disabled_by_env"}


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-8-sig"])
def test_a_log_in_another_encoding_is_read(encoding, tmp_path):
    """PowerShell redirects in UTF-16, and editors save with a byte order mark. 1.2 MB of UTF-16 are two blocks."""
    log = tmp_path / "train.log"
    lines = [*SOCKETS, *([HEAD + "Channel 00/0 : 2[0] -> 1[1] [receive] via NET/Socket/0"] * 9_000)]
    log.write_bytes("\r\n".join([*lines, ""]).encode(encoding))
    verdict = evidence.read_files([log])
    assert verdict.network == "Socket"
    assert (verdict.send, verdict.receive) == (ChannelCount(total=1), ChannelCount(total=9_000))
    assert verdict.lines_read == len(lines)


@pytest.mark.parametrize("redraws", [400, 60_000])
def test_a_progress_bar_of_any_length_hides_no_message(redraws, tmp_path):
    """A bar redraws itself with carriage returns: thousands of bytes before the first newline."""
    bar = "".join(f"\r {n % 100}%|####      | {n}/{redraws} [00:01<00:20,  1.20it/s]" for n in range(redraws))
    log = tmp_path / "train.log"
    log.write_text("\n".join(["start", bar + "\r" + SOCKETS[-1], *SOCKETS[:-1], ""]))
    verdict = evidence.read_files([log])
    assert verdict.send == ChannelCount(total=1)
    assert verdict.lines_read == 1 + len(SOCKETS)
    assert next(row.line for row in verdict.proof if "NET/Socket" in row.text) == 2


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("times", [1, 12_000])  # so many are more than a block
def test_every_line_end_ends_the_last_line(end, times, tmp_path):
    """A channel before the file's last line end is whole; without one the tag may have been next."""
    log = tmp_path / "train.log"
    log.write_bytes((SOCKETS[-1] + end).encode() * times)
    whole = evidence.read_files([log])
    assert (whole.send, whole.torn_lines) == (ChannelCount(total=times), 0)
    log.write_bytes(log.read_bytes().removesuffix(end.encode()))
    torn = evidence.read_files([log])
    assert (torn.send.total, torn.torn_lines) == (times - 1, 1)


def test_a_log_in_one_json_string_is_read(tmp_path):
    """Some collectors give the whole log as one value; Loki gives each line in a list, and all lists in one line."""
    log = tmp_path / "logs.json"
    entries = [[str(number), text] for number, text in enumerate(["step"] * 60_000 + list(SOCKETS))]
    for data in (
        {"logs": "step\n" * 400_000 + "\n".join(SOCKETS)},
        {"values": entries},
        [{"line": t} for _, t in entries],
    ):
        log.write_text(json.dumps(data))
        verdict = evidence.read_files([log])
        assert (verdict.network, verdict.send.total, verdict.transports["SHM"]) == ("Socket", 1, 1)


TEXTS = ("problems", "notes", "proof", "fabric", "lines_read", "schema_version", "runs", "rank_hosts")


def row_of(verdict: Evidence) -> dict:
    """Every field that is not its type's default, problems with the lines that prove them, and what a gate answers."""
    usual = Evidence()
    document = plain.write(verdict)
    found = {each.name: document[each.name] for each in fields(Evidence) if each.name not in TEXTS
             and getattr(verdict, each.name) != getattr(usual, each.name)}  # fmt: skip
    found["problems"] = [  # with the action where it is not that of the code
        [p.severity, p.code, p.message, p.place, [row.line for row in p.lines],
         *([p.action] if p.action != CODES[p.code].action else [])]
        for p in verdict.problems
    ]  # fmt: skip
    found["notes"] = [note.code for note in verdict.notes]
    found["runs"] = [[run.first.line, run.inter_node_transport, run.gdrdma, run.outcome] for run in verdict.runs]
    found["fabric"] = [[row.line, row.proves] for row in verdict.fabric]
    gates = [evidence.exit_code(verdict), evidence.exit_code(verdict, fail_on="warn")]
    return {name: value for name, value in found.items() if value} | {"exit_codes": gates}


def test_golden_verdicts() -> None:
    """A row says what it shows; rows that differ in one fact are adjacent."""
    golden_rows("evidence.jsonl", "verdict", lambda row: row_of(read(row["lines"])))


GDRDMA = {"on": True, "off": False, "partial": "partial", "none": None}


@pytest.mark.corpus
@each_row("case", lambda: json.loads((corpus_folder() / "nccl_logs/index.json").read_text()), ids=lambda c: c["file"])
def test_the_verdict_is_the_experts(corpus, case: dict) -> None:
    """Every field that the index states, no problem beyond those it lists, and proof by number and text of lines."""
    path = corpus / "nccl_logs" / case["file"]
    verdict = evidence.read_files([path])
    got: dict = {
        "inter_node_transport": verdict.inter_node_transport,
        "intra_node_transport": verdict.intra_node_transport,
        "gdrdma": GDRDMA[verdict.gdrdma],
        "problems": sorted(problem.code for problem in verdict.problems),
        "pxn": verdict.pxn,
        "link_layer": verdict.link_layer,
        "library": verdict.library,
    }
    want = {key: case[key] for key in got if key in case} | {"problems": sorted(case["problems"])}
    # An excerpt may have lost the line that states the version; what is not there cannot be read.
    version = case["nccl_version"]
    if version is None or version.removeprefix("RCCL ") in path.read_text(errors="replace"):
        got["nccl_version"], want["nccl_version"] = verdict.nccl_version, version
    assert {key: got[key] for key in want} == want
    lines = path.read_bytes().split(b"\n")
    assert verdict.lines_read == len(lines) - (lines[-1] == b"")
    rows = [row for problem in verdict.problems for row in problem.lines] + list(verdict.proof)
    for row in rows:
        assert row.text[:60].encode() in lines[row.line - 1]
