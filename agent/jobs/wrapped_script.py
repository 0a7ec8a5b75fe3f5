"""A user's own batch script for Slurm: what `wrap` adds to it on these hosts."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from agent.advice.advise import advise
from agent.advice.request import Request
from agent.base.inputs import InputError, RequestError
from planner.slurm.wrap import ScriptError, check_options, nodes_of, wrap_script
from probes.api import Snapshot

SYNTAX_SECONDS = 10.0  # bash reads a script of 1 MiB in a fraction of a second


def wrapped_script(text: str, found: Sequence[Snapshot], options: Mapping[str, Any]) -> tuple[str, list[str]]:
    """The script with what it lacks, and notes. Raises InputError that names the line."""
    if options["resources"] or options["preflight_image"]:
        raise InputError("--resource and --preflight-image are for manifests; a batch script asks with #SBATCH")
    try:
        check_options(text)
        _check_syntax(text)
        nodes = nodes_of(text)
        request = Request(hosts=options["hosts"], root=options["root"], machine=options["machine"], nodes=nodes)
        advice = advise(request, lambda: found)
        made, notes = wrap_script(text, advice.settings, python=sys.executable, has_log=advice.backend == "nccl")
    except (ScriptError, RequestError) as error:
        raise InputError(str(error)) from None
    if nodes is None:
        notes.append("unknown how many nodes the job has: no #SBATCH --nodes says; the environment is for one node")
    return made, notes


def _check_syntax(text: str) -> None:
    """ScriptError for a script that bash cannot read; bash only parses it. Without bash the syntax is not checked."""
    try:
        done = subprocess.run(
            ["bash", "-n"], input=text, capture_output=True, text=True, errors="replace", timeout=SYNTAX_SECONDS,
            check=False, env={"LC_ALL": "C", "PATH": "/usr/bin:/bin"},
        )  # fmt: skip
    except FileNotFoundError:
        return
    except subprocess.TimeoutExpired:
        raise ScriptError(f"line 1: bash did not read the script within {SYNTAX_SECONDS:.0f} s") from None
    if found := re.search(r"line (\d+): (.*)", done.stderr):
        raise ScriptError(f"line {found[1]}: {found[2]}")
