"""The verbs scan, demo, capture and diff, which read hosts, record them in files, and compare them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from agent.base.options import command, read_snapshots
from agent.base.output import console, emit, print_text, write_result

if TYPE_CHECKING:
    from probes.api import Snapshot

DEMO = Path(__file__).parents[1] / "data" / "demo.json"


@command("scan")
def scan(hosts: tuple[Path, ...], root: str, form: str, timeout: float, everything: bool, verbose: bool) -> None:
    """Inspect this host and print its devices and findings. Reads only."""
    from agent.checks.view import build_view
    from agent.terminal.hosts import print_scan
    from probes.registry import ALL

    view = build_view(read_snapshots(hosts, ALL, root=root, timeout_seconds=timeout))
    value = [{"snapshot": s, "checks": [c for c in view.checks if c.node == s.hostname]} for s in view.snapshots]
    emit(value if len(value) > 1 else value[0], form,
         lambda out: print_scan(out, view, verbose=verbose or everything, everything=everything))  # fmt: skip


@command("demo")
def demo(verbose: bool) -> None:
    """Show the findings of a faulty node with eight GPUs. The machine is built in; nothing is measured."""
    from agent.checks.view import build_view
    from agent.terminal.hosts import print_scan
    from probes.registry import ALL

    print_text("This node is a built-in example with deliberate faults. It is not a real machine.")
    print_scan(console(), build_view(read_snapshots((DEMO,), ALL)), verbose=verbose, everything=False)
    print_text(f"Check your own node: topoflight preflight. Every command can read this one: --host {DEMO}")


@command("capture")
def capture(root: str, target: Path | None) -> None:
    """Scan this host and write the recording."""
    from probes.registry import ALL
    from probes.scanner import Scanner, dumps

    with Scanner(root, probes=ALL) as scanner:
        text = dumps(scanner.capture()[1])
    if target is None:
        print_text(text, nl=False)
        return
    write_result(target, text)
    print_text(f"{target}: {len(text)} bytes", err=True)


@command("diff")
@click.argument("files", nargs=-1, type=click.Path(exists=True, path_type=Path))
def diff(files: tuple[Path, ...], fleet: Path | None, form: str) -> None:
    """Read the recordings and print the differences."""
    from probes.registry import ALL
    from topology import diff as differ

    if fleet is not None:
        if files:
            raise click.UsageError("--fleet takes a folder and no further files")
        view = differ.compare_fleet([((host.hostname,), host) for host in read_snapshots((fleet,), ALL)])
        emit(view, form, lambda out: out.print(differ.format_fleet(view), markup=False))
        return
    if len(files) != 2:
        raise click.UsageError(f"diff takes two recordings, {len(files)} were given")
    before, after = (_read_one(path) for path in files)
    names = [path.name for path in files]
    first, second = names if names[0] != names[1] else map(str, files)
    differences = differ.diff(before, after, (f"in {first}", f"in {second}"))
    emit(list(differences), form, lambda out: out.print(differ.format_diff(differences), markup=False))


def _read_one(path: Path) -> Snapshot:
    """Return the host of a recording, by its own name. Raises UsageError if the file contains several hosts."""
    from probes.registry import ALL

    snapshots = read_snapshots((path,), ALL)
    if len(snapshots) != 1:
        raise click.UsageError(f"{path}: holds {len(snapshots)} hosts; diff compares two, and --fleet a folder of many")
    return snapshots[0]
