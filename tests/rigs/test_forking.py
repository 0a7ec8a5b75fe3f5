"""The stand-in interpreter: what it forks ends, dies, prints and shows itself as a started process would."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from rigs import forking
from rigs.waiting import eventually

from collectives.bench.processes import marked

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("forked_ranks")]
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0", "--standalone"]
RANK = """
import os, pathlib, sys, time
rank = os.environ["RANK"]
print("rank", rank, os.getcwd(), sys.argv[1], flush=True)
environment = pathlib.Path("/proc/self/environ").read_bytes().split(b"\\0")
assert f"RANK={rank}".encode() in environment and b"OWN=1" in environment
assert pathlib.Path(f"/proc/{os.getppid()}/cmdline").read_bytes().split(b"\\0")[2] == b"torch.distributed.run"
if sys.argv[1] == "wait":
    pathlib.Path(f"up-{rank}").touch()
    time.sleep(600)
sys.exit(int(sys.argv[1]))
"""


def start(folder, *words):
    """Two ranks of the script; their environment names the folder."""
    (folder / "rank.py").write_text(RANK)
    env = {**os.environ, "OWN": "1", "FORKED_IN": str(folder)}
    argv = [sys.executable, *TORCHRUN, str(folder / "rank.py"), *words]
    return subprocess.Popen(argv, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.parametrize("code", [0, 65])
def test_streams_folder_environment_and_exit_code(tmp_path, code):
    job = start(tmp_path, str(code))
    said = job.communicate(timeout=300)[0]
    assert job.returncode == (1 if code else 0), said  # torchrun's own
    assert all(f"rank {rank} {tmp_path} {code}\n" in said for rank in (0, 1)), said
    assert (f"exitcode  : {code}" in said) == bool(code), said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_what_was_forked(tmp_path, number):
    """SIGTERM is passed on, as is the death of the client; the ranks of a killed torchrun live, as started ones do."""
    job = start(tmp_path, "wait")
    eventually(lambda: len(list(tmp_path.glob("up-*"))) == 2, "both ranks run", 300)
    assert len(marked("FORKED_IN", str(tmp_path))) == 3, "torchrun and two ranks"
    job.send_signal(number)
    assert job.wait(300) == (1 if number == signal.SIGTERM else -number)
    left = 0 if number == signal.SIGTERM else 2
    eventually(lambda: len(marked("FORKED_IN", str(tmp_path))) == left, f"{left} are left", 300)
    for rank in marked("FORKED_IN", str(tmp_path)):
        rank.kill()
    job.stdout.close()


def test_what_is_not_forked_is_the_real_interpreter(tmp_path):
    """With the packages of this environment, and under the stand-in's name, so that it starts ranks as this does."""
    text = "import sys, psutil; print(sys.executable, sys.argv[1:])"
    said = subprocess.run([sys.executable, "-c", text, "a"], capture_output=True, text=True, check=True).stdout
    assert said == f"{sys.executable} ['a']\n"


def test_a_preload_that_fails_is_told(tmp_path, monkeypatch):
    """And does not leave a session that waits for a server."""
    (tmp_path / "torch.py").write_text("raise ImportError('no such thing')")
    monkeypatch.setattr(forking, "ROOT", Path(f"{tmp_path}:{forking.ROOT}"))
    with pytest.raises(RuntimeError, match="no such thing"):
        forking._start(tmp_path, tmp_path / "socket", os.getpid())


def test_the_server_has_begun_nothing_that_no_fork_survives():
    """One thread, no OpenMP pool."""
    owner = str(os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid())
    lines = {one.pid: one.info["cmdline"] or [] for one in psutil.process_iter(["cmdline"])}
    (pid,) = [pid for pid, line in lines.items() if str(forking.HERE / "server.py") in line and line[-1] == owner]
    assert len(list(Path(f"/proc/{pid}/task").iterdir())) == 1
