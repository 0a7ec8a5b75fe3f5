"""The value at the launch counts: what lint-env judges is what bash gives to the programs that a script starts."""

import json
import os
import re
import subprocess
from pathlib import Path

from rigs.tables import each_row, rows_of

from agent.cli.lint_env import lint_text
from planner.lint.sources import explain_nothing, read_text

rows = rows_of(__file__)
NAME = "NCCL_IB_DISABLE"
ROWS = Path(__file__).with_name("lint_launches.txt").read_text(encoding="utf-8").splitlines()
SCRIPTS = [row.replace("↵", "\n") for row in ROWS if not row.startswith("# ")]
NUMACTL = """while [ "${1#-}" != "$1" ]; do case $1 in -m|--membind) shift 2;; *) shift;; esac; done; exec "$@\""""
SUDO = """[ "$1" = -u ] && shift 2
case $1 in NCCL*=*) exec env "$@";;
-E|--preserve-env=N*) shift; exec env "$@";; *) exec env -u NCCL_IB_DISABLE "$@";; esac"""
SRUN = """case $1 in --export=ALL,*) v=${1#--export=ALL,}; shift; exec env "$v" "$@";; --export=ALL) shift; exec "$@";;
*) shift; exec env -u NCCL_IB_DISABLE "$@";; esac"""

SSH = 'shift; exec env -i PATH="$PATH" bash -c "$*"'


def test_lint_judges_what_bash_hands_on(tmp_path: Path) -> None:
    record = f'echo "${{{NAME}-none}}" >> {tmp_path}/record'
    programs = {"torchrun": record, "accelerate": record, "sudo": SUDO, "numactl": NUMACTL, "srun": SRUN, "ssh": SSH}
    for program, text in programs.items():
        (tmp_path / program).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / program).chmod(0o755)
    around = {name: value for name, value in os.environ.items() if not name.startswith("NCCL_")}
    around["PATH"] = f"{tmp_path}:{around['PATH']}"
    wrong, recorded = [], list[str]()
    for row in SCRIPTS:
        mark = row[0] if row[:2] in ("? ", "+ ", "~ ") else ""
        text = row[2 * bool(mark) :] + "\n"
        for short, meant in ((r"\bT\b", "torchrun t.py"), (r"\bA(?=[01$])", "export N="), (r"\bN\b", NAME)):
            text = re.sub(short, meant, text)
        (tmp_path / "record").write_text("")
        subprocess.run(["bash", "-c", text], env=around, cwd=tmp_path, capture_output=True, stdin=subprocess.DEVNULL)
        recorded += (tmp_path / "record").read_text().split()
        got = {*(tmp_path / "record").read_text().split()} - {"none"}
        found = read_text(f"#!/bin/bash\n{text}", None, "a.sh")
        judged = {each.environment[NAME] for each in found.environments if NAME in each.environment}
        right = {
            "": judged == got,
            "+": judged > got,
            "?": judged != got and any(NAME in each.unresolved for each in found.environments),
            "~": judged != got and bool(found.unread or found.unreached),
        }
        if not right[mark]:
            wrong.append((row, got, judged))
    assert not wrong and {"0", "1", "none"} <= set(recorded), wrong


@each_row(("text", "environments"), rows("launches"))
def test_launches_that_get_different_settings_are_named_by_their_line(text: str, environments: list[str]) -> None:
    found = read_text("#!/bin/bash\n" + text, None, "a.sh")
    got = [f"{each.source}: {each.environment.get('NCCL_NET', '')}" for each in found.environments]
    assert (got, found.unread) == (environments, ())


SLURM = "#!/bin/bash\n#SBATCH -N 2\n# Settings\n\n# export NCCL_NET=IB\nsrun python t.py\n"


def test_settings_that_no_program_gets_are_named_and_not_judged() -> None:
    answer = lint_text("export NCCL_NET=Bad\nsudo torchrun t.py\n", "auto", nccl_version=None, machine=None)
    assert (answer.exit_code, answer.checks) == (0, ()) and "NCCL_NET (line 1: " in answer.read


def test_a_script_whose_settings_are_comments_is_no_markdown() -> None:
    answer = explain_nothing(SLURM, read_text(SLURM, None, "a.sbatch"))
    assert answer.endswith("only in comments (line 5); it was read as: Slurm batch script")


@each_row(("text", "ways"), rows("decided"))
def test_what_only_a_run_decides_is_checked_both_ways_and_named(text: str, ways: dict[str, str]) -> None:
    """Each condition's settings, with the condition."""
    found = read_text("#!/bin/bash\n" + text, None, "a.sh").environments
    got = {each.source.removeprefix("shell script").removeprefix(", "): each for each in found}
    assert {
        way: each.environment["NCCL_IB_TC"] for way, each in got.items() if "NCCL_IB_TC" in each.environment
    } == ways


def test_files_and_names_that_are_not_known_are_named_with_their_lines() -> None:
    loads = read_text('. /etc/x\nexport "$L"\neval "$C"\nNCCL_NET=IB torchrun a\n', None, "a.sh")
    assert [re.sub(r"\D", "", each) for each in loads.files] == ["1", "3"] and [e.line for e in loads.unread] == [2]
    run = 'export NCCL_NET=IB\neval "$X"\nexport NCCL_NET=Socket\neval "$X"\n'
    found = read_text(json.dumps({"run": run})).environments  # JSON has no lines
    assert [each.source for each in found] == ["document run, a command"] * 2
