"""What `why --watch` costs a job: CPU seconds of its thread with the recorder full, and steps with and without it.

torchrun --nproc-per-node 2 bench/why_cost.py [PAIRS]

Windows with and without the thread take turns within one run, in a random order within each pair. A machine's noise
is greater than what is looked for, so the thread does everything TIMES as often as beside a watcher that finds all
fine, one dump a window, and what it costs is divided by that. Told is the median over pairs of the ratio, with its
95 % interval (bootstrap over pairs): of wall time a step, and of the process's CPU time a step.
"""

from __future__ import annotations

import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from agent.why.ranks import ASK_SECONDS, MOST_ASK_SECONDS  # noqa: E402
from contracts.rank_state import ASK  # noqa: E402
from finetune import beside  # noqa: E402

WINDOW_SECONDS = 2.5
TIMES = round(MOST_ASK_SECONDS / WINDOW_SECONDS)


def cpu(work: Callable[[], object], times: int) -> float:
    """CPU seconds of one, in a thread of its own, as the job has it."""
    took: list[float] = []

    def run() -> None:
        for _ in range(times):
            began = time.thread_time()
            work()
            took.append(time.thread_time() - began)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return sorted(took)[len(took) // 2]


class Switched(beside.Beside):
    """The thread as it is, which does nothing while it is off."""

    on = False

    def look(self) -> None:
        """While it is on."""
        if self.on:
            super().look()

    def write(self, *, ended: bool = False) -> None:
        """While it is on."""
        if self.on:
            super().write(ended=ended)

    def wanted(self) -> bool:
        """While it is on."""
        return self.on and super().wanted()

    def dump(self) -> None:
        """While it is on."""
        if self.on:
            super().dump()


def window(one: Switched, weights: torch.Tensor) -> tuple[float, float]:
    """Wall and CPU seconds of a step, in one window of training steps that all ranks make alike."""
    dist.barrier()
    steps, wall, cpu_began = 0, time.monotonic(), time.process_time()
    over = torch.zeros(1)
    if one.on and dist.get_rank() == 0:
        (one.folder / ASK).touch()
    while not over.item():
        for _ in range(8):
            gradient = weights @ weights
            dist.all_reduce(gradient)
        steps += 8
        over.fill_(float(time.monotonic() - wall > WINDOW_SECONDS))
        dist.broadcast(over, 0)
    return (time.monotonic() - wall) / steps, (time.process_time() - cpu_began) / steps


def interval(ratios: list[float]) -> str:
    """ "+0.1 % (-0.2 to +0.4)": the median's excess over 1 of a thread as it is, and its 95 % interval."""
    chance = random.Random(1)
    middles = sorted(median(chance.choices(ratios, k=len(ratios))) for _ in range(4000))
    low, high = middles[100], middles[3899]
    middle, low, high = ((one - 1) / TIMES for one in (median(ratios), low, high))
    return f"{middle:+.2%} ({low:+.2%} to {high:+.2%})"


def beside_steps(pairs: int) -> tuple[str, str]:
    """Wall and CPU time of a step with the thread, over those without."""
    weights, chance = torch.randn(384, 384), random.Random(0)
    walls, cpus = [], []
    with tempfile.TemporaryDirectory() as name:
        names = [name]
        dist.broadcast_object_list(names)  # one folder, as a run has it
        look_seconds = beside.LOOK_SECONDS / TIMES
        one = Switched(Path(names[0]), dist.get_rank(), dist.get_world_size(), look_seconds=look_seconds)
        beside.ENDS_SECONDS /= TIMES
        one.folder.mkdir(parents=True, exist_ok=True)
        one.start()
        for _ in range(pairs):
            rows = {}
            for on in (first := chance.random() < 0.5, not first):
                one.on = on
                rows[on] = window(one, weights)
            walls.append(rows[True][0] / rows[False][0])
            cpus.append(rows[True][1] / rows[False][1])
        one.over.set()
        one.join()
        dist.barrier()
    return interval(walls), interval(cpus)


def main() -> None:
    """Fill the recorder, then measure on rank 0."""
    dist.init_process_group("gloo")
    tensor = torch.ones(1000)
    for _ in range(2500):
        dist.all_reduce(tensor)
    with tempfile.TemporaryDirectory() as folder:
        one = beside.Beside(Path(folder), dist.get_rank(), dist.get_world_size())
        one.folder.mkdir(parents=True)
        # in a collective, a look asks the sockets too
        look, write, dump = cpu(lambda: (one.look(), beside._sending()), 200), cpu(one.write, 20), cpu(one.dump, 5)
    share = look / beside.LOOK_SECONDS + write / (beside.WRITE_LOOKS * beside.LOOK_SECONDS)
    if dist.get_rank() == 0:
        print(f"look {look * 1e6:.0f} us, write {write * 1e3:.2f} ms, dump {dump * 1e3:.1f} ms of CPU")
        watched, suspected = (share + dump / seconds for seconds in (MOST_ASK_SECONDS, ASK_SECONDS))
        print(f"{share:.4%} of a CPU unwatched, {watched:.4%} with --watch, {suspected:.4%} where it finds a fault")
    wall, process = beside_steps(int(sys.argv[1]) if len(sys.argv) > 1 else 60)
    if dist.get_rank() == 0:
        print(f"a step with --watch: wall time {wall}, CPU time {process}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
