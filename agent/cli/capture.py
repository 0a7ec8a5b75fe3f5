"""The verb capture."""

from __future__ import annotations

from pathlib import Path

import click

from agent.base.inputs import OUTPUT_FILE
from agent.base.options import root_option
from agent.base.output import say, waiting, write_result


@click.command()
@root_option
@click.option("-f", "--file", "target", type=OUTPUT_FILE, help="Write here, not stdout.")
def capture(root: str, target: Path | None) -> None:
    """Record every answer this host gives to the probes.

    The recording replays the whole product with --host, without the hardware. It holds no environment variable
    outside NCCL's families, and no process names.
    """
    from probes.host.recording import dumps
    from probes.scanner import capture as record

    with waiting("capture: asking this host"):
        text = dumps(record(root))
    if target is None:
        say(text, nl=False)
        return
    write_result(target, text)
    say(f"{target}: {len(text)} bytes", err=True)
