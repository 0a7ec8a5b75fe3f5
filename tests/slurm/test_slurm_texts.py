"""Slurm without Slurm: host lists, batch scripts that are written, and a user's own that is wrapped."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from rigs.command import topoflight
from rigs.tables import each_row

from contracts.host_list import HostListError, compress_host_list, expand_host_list, slurm_name

LISTS = {  # list as Slurm writes it: hosts
    "node[01-04,07]": ["node01", "node02", "node03", "node04", "node07"],
    "node[9,10-12]": ["node9", "node10", "node11", "node12"],
    "login": ["login"],
    "gpu7": ["gpu7"],
    "a[1-2]-ib": ["a1-ib", "a2-ib"],
    "": [],
}
READ = {
    "node[01-02],\n  gpu7 login": ("node01", "node02", "gpu7", "login"),
    "r[1-2]n[01-02]": ("r1n01", "r1n02", "r2n01", "r2n02"),
    "a,a,b": ("a", "b"),
    "node[08-10]": ("node08", "node09", "node10"),
}
WRONG = (
    "node[04-01]",
    "node[1-",
    "node]1[",
    "a b;c",
    "n[1-100001]",
    "n[1-1000]m[1-1000]",
    "n[x]",
    "../n",
    "n[1-9999999999]",
)


def test_host_lists_are_written_and_read_as_slurm_does() -> None:
    """Each list reads back as its hosts; what is none is refused with the part that is wrong."""
    for text, hosts in LISTS.items():
        assert (compress_host_list(reversed(hosts)), list(expand_host_list(text))) == (text, hosts), text
    for text, found in READ.items():
        assert expand_host_list(text) == found, text
    for text in WRONG:
        with pytest.raises(HostListError, match=r"must be a number|is no host name|more than"):
            expand_host_list(text)
    names = ("gpu1.example.com", "gpu1", "10.0.0.1", "fd00::1")
    assert [slurm_name(name) for name in names] == ["gpu1", "gpu1", "10.0.0.1", "fd00::1"]


LAUNCH = ("launch", "--api", "slurm", "--machine", "p5.48xlarge", "--nodes", "2", "--dry-run", "-o", "yaml")


def test_a_batch_script_has_what_was_asked_for(tmp_path: Path) -> None:
    """bash reads it; its options and settings stand in it with their reasons."""
    done = topoflight(
        *LAUNCH, "--output", tmp_path, "--exclude", "node[05-07],node9", "--time-limit", "2:00:00",
        "--partition", "gpu", "--sbatch", "account=physics", "--sbatch", "contiguous", "--require", "gpu.*",
        "--restarts", "5",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    wanted = (
        "#SBATCH --nodes=2", "#SBATCH --gres=gpu:8", "#SBATCH --exclude=node[9,05-07]", "#SBATCH --time=2:00:00",
        "#SBATCH --partition=gpu", "#SBATCH --account=physics", "#SBATCH --contiguous", "#SBATCH --requeue",
        "#SBATCH --signal=B:TERM@120", "export NCCL_NET='AWS Libfabric'",
    )  # fmt: skip
    assert [line for line in wanted if line not in lines] == []
    assert lines[lines.index("export NCCL_NET='AWS Libfabric'") - 1].startswith("# EFA works only")
    assert "--require 'gpu.*'" in done.stdout and '"$restarts" -lt 5' in done.stdout and "ulimit -l" in done.stdout
    checked = subprocess.run(["bash", "-n"], input=done.stdout, capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")


REFUSED = {
    ("--exclude", "node[3"): "is no host name",
    ("--exclude", "/nowhere/hosts"): "--exclude /nowhere/hosts: No such file",
    ("--time-limit", "soon"): "--time-limit 'soon': must be MINUTES",
    ("--sbatch", "output=x"): "--sbatch output: the script sets this option itself",
    ("--sbatch", "comment=a b"): "--sbatch comment 'a b': must have no blanks",
    ("--sbatch", "x;y=1"): "no option of sbatch",
    ("--require", "gpu.nothing"): "--require gpu.nothing",
    ("--image", "x"): "--image and --api=slurm cannot be combined",
    ("--timeout", "5"): "--timeout and --api cannot be combined",
}


@each_row("words", REFUSED)
def test_a_wrong_option_is_refused_by_name(words: tuple[str, str]) -> None:
    done = topoflight(*LAUNCH, *words)
    assert done.exit_code == 2 and REFUSED[words] in done.output, done.output


SCRIPT = """\
#!/bin/bash
#SBATCH -N 2 --gpus-per-node=8

# srun would be here, and NCCL_NET too
module load cuda   # stays
export NCCL_DEBUG=WARN
for seed in 1 2; do
    srun --label torchrun train.py "$seed"
done
"""
BAD = {  # what is wrong: script
    "line 2: #SBATCH nodes=2: 'nodes=2' is no option": "#!/bin/bash\n#SBATCH nodes=2\nsrun x\n",
    "line 4: syntax error": "#!/bin/bash\nif true; then\nsrun x\n",
    "line 1: a DOS line break": "#!/bin/bash\r\nsrun x\r\n",
    "line 1: sbatch takes only": "#SBATCH -N 2\nsrun x\n",
    "line 1: '#!/usr/bin/python3' names no shell": "#!/usr/bin/python3\nprint()\n",
    "line 3: no command of the script starts ranks": "#!/bin/bash\necho srun\nhostname\n",
    'line 2: #SBATCH --comment="a: no closing': '#!/bin/bash\n#SBATCH --comment="a\nsrun x\n',
}


def test_wrap_adds_to_a_batch_script_and_moves_nothing(tmp_path: Path) -> None:
    """Settings that the script has stay; the added lines are together, before the statement that starts ranks."""
    path = tmp_path / "job.sbatch"
    path.write_text(SCRIPT)
    done = topoflight("wrap", path, "--machine", "p5.48xlarge", "--apply")
    assert done.exit_code == 0, done.output
    made, old = path.read_text().splitlines(), SCRIPT.splitlines()
    added = made[6 : len(made) - 3]
    assert made[:6] + made[-3:] == old and added[0].startswith("# Added by topoflight wrap")
    text = "\n".join(added)
    assert "export NCCL_DEBUG=" not in text and "export NCCL_NET='AWS Libfabric'" in text and "NCCL_DEBUG_FILE=" in text
    assert "preflight -q -o reason || exit" in text
    again = topoflight("wrap", path, "--machine", "p5.48xlarge", "--apply")
    assert again.exit_code == 0 and path.read_text().splitlines() == made and "wrapped before" in again.output
    path.write_text(SCRIPT.replace("export", "#SBATCH --time=1\nexport"))
    late = topoflight("wrap", path, "--machine", "p5.48xlarge")
    assert "line 6: sbatch ignores this option" in late.output, late.output
    for message, script in BAD.items():
        path.write_bytes(script.encode())
        done = topoflight("wrap", path, "--machine", "p5.48xlarge", "--apply")
        assert done.exit_code == 2 and message in done.output, (message, done.output)
        assert path.read_bytes() == script.encode()
