"""What the terminal shows: tables of 80 columns, words beside glyphs, failures first with the remedy."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from agent import units
from agent.gate.judged import bar_words, expected_rate, expected_words
from agent.gate.verdict import Check, Verdict, unjudged
from agent.jobs.run import Comparison
from agent.pages.prose import CLASSES
from agent.view import Group, grouped, passed_ids, reasons
from collectives.bench.results import BenchResult, RdmaResult
from collectives.nccl_log.transport import Evidence, ProofLine
from contracts.layout import Layout
from contracts.run_record import RunRecord
from planner.advice import RankedLayout, Recommendation
from probes.api import Absent, Failed, Finding, Ok, Snapshot
from probes.gpu.facts import GpuFacts
from probes.hostinfo.probe import HostinfoFacts
from probes.interfaces.facts import InterfacesFacts
from probes.limits.probe import LimitsFacts
from probes.rdma.facts import RdmaFacts
from topology.formats.matrix import columns
from topology.graph import UNKNOWN, NodeTopology, Pairs, level, nvlinks
from topology.reference import departures

if TYPE_CHECKING:
    from agent.gate.report import Report

GLYPHS = {"pass": "✓ pass", "info": "· info", "unknown": "? unknown", "warn": "! warn", "fail": "✗ FAIL"}
SHOWN = 8  # names in a row before the rest is a number
COLOURS = {"pass": "green", "info": "cyan", "unknown": "magenta", "warn": "yellow", "fail": "bold red"}


def table(*columns: str) -> Table:
    """An empty table in the house's look."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, expand=False)
    for column in columns:
        made.add_column(column, overflow="fold")
    return made


def scan(out: Console, found: Sequence[Snapshot], checks: Sequence[Check], everything: bool) -> None:
    """Hosts and their findings."""
    for snapshot in found:
        host(out, snapshot)
        out.print("\n[bold]Findings[/bold]")
        mine = [check for check in checks if check.node == snapshot.hostname]
        findings(out, mine, everything=everything)
        found_bad = [check for check in mine if check.status in ("fail", "warn")]
        if found_bad:
            out.print("[dim]scan only tells; `topoflight preflight` turns this into a verdict and an exit code[/dim]")


def host(out: Console, snapshot: Snapshot) -> None:
    """What one host has, one row per probe; absent and failed ones say so."""
    out.print(f"\n[bold]{escape(snapshot.hostname)}[/bold]")
    rows = table("probe", "found")
    for name, outcome in snapshot.outcomes.items():
        if isinstance(outcome, Absent):
            rows.add_row(name, f"absent: {escape(outcome.why)}")
        elif isinstance(outcome, Failed):
            rows.add_row(name, f"[red]failed: {escape(outcome.error)}[/red]")
        elif isinstance(outcome, Ok):
            for line in facts_lines(outcome.facts):
                rows.add_row(name, escape(line))
                name = ""
    out.print(rows)


def facts_lines(facts: object) -> list[str]:
    """One probe's facts in a few lines."""
    if isinstance(facts, HostinfoFacts):
        where = f", virtual machine ({facts.virtual_machine})" if facts.virtual_machine else ""
        return [
            f"{facts.cpu_name or 'unknown CPU'}: {_counted(facts.sockets, 'socket')}, "
            f"{_counted(facts.threads, 'thread')}, {units.size(facts.memory_bytes)}{where}",
            *(f"NUMA {n.node}: CPUs {_cpus(n.cpus)}" for n in facts.numa),
        ]
    if isinstance(facts, GpuFacts):
        names = sorted({gpu.name or "unknown model" for gpu in facts.gpus})
        lost = [gpu.index for gpu in facts.gpus if gpu.error]
        text = f"{len(facts.gpus)} x {', '.join(names)}, driver {facts.driver_version or 'unknown'}"
        return [text + (f"; not answering: {lost}" if lost else "")]
    if isinstance(facts, RdmaFacts):
        lines = []
        for device in facts.devices:
            for port in device.ports:
                lines.append(
                    f"{device.name}:{port.port} {device.kind} {port.state or 'state unknown'} "
                    f"{port.rate_text or units.bits(port.rate_bytes_per_second)} {port.link_layer or ''}"
                    f"{f' netdev {port.netdev}' if port.netdev else ''}"
                )
            if not device.ports:
                lines.append(f"{device.name} {device.kind}, no port")
        return lines or ["no device"]
    if isinstance(facts, InterfacesFacts):
        return [
            f"{i.name} {i.role}{f' ({i.kind})' if i.kind else ''} mtu {i.mtu_bytes or '?'} "
            f"{units.bits(i.speed_bytes_per_second) if i.speed_bytes_per_second else 'speed unknown'} "
            f"{' '.join(i.addresses[:2])}"
            f"{' ← NCCL takes this one' if i.name == facts.nccl_choice else ''}"
            for i in facts.interfaces
        ]
    if isinstance(facts, LimitsFacts):
        soft = (
            "unlimited"
            if facts.memlock_soft_bytes is None and facts.memlock_known
            else units.size(facts.memlock_soft_bytes)
        )
        return [f"memlock {soft}, /dev/shm {units.size(facts.shm_size_bytes)}, of {facts.whose}"]
    devices = getattr(facts, "devices", None)
    return [units.count(len(devices), "PCI device") if devices is not None else type(facts).__name__]


def _counted(number: int | None, one: str) -> str:
    return f"{one}s unknown" if number is None else units.count(number, one)


def _cpus(text: str) -> str:
    """A kernel's CPU list; one that alternates between sockets is long, and its number says more."""
    parts = text.split(",")
    if len(parts) < 5:
        return text
    ends = [part.partition("-") for part in parts]
    total = sum(int(last or first) - int(first) + 1 for first, _, last in ends if first.isdecimal())
    return f"{','.join(parts[:3])} … {parts[-1]} ({total} CPUs)"


def findings(out: Console, checks: Iterable[Check], *, everything: bool = False) -> None:
    """Findings worst first, the same one on several subjects once; unknowns by name, passes as a count."""
    quiet: dict[str, list[Group]] = {"unknown": [], "pass": []}
    checks = tuple(checks)
    told = grouped(checks)
    named = len({check.node for check in checks if check.node}) > 1
    for group in told:
        if everything or group.status in ("fail", "warn", "info") or (group.required and group.status == "unknown"):
            finding(out, group, named=named)
        else:
            quiet[group.status].append(group)
    unknowns(out, quiet["unknown"])
    passed = len(passed_ids(told))
    if passed and quiet["pass"]:
        out.print(f"[dim]{units.count(passed, 'check')} passed (--all names them)[/dim]")


def unknowns(out: Console, groups: Sequence[Group]) -> None:
    """Checks that were not measured, by name under what kept them from it."""
    if groups:
        number = units.count(len({group.id for group in groups}), "check")
        out.print(
            f"[{COLOURS['unknown']}]{GLYPHS['unknown']}[/{COLOURS['unknown']}] {number}, neither passed nor failed"
        )
    for why, codes in reasons(groups).items():
        _indented(out, escape(why))
        _indented(out, f"[dim]{escape(_some(codes))}[/dim]", 9)


def finding(out: Console, group: Group, *, named: bool = False) -> None:
    """One finding: what, where, what proves it, what to do; `named` says its node though it be one only."""
    colour = COLOURS[group.status]
    one = len(group.subjects) == 1 and (group.alike or bool(group.trouble))
    where = f"on {group.subjects[0]}" if one else group.places
    head = f"[{colour}]{GLYPHS[group.status]}[/{colour}] [bold]{escape(group.title)}[/bold]"
    out.print(f"{head} {escape(where)}" if where else head)
    nodes = group.nodes if named or len(group.nodes) > 1 else ()
    _indented(out, f"{group.trouble}:" if group.trouble else "")
    if group.alike:
        _indented(out, escape(group.message))
        if nodes and not one and group.subjects:
            for node, subjects in group.by_node[:SHOWN]:
                _indented(out, escape(_some(subjects, f"on {node}: ")))
        else:
            _indented(out, "" if one else escape(_some(group.subjects, "on ")))
    else:
        for check in group.checks[:SHOWN]:
            told = check.subject and not one and not check.message.startswith(check.subject)
            where = f"{check.node}: " if nodes else ""
            _indented(out, escape(f"{where}{check.subject}: {check.message}" if told else f"{where}{check.message}"))
        if group.size > SHOWN:
            _indented(out, f"and {group.size - SHOWN} more")
    _indented(out, escape(_some(nodes, "nodes " if len(nodes) > 1 else "node ")))
    if group.status in ("fail", "warn"):
        for check in group.checks[: len(group.codes) if group.trouble else 1]:  # those of the first device
            for line in check.evidence[:4]:
                _indented(out, f"[dim]{escape(line)}[/dim]")
        _indented(out, f"[bold]→ {escape(group.remedy)}[/bold]" if group.remedy else "")


def _some(names: Sequence[str], word: str = "") -> str:
    """ "on mlx5_0, mlx5_1 and 8 more"; empty where there are none."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{word}{', '.join(names[:SHOWN])}{more}" if names else ""


def _indented(out: Console, text: str, by: int = 7) -> None:
    if text:
        out.print(Padding(text, (0, 0, 0, by), expand=False))


def matrix(out: Console, node: NodeTopology) -> None:
    """The link matrix: as `nvidia-smi topo -m` prints it for a pipe or a wide terminal, else in blocks that fit."""
    from topology.formats.text import render

    whole = render(node)
    widest = max(len(line.expandtabs()) for line in whole.splitlines()[: len(node.devices) + 1])
    if not out.is_terminal or widest <= out.width:
        out.print(whole, markup=False, overflow="ignore", no_wrap=True, crop=False)
        return
    blocks(out, node)


def blocks(out: Console, node: NodeTopology) -> None:
    """GPUs among themselves, then GPUs to NICs, as many columns at a time as the width takes; NICs by number."""
    known, labels = Pairs(node.pairs), columns(node)
    fitting = max(1, (out.width - 6) // 7)
    for devices in (node.devices,) if len(node.devices) <= fitting else (node.gpus, node.nics):
        for start in range(0, len(devices), fitting):
            part = devices[start : start + fitting]
            rows = table("", *(labels[device.name] for device in part))
            for column in rows.columns:
                column.no_wrap = True
            for gpu in node.gpus:
                rows.add_row(gpu.name, *("X" if gpu is d else known.label(gpu.name, d.name) for d in part))
            if node.gpus and part:
                out.print(rows)
    named = [f"{labels[nic.name]} {nic.name}" for nic in node.nics if labels[nic.name] != nic.name]
    if named:
        out.print(escape(", ".join(named)), style="dim")
    seen = {"nv" if nvlinks(pair.label) else level(pair.label).lower() for pair in node.pairs}
    words = [text for word, text in CLASSES if word in seen]
    if words:
        out.print(escape("; ".join(words)), style="dim")


def node(out: Console, topology: NodeTopology, *, brief: bool = False) -> None:
    """Matrix, islands, nearest NICs, expectations and warnings of one node; in a report the matrix in blocks."""
    out.print(f"\n[bold]{escape(topology.hostname)}[/bold] ({escape(topology.source)})")
    if topology.sku or topology.gpus:
        out.print(f"recognised as: {escape(topology.sku or 'no machine of the reference table')}")
    for departure in departures(topology):
        out.print(f"[yellow]! departs from it:[/yellow] {escape(departure)}")
    if not topology.gpus and not topology.nics:
        out.print("no GPU and no RDMA device was read: there is no link to show")
    elif brief:
        blocks(out, topology)
    else:
        matrix(out, topology)
    links = Pairs(topology.pairs)
    for island in topology.islands:
        known = all(links.label(a, b) != UNKNOWN for i, a in enumerate(island.gpus) for b in island.gpus[i + 1 :])
        kind = "every pair" if island.all_to_all else "not every pair" if known else "not every pair is known"
        out.print(f"NVLink island: {' '.join(island.gpus)} ({kind}, {' '.join(island.nvlinks_per_pair)})")
    nearest_nics(out, topology)
    for expected in topology.expectations:
        if expected.op == "all_gather" and expected.scope in ("island", "node", "cluster"):
            out.print(f"expected all_gather within {expected.scope}: {expected_rate(expected)} bus bandwidth")
    for warning in topology.warnings:
        out.print(f"[yellow]![/yellow] {escape(warning)}")


def told(out: Console, found: Sequence[Finding]) -> None:
    """What a topology alone shows: failures and warnings, with what proves them and what mends them."""
    for finding in found:
        if finding.severity.value in ("fail", "warn"):
            colour = COLOURS[finding.severity.value]
            out.print(
                f"[{colour}]{escape(GLYPHS[finding.severity.value])}[/{colour}] [bold]{escape(finding.code)}[/bold]"
            )
            _indented(out, escape(finding.message))
            for line in finding.evidence[:3]:
                _indented(out, f"[dim]{escape(line)}[/dim]")
            _indented(out, f"[bold]→ {escape(finding.remedy)}[/bold]")


def nearest_nics(out: Console, topology: NodeTopology) -> None:
    """Each GPU's nearest NIC; GPUs that share theirs on one line."""
    shared: dict[tuple[str, ...], list[str]] = {}
    for nearest in topology.nearest_nic:
        doubt = "" if nearest.decidable else f"; undecidable: {nearest.why}"
        nics = _some(nearest.nics, "nearest NIC ") or "nearest NIC unknown"
        shared.setdefault((nics, nearest.label, doubt), []).append(nearest.gpu)
    for (nics, label, doubt), gpus in shared.items():
        out.print(escape(f"{' '.join(gpus)}: {nics} ({label}){doubt}"))


def bench(out: Console, result: BenchResult) -> None:
    """Measured collectives, one row per op and size."""
    expected = any(m.expected_busbw_bytes_per_second for m in result.measurements)
    rows = table("op", "size", "median", "± 95 %", "algbw", "busbw", *(["expected"] if expected else []), "verified")
    for column in rows.columns:
        column.no_wrap = True
    for m in result.measurements:
        cells = [m.op, units.size(m.bytes), units.seconds(m.median_seconds)]
        cells.append(f"{m.spread_ratio * 100:.1f} %" if m.spread_ratio is not None else "?")
        cells += [units.rate(m.algbw_bytes_per_second), units.rate(m.busbw_bytes_per_second)]
        if expected:
            cells.append(expected_words(m))
        rows.add_row(*cells, "yes" if m.verified else "NO")
    where = f"{result.world_size} {result.backend} ranks on {', '.join(sorted(set(result.hosts))) or 'this host'}"
    out.print(f"\n[bold]Measured[/bold], {escape(where)}")
    out.print(rows)
    if result.step is not None:
        pieces = table("one training step", "bytes", "calls", "ranks", "time")
        for part in result.step.parts:
            moved, time = units.size(part.bytes), units.seconds(part.median_seconds)
            pieces.add_row(part.name, moved, str(part.times), str(part.group_ranks), time)
        out.print(pieces)
        out.print(f"communication of the step, nothing hidden: {units.seconds(result.step.median_seconds)}")
    if len(set(result.hosts)) > 1 and result.carried:
        over: dict[str, int] = {}
        for row in result.carried:
            name = f"{row.interface or 'an unknown interface'} on {result.hosts[row.rank]}"
            over[name] = over.get(name, 0) + row.bytes
        most = sorted(over.items(), key=lambda item: -item[1])[:SHOWN]
        out.print("over TCP: " + escape(", ".join(f"{units.size(count)} by {name}" for name, count in most)))
    for problem in result.problems:
        out.print(f"[red]! {escape(problem)}[/red]")
    if result.evidence is not None:
        e = result.evidence
        out.print(
            f"transport between nodes: {e.inter_node_transport or 'none'}; within: {e.intra_node_transport or 'none'}; "
            f"GPUDirect RDMA: {e.gdrdma} (send {e.send.gdrdma}/{e.send.total}, "
            f"receive {e.receive.gdrdma}/{e.receive.total})"
        )


def rdma(out: Console, result: RdmaResult) -> None:
    """Measured RDMA writes, one row per port."""
    rows = table("port", "rate", "MTU", "written", "expected")
    for write in result.writes:
        bar = next((bar for bar in write.bars if bar.low is not None), None)
        rows.add_row(
            write.port, units.bits(write.rate_bytes_per_second), str(write.mtu_bytes or "?"),
            units.rate(write.bytes_per_second), bar_words(bar) if bar else "unknown",
        )  # fmt: skip
    out.print(f"\n[bold]RDMA writes[/bold] from {escape(result.host)} to {escape(result.peer)}")
    out.print(rows)
    for problem in result.problems:
        out.print(f"[red]! {escape(problem)}[/red]")


def recommendation(out: Console, advice: Recommendation, *, explain: bool = False) -> None:
    """The layout with its forecast, then the settings with their reasons."""
    layout(out, advice)
    if explain and advice.chosen is not None:
        parts(out, advice.chosen)
    out.print("\n[bold]Environment[/bold]")
    if advice.settings:
        for setting in advice.settings:
            out.print(f"[bold]{escape(f'{setting.name}={setting.value}')}[/bold]", overflow="fold")
            _indented(out, escape(setting.reason.rule), 4)
            _indented(out, f"[dim]{escape(setting.reason.evidence)}[/dim]", 4)
    else:
        out.print("set nothing: NCCL finds by itself what this machine has")
    for note in advice.notes:
        point(out, "·", f"[bold]{escape(note.topic)}[/bold]: {escape(note.text)}")
    for need in advice.needs:
        point(out, "·", f"the pod needs {escape(units.need(need.name, need.value))}: {escape(need.reason.rule)}")


def parts(out: Console, ranked: RankedLayout) -> None:
    """The forecast part by part, and every number it rests on."""
    rows = table("part", "value", "how")
    for part in ranked.forecast.time_parts:
        rows.add_row(part.name, units.seconds(part.value), escape(part.detail))
    for part in ranked.forecast.memory_parts:
        rows.add_row(part.name, units.size(part.value), escape(part.detail))
    out.print(rows)
    for line in ranked.forecast.inputs:
        out.print(f"· {escape(line)}")


def explanation(out: Console, text: str) -> None:
    """A section of the pages of findings or alerts: its points under each other, commands marked."""
    title, _, body = text.partition("\n\n")
    out.print(f"[bold]{escape(title)}[/bold]\n")
    for piece in re.split(r"^- ", body, flags=re.MULTILINE):
        words = escape(" ".join(piece.split()))
        words = re.sub(r"\*\*([^*]+)\*\*", r"[bold]\1[/bold]", words)
        if not words:
            continue
        shown = re.sub(r"`([^`]+)`", r"[cyan]\1[/cyan]" if out.is_terminal else r"`\1`", words)
        if words.startswith("[bold]"):
            _indented(out, shown, 2)
        else:
            out.print(shown)


def point(out: Console, mark: str, text: str) -> None:
    """A line with a mark before it, its further lines under its words."""
    row = Table.grid(padding=(0, 1))
    row.add_row(mark, text)
    out.print(row)


def device_of(advice: Recommendation) -> str:
    """What holds a rank's memory: its GPU, or the host's share of a rank where there is none."""
    return "rank" if advice.backend == "gloo" else "GPU"


def layout(out: Console, advice: Recommendation) -> None:
    """The chosen layout, the runners-up and what was turned down."""
    if advice.chosen is None:
        if advice.model is not None:
            out.print("\n[bold red]No layout fits[/bold red]")
            rejected(out, advice)
        return
    chosen = advice.chosen
    out.print(f"\n[bold]Layout[/bold] for {advice.model.name if advice.model else 'the model'}")
    for ranked in (chosen, *advice.runners_up[:3]):
        mark = "[green]✓[/green]" if ranked is chosen else " "
        out.print(f"{mark} {layout_title(ranked.layout)}")
        memory = units.interval(ranked.forecast.memory_bytes, "B")
        point(
            out,
            "   ",
            f"step {units.interval(ranked.forecast.step_seconds, 's')}, memory {memory} per {device_of(advice)}",
        )
        point(out, "   ", escape(ranked.forecast.dominant if ranked is chosen else ranked.why))
    if advice.total_seconds is not None:
        out.print(f"the whole run: {advice.total_steps} steps, {units.hours(advice.total_seconds)}")
    rejected(out, advice)
    for help_ in advice.helps_most:
        point(out, "→", escape(help_))
    for unknown in advice.unknowns:
        point(out, "?", escape(unknown))


def layout_title(shape: Layout) -> str:
    """Everything that tells one layout from another, in a line of markup."""
    recompute = {"none": "no recompute"}.get(shape.checkpointing, f"{shape.checkpointing} recompute")
    offload = "" if shape.offload == "none" else f", {shape.offload} offloaded to the CPU"
    return (
        f"[bold]{shape.family}[/bold], {shape.world_size} ranks, micro-batch {shape.micro_batch} x "
        f"{shape.gradient_accumulation}, {recompute}, {shape.precision}{offload}"
    )


def rejected(out: Console, advice: Recommendation) -> None:
    """Families that were turned down, with the rule that did it."""
    if advice.rejected:
        rows = table("turned down", "because")
        for item in advice.rejected[:12]:
            rows.add_row(escape(item.what), escape(item.reason))
        out.print(rows)


def comparison(out: Console, lines: Iterable[Comparison]) -> None:
    """Forecast against flight, a line each."""
    out.print("\n[bold]Forecast against flight[/bold]")
    for line in lines:
        show = units.seconds if line.unit == "s" else units.size
        out.print(
            f"{line.what}: forecast {units.interval(line.forecast, line.unit)}, measured {show(line.measured)}: "
            f"{line.words}"
        )
        if line.detail:
            out.print(f"  {escape(line.detail)}")


def verdict(out: Console, judged: Verdict, seconds: float) -> None:
    """The last line."""
    word = {"pass": "green", "warn": "yellow", "fail": "bold red", "unknown": "magenta"}[judged.word]
    said = "; ".join(filter(None, (judged.why, units.rest(judged.word, judged.by_check, "above"))))
    out.print(f"\n[{word}]{GLYPHS[judged.word]}[/{word}] {escape(said)} in {units.seconds(seconds)}")


_NVLINK_WORDS = {
    "used": "used",
    "enabled": "enabled for a communicator, no channel seen",
    "available": "the hardware has it, no use of it seen",
    "not available": "not available",
    "unknown": "unknown",
}
_OUTCOMES = {"failed": "failed", "finished": "finished", "unknown": "unknown: no line tells"}


def _place(line: ProofLine) -> str:
    return f"line {line.line}" + (f" of {line.file}" if line.file else "")


def evidence(out: Console, found: Evidence) -> None:
    """The verdict on a log, the problems with their lines, and the lines that prove it."""
    rows = table("what", "verdict")
    rows.add_row("library", f"{found.library} {found.nccl_version or 'version unknown'}")
    rows.add_row("between nodes", escape(found.inter_node_transport or "none seen"))
    rows.add_row("within a node", escape(found.intra_node_transport or "none seen"))
    counts = (
        f"send {found.send.gdrdma}/{found.send.total}, receive {found.receive.gdrdma}/{found.receive.total} channels"
    )
    word = {"none": "no evidence"}.get(found.gdrdma, found.gdrdma)
    rows.add_row("GPUDirect RDMA", f"{word}: {counts}")
    if found.undirected.total:
        rows.add_row("", f"{found.undirected.gdrdma}/{found.undirected.total} channels of unnamed direction")
    for name, number in sorted(found.transports.items()):
        rows.add_row("channels", f"{number} via {escape(name)}")
    rows.add_row("NVLS", _NVLINK_WORDS[found.nvls_use])
    if found.mnnvl_use not in ("unknown", "off"):
        clique = f", a clique of {found.mnnvl_clique} GPUs" if found.mnnvl_clique else ""
        rows.add_row("NVLink between nodes", _NVLINK_WORDS[found.mnnvl_use] + clique)
    rows.add_row("end of the job", _OUTCOMES[found.outcome])
    for number, run in enumerate(found.runs, 1):
        joined = f"between nodes {run.inter_node_transport or 'none seen'}, GPUDirect RDMA {run.gdrdma}"
        rows.add_row(f"run {number}", escape(f"from {_place(run.first)}: {joined}, {_OUTCOMES[run.outcome]}"))
    if found.torn_lines:
        rows.add_row("torn lines", f"{found.torn_lines}, counted as neither on nor off")
    for path in found.gdr_paths[:4]:
        rows.add_row("GPU to NIC", escape(path))
    for seen in found.notes[:6]:
        rows.add_row("note", escape(f"{seen.code}: {seen.message}"))
    out.print(rows)
    for problem in found.problems:
        colour, times = COLOURS.get(problem.severity, "yellow"), f" (x {problem.count})" if problem.count > 1 else ""
        mark = GLYPHS.get(problem.severity, problem.severity)
        out.print(f"[{colour}]{escape(mark)}[/{colour}] [bold]{escape(problem.code)}[/bold]{times}")
        _indented(out, escape(problem.message))
        for line in problem.lines[:2]:
            _indented(out, f"[dim]{escape(f'{_place(line)}: {line.text}')}[/dim]")
        _indented(out, f"[bold]→ {escape(problem.action)}[/bold]")
    if found.proof:
        out.print("[bold]Proof[/bold]")
    for line in found.proof[:8]:
        _indented(out, f"[dim]{escape(f'{_place(line)}: {line.text}')}[/dim] · {escape(line.proves)}", 2)


def report(out: Console, whole: Report, *, everything: bool = False) -> None:
    """The whole report, in the order of the flight, verdict last; first what it does not speak of."""
    if (aside := unjudged(whole.checks)) and whole.verdict.word in ("pass", "warn"):
        out.print(f"[{COLOURS['unknown']}]{escape(aside)}[/{COLOURS['unknown']}]: this says nothing of GPUs")
    for snapshot, topology in zip(whole.snapshots, whole.topologies, strict=True):
        host(out, snapshot)
        node(out, topology, brief=True)
    if whole.bench is not None:
        bench(out, whole.bench)
    if whole.recommendation is not None:
        recommendation(out, whole.recommendation)
    if whole.flight is not None:
        run(out, whole.flight)
        comparison(out, whole.comparisons)
    by_network(out, whole)
    out.print("\n[bold]Findings[/bold]")
    findings(out, whole.checks, everything=everything)
    for note in whole.notes:
        out.print(f"· {escape(note)}")
    verdict(out, whole.verdict, whole.seconds)


def by_network(out: Console, whole: Report) -> None:
    """Flights of one job over different networks, a bar each."""
    from agent.pages import charts, runs

    for bars in runs.by_network(runs.shown(whole.flights)):
        out.print(f"\n[bold]{escape(bars.title)}[/bold]")
        rows = Table.grid(padding=(0, 2))
        for label, bar, shown in charts.blocks(bars.runs, 20):
            rows.add_row(escape(label), bar, shown)
        out.print(rows)


def run(out: Console, record: RunRecord) -> None:
    """What the job says of itself."""
    out.print(f"\n[bold]Flight[/bold] {escape(record.placements)}")
    loss, measured = "loss unknown", record.measured
    if record.loss.first is not None and record.loss.last is not None:
        loss = f"loss {record.loss.first:.3f} -> {record.loss.last:.3f}"
    tokens = f"{measured.tokens_per_second:.0f} tokens/s" if measured.tokens_per_second else "tokens/s unknown"
    exposed = record.communication.exposed_share if record.communication else None
    waits = f", communication {exposed:.0%} exposed" if exposed else ""
    out.print(f"{record.steps_done} steps, {loss}, {tokens}{waits}")
    saved = f"model: {record.saved_model}" if record.saved_model else f"adapter: {record.adapter or 'none'}"
    out.print(f"{saved}\ncheckpoint: {record.checkpoint or 'none'}", markup=False)
