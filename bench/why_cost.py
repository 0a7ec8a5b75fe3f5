"""What the thread beside a rank costs: CPU seconds of a look, a write and a dump, with the recorder full.

torchrun --nproc-per-node 2 bench/why_cost.py
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from finetune import beside  # noqa: E402

DUMP_EVERY = 30.0  # as a watcher asks; unwatched only where nothing moves


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


def main() -> None:
    """Fill the recorder, then measure on rank 0."""
    dist.init_process_group("gloo")
    tensor = torch.ones(1000)
    for _ in range(2500):
        dist.all_reduce(tensor)
    with tempfile.TemporaryDirectory() as folder:
        one = beside.Beside(Path(folder), dist.get_rank(), dist.get_world_size())
        one.folder.mkdir(parents=True)
        look, write, dump = cpu(one.look, 200), cpu(one.write, 20), cpu(one.dump, 5)
    share = look / beside.LOOK_SECONDS + write / (beside.WRITE_LOOKS * beside.LOOK_SECONDS)
    if dist.get_rank() == 0:
        print(f"look {look * 1e6:.0f} us, write {write * 1e3:.2f} ms, dump {dump * 1e3:.1f} ms of CPU")
        print(f"{share:.4%} of a CPU unwatched, {share + dump / DUMP_EVERY:.4%} with --watch")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
