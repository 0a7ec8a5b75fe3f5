"""`topoflight` and `python -m agent.cli`: light enough to wait in.

In the agent's container every `kubectl exec ... topoflight VERB` is a process that holds 60 MiB beside the agent's 83
of 256 (tests/images): there one verb runs at a time, and those that wait have imported nothing of it (3 MiB each).
"""

import fcntl
import os
import sys
import time

TURN_SECONDS = 600.0  # a dozen scans of a host whose drivers hang, 40 s each


def main() -> None:
    """Entry point of the console script."""
    if os.environ.get("TOPOFLIGHT_ROLE") == "agent" and "serve" not in sys.argv:
        _wait_for_turn()
    try:
        from agent.cli.main import main as run

        run()
    except KeyboardInterrupt:  # while modules are imported, or while the verb ends
        sys.exit(130)


def _wait_for_turn() -> None:
    """Hold the container's lock until this process ends; the kernel lets it go. Exits with 1 where it is never free."""
    place = os.path.join(os.environ.get("TOPOFLIGHT_STATE") or "/tmp", "verb.lock")  # noqa: PTH118, S108 - pathlib: 2 MiB
    try:
        lock = os.open(place, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        return  # nowhere to wait: better a verb that runs than none
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
