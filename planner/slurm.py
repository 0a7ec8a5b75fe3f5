"""Slurm batch scripts: a generated script for a fine-tune job, or a user's script with missing parts added.

Specification: sbatch(1), srun(1), scontrol(1) of Slurm 22.05 (a script begins with #!, and its options end at the first
command); torchrun's TORCH_ELASTIC_SHUTDOWN_TIMEOUT.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from contracts.run_record import RESUMABLE
from contracts.tables import read_texts
from planner.advice import render
from planner.kubernetes.manifests import END_SECONDS, RUNS_GATE, SAVE_SECONDS
from planner.lint.expansion import limit_parsing, parse
from planner.lint.shell import read_shell
from planner.nccl_env.situation import Setting

MAX_OPTION_CHARACTERS = 65536  # per line; shlex takes time quadratic in the length of a word
_KEY = re.compile(r"[a-z][a-z0-9-]{0,40}")
_TIME = re.compile(r"\d{1,9}(:\d{2}){0,2}|\d{1,5}-\d{1,2}(:\d{2}){0,2}|UNLIMITED")  # sbatch(1), --time
MAX_SIGNAL_SECONDS = 65535  # sbatch(1), --signal
_EARLY_SECONDS = 60  # sbatch(1), --signal: the signal may come so much earlier
_text = read_texts(__file__, "slurm.toml")
_OPTION_OF_TEMPLATE = frozenset({
    "nodes", "ntasks-per-node", "gres", "exclude", "time", "signal", "requeue", "open-mode", "output", "job-name",
})  # fmt: skip


class ScriptError(ValueError):
    """The script cannot be generated or wrapped; the message names the option or line, and the reason."""


def check_word(option: str, value: str) -> None:
    """Raise ScriptError for a value that would end or split an #SBATCH line."""
    if re.search(r"[\s\"'#\\]|[^\x20-\x7e]", value):
        raise ScriptError(_text("word", what=option, value=value[:80]))


def parse_limit(text: str) -> int | None:
    """Return the seconds of a time limit in a format of sbatch(1), --time, matched by `_TIME`; None: no limit."""
    if text == "UNLIMITED":
        return None
    days, has_days, clock = text.rpartition("-")
    numbers = [int(number) for number in clock.split(":")]
    if not has_days and len(numbers) < 3:  # minutes, or minutes and seconds
        numbers = [0, *numbers]
    hours, minutes, seconds = (*numbers, 0, 0)[:3]
    return (int(days or 0) * 24 + hours) * 3600 + minutes * 60 + seconds or None  # 0 also means no limit


def _check_signal(time_limit: str | None, signal_seconds: int) -> None:
    """Raise ScriptError if Slurm cannot signal a job so long before its time limit."""
    notice, faster = _text("notice", seconds=signal_seconds), _text("faster")
    if signal_seconds > MAX_SIGNAL_SECONDS:
        raise ScriptError(_text("signal_too_early", notice=notice, most=MAX_SIGNAL_SECONDS, faster=faster))
    limit = parse_limit(time_limit) if time_limit else None
    if limit is not None and limit <= signal_seconds + _EARLY_SECONDS:
        minutes = (signal_seconds + _EARLY_SECONDS) // 60 + 5  # minutes for gate, imports, model and the first steps
        raise ScriptError(_text(
            "limit_too_short", value=time_limit, limit=limit, notice=notice, early=_EARLY_SECONDS,
            least=f"{minutes // 60:02}:{minutes % 60:02}:00",
            hint=f". {faster}" if signal_seconds > SAVE_SECONDS + END_SECONDS else "",
        ))  # fmt: skip


def render_script(*, name: str, output: Path, time_limit: str | None, options: Mapping[str, str], save_seconds: int,
                 **values: Any) -> str:  # fmt: skip
    """Return the complete script for sbatch. Raises ScriptError.

    `output` is an absolute path on a file system that all nodes share; `more` are other options of sbatch;
    `save_seconds` limits a checkpoint after SIGTERM. `values` are the other values of templates/job.sbatch.j2.
    """
    if time_limit is not None and not _TIME.fullmatch(time_limit):
        raise ScriptError(_text("time_limit", value=time_limit))
    for key, value in options.items():
        if not _KEY.fullmatch(key) or key in _OPTION_OF_TEMPLATE:
            raise ScriptError(_text("own_option" if key in _OPTION_OF_TEMPLATE else "no_option", option=key))
        check_word(f"--sbatch {key}", value)
    check_word("--output", str(output))
    check_word("--name", name)
    signal_seconds = save_seconds + END_SECONDS
    _check_signal(time_limit, signal_seconds)
    return render(
        "job.sbatch", name=name, output=output, time_limit=time_limit, more=options, save_seconds=save_seconds,
        resumable=RESUMABLE, signal_seconds=signal_seconds, early_seconds=_EARLY_SECONDS, **values,
    )  # fmt: skip


# A user's script: lines are only inserted, in one place, before the first statement that starts ranks.

MARK = "# Added by topoflight wrap"
_COMMENT = re.compile(r"\s*(#.*)?")


def check_options(text: str) -> list[str]:
    """Return notes on a script's sbatch options. Raises ScriptError if sbatch would reject or misread a line."""
    lines = text.split("\n")
    if not text.startswith("#!"):
        raise ScriptError(_text("no_shebang"))
    if not re.match(r"#!\s*(/\S*/(env\s+)?)?(ba|da|k|z)?sh\b", lines[0]):
        raise ScriptError(_text("no_shell", line=lines[0][:60]))
    problems: list[str] = []
    is_over = False
    for number, line in enumerate(lines, 1):
        if wrong := re.search(r"[\0-\x08\x0b-\x1f]", line):
            raise ScriptError(_text("dos" if wrong[0] == "\r" else "character", number=number, found=wrong[0]))
        if re.match(r"[ \t]*#SBATCH\b", line) and (is_over or line[0] != "#"):
            problems.append(_text("late" if is_over else "blanks", number=number))
        elif line.startswith("#SBATCH"):
            _check_option(number, line.removeprefix("#SBATCH"))
        if re.match(r"#SBATCH\b|\s*[^\s#]", line) and re.search(r"\s--export[= ](?!\S*\bALL\b)", line):
            problems.append(_text("export", number=number))
        is_over = is_over or not _COMMENT.fullmatch(line)
    return problems


def parse_size(text: str) -> tuple[int | None, int | None]:
    """Return the nodes (the minimum of a range) and the GPUs of each in a script's options; None without an option."""
    options = r"-N\s*|--nodes[= ]\s*", r"--(?:gres[= ]gpu:|gpus-per-node[= ])(?:[A-Za-z][\w.-]*:)?"
    matches = (re.findall(rf"^#SBATCH\s(?:[^\n#]*\s)?(?:{each})(\d{{1,6}})\b", text, re.MULTILINE) for each in options)
    nodes, gpus = (int(each[-1]) or None if each else None for each in matches)
    return nodes, gpus


def _check_option(number: int, option: str) -> None:
    """Raise ScriptError for an #SBATCH line without an option."""
    if len(option) > MAX_OPTION_CHARACTERS:
        raise ScriptError(_text("too_long", number=number, rest=option[:60], most=MAX_OPTION_CHARACTERS))
    try:
        tokens = shlex.split(option, comments=True)
    except ValueError as error:
        raise ScriptError(_text("quotes", number=number, rest=option[:60], error=str(error).lower())) from None
    if tokens and not tokens[0].startswith("-"):
        raise ScriptError(_text("not_an_option", number=number, rest=option[:60], word=tokens[0][:40]))


def wrap_script(
    text: str, settings: Sequence[Setting], *, python: str, has_log: bool, monitor: str = "",
    require: Sequence[str] = (),
) -> tuple[str, list[str]]:  # fmt: skip
    """Return the script with missing parts added, and notes. Raises ScriptError.

    A variable that the script names outside comments is not changed. `python` is an interpreter on the nodes that has
    this package, `monitor` the folder in it that starts the rank monitor; `has_log`: whether the ranks use NCCL;
    `require`: checks that must be measured.
    """
    notes = check_options(text)
    if MARK in text:
        return text, [*notes, _text("wrapped")]
    limit_parsing()
    root = parse(text.encode())
    if root is None:
        raise ScriptError(_text("nested"))
    starts = read_shell(text).starts
    if not starts:
        raise ScriptError(_text("no_start", number=text.count("\n") or 1))
    code = "\n".join(line for line in text.split("\n") if not line.lstrip().startswith("#") or "#SBATCH" in line)
    present = [setting for setting in settings if re.search(rf"\b{setting.name}\b", code)]
    notes += [_text("present", name=setting.name, value=setting.value) for setting in present]
    if has_gate := bool(RUNS_GATE.search(code)):
        notes.append(_text("has_gate"))
    block = render(
        "wrap.sbatch", mark=MARK, settings=[setting for setting in settings if setting not in present], python=python,
        monitor="" if "TOPOFLIGHT_RUN" in code else monitor, has_gate=has_gate, require=require,
        log={name for name in ("NCCL_DEBUG", "NCCL_DEBUG_FILE") if has_log and not re.search(rf"\b{name}\b", code)},
    )  # fmt: skip
    lines = text.split("\n")
    row = min(starts) - 1
    for node in reversed(root.children):  # do not split a statement, or a line in which one ends, such as `fi; srun`
        if node.start_point.row < row <= node.end_point.row:
            row = node.start_point.row
    return "\n".join([*lines[:row], *block.rstrip("\n").split("\n"), *lines[row:]]), notes
