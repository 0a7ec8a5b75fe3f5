"""The kernel's log, read on from where the last look ended.

Specification: Linux Documentation/ABI/testing/dev-kmsg; syslog(2), klogctl(3) where the device is not there. Formatting
all of the log costs the kernel milliseconds, which every scan would pay.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections import deque

_READ_ALL, _SIZE_BUFFER = 3, 10  # SYSLOG_ACTION_*; reading all leaves the log as it is
_LEAST_BYTES, _MOST_BYTES = 1 << 17, 1 << 24  # what kernels keep; the newest part where it is more
_RECORD_BYTES = 8192  # CONSOLE_EXT_LOG_MAX: no record of /dev/kmsg is longer
_RECORDS_MAX = 1 << 17  # of one look: a log that grows as fast as it is read is not read for ever
LINES_MAX = 256  # a failing GPU repeats itself


class KernelLog:
    """Keeps the newest lines with each word that was asked for."""

    def __init__(self, device: str = "/dev/kmsg") -> None:
        self._device = device
        self._open: dict[str, tuple[int, deque[str]]] = {}  # word -> where the next record is read, lines so far

    def lines(self, word: str) -> tuple[str, ...]:
        """The newest lines with the word, oldest first. Raises OSError where the log may not be read."""
        try:
            if word not in self._open:
                descriptor = os.open(self._device, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                self._open[word] = descriptor, deque(maxlen=LINES_MAX)
        except OSError:
            return _all_lines(word)
        descriptor, found = self._open[word]
        for _ in range(_RECORDS_MAX):
            try:
                record = os.read(descriptor, _RECORD_BYTES)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno == errno.EPIPE:  # records were overwritten before they were read: go on with the next
                    continue
                self._forget(word)
                return _all_lines(word)
            if not record:
                break
            # "priority,sequence,microseconds,-;text", then lines of a dictionary
            line = record.partition(b";")[2].partition(b"\n")[0].decode(errors="replace")
            if word in line:
                found.append(line)
        return tuple(found)

    def _forget(self, word: str) -> None:
        os.close(self._open.pop(word)[0])

    def close(self) -> None:
        """Give the device back."""
        for word in tuple(self._open):
            self._forget(word)


def _all_lines(word: str) -> tuple[str, ...]:
    """All of the log in one piece."""
    libc = ctypes.CDLL(None, use_errno=True)
    size = min(max(libc.klogctl(_SIZE_BUFFER, None, 0), _LEAST_BYTES), _MOST_BYTES)
    content = ctypes.create_string_buffer(size)
    length = libc.klogctl(_READ_ALL, content, size)
    if length < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), "kernel log")
    lines = ctypes.string_at(content, length).decode(errors="replace").splitlines()
    return tuple([line for line in lines if word in line][-LINES_MAX:])
