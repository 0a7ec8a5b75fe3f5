"""The value at the launch counts: what lint-env judges is what bash gives to the programs that a script starts."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from agent.checks.lint import lint_text
from planner.lint.sources import read_text, why_nothing

NAME = "NCCL_IB_DISABLE"
# A stands for `export NCCL_IB_DISABLE=`, N for the name, T for a launch that is recorded.
SCRIPTS = (
    # after the launch, before it, for it alone
    "A1\nT\nA0", "N=1 T\nA0", "A1\nT\nunset N", "A1\nT\nA0\nT", "A1\nT\nunset N\nT", "A0\nN=1 T\nT",
    "A0\nN=1 T", "T\nA0\nN=1 T", "A0\nN=1 T\nA1\nT", "A0\nenv N=1 T", "A0\naccelerate a\nN=1 T",
    "A0\nexport X=1 && N=1 T", "r() { T; }\nA0\nN=1 r",
    "r() { A1; T; }\nA0\nr", "A1\nsudo T\nbash -c T", "T\nA1\nsudo T",
    "for v in 1 0; do\nT\nA1\nsudo T\ndone", "A0\nN=1 bash -c T",
    "A0\nsudo -E N=1 T", "sudo N=1 T",
    "A1 && T\nA0", "A1\nT | tee log\nA0", "A1\nT > log 2>&1\nA0", "A1\nif ! T; then exit 1; fi\nA0", "A1\ntime T\nA0",
    "A1\nnohup T &\nwait\nA0", "A1\nL=torchrun\n$L t.py\nT\nA0", "A1\nexec T\nA0\nT",
    "for v in 1 0; do\nA$v\nT\ndone",
    # behind a program that starts it: what is set after it reaches no launch
    "A1\ntimeout 5 T\nA0", "A1\ntimeout -k 1 -s TERM 5m T\nA0", "A1\nnohup T\nA0", "A1\ntime -p T\nA0",
    "A1\nnumactl -m 0 --membind 0 T\nA0", "A1\nnumactl --cpunodebind=0 -- T\nA0", "A1\ntaskset -c 0 T\nA0",
    "A1\nnice -n 5 T\nA0", "A1\nstdbuf -oL -e L T\nA0", "A1\nionice -c 3 T\nA0", "A1\nsetsid -w T\nA0",
    "A1\n/usr/bin/env timeout 5 nohup nice T\nA0", "A1\ntimeout 5 env -u N T", "A0\nN=1 timeout 5 T",
    # lines that the grammar joins
    "Y=1 X=2\nA1\nT", "Y=1 X=2\n\nA1\nT", "Y=1 X=2 # why\nA1\nT", "Y=1 X=2\nW=3 Z=4\nA1\nY=5 X=6\nA0\nT",
    "f() {\n  Y=1 X=2\n  A1\n}\nf\nT", "if true; then\n  Y=1 X=2\n  A1\n  W=1 Z=2\n  A0\nfi\nT", "N=0 X=2\nN=1 T",
    "Y=1 X=2\n[ -d . ] && A1\nT", "Y=1 X=2\n{ A1; }\nT", "Y=1 X=2\nif A1; then false; fi\nT",
    "A1\nY=1 X=2\nunset N\nT",
    "Y=1 X=2\ndeclare -x N=1\nT", "Y=1 N=1\nexport X N\nT", "Y=(1 2)\nX=1\nA1\nT", "N=1 X=2 \\\nT", "Y=1 A1\nT",
    "A1\nY=1 X=2\nT", "V=$(Y=1 X=2\nA1\nT)\ntrue", "bash -c 'Y=1 X=2\nA1\nT'", "A1\nY=1 unset N\nT",
    # functions, and scripts in quotes
    "f() { A1; }\nT", "f() { A1; }\nf\nT", "r() { T; }\nA1\nr\nA0\nr", "r() { T; }\nN=1 r\nr",
    "r() { return 0; A1; }\nr\nT", "f() { ( A1 ); }\nf\nT", "bash -c 'A1; T'\nT", "A1\nbash -c 'T'\nA0", "eval 'A1'\nT",
    "A1\nenv -u N bash -c 'T'",
    # what never runs
    "exit 0\nA1\nT", "if false; then\nA1\nfi\nT", "if true; then A1; else A0; fi\nT",
    "true && A1\nT", "u() { exit 1; }\n[ -z x ] && u\nA1\nT", "u() { exit 1; }\nu\nA1\nT", ": <<'D'\nA1\nD\nT",
    "A1\ncommand -v T\nT",
    "return 0\nA1\nT", "f() { A1; }\ng() { f; }\ng\nT",
    # what the program does not get
    "( A1 )\nT", "( A1; T )\nT", "{ A1; }\nT",
    "A1\nenv -u N T", "A1\nenv --unset=N T", "A1\nenv -i PATH=$PATH T", "A1\nenv -u N N=0 T", "N=1 X=2 \\\n# why\nT",
    "N=1 X=2\nT", "N=1 X=2\nexport N\nT", "A1\nsudo -u root -E T",
    "A1\nsudo T", "A1\nsudo -E T", "A1\nsudo --preserve-env=N T", "A1\nsrun --export=NONE T",
    "A1\nsrun --export=ALL T", "A1\nsrun --export=X T",
    "accelerate launch t.py --env N=1",
    "set -a\nN=1\nset +a\nN=0\nT", "set -a\nset +a\nN=1\nT",
    "set -o allexport\nN=1\nset +o allexport\nT\nN=0\nT", "N=1\nset -a\nset +a\nT",
    "N=1\nT\nexport N\nT",
    # what a builtin gets no program has; export of a name that stands before it as well
    "N=1 true\nT", "N=1 X=2 echo a\nT", "N=1 nohup true; T", "A1\nN=0 wait\nT", "N=1 eval 'T'\nT",
    "A0\nN=1 export X\nT", "A0\nN=1 export X N\nT", "N=1 declare -x N\nT", "N=1 X=2 export Y N\nT",
    # the end of an export
    "A1\nexport -n N\nT", "export -n N=1\nT", "A1\nexport -n N\nN=0\nT", "A1\nexport -n N\nexport N\nT",
    "A1\ndeclare +x N=0\nT\nexport N\nT", "A1\nT\nexport -n N\nT", "A1\nexport -p\nT",
    # in a condition, and behind a test that the grammar reads as a division
    "! A1\nT", "if ! A1; then exit 1; fi\nT", "command export N=1\nT",
    "[ -d / ] && A1\nT", "[[ -d / ]] && A1\nT", "[ x != / ] && { A1; }\nT",
    # a launch of a later round of a loop
    "for v in 1 1; do\nT\nA1\ndone", "for v in $(echo 1 0); do\nT\nexport N=$v\nT\ndone",
    "while read v; do T; A1; done < <(printf '1\\n2\\n')", "for ((v = 0; v < 2; v++)); do T; A1; done",
    "for v in 1 2; do\nT\nA1\nT\nunset N\ndone", "while [ ! -e once ]; do\nA1\nT\nA0\n> once\ndone",
)  # fmt: skip
NUMACTL = """while [ "${1#-}" != "$1" ]; do case $1 in -m|--membind) shift 2;; *) shift;; esac; done; exec "$@\""""
SUDO = """[ "$1" = -u ] && shift 2
case $1 in NCCL*=*) exec env "$@";;
-E|--preserve-env=N*) shift; exec env "$@";; *) exec env -u NCCL_IB_DISABLE "$@";; esac"""
SRUN = """case $1 in --export=ALL,*) v=${1#--export=ALL,}; shift; exec env "$v" "$@";; --export=ALL) shift; exec "$@";;
*) shift; exec env -u NCCL_IB_DISABLE "$@";; esac"""


def test_lint_judges_what_bash_hands_on(tmp_path: Path) -> None:
    record = f'echo "${{{NAME}-none}}" >> {tmp_path}/record'
    for program, text in {
        "torchrun": record,
        "accelerate": record,
        "sudo": SUDO,
        "numactl": NUMACTL,
        "srun": SRUN,
    }.items():
        (tmp_path / program).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / program).chmod(0o755)
    around = {name: value for name, value in os.environ.items() if not name.startswith("NCCL_")}
    wrong, recorded = [], list[str]()
    for row in SCRIPTS:
        text = (
            re.sub(r"\bN\b", NAME, re.sub(r"\bA(?=[01$])", "export N=", re.sub(r"\bT\b", "torchrun t.py", row))) + "\n"
        )
        (tmp_path / "record").write_text("")
        subprocess.run(
            ["bash", "-c", text],
            env={**around, "PATH": f"{tmp_path}:{around['PATH']}"},
            cwd=tmp_path,
            capture_output=True,
        )
        recorded += (tmp_path / "record").read_text().split()
        got = {*(tmp_path / "record").read_text().split()} - {"none"}
        found = read_text(f"#!/bin/bash\n{text}", None, "a.sh").environments
        judged = {each.environment[NAME] for each in found if NAME in each.environment}
        if judged != got:
            wrong.append((text, got, judged))
    assert not wrong and {"0", "1", "none"} == set(recorded), wrong


def test_launches_that_get_different_settings_are_named_by_their_line() -> None:
    one, other, same = "export NCCL_NET=IB\n", "export NCCL_NET=Socket\n", "export NCCL_DEBUG=WARN\n"
    rows = (
        (same + one + "torchrun a\n" + other + "torchrun b\n",
         {"shell script": "Socket", "shell script, the launch of line 4": "IB"}),
        (one + "python a.py\n" + same + "torchrun b\n", {"shell script": "IB"}),
        (one + "torchrun a\nunset NCCL_NET\ntorchrun b\n", {"shell script, the launch of line 3": "IB"}),
        # a program that is not known gets it
        ("python prepare.py\n" + one + "trtllm-bench a\n", {"shell script": "IB"}),
        ("python prepare.py\n" + one + "mkdir a\n", {}),
        ("./configure\n" + one, {"shell script": "IB"}), ("python -m pip install a\n" + one, {"shell script": "IB"}),
    )  # fmt: skip
    wrong = []
    for text, wanted in rows:
        found = read_text("#!/bin/bash\n" + text, None, "a.sh")
        got = {each.source: each.environment.get("NCCL_NET", "") for each in found.environments}
        if got != wanted or found.unread:
            wrong.append((text, got))
    assert not wrong


STAGES = "FROM x AS a\nENV NCCL_NET=IB\n"
SLURM = "#!/bin/bash\n#SBATCH -N 2\n# Settings\n\n# export NCCL_NET=IB\nsrun python t.py\n"
STEP = "on: [push]\njobs:\n  a:\n    steps:\n      - name: s\n        run: |\n          "
# file name, text, what is set, settings that the job does not get
TEXTS: tuple[tuple[str, str, dict[str, str], dict[str, int]], ...] = (
    ("Dockerfile", STAGES + "FROM y\nENV NCCL_DEBUG=WARN\n", {"NCCL_DEBUG": "WARN"}, {"NCCL_NET": 2}),
    ("Dockerfile", STAGES + "FROM a AS b\nENV NCCL_DEBUG=WARN\nFROM b\n", {"NCCL_NET": "IB", "NCCL_DEBUG": "WARN"}, {}),
    ("Dockerfile", "ARG B=a\n" + STAGES + "FROM ${B}\n", {"NCCL_NET": "IB"}, {}),
    ("Dockerfile", STAGES + 'ENTRYPOINT ["env", "-u", "NCCL_NET", "torchrun", "t.py"]\n', {}, {"NCCL_NET": 2}),
    ("Dockerfile", STAGES + 'ENTRYPOINT ["env", "-u", "NCCL_NET"]\nCMD ["torchrun", "t.py"]\n', {}, {"NCCL_NET": 2}),
    ("Dockerfile", STAGES + "ENTRYPOINT env -u NCCL_NET torchrun t.py\n", {}, {"NCCL_NET": 2}),
    ("Dockerfile", STAGES + 'CMD ["torchrun", "t.py", "--env", "NCCL_ALGO=Ring"]\n', {"NCCL_NET": "IB"},
     {"NCCL_ALGO": 3}),
    ("a.sh", "export NCCL_NET=IB\ndocker run -e NCCL_NET i torchrun t.py\n", {"NCCL_NET": "IB"}, {}),
    ("a.sh", "export NCCL_NET=IB\nmpirun -x NCCL_NET -x NCCL_ALGO=Ring a\n",
     {"NCCL_NET": "IB", "NCCL_ALGO": "Ring"}, {}),
    ("a.yml", STEP + "export FI_PROVIDER=efa\n", {"FI_PROVIDER": "efa"}, {}),
    ("a.yml", STEP + "export CUDA_LAUNCH_BLOCKING=1\n", {"CUDA_LAUNCH_BLOCKING": "1"}, {}),
    ("a.yml", STEP + "export NCCL_NET=IB\n          torchrun t.py\n          unset NCCL_NET\n", {"NCCL_NET": "IB"}, {}),
)  # fmt: skip


def test_settings_that_no_program_gets_are_named_and_not_judged() -> None:
    wrong = []
    for name, text, sets, lines in TEXTS:
        found = read_text(text, None, name)
        got = {key: value for each in found.environments for key, value in each.environment.items()}
        if (got, {each.name: each.line for each in found.unreached}) != (sets, lines):
            wrong.append((name, text, got, found.unreached))
    assert not wrong
    answer = lint_text("export NCCL_NET=Bad\nsudo torchrun t.py\n", "auto", nccl_version=None, machine=None)
    assert (answer.exit_code, answer.checks) == (0, ()) and "NCCL_NET (line 1: " in answer.read


def test_a_script_whose_settings_are_comments_is_no_markdown() -> None:
    answer = why_nothing(SLURM, read_text(SLURM, None, "a.sbatch"))
    assert answer.endswith("only in comments (line 5); it was read as: Slurm batch script")
