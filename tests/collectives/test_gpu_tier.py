"""`make gpu` as far as a host without a GPU goes: every step runs or says why not, and is on the page at once."""

from pathlib import Path

import pytest
from rigs.command import interpreter, topoflight
from rigs.recorded import path_of
from rigs.tables import each_row

from bench.gpu import RUNS, config_file


@pytest.mark.ranks
@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_what_a_cpu_can_run_of_the_tier_stands_on_its_page(tmp_path):
    """Bus bandwidth next to that of torch alone, and a fine-tune's forecast next to its measurement."""
    page = tmp_path / "gpu.md"
    done = interpreter("bench/gpu.py", "--cpu", "--page", page, "--seconds", 600, seconds=800)
    assert done.returncode == 0, done.stdout + done.stderr
    text = page.read_text()
    assert "no GPU" in text.splitlines()[2] and "## Not reached" not in text
    assert "bus bandwidth, verified" in text and ", ratio " in text
    assert text.count("; first and last loss ") == 2
    assert "- status: complete" in text and "- memory bytes: " in text
    for line in done.stdout.splitlines():
        assert line.split(": ", 2)[-1] in text


@pytest.mark.long
@each_row(("name", "more"), RUNS.items())
def test_every_run_of_the_tier_can_be_launched_on_a_gpu(name, more, tmp_path):
    """Planned for one H100, with the model and the rows that the tier makes: nothing of it is refused."""
    words = ["--api", "job", "--dry-run", "--image", "x", "--host", path_of(), "--nodes", "1", "--ranks", "1"]
    path = config_file(tmp_path, more, model=more.get("model", "gpu"))
    lengths = ["--lengths", "2048:256"]  # without them a process of the job's reads the rows
    done = topoflight("launch", *words, *lengths, *more.get("options", ()), "--no-preflight", "--config", path)
    assert done.exit_code == 0, f"{name}: {done.stderr}"


@pytest.mark.long
def test_no_page_of_a_gpu_is_written_without_one(tmp_path):
    """What was not reached is named; without a GPU nothing runs."""
    if any(Path("/dev").glob("nvidia[0-9]*")):
        pytest.skip("this host has a GPU")
    page = tmp_path / "gpu.md"
    done = interpreter("bench/gpu.py", "--page", page)
    assert done.returncode == 2 and "no NVIDIA GPU" in done.stderr and not page.exists()
    done = interpreter("bench/gpu.py", "--cpu")
    assert done.returncode == 2 and "--cpu requires --page" in done.stderr
    done = interpreter("bench/gpu.py", "--cpu", "--page", page, "--seconds", 0)
    assert done.returncode == 1 and "## Not reached\n\n- Links against nvidia-smi" in page.read_text()
