"""libibverbs through pyverbs, where the distribution's python3-pyverbs is installed.

Specification: ibv_reg_mr(3), ibv_query_device(3), ibv_query_port(3); memory is registered for
local access only and given back at once.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from probes.host.protocol import Json

_LOCAL_WRITE = 1  # IBV_ACCESS_LOCAL_WRITE; pyverbs moved its enumerations between releases


def ask(what: str, *arguments: int | str) -> Json:
    """ "version", "devices", "port" with a device's name and a port, "register" with a name and a number of bytes."""
    if what == "version":
        return _version()
    if what == "devices":
        return _devices()
    if what == "register":
        device, length = arguments
        return _register(str(device), int(length))
    if what == "port":
        device, number = arguments
        return _port(str(device), int(number))
    raise ValueError(f'verbs answers "version", "devices", "port" and "register", not {what!r}')


@contextmanager
def _as_oserror() -> Iterator[None]:
    """Pyverbs' own errors carry an errno, -1 where the kernel has no RDMA at all."""
    from pyverbs.pyverbs_error import PyverbsError

    try:
        yield
    except PyverbsError as error:
        number = getattr(error, "error_code", 0) or 0
        raise OSError(number if number > 0 else errno.ENODEV, str(error).split("\n")[0]) from error


def _version() -> str:
    import pyverbs
    import pyverbs.device  # the part that loads libibverbs, which may be missing where the binding is not

    return str(getattr(pyverbs, "__version__", "unknown"))


def _devices() -> list[Json]:
    from pyverbs import device as verbs_device

    with _as_oserror():
        return [{"name": _text(d.name), "node_type": int(d.node_type)} for d in verbs_device.get_device_list()]


def _port(device: str, number: int) -> Json:
    """The codes of ibv_port_attr as they are: IBV_MTU_256 is 1, IBV_MTU_4096 is 5."""
    from pyverbs.device import Context

    with _as_oserror(), Context(name=device) as context:
        port = context.query_port(number)
        names = ("active_mtu", "max_mtu", "active_width", "active_speed")
        return {name: int(getattr(port, name)) for name in names}


def _register(device: str, length: int) -> Json:
    from pyverbs.device import Context
    from pyverbs.mr import MR
    from pyverbs.pd import PD

    with (
        _as_oserror(),
        Context(name=device) as context,
        PD(context) as domain,
        MR(domain, length, _LOCAL_WRITE),
    ):
        return {"registered_bytes": length, "pid": os.getpid()}


def _text(name: Any) -> str:
    return name.decode() if isinstance(name, bytes) else str(name)
