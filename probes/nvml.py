"""NVML through pynvml, one call at a time, answers made plain (numbers, strings, lists, dicts).

Specification: NVML API reference (nvml.h); pynvml is NVIDIA's own binding. Nothing here knows what a call means.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from typing import Any

from probes.host import GpuHandle, Json, NvmlError

ERROR_NAMES = {
    1: "UNINITIALIZED", 2: "INVALID_ARGUMENT", 3: "NOT_SUPPORTED", 4: "NO_PERMISSION", 5: "ALREADY_INITIALIZED",
    6: "NOT_FOUND", 7: "INSUFFICIENT_SIZE", 8: "INSUFFICIENT_POWER", 9: "DRIVER_NOT_LOADED", 10: "TIMEOUT",
    11: "IRQ_ISSUE", 12: "LIBRARY_NOT_FOUND", 13: "FUNCTION_NOT_FOUND", 14: "CORRUPTED_INFOROM", 15: "GPU_IS_LOST",
    16: "RESET_REQUIRED", 17: "OPERATING_SYSTEM", 18: "LIB_RM_VERSION_MISMATCH", 19: "IN_USE", 20: "MEMORY",
    21: "NO_DATA", 22: "VGPU_ECC_NOT_SUPPORTED", 23: "INSUFFICIENT_RESOURCES", 24: "FREQ_NOT_SUPPORTED",
    25: "ARGUMENT_VERSION_MISMATCH", 26: "DEPRECATED", 27: "NOT_READY", 28: "GPU_NOT_FOUND", 29: "INVALID_STATE",
    30: "RESET_TYPE_NOT_SUPPORTED", 999: "UNKNOWN",
}  # fmt: skip
"""nvmlReturn_t, NVML_ERROR_ left out."""

ERROR_CODES = {name: code for code, name in ERROR_NAMES.items()}

_STALE_HANDLE = {1, 2, 15, 16}  # the driver went or the GPU did: ask for the handle again next time
_DRIVER_CHANGED = {1, 9, 12, 15, 16, 18}  # a GPU or the driver went: what comes back need not be the same
_LINK_STATE = "nvmlDeviceGetNvLinkState"
_FIXED = {  # of a GPU, a link that is up, or a place on the board; the driver cannot be unloaded while it is open
    "nvmlDeviceGetUUID", "nvmlDeviceGetName", "nvmlDeviceGetCudaComputeCapability",
    "nvmlDeviceGetTopologyCommonAncestor", "nvmlDeviceGetNvLinkVersion", "nvmlDeviceGetNvLinkRemoteDeviceType",
    "nvmlDeviceGetNvLinkRemotePciInfo", "nvmlDeviceGetTemperatureThreshold", "nvmlDeviceGetMaxClockInfo",
    "nvmlDeviceGetPowerManagementDefaultLimit",
}  # fmt: skip
_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")  # nvmlValueType_t -> union member


def failure(symbol: str, name: str) -> NvmlError:
    """The error NVML gives by that name."""
    return NvmlError(symbol, ERROR_CODES.get(name, 999), name)


class Nvml:
    """A loaded and initialised NVML; handles and what cannot change are kept between calls."""

    def __init__(self) -> None:
        self._pynvml: Any = None
        self._handles: dict[int, Any] = {}
        self._functions: dict[str, Callable[..., Json]] = {}
        self._fixed: dict[tuple[Any, ...], Json] = {}  # only answers: an error may pass
        self._no_links: set[tuple[Any, ...]] = set()  # questions for NVLinks beyond those of the board

    def call(self, symbol: str, *arguments: GpuHandle | int | str) -> Json:
        """Call pynvml's function of that name; a `GpuHandle` is replaced by the driver's handle."""
        fixed = (symbol, *arguments) if symbol in _FIXED else None
        if fixed in self._fixed:
            return self._fixed[fixed]
        if symbol == _LINK_STATE and (symbol, *arguments) in self._no_links:
            raise failure(symbol, "INVALID_ARGUMENT")
        function = self._functions.get(symbol) or self._function(symbol)
        pynvml = self._pynvml
        try:
            answer = function(*[self._handle(a.index) if isinstance(a, GpuHandle) else a for a in arguments])
            answer = answer if type(answer) is int or symbol in _SPECIAL else plain(answer)
        except pynvml.NVMLError as error:
            self._learn(error.value, symbol, arguments)
            raise NvmlError(symbol, error.value, ERROR_NAMES.get(error.value, f"CODE_{error.value}")) from None
        except pynvml.NVMLLibraryMismatchError:
            raise failure(symbol, "FUNCTION_NOT_FOUND") from None
        except UnicodeDecodeError:
            raise NvmlError(symbol, 999, "GARBLED_TEXT") from None
        if fixed is not None:
            self._fixed[fixed] = answer
        return answer

    def _learn(self, code: int, symbol: str, arguments: tuple[GpuHandle | int | str, ...]) -> None:
        """What an error says of the answers and handles that were kept."""
        if code in _DRIVER_CHANGED:
            self._fixed.clear()
            self._no_links.clear()
        if code == ERROR_CODES["INVALID_ARGUMENT"] and symbol == _LINK_STATE and arguments[1:] > (0,):
            self._no_links.add((symbol, *arguments))
        elif code in _STALE_HANDLE:
            self._handles.clear()

    def _function(self, symbol: str) -> Callable[..., Json]:
        library = self._library(symbol)
        function = _SPECIAL.get(symbol) or getattr(library, symbol, None)
        if function is None or not symbol.startswith("nvml"):
            raise failure(symbol, "FUNCTION_NOT_FOUND")
        self._functions[symbol] = function
        return function

    def _library(self, symbol: str) -> Any:
        if self._pynvml is None:
            import pynvml

            try:
                pynvml.nvmlInit()
            except pynvml.NVMLError as error:
                raise NvmlError(symbol, error.value, ERROR_NAMES.get(error.value, f"CODE_{error.value}")) from None
            self._pynvml = pynvml
        return self._pynvml

    def _handle(self, index: int) -> Any:
        if index not in self._handles:
            self._handles[index] = self._pynvml.nvmlDeviceGetHandleByIndex(index)
        return self._handles[index]


def plain(value: Any) -> Json:
    """A number, a text, a ctypes structure or array, or one of pynvml's friendly objects, as plain data."""
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
    """NVML's "00000000:1B:00.0" as sysfs spells it; None for an empty or hidden ("FFFFFFFF:...") one."""
    found = re.fullmatch(r"([0-9A-F]{4,8}):([0-9A-F]{2}):([0-9A-F]{2})\.([0-7])", nvml.strip().upper())
    if found is None or found[1].strip("F") == "":
        return None
    return f"{int(found[1], 16):04x}:{found[2]}:{found[3]}.{found[4]}".lower()


def nvml_bus_id(sysfs_: str | None) -> str:
    """The bus id as NVML and dcgm-exporter spell it: "00000000:1B:00.0"; empty where unknown."""
    if not sysfs_:
        return ""
    domain, _, rest = sysfs_.partition(":")
    return f"{int(domain, 16):08X}:{rest.upper()}"


def _field_values(handle: Any, *fields: int | str) -> list[Json]:
    """nvmlDeviceGetFieldValues; a field is a number, or "number:scope" (scope is a link, for example).

    One value per field in the same order, None where the GPU does not support it: that is told field by field.
    """
    import pynvml

    wanted = [tuple(map(int, field.split(":"))) if isinstance(field, str) else field for field in fields]
    # The fields' own descriptors: pynvml's attribute access looks for text in every one and costs ten times as much.
    fail, kind, value = (getattr(pynvml.c_nvmlFieldValue_t, n).__get__ for n in ("nvmlReturn", "valueType", "value"))
    return [
        getattr(value(answer), _MEMBERS[kind(answer)]) if fail(answer) == 0 and kind(answer) < len(_MEMBERS) else None
        for answer in pynvml.nvmlDeviceGetFieldValues(handle, wanted)
    ]


def _pci_info(handle: Any) -> Json:
    """nvmlDeviceGetPciInfo: the bus id says all that the other fields say."""
    import pynvml

    return {"busId": plain(pynvml.nvmlDeviceGetPciInfo(handle).busId)}


def _remote_pci_info(handle: Any, link: int) -> Json:
    """nvmlDeviceGetNvLinkRemotePciInfo, asked of every link: the bus id only."""
    import pynvml

    return {"busId": plain(pynvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId)}


def _fabric_info(handle: Any) -> Json:
    """nvmlDeviceGetGpuFabricInfoV, which fills a structure of the caller's version."""
    import pynvml

    info = pynvml.c_nvmlGpuFabricInfo_v2_t()
    pynvml.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(info))
    return plain(info)


def _fabric_info_v1(handle: Any) -> Json:
    """nvmlDeviceGetGpuFabricInfo, the form of drivers before 535."""
    import pynvml

    info = pynvml.c_nvmlGpuFabricInfo_t()
    pynvml.nvmlDeviceGetGpuFabricInfo(handle, ctypes.byref(info))
    return plain(info)


_SPECIAL: dict[str, Callable[..., Json]] = {
    "nvmlDeviceGetPciInfo": _pci_info,
    "nvmlDeviceGetNvLinkRemotePciInfo": _remote_pci_info,
    "nvmlDeviceGetFieldValues": _field_values,
    "nvmlDeviceGetGpuFabricInfoV": _fabric_info,
    "nvmlDeviceGetGpuFabricInfo": _fabric_info_v1,
}
