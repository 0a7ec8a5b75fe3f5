"""What /proc says of a process: its arguments and environment, set as exec(2) would set them.

Surface: prctl(2) PR_SET_MM_MAP, which needs no capability (linux/prctl.h). A forked process shows those of the process
that it was forked from, and the product finds the processes of a run by their environment in /proc.
"""

import ctypes
import mmap
import os
import struct

PR_SET_MM, PR_SET_MM_MAP = 35, 14
_blocks = []  # mapped for as long as the process lives


def show(argv, environment):
    """Let /proc/self/cmdline and /proc/self/environ show these. Raises OSError where the kernel does not allow it."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sbrk.restype = ctypes.c_void_p
    words = b"".join(os.fsencode(word) + b"\0" for word in argv)
    variables = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environment.items())
    block = mmap.mmap(-1, len(words) + len(variables) + 1, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block.write(words + variables)
    _blocks.append(block)
    start = ctypes.addressof(ctypes.c_char.from_buffer(block))
    middle, end = start + len(words), start + len(words) + len(variables)
    with open("/proc/self/stat") as file:  # noqa: PTH123 - the client imports as little as it can
        fields = file.read().rpartition(")")[2].split()
    code_start, code_end, stack, data_start, data_end, heap = (int(fields[n - 3]) for n in (26, 27, 28, 45, 46, 47))
    layout = struct.pack("=12QIi", code_start, code_end, data_start, data_end, heap, libc.sbrk(0), stack,
                         start, middle, middle, end, 0, 0, -1)  # fmt: skip
    buffer = ctypes.create_string_buffer(layout)
    libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    if libc.prctl(PR_SET_MM, PR_SET_MM_MAP, ctypes.addressof(buffer), len(layout), 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_MM_MAP)")
