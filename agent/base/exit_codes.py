"""The exit codes of all verbs; docs/reference/exit-codes.md explains them."""

from __future__ import annotations

EXIT_PASS = 0
EXIT_TOOL_ERROR = 1
EXIT_USAGE = 2
EXIT_FAILED = 3
EXIT_WARNED = 4
EXIT_UNKNOWN = 5
EXIT_STOPPED = 75  # EX_TEMPFAIL of sysexits.h: ended from outside before it was done
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as a shell reports Ctrl-C
EXIT_CLOSED_PIPE = 141  # 128 + SIGPIPE, as a shell reports a program whose reader has left
