"""NVML calls through pynvml, one at a time; answers are converted to numbers, strings, lists and dicts.

Specification: NVML API reference (nvml.h); pynvml is NVIDIA's own binding. This module does not interpret answers.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from contracts.tables import read_table
from probes.host.protocol import GpuHandle, Json, NvmlError

_TABLE: dict[str, Any] = read_table(__file__, "nvml.toml")
ERROR_CODES: dict[str, int] = _TABLE["errors"]
"""nvmlReturn_t values by name, without the prefix NVML_ERROR_."""

ERROR_NAMES = {code: name for name, code in ERROR_CODES.items()}

NO_DEVICE_FILES = "NO_DEVICE_FILES"
"""Not an NVML error: DRIVER_NOT_LOADED although the kernel has the driver, in a container without /dev/nvidiactl."""

CALL_BYTES = 128
"""Size of the file that holds the name of the call in progress (`Nvml.call_file`), padded with zeros."""

LIBRARY = "libnvidia-ml.so.1"
DRIVER_PATHS = "TOPOFLIGHT_DRIVER_PATHS"
"""Environment variable with folders, separated by colons, that are searched for the library first."""

INIT = "nvmlInit"
HANDLE = "nvmlDeviceGetHandleByIndex"
XIDS = "nvmlEventSetWait"

_STALE_HANDLE = {1, 2, 15, 16}  # the driver or the GPU is gone: request a new handle for the next call
_XID_EVENT = 8  # nvmlEventTypeXidCriticalError
_NO_FIELD = {2, 3}  # INVALID_ARGUMENT of a driver that is older than the field; NOT_SUPPORTED of the board
_MAX_EVENTS = 1024  # limit per driver load; older ones are dropped
_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")  # nvmlValueType_t -> union member


def failure(symbol: str, name: str) -> NvmlError:
    """Return the NvmlError with this name."""
    return NvmlError(symbol, ERROR_CODES.get(name, 999), name)


class Nvml:
    """An initialised NVML library. Handles are cached between calls."""

    def __init__(self) -> None:
        self.call_file: int | None = None
        """File descriptor of the file with the call in progress; the parent reads it if this process dies."""
        self._pynvml: Any = None
        self._handles: dict[int, Any] = {}
        self._functions: dict[str, Callable[..., Json]] = {}
        self._events = _EventLog()

    def call(self, symbol: str, *arguments: GpuHandle | int | str) -> Json:
        """Call the pynvml function of this name; each `GpuHandle` is replaced by the driver's handle.

        Raises NvmlError. Its symbol is the function that failed: this one, nvmlInit, or the lookup of a handle.
        """
        try:
            return self._call_function(symbol, arguments)
        finally:
            self._name_call("")

    def _name_call(self, call: str) -> None:
        if self.call_file is not None:
            os.pwrite(self.call_file, call.encode()[:CALL_BYTES].ljust(CALL_BYTES, b"\0"), 0)

    def _call_function(self, symbol: str, arguments: tuple[GpuHandle | int | str, ...]) -> Json:
        pynvml, failing = self._get_library(), HANDLE
        function = self._functions.get(symbol) or self._get_function(symbol)
        try:
            places = [self._get_handle(a.index) if isinstance(a, GpuHandle) else a for a in arguments]
            failing = symbol
            of_gpu = next((f" of GPU{a.index}" for a in arguments if isinstance(a, GpuHandle)), "")
            self._name_call(f"{symbol}{of_gpu}")
            answer = function(*places)
            return answer if type(answer) is int or symbol in _SPECIAL or symbol == XIDS else plain(answer)
        except pynvml.NVMLError as error:
            self._forget_stale(error.value)
            raise NvmlError(failing, error.value, ERROR_NAMES.get(error.value, f"CODE_{error.value}")) from None
        except pynvml.NVMLLibraryMismatchError:
            raise failure(failing, "FUNCTION_NOT_FOUND") from None
        except UnicodeDecodeError:
            raise NvmlError(failing, 999, "GARBLED_TEXT") from None

    def _forget_stale(self, code: int) -> None:
        """Drop handles that may be invalid after this error."""
        if code in _STALE_HANDLE:
            self._handles.clear()
        if code == ERROR_CODES["UNINITIALIZED"]:
            self._pynvml, self._events = None, _EventLog()  # the next call initialises NVML again
            self._functions.clear()

    def _get_function(self, symbol: str) -> Callable[..., Json]:
        library = self._get_library()
        function = _SPECIAL.get(symbol) or getattr(library, symbol, None)
        if symbol == XIDS:
            function = partial(self._events.xids, library, self._get_handle)
        if function is None or not symbol.startswith("nvml"):
            raise failure(symbol, "FUNCTION_NOT_FOUND")
        self._functions[symbol] = function
        return function

    def _get_library(self) -> Any:
        if self._pynvml is None:
            import pynvml

            _load_library()
            self._name_call(INIT)
            try:
                pynvml.nvmlInit()
            except pynvml.NVMLError as error:
                raise NvmlError(INIT, error.value, ERROR_NAMES.get(error.value, f"CODE_{error.value}")) from None
            self._pynvml = pynvml
        return self._pynvml

    def _get_handle(self, index: int) -> Any:
        if index not in self._handles:
            self._name_call(f"{HANDLE} of GPU{index}")
            self._handles[index] = self._pynvml.nvmlDeviceGetHandleByIndex(index)
        return self._handles[index]


def _load_library() -> None:
    """If the loader cannot find NVML, load it from known node paths; pynvml then finds its soname already loaded."""
    given_folders = [folder for folder in os.environ.get(DRIVER_PATHS, "").split(":") if folder]
    usual = [f"{root}{folder}" for root, folder in itertools.product(_TABLE["roots"], _TABLE["folders"])]
    for path in (LIBRARY, *(f"{folder}/{LIBRARY}" for folder in [*given_folders, *usual])):
        try:
            ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
        except OSError:  # missing, or built for another architecture
            continue
        return


class _EventLog:
    """Xids that the driver reported since this process registered for NVML events.

    Specification: NVML API reference, event handling. An event set contains only events after a GPU was registered. A
    wait with timeout 0 removes one event from the set, or returns TIMEOUT.
    """

    def __init__(self) -> None:
        self._set: Any = None
        self._watched: dict[int, Any] = {}  # GPU index -> handle of a registered GPU
        self._refused: dict[int, str] = {}  # GPU index -> reason that its events are not available
        self._xids: list[list[int]] = []  # [GPU index, Xid], oldest first

    def xids(self, pynvml: Any, handle: Callable[[int], Any], count: int) -> Json:
        """Return {"watched": registered GPUs below `count`, "xids": [[GPU, Xid], ...] since their registration}."""
        if self._set is None:
            self._set = pynvml.nvmlEventSetCreate()
        for index in range(count):
            if index not in self._watched and index not in self._refused:
                self._register(pynvml, handle, index)
        self._drain(pynvml)
        return {"watched": sorted(self._watched), "xids": list(self._xids)}

    def _register(self, pynvml: Any, handle: Callable[[int], Any], index: int) -> None:
        try:
            device = handle(index)
            if pynvml.nvmlDeviceGetSupportedEventTypes(device) & _XID_EVENT:
                pynvml.nvmlDeviceRegisterEvents(device, _XID_EVENT, self._set)
                self._watched[index] = device
        except pynvml.NVMLError as error:
            self._refused[index] = ERROR_NAMES.get(error.value, f"CODE_{error.value}")

    def _drain(self, pynvml: Any) -> None:
        names = {ctypes.cast(device, ctypes.c_void_p).value: index for index, device in self._watched.items()}
        for _ in range(_MAX_EVENTS if self._watched else 0):
            try:
                event = pynvml.nvmlEventSetWait_v2(self._set, 0)
            except pynvml.NVMLError as error:
                if error.value == ERROR_CODES["TIMEOUT"]:
                    break
                raise
            index = names.get(ctypes.cast(event.device, ctypes.c_void_p).value)
            if event.eventType == _XID_EVENT and index is not None:
                self._xids = [*self._xids, [index, int(event.eventData)]][-_MAX_EVENTS:]


def plain(value: Any) -> Json:
    """Convert a number, a text, a ctypes structure or array, or one of pynvml's own classes to plain data."""
    if value is None or isinstance(value, int | float | str):
        return value
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, ctypes.Structure):
        return {name: plain(getattr(value, name)) for name, *_ in value._fields_}
    if isinstance(value, ctypes.Array | list | tuple):
        return [plain(item) for item in value]
    return {name: plain(item) for name, item in vars(value).items()}


def sysfs_bus_id(nvml: str) -> str | None:
    """Convert NVML's "00000000:1B:00.0" to the form of sysfs; None if it is empty or hidden ("FFFFFFFF:...")."""
    match = re.fullmatch(r"([0-9A-F]{4,8}):([0-9A-F]{2}):([0-9A-F]{2})\.([0-7])", nvml.strip().upper())
    if match is None or match[1].strip("F") == "":
        return None
    return f"{int(match[1], 16):04x}:{match[2]}:{match[3]}.{match[4]}".lower()


def _read_field_values(handle: Any, *fields: int | str) -> list[Json]:
    """Call nvmlDeviceGetFieldValues. A field is a number, or "number:scope" (the scope is a link, for example).

    Returns one value per field, in order. Each field has its own return code: the value is None if the GPU or driver
    does not have the field, and otherwise the name of the error.
    """
    import pynvml

    queries = [tuple(map(int, field.split(":"))) if isinstance(field, str) else field for field in fields]
    # Use the descriptors of the ctypes fields: pynvml's attribute access decodes text and is ten times slower.
    fail, kind, value = (getattr(pynvml.c_nvmlFieldValue_t, n).__get__ for n in ("nvmlReturn", "valueType", "value"))
    return [
        (getattr(value(answer), _MEMBERS[kind(answer)]) if kind(answer) < len(_MEMBERS) else "GARBLED_VALUE")
        if (code := fail(answer)) == 0
        else None
        if code in _NO_FIELD
        else ERROR_NAMES.get(code, f"CODE_{code}")
        for answer in pynvml.nvmlDeviceGetFieldValues(handle, queries)
    ]


def _make_bus_id_call(symbol: str) -> Callable[..., Json]:
    """Return a function that calls NVML for an nvmlPciInfo_t and returns its bus id, from which the rest follows."""

    def ask(*arguments: Any) -> Json:
        import pynvml

        return {"busId": plain(getattr(pynvml, symbol)(*arguments).busId)}

    return ask


def _read_processes(handle: Any) -> Json:
    """Call nvmlDeviceGetComputeRunningProcesses; drivers before 510 do not have its version 3."""
    import pynvml

    try:
        return plain(pynvml.nvmlDeviceGetComputeRunningProcesses_v3(handle))
    except pynvml.NVMLError as error:
        if error.value != ERROR_CODES["FUNCTION_NOT_FOUND"]:
            raise
    return plain(pynvml.nvmlDeviceGetComputeRunningProcesses_v2(handle))


def _make_call(symbol: str, *names: str) -> Callable[..., Json]:
    """Return a function that fills a structure: the first version in `names` (newest first) that the driver knows."""

    def ask(handle: Any) -> Json:
        import pynvml

        for name in names:
            filled = getattr(pynvml, name)()
            try:
                getattr(pynvml, symbol)(handle, ctypes.byref(filled))
            except pynvml.NVMLError as error:
                if error.value != ERROR_CODES["ARGUMENT_VERSION_MISMATCH"] or name == names[-1]:
                    raise
            else:
                return plain(filled)
        raise AssertionError(f"no structure for {symbol}")

    return ask


_SPECIAL: dict[str, Callable[..., Json]] = {
    "nvmlDeviceGetSramEccErrorStatus": _make_call("nvmlDeviceGetSramEccErrorStatus", "c_nvmlEccSramErrorStatus_v1_t"),
    "nvmlDeviceGetComputeRunningProcesses": _read_processes,
    "nvmlDeviceGetPciInfo": _make_bus_id_call("nvmlDeviceGetPciInfo"),
    "nvmlDeviceGetNvLinkRemotePciInfo": _make_bus_id_call("nvmlDeviceGetNvLinkRemotePciInfo"),
    "nvmlDeviceGetFieldValues": _read_field_values,
    # version 2 has no health summary
    "nvmlDeviceGetGpuFabricInfoV": _make_call(
        "nvmlDeviceGetGpuFabricInfoV", "c_nvmlGpuFabricInfo_v3_t", "c_nvmlGpuFabricInfo_v2_t"
    ),
    "nvmlDeviceGetGpuFabricInfo": _make_call("nvmlDeviceGetGpuFabricInfo", "c_nvmlGpuFabricInfo_t"),  # before 535
}
