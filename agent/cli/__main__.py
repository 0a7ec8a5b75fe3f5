"""Entry point of `topoflight` and `python -m agent.cli`, small enough that many processes can wait in it.

In the agent's container each `kubectl exec ... topoflight VERB` is a process of 60 MiB, next to the agent's 85 of 256
(tests/images). Only one verb runs there at a time. The others wait before they import anything (3 MiB each).
"""

import fcntl
import os
import sys
import time

WAIT_SECONDS, POLL_SECONDS = 600.0, 0.05  # a dozen scans of a host with hanging drivers take 40 s each


def main() -> None:
    """Run a verb; an interrupt while it waits or while its modules are imported ends it without a traceback."""
    try:
        if os.environ.get("TOPOFLIGHT_ROLE") == "agent" and "serve" not in sys.argv:
            _wait_for_other_verbs()
        from agent.cli.main import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


def _wait_for_other_verbs() -> None:
    """Take the container's lock, which the kernel releases when this process ends. Exit with 1 after WAIT_SECONDS."""
    path = os.path.join(os.environ.get("TOPOFLIGHT_STATE") or "/tmp", "verb.lock")  # noqa: PTH118, S108 - pathlib: 2 MiB
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        return  # no lock file can be created: run the verb without the lock
    for _ in range(int(WAIT_SECONDS / POLL_SECONDS)):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            time.sleep(POLL_SECONDS)
        else:
            return
    sys.exit(f"Error: another verb has run in this container for {WAIT_SECONDS:.0f} s ({path} is locked)")


if __name__ == "__main__":
    main()
