"""The verbs capture, bundle and diff: a host recorded in a file, all that a support bundle holds, and what differs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from agent.base import units
from agent.base.hosts import snapshots
from agent.base.options import with_options
from agent.base.output import emit, print_text, write_result
from agent.base.progress import waiting
from agent.base.recordings import bundle_differences

if TYPE_CHECKING:
    from probes.api import Snapshot


@click.command()
@with_options("capture")
def capture(root: str, target: Path | None) -> None:
    """Record this host in a file that every command can read with --host.

    The recording contains no environment variables except those of NCCL and related libraries, and no process names.
    """
    from probes.registry import ALL
    from probes.scanner import Scanner, dumps

    with waiting("capture: asking this host"), Scanner(root, probes=ALL) as scanner:
        text = dumps(scanner.capture()[1])
    if target is None:
        print_text(text, nl=False)
        return
    write_result(target, text)
    print_text(f"{target}: {len(text)} bytes", err=True)


@click.command()
@with_options("bundle")
def bundle(
    root: str, target: str, state: Path, cluster: bool, nodes: tuple[str, ...], namespace: str, context: str | None
) -> None:
    """Create a support bundle: recording, findings, versions, limits, devices of the kubelet, and logs.

    Values that look like secrets are removed. Every command reads the file with `--host bundle.tgz`. Nothing is sent.
    """
    from agent.jobs import bundle as making

    if cluster:
        with waiting("bundle: asking the agents"):
            hosts = making.of_cluster(namespace, context, nodes)
    else:
        from probes.registry import ALL
        from probes.scanner import Scanner

        with waiting("bundle: asking this host"), Scanner(root, probes=ALL) as scanner:
            snapshot, recording = scanner.capture()
        hosts = {snapshot.hostname: making.of_host(snapshot, recording, root=root, state=state)}
    content = making.pack_bundle(hosts)
    if target == "-":
        sys.stdout.buffer.write(content)
        return
    write_result(Path(target), content, 0o600)
    failed = [name for name, files in hosts.items() if "error.txt" in files]
    failures = f"; no answer from {', '.join(failed)}" if failed else ""
    written = f"{len(content)} bytes from {units.count(len(hosts), 'host')}"
    print_text(f"{target}: {written}{failures}. Check the contents before you send it.", err=True)
    for line in bundle_differences(hosts):
        print_text(line, err=True)


@click.command()
@click.argument("files", nargs=-1, type=click.Path(exists=True, path_type=Path))
@with_options("diff")
def diff(files: tuple[Path, ...], fleet: Path | None, form: str) -> None:
    """Show the differences between the recordings A and B that matter for training, worst first.

    With --fleet DIR: show the nodes that differ from the others, and the groups of equal nodes.
    """
    from probes.registry import ALL
    from topology import diff as differ

    if fleet is not None:
        if files:
            raise click.UsageError("--fleet takes a folder and no further files")
        view = differ.fleet(snapshots((fleet,), ALL))
        emit(view, form, lambda out: out.print(differ.fleet_text(view), markup=False))
        return
    if len(files) != 2:
        raise click.UsageError(f"diff takes two recordings, {len(files)} were given")
    before, after = (_only(path) for path in files)
    names = [path.name for path in files]
    first, second = names if names[0] != names[1] else map(str, files)
    differences = differ.diff(before, after, (f"in {first}", f"in {second}"))
    alike = "✓ nothing that matters for training differs → if one is slower, measure: topoflight bench"
    emit(list(differences), form, lambda out: out.print(differ.diff_text(differences) if differences else alike,
                                                        markup=False))  # fmt: skip


def _only(path: Path) -> Snapshot:
    """The host of a recording, by its own name. Raises UsageError where there are several."""
    from probes.registry import ALL

    found = snapshots((path,), ALL)
    if len(found) != 1:
        raise click.UsageError(f"{path}: holds {len(found)} hosts; diff compares two, and --fleet a folder of many")
    return found[0]
