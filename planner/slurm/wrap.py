"""A user's own batch script with the gate, the recommended environment and a place for NCCL's log added.

Lines are added in one place, before the first statement that starts ranks; no other line changes. Specification:
sbatch(1) of Slurm 22.05: the script begins with #!, and options end at the first command.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from planner.advice import render
from planner.lint.expansion import limit_parsing, parse_lines, walk
from planner.nccl_env.texts import Setting

MARK = "# Added by topoflight wrap"
_STARTS_RANKS = re.compile(
    r"(?:\S*/)?(srun|mpirun|mpiexec|torchrun|accelerate|deepspeed|prun|jsrun)\b|.*torch\.distributed"
)
_COMMENT = re.compile(r"\s*(#.*)?")


class ScriptError(ValueError):
    """A script that cannot be wrapped; the message names the line and why."""


def is_batch_script(text: str) -> bool:
    """Whether a text is a script and no manifest."""
    return text.startswith("#!") or re.search(r"^#SBATCH\b", text, re.MULTILINE) is not None


def check_options(text: str) -> list[str]:
    """Notes on the options of sbatch in a script. Raises ScriptError where sbatch would refuse or misread a line."""
    lines = text.split("\n")
    if not text.startswith("#!"):
        raise ScriptError("line 1: sbatch takes only a script that begins with #! and a shell, such as #!/bin/bash")
    if not re.match(r"#!\s*(/\S*/(env\s+)?)?(ba|da|k|z)?sh\b", lines[0]):
        raise ScriptError(f"line 1: {lines[0][:60]!r} names no shell whose syntax is read")
    late: list[str] = []
    is_over = False
    for number, line in enumerate(lines, 1):
        if wrong := re.search(r"[\0-\x08\x0b-\x1f]", line):
            what = "a DOS line break; dos2unix removes them" if wrong[0] == "\r" else f"the character {wrong[0]!r}"
            raise ScriptError(f"line {number}: {what}: sbatch refuses such a script")
        if line.startswith("#SBATCH") and is_over:
            late.append(f"line {number}: sbatch ignores this option, because it follows the first command")
        elif line.startswith("#SBATCH"):
            _check_option(number, line.removeprefix("#SBATCH"))
        is_over = is_over or not _COMMENT.fullmatch(line)
    return late


def nodes_of(text: str) -> int | None:
    """The nodes that the options of a script ask for, the fewest of a range; None where no option says."""
    found = re.findall(r"^#SBATCH\s(?:[^\n#]*\s)?(?:-N\s*|--nodes[= ]\s*)(\d{1,6})\b", text, re.MULTILINE)
    return int(found[-1]) or None if found else None


def _check_option(number: int, rest: str) -> None:
    """ScriptError for a line of #SBATCH that holds no option."""
    try:
        words = shlex.split(rest, comments=True)
    except ValueError as error:
        raise ScriptError(f"line {number}: #SBATCH{rest[:60]}: {str(error).lower()}") from None
    if words and not words[0].startswith("-"):
        raise ScriptError(f"line {number}: #SBATCH{rest[:60]}: {words[0][:40]!r} is no option of sbatch")


def wrap_script(text: str, settings: Sequence[Setting], *, python: str, has_log: bool) -> tuple[str, list[str]]:
    """The script with what it lacks, and notes. Raises ScriptError.

    A variable that the script names anywhere outside comments stays as it is. `python` is an interpreter on the nodes
    that has this package; `has_log` says whether the ranks use NCCL.
    """
    notes = check_options(text)
    if MARK in text:
        return text, [*notes, "the script has been wrapped before: nothing is added"]
    limit_parsing()
    _, root = parse_lines(text.encode())
    if root is None:
        raise ScriptError("line 1: the script is nested or broken beyond what is read")
    starts = [node for node in root.children if any(_starts_ranks(each.text) for each in walk(node, "command"))]
    if not starts:
        raise ScriptError(
            f"line {text.count(chr(10)) or 1}: no command of the script starts ranks (srun, torchrun, ...)"
        )
    code = "\n".join(line for line in text.split("\n") if not line.lstrip().startswith("#") or "#SBATCH" in line)
    kept = [setting for setting in settings if re.search(rf"\b{setting.name}\b", code)]
    notes += [f"{setting.name} stays as the script sets it; recommended: {setting.value}" for setting in kept]
    block = render(
        "wrap.sbatch", mark=MARK, settings=[setting for setting in settings if setting not in kept], python=python,
        log={name for name in ("NCCL_DEBUG", "NCCL_DEBUG_FILE") if has_log and not re.search(rf"\b{name}\b", code)},
    )  # fmt: skip
    lines = text.split("\n")
    row = starts[0].start_point.row
    return "\n".join([*lines[:row], *block.rstrip("\n").split("\n"), *lines[row:]]), notes


def _starts_ranks(command: bytes | None) -> bool:
    """Whether a command, after its assignments, starts ranks or is a step of Slurm."""
    words = re.sub(r"^(\w+=\S*\s+)*(exec\s+|time\s+|nohup\s+)*", "", (command or b"").decode(errors="replace"))
    return re.match(_STARTS_RANKS, words) is not None
