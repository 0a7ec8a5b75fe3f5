"""One benchmark at a time on a host, whichever process crashed before."""

import fcntl
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from collectives.bench import processes

HOLD = "import sys, time; from pathlib import Path; from collectives.bench import processes\n"
HOLD += "with processes.lock_host(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"


@pytest.fixture
def holder(tmp_path):
    words = [sys.executable, "-c", HOLD, str(tmp_path / "lock")]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_second_benchmark_is_refused_as_long_as_the_first_lives(holder, tmp_path):
    with pytest.raises(processes.BusyError, match=f"pid {holder.pid} holds"), processes.lock_host(tmp_path / "lock"):
        pass
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    with processes.lock_host(tmp_path / "lock"):
        pass


def test_the_lock_is_free_after_an_error(tmp_path):
    with pytest.raises(ZeroDivisionError), processes.lock_host(tmp_path / "lock"):
        _ = 1 / 0
    with processes.lock_host(tmp_path / "lock"):
        pass


def test_a_link_in_the_place_of_the_lock_is_not_followed(tmp_path):
    target = tmp_path / "precious"
    target.write_text("content")
    (tmp_path / "lock").symlink_to(target)
    with pytest.raises(OSError, match="lock"), processes.lock_host(tmp_path / "lock"):
        pass
    assert target.read_text() == "content"


def test_gpus_in_use_are_refused_unless_forced():
    with pytest.raises(processes.BusyError, match="pid 12, pid 34"):
        processes.refuse_busy_gpus((34, 12), force=False)
    processes.refuse_busy_gpus((34, 12), force=True)
    processes.refuse_busy_gpus((), force=False)


def test_the_folder_of_a_killed_run_is_swept_and_that_of_a_living_one_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead = tmp_path / f"{processes.FOLDER_PREFIX}dead"
    dead.mkdir()
    link = tmp_path / f"{processes.FOLDER_PREFIX}link"
    link.symlink_to(tmp_path)
    with processes.run_folder() as living:
        assert not dead.exists()
        processes.remove_stale_folders(tmp_path)
        assert living.exists() and living.name.startswith(processes.FOLDER_PREFIX)
    assert not living.exists() and link.exists()


def test_a_folder_is_not_swept_while_its_owner_has_yet_to_lock_it(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    locks = fcntl.flock

    def meanwhile(descriptor, how):
        monkeypatch.setattr(fcntl, "flock", locks)
        processes.remove_stale_folders(tmp_path)
        locks(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", meanwhile)
    with processes.run_folder() as living:
        assert fcntl.flock is locks and living.exists()
