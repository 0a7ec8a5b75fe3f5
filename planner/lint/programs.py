"""Recognise the programs and the settings in the words of a command.

Specification: mpirun(1) -x, Hydra -genv, srun(1) and sbatch(1) --export, docker-run(1) -e, env(1), sudo(8), apptainer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from planner.lint.script import NAMED, WORDS, Assigned, Inner, Unread, Word, pattern

MAX_OPTIONS = 1 << 12  # characters of a command that are searched for variables and options
_NAMES = WORDS["shell"]


def name_of(word: Word) -> str:
    """Return the name of a program without its folder; "python" for every release of Python."""
    return re.sub(r"\Apython[\d.]+\Z", "python", word.text.rsplit("/", 1)[-1])


def find_program(command: Sequence[Word]) -> int:
    """Return the index of the program after wrappers such as sudo: the first word that is no option or number."""
    names = [name_of(each) for each in command]
    if names[0] not in _NAMES["wrappers"] or (names[0] == "command" and "-v" in names[1:2]):
        return 0
    after = (index for index, name in enumerate(names) if name not in _NAMES["wrappers"])
    return next((index for index in after if not re.match(r"-|\d|[A-Za-z_]\w*=", command[index].text)), len(command))


def is_launcher(command: Sequence[Word]) -> bool:
    """Whether a command starts ranks or a training program, also behind a wrapper; not `python -m pip`."""
    at = next((index for index, word in enumerate(command) if name_of(word) in _NAMES["launchers"]), None)
    if at is None:
        return False
    arguments = [word.text for word in command[at + 1 : at + 3]]
    is_chore = arguments[:1] == ["-m"] and _NAMES["modules"].intersection(arguments[1:])
    return name_of(command[at]) != "python" or not (is_chore or _NAMES["chores"].intersection(arguments[:1]))


def is_idle(command: Sequence[Word]) -> bool:
    """Whether a program does not use NCCL, and starts no other one (`docker run`)."""
    program = name_of(command[0])
    starts = program in _NAMES["runs"] and any(word.text in _NAMES["starts"] for word in command[1:])
    return program in _NAMES["utilities"] and not starts


def list_removed(command: str, names: Iterable[str]) -> list[str]:
    """Return the variables that a command does not pass on: env(1) -i and -u, sudo(8) without -E, srun(1) --export."""
    removed, everything = set(pattern("removes_one").findall(command)), pattern("removes_all").match(command)
    command = re.sub(r"--container-env[= ]\S*", "", command)  # of the variables that reach srun's steps
    is_of_container = pattern("in_container").match
    return [n for n in names if n in removed or (everything and n not in command and not is_of_container(n))]


def split_command(command: Sequence[Word]) -> Iterator[Assigned | Inner | Unread]:
    """Yield the settings that the words of a command give to its program, and the texts that it runs or reads.

    A text without a reader is the name of a file with settings.
    """
    may_set = False  # NAME=VALUE may follow, as after env(1)
    runs_script = False  # behind torchrun, Python and others whose argument is a script
    is_argument = False  # it is an argument of a Python script
    texts = [word.text for word in command]
    # the last `--` with a command behind it, which a Python script before it starts
    last = max((at for at, text in enumerate(texts[:-1]) if text == "--" and texts[at + 1][:1] != "-"), default=0)
    for index, word in enumerate(command):
        text, before = word.text, texts[index - 1] if index else ""
        if index > 1 and texts[index - 2] in _NAMES["takes_pair"]:
            yield Assigned(before, text, word.raw, word.line)
        option, equals, tail = text.partition("=") if text[:1] == "-" else (before, "", text)
        argument = tail if equals else text
        takes_list = option in _NAMES["takes_list"]
        is_setting = re.match(r"[A-Za-z_]\w*=", text, re.ASCII) is not None
        is_argument = is_argument or (runs_script and re.fullmatch(r"[^-:=\s][^:=\s]*\.py", text) is not None)
        launches = name_of(word) == "python" and index < last and texts[index + 1] != "-m"
        runs_script = runs_script or (name_of(word) in _NAMES["takes_script"] and not launches)
        if option in _NAMES["takes_file"] and argument != option:
            yield Inner(argument, "", word.line)
        elif not is_argument and (takes_list or pattern("takes_setting").fullmatch(option) or (is_setting and may_set)):
            # srun(1): a value ends at each comma. Open MPI separates the variables of mca_base_env_list with semicolons
            comma, name = ";" if option == "mca_base_env_list" else ",", ""
            for part in re.split(comma if takes_list else r",(?=[A-Z_][A-Z0-9_]*=)", argument):
                previous, (name, sign, value) = name, part.partition("=")
                if sign:
                    raw = word.raw.partition(f"{name}=")[2]
                    yield Assigned(name, value, raw.partition(comma)[0] if takes_list else raw, word.line)
                elif pattern("holds_list").fullmatch(previous) and pattern("rest_of_value").fullmatch(part):
                    yield Unread(word.line, f"a comma ends the value of {previous}: export it before the command")
        elif index and (not is_argument or pattern("dotted").match(text)):
            yield from _read_word(command, index)
        is_value = before in ("-u", "-C") or (text[:1] == "-" and text not in ("-S", "--split-string")) or is_setting
        may_set = name_of(word) in {"env", *_NAMES["wrappers"]} or (may_set and is_value)


def _read_word(command: Sequence[Word], index: int) -> Iterator[Assigned | Inner]:
    """Yield what a word is that sets no variable by an option: a script, JSON, a key path of Hydra or Helm."""
    (text, raw, line), before = command[index], command[index - 1].text
    line = line if text.count("\n") <= raw.count("\n") else 0  # the value of a variable has lines elsewhere
    if before in ("-S", "--split-string"):
        yield Inner(f"env {text}", "bash", line)
    elif runs := _find_runner(command, index):
        yield Inner(text, runs, line)
    elif pattern("dotted").match(text):  # env.NAME=VALUE,env.NAME=VALUE
        for part in re.split(r"(?<!\\),(?=[\w.\[\]-]+=)", text):
            if match := pattern("dotted").match(part):
                value = part[match.end() :].strip("\"'").replace("\\,", ",")
                yield Assigned(match[1], value, value, line)
    elif name_of(command[0]) in _NAMES["remote"] and re.search(r"\s", text):
        yield Inner(text, "bash", line)
    elif NAMED.search(text):
        text = text.split("=", 1)[1] if re.match(r"--?[\w.-]+=|\w+=[\[{]", text) else text
        if text.lstrip().startswith(("{", "[")) and '"' in text:
            yield Inner(text, "option.json", line)
        elif pattern("commands").search(text):
            yield Inner(text, "bash", line)


def _find_runner(words: Sequence[Word], index: int) -> str:
    """Return the kind of program that runs this word as a command (option -c), python or bash; empty: none."""
    if not re.fullmatch(r"-\w*c", words[index - 1].text):
        return ""
    program = name_of(words[0])
    near = next((name_of(each) for each in reversed(words[max(0, index - 8) : index]) if each.text[:1] != "-"), program)
    if "python" in (program, near):
        return "python"
    own_option, is_text = {program, near} & _NAMES["own_c"], re.search(r"\s", words[index].text) is not None
    return "bash" if near in _NAMES["shells"] - _NAMES["own_c"] or (is_text and not own_option) else ""
