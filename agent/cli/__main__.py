"""Entry point of `topoflight` and `python -m agent.cli`, small enough that many processes can wait in it.

In the agent's container each `kubectl exec ... topoflight VERB` is a process of 60 MiB, next to the agent's 83 of 256
(tests/images). Only one verb runs there at a time; the waiting ones have imported nothing yet (3 MiB each).
"""

import fcntl
import os
import sys
import time

TURN_SECONDS = 600.0  # a dozen scans of a host with hanging drivers take 40 s each


def main() -> None:
    """Entry point of the console script."""
    if os.environ.get("TOPOFLIGHT_ROLE") == "agent" and "serve" not in sys.argv:
        _wait_for_turn()
    try:
        from agent.cli.main import main as run

        run()
    except KeyboardInterrupt:  # during imports or at the end of the verb
        sys.exit(130)


def _wait_for_turn() -> None:
    """Hold the container's lock until this process ends, when the kernel releases it. Exit with 1 after the timeout."""
    place = os.path.join(os.environ.get("TOPOFLIGHT_STATE") or "/tmp", "verb.lock")  # noqa: PTH118, S108 - pathlib: 2 MiB
    try:
        lock = os.open(place, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        return  # no lock file can be created: run the verb without the lock
    end = time.monotonic() + TURN_SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if time.monotonic() > end:
                sys.exit(f"Error: another verb has run in this container for {TURN_SECONDS:.0f} s ({place} is locked)")
            time.sleep(0.05)
        else:
            return


if __name__ == "__main__":
    main()
