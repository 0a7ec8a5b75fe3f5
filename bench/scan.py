"""Time and memory of a scan: `python bench/scan.py [--scans 10000] [--machine hgx-h100-8xH100-8hca]`.

Two scans of the same 8-GPU, 8-HCA machine: its recording in this process, and the fake NVML with the real pynvml in
the child process that a live scan uses. Work is CPU time (user and system) of every process that takes part, so that
a busy machine does not count; memory is the resident set of the process that asks the drivers, by tenths of the run.
Beside them `nvidia-smi topo -m`, where there is one.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "fakes" / "nvml"))

import nvml_profile  # noqa: E402 - found through the line above

from probes.api import Ok  # noqa: E402
from probes.gpu.facts import GpuFacts  # noqa: E402
from probes.host.recording import load  # noqa: E402
from probes.scan import scan  # noqa: E402
from probes.scanner import Scanner  # noqa: E402


@dataclass(frozen=True, kw_only=True)
class Result:
    """One bench: milliseconds of CPU per scan, and memory at ten moments."""

    name: str
    first_ms: float
    median_ms: float
    slowest_ms: float
    resident_mib: tuple[float, ...]


def _cpu_clock(pid: int) -> int:
    """The clock of a process' CPU time in nanoseconds, as clock_getcpuclockid(3) names it."""
    return (~pid << 3) | 2  # CPUCLOCK_SCHED


def measure(name: str, scans: int, once: Callable[[], None], process: psutil.Process) -> Result:
    """Scan once cold, then `scans` times. CPU time is this process' and the child's."""
    clocks = {_cpu_clock(os.getpid()), _cpu_clock(process.pid)}

    def work() -> float:
        return sum(time.clock_gettime(clock) for clock in clocks)

    def milliseconds(rounds: int) -> float:
        start = work()
        for _ in range(rounds):
            once()
        return (work() - start) * 1e3 / rounds

    block = max(1, scans // 100)
    first, spent, resident = milliseconds(1), [], []
    for number in range(max(1, scans // block)):
        spent.append(milliseconds(block))
        if number % max(1, scans // block // 10) == 0:
            resident.append(process.memory_info().rss / (1 << 20))
    return Result(
        name=name, first_ms=first, median_ms=statistics.median(spent), slowest_ms=max(spent),
        resident_mib=tuple(resident),
    )  # fmt: skip


def recorded(machine: Path, scans: int) -> Result:
    """All probes on the recording, in this process."""
    host = load(machine)

    def once() -> None:
        assert isinstance(scan(host).outcomes["gpu"], Ok)  # noqa: S101 - a bench of failures measures nothing

    return measure("recording, all probes", scans, once, psutil.Process())


def faked(machine: Path, scans: int) -> Result:
    """All probes through the child; the GPUs through the fake NVML."""
    answers = json.loads(machine.read_text(encoding="utf-8"))["answers"]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "root"
        nvml_profile.build(Path(folder))
        (Path(folder) / "profile").write_text(nvml_profile.profile(answers["nvml"]), encoding="utf-8")
        nvml_profile.restore_files(answers, root)
        os.environ |= {"LD_LIBRARY_PATH": folder, "FAKE_NVML_PROFILE": f"{folder}/profile"}
        with Scanner(str(root)) as scanner:
            facts = scanner.scan().facts(GpuFacts)
            assert facts is not None and len(facts.gpus) == len(answers["nvml"]["nvmlDeviceGetName"])  # noqa: S101
            child = psutil.Process(scanner.child_pid or 0)

            def once() -> None:
                scanner.scan()

            return measure("fake NVML through the child, all probes", scans, once, child)


def nvidia_smi() -> str:
    """The same question to NVIDIA's own tool, wall clock."""
    if shutil.which("nvidia-smi") is None:
        return "nvidia-smi topo -m: not on this machine"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    subprocess.run(["nvidia-smi", "topo", "-m"], stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return f"nvidia-smi topo -m: {spent * 1e3:.1f} ms of CPU, {(time.perf_counter() - start) * 1e3:.1f} ms wall clock"


def main() -> int:
    """Print both, and end with 1 where a scan costs more than the limit or memory grows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--scans", type=int, default=10_000)
    parser.add_argument("--machine", default="hgx-h100-8xH100-8hca")
    parser.add_argument("--limit-ms", type=float, default=50.0)
    parser.add_argument("--growth-mib", type=float, default=2.0, help="allowed between the second tenth and the last")
    arguments = parser.parse_args()
    machine = ROOT / "tests" / "machines" / f"{arguments.machine}.json"
    worst = 0
    for bench in (faked, recorded):
        result = bench(machine, arguments.scans)
        grown = result.resident_mib[-1] - result.resident_mib[min(1, len(result.resident_mib) - 1)]
        bad = result.median_ms > arguments.limit_ms or grown > arguments.growth_mib
        worst = max(worst, int(bad))
        print(f"{result.name}: {arguments.scans} scans of {machine.stem}")
        print(f"  CPU per scan: first {result.first_ms:.1f} ms, then {result.median_ms:.1f} ms "
              f"(slowest hundredth {result.slowest_ms:.1f} ms), limit {arguments.limit_ms:.0f} ms")  # fmt: skip
        print(f"  resident MiB: {' '.join(f'{mib:.1f}' for mib in result.resident_mib)}; grown {grown:+.1f}")
        print(f"  {'NOT within the limits' if bad else 'within the limits'}", flush=True)
    print(nvidia_smi())
    return worst


if __name__ == "__main__":
    sys.exit(main())
