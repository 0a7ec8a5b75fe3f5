"""The value at the launch counts: what lint-env judges is what bash gives to the programs that a script starts."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from agent.cli.lint_env import lint_text
from planner.lint.sources import read_text, why_nothing

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


def test_launches_that_get_different_settings_are_named_by_their_line() -> None:
    one, other, same = "export NCCL_NET=IB\n", "export NCCL_NET=Socket\n", "export NCCL_DEBUG=WARN\n"
    rows = (
        (same + one + "torchrun a\n" + other + "torchrun b\n",
         ["shell script, the launch of line 4: IB", "shell script, the launch of line 6: Socket"]),
        ("for n in IB Socket; do\nNCCL_NET=$n srun a\ndone\n",
         ["shell script, the launch of line 3: IB", "shell script, the launch of line 3: Socket"]),
        (one + "python a.py\n" + same + "torchrun b\n", ["shell script: IB"]),
        (one + "torchrun a\nunset NCCL_NET\ntorchrun b\n", ["shell script: IB"]),
        # a program that is not known gets it
        ("python prepare.py\n" + one + "trtllm-bench a\n", ["shell script: IB"]),
        ("python prepare.py\n" + one + "mkdir a\n", []),
        ("./configure\n" + one, ["shell script: IB"]), ("python -m pip install a\n" + one, ["shell script: IB"]),
    )  # fmt: skip
    wrong = []
    for text, wanted in rows:
        found = read_text("#!/bin/bash\n" + text, None, "a.sh")
        got = [f"{each.source}: {each.environment.get('NCCL_NET', '')}" for each in found.environments]
        if got != wanted or found.unread:
            wrong.append((text, got))
    assert not wrong


SLURM = "#!/bin/bash\n#SBATCH -N 2\n# Settings\n\n# export NCCL_NET=IB\nsrun python t.py\n"


def test_settings_that_no_program_gets_are_named_and_not_judged() -> None:
    answer = lint_text("export NCCL_NET=Bad\nsudo torchrun t.py\n", "auto", nccl_version=None, machine=None)
    assert (answer.exit_code, answer.checks) == (0, ()) and "NCCL_NET (line 1: " in answer.read


def test_a_script_whose_settings_are_comments_is_no_markdown() -> None:
    answer = why_nothing(SLURM, read_text(SLURM, None, "a.sbatch"))
    assert answer.endswith("only in comments (line 5); it was read as: Slurm batch script")


def test_what_only_a_run_decides_is_checked_both_ways_and_named() -> None:
    """Each condition's settings, with the condition; files and names that are not known, with their lines."""
    tc = "NCCL_IB_TC"
    rows = (
        ("export NCCL_IB_TC=1\nM=${M:-a}\n[ $M = a ] && export NCCL_IB_TC=2\ntorchrun a\n",
         {"": "1", "if [ $M = a ]": "2"}),
        ("f() { case $1 in a) export NCCL_IB_TC=1;; *) export NCCL_IB_TC=2;; esac; }\nf ${M:-a}\ntorchrun a\n",
         {"": "2", "case $1 in a": "1"}),
        ("[ -d x ] && O='-x NCCL_IB_TC=1'\nmpirun $O a\n", {"if [ -d x ]": "1"}),
        ("if grep -q x y; then X=1; else X=2; fi\nexport NCCL_IB_TC=$X\ntorchrun a\n",
         {"": "1", "else of if grep -q x y": "2"}),
        ("f() { if grep -q x y; then return; fi; export NCCL_IB_TC=1; }\nf\ntorchrun a\n",
         {"": "1"}),
        ("for v in a b; do\ngrep -q x y || continue\nexport NCCL_IB_TC=1\ndone\ntorchrun a\n", {"": "1"}),
        ("export NCCL_IB_TC=2\nf() { if grep -q x y; then return; fi; export NCCL_IB_TC=1; }\nf\ntorchrun a\n",
         {"": "1", "if grep -q x y": "2"}),
        *((f"export NCCL_IB_TC=2\n{each}\ntorchrun a\n", {"": "2", "else of if grep -q x y": "1"}) for each in (
            "for v in a b; do if grep -q x y; then continue; fi; export NCCL_IB_TC=1; done",
            "for v in a; do if grep -q x y; then break; fi; export NCCL_IB_TC=1; done",
        )),
        ("a=(-n 2)\nif grep -q x y; then a+=(-x NCCL_IB_TC=1); fi\na+=(-x NCCL_NET=IB)\nmpirun ${a[@]} b\n",
         {"": "1"}),
        ("a='-n 2'\n[ -d x ] && a+=' -x NCCL_IB_TC=1'\na+=' -x NCCL_NET=IB'\nmpirun $a b\n",
         {"if [ -d x ]": "1"}),
        ("while read l; do a+=($l); done\na+=(-x NCCL_IB_TC=1)\nmpirun ${a[@]} b\n", {"": "1"}),
        ("export NCCL_IB_TC=1\nunset $V\nunset $W\ntorchrun a\n", {"": "1"}),
        ("x=1\n[[ $x == [[:digit:]] ]] && export NCCL_IB_TC=1\ntorchrun a\n", {"if [[ $x == [[:digit:]] ]]": "1"}),
        ("x=1\ncase $x in +([0-9])) export NCCL_IB_TC=1;; *) export NCCL_IB_TC=2;; esac\ntorchrun a\n",
         {"": "2", "case $x in +([0-9])": "1"}),
        *((f"{each}\ntorchrun a\n", {}) for each in (
            "a=(1 2)\na[0]=5\nexport NCCL_IB_TC=${a[0]}", "a=([1]=1 [0]=2)\nexport NCCL_IB_TC=${a[0]}",
            "a=(1 2)\nread -a a <<< 5\nexport NCCL_IB_TC=${a[0]}", "export NCCL_IB_TC=$((-7 / 2))",
            "set --\nwhile [ $# -lt 80 ]; do set -- $@ x; done\nexport NCCL_IB_TC=$#",
            "for i in {01..02} /sys/x*; do export NCCL_IB_TC=$i; done", "bash -s 1 <<'E'\nexport NCCL_IB_TC=$1\nx\nE",
        )),
    )  # fmt: skip
    wrong = []
    for text, wanted in rows:
        found = read_text("#!/bin/bash\n" + text, None, "a.sh").environments
        got = {each.source.removeprefix("shell script").removeprefix(", "): each.environment.get(tc) for each in found}
        if {place: value for place, value in got.items() if value} != wanted:
            wrong.append((text, got))
    assert not wrong
    loads = read_text('. /etc/x\nexport "$L"\neval "$C"\nNCCL_NET=IB torchrun a\n', None, "a.sh")
    assert [re.sub(r"\D", "", each) for each in loads.files] == ["1", "3"] and [e.line for e in loads.unread] == [2]
