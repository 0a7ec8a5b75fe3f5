"""Two ranks that run plans one after the other, forked from one process: `trl_ranks.py CASES RANKS`.

Each case is a plan.json, a port and whether rank 1 gets SIGTERM in its third step. Prints the exit codes of rank 0.
"""

import atexit
import json
import os
import signal
import sys
from pathlib import Path

import transformers
from accelerate.state import AcceleratorState, GradientState, PartialState
from equivalence_ranks import fork
from transformers import trainer

import finetune.sft_trl  # noqa: F401 - TRL is imported once, before the fork
from finetune import train

USUAL = trainer.DEFAULT_CALLBACKS


class StopsAtStep3(transformers.TrainerCallback):
    """A callback of the user's: SIGTERM in the third step."""

    def on_step_begin(self, _args, state, _control, **_words):
        """Stop where two steps are done."""
        if state.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)


def main(path, rank, world):
    """All cases."""
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # a thread started after the fork has no pool of torch's
    codes = []
    for case in json.loads(Path(path).read_text()):
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
                          MASTER_ADDR="127.0.0.1", MASTER_PORT=str(case["port"]))  # fmt: skip
        os.environ.update(case["environment"])
        trainer.DEFAULT_CALLBACKS = [*USUAL, StopsAtStep3] if case["stop"] and rank == 1 else USUAL
        for state in (AcceleratorState, PartialState, GradientState):
            state._reset_state()
        codes.append(train.main(["--plan", case["plan"]]))
    atexit._run_exitfuncs()  # a forked rank ends without them, and the last job may end before its monitor's first look
    if rank == 0:
        print("CODES", json.dumps(codes), flush=True)


if __name__ == "__main__":
    sys.exit(fork(sys.argv[1], int(sys.argv[2]), main))
