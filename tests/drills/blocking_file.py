"""A file whose read never returns: a FUSE file system of one file, spoken over /dev/fuse without a library.

Specification: Linux include/uapi/linux/fuse.h (protocol 7.31), Documentation/filesystems/fuse. A reader whose request
was taken and not answered cannot be killed, as with a driver that hangs, until the file system is taken away.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import stat
import struct
import threading
from pathlib import Path

_INIT, _GETATTR, _OPEN, _READ, _FORGET, _INTERRUPT, _BATCH_FORGET = 26, 3, 14, 15, 2, 36, 42
_SILENT = {_FORGET, _INTERRUPT, _BATCH_FORGET, _READ}
_MNT_DETACH = 2


class BlockingFile:
    """Mounted over a file while the block lasts; a process that reads it then hangs in the kernel."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.readers = 0
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fuse = -1
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> BlockingFile:
        self._fuse = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        options = f"fd={self._fuse},rootmode={stat.S_IFREG:o},user_id=0,group_id=0".encode()
        if self._libc.mount(b"drill", os.fsencode(self.path), b"fuse", 0, options) != 0:
            number = ctypes.get_errno()
            os.close(self._fuse)
            raise OSError(number, os.strerror(number), f"mount {self.path}")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._libc.umount2(os.fsencode(self.path), _MNT_DETACH)
        self._over.set()
        self._thread.join()  # a thread that reads it keeps it open
        os.close(self._fuse)  # every request in flight now ends with ENOTCONN

    def _serve(self) -> None:
        poll = select.poll()
        poll.register(self._fuse, select.POLLIN)
        while not self._over.is_set():
            if not poll.poll(50):
                continue
            try:
                request = os.read(self._fuse, 1 << 17)
            except OSError as error:
                if error.errno in (errno.EINTR, errno.EAGAIN, errno.ENOENT):
                    continue
                return  # unmounted
            _, operation, unique = struct.unpack_from("=IIQ", request)
            self.readers += operation == _READ
            if operation not in _SILENT:
                number, body = _answer(operation)
                os.write(self._fuse, struct.pack("=IiQ", 16 + len(body), -number, unique) + body)


def _answer(operation: int) -> tuple[int, bytes]:
    """(errno, body) for what the kernel asks of one regular file."""
    if operation == _INIT:
        return 0, struct.pack("=IIIIHHIIHHI28x", 7, 31, 0, 0, 0, 0, 4096, 1, 0, 0, 0)
    if operation == _GETATTR:
        mode = stat.S_IFREG | 0o444
        attributes = struct.pack("=QQQQQQIIIIIIIIII", 1, 4096, 8, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)
        return 0, struct.pack("=QII", 1, 0, 0) + attributes
    if operation == _OPEN:
        return 0, struct.pack("=QII", 1, 1, 0)  # FOPEN_DIRECT_IO: each read is a request
    return errno.ENOSYS, b""
