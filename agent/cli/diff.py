"""The verb diff."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from agent.base.hosts import snapshots
from agent.base.options import with_options
from agent.base.output import emit

if TYPE_CHECKING:
    from probes.api import Snapshot


def _only(path: Path) -> Snapshot:
    """The host of a recording, by its own name. Raises UsageError where there are several."""
    from probes.registry import ALL

    found = snapshots((path,), ALL)
    if len(found) != 1:
        raise click.UsageError(f"{path}: holds {len(found)} hosts; diff compares two, and --fleet a folder of many")
    return found[0]


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
