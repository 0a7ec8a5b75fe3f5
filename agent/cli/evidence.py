"""The verb evidence."""

from __future__ import annotations

import sys
from typing import Literal

import click

from agent.base.inputs import InputError
from agent.base.options import format_option, verbose_option
from agent.base.output import emit


@click.command()
@click.argument("source", metavar="[FILE|DIR|-]...", nargs=-1)
@click.option(
    "--port", "ports", multiple=True, help="An RDMA port that should appear (mlx5_0:1): a missing one is dead."
)
@click.option("--fail-on", default="fail", type=click.Choice(["fail", "warn"]), show_default=True)
@click.option("--require-gdrdma/--no-require-gdrdma", default=True, show_default=True,
              help="Whether RDMA without GPUDirect fails: EFA of g5 and g6 has none.")  # fmt: skip
@format_option
@verbose_option
def evidence(
    source: tuple[str, ...],
    ports: tuple[str, ...],
    fail_on: Literal["fail", "warn"],
    require_gdrdma: bool,
    form: str,
    verbose: bool,
) -> None:
    """Prove from NCCL logs which transport every channel takes, and say how the job ended.

    `kubectl logs JOB | topoflight evidence -`. Several files, or a folder, are the logs of one job: one verdict. Packed
    files (gzip, bzip2, xz) are read as they are. Exit code 0 proven good, 3 a failure, 4 a warning with --fail-on
    warn, 5 no evidence.
    """
    from agent.terminal.evidence import evidence as show
    from collectives.nccl_log import evidence as reader
    from collectives.nccl_log.reader import LogFileError

    try:
        found = reader.read_files(source or ("-",), ports=ports or None)
    except OSError as error:
        raise InputError(f"{error.filename or ' '.join(source)}: {error.strerror}") from None
    except LogFileError as error:
        raise InputError(str(error)) from None
    emit(reader.to_json(found), form, lambda out: show(out, found, verbose=verbose))
    sys.exit(reader.exit_code(found, fail_on=fail_on, require_gdrdma=require_gdrdma))
