"""NVLinks of one GPU.

Specification: NVML API reference, NvLink methods and NVML_FI_DEV_NVLINK_* fields. State 0 is a link without a partner:
a bridge that is not fitted, or a broken one. INVALID_ARGUMENT is a link that the board does not have, NOT_SUPPORTED on
link 0 a board without NVLink.
"""

from __future__ import annotations

from typing import Any

from probes.gpu_types import NvLink
from probes.host import GpuHandle, Host, Json, NvmlError
from probes.nvml import sysfs_bus_id

LINKS_MAX = 36  # NVML_NVLINK_MAX_LINKS

_REMOTE_KINDS = {0: "gpu", 1: "cpu", 2: "nvswitch"}  # nvmlIntNvLinkDeviceType_t; 1 is IBM's NPU
_GENERATIONS = {1: 1, 2: 2, 3: 2, 4: 3, 5: 3, 6: 4, 7: 5, 8: 6}  # nvmlNvlinkVersion_t: 1.0 2.0 2.2 3.0 3.1 4.0 5.0 6.0
_ERRORS = ("replay", "recovery", "crc_flit", "crc_data")  # nvmlNvLinkErrorCounter_t 0 to 3
_ERROR_FIELDS = {  # NVML_FI_DEV_NVLINK_*, scope is the link: the first three on Hopper, the others from Blackwell on
    161: "replay",  # ERROR_DL_REPLAY
    162: "recovery",  # ERROR_DL_RECOVERY
    163: "crc_flit",  # ERROR_DL_CRC
    208: "receive",  # COUNT_RCV_ERRORS
    214: "recovery_failed",  # COUNT_LINK_RECOVERY_FAILED_EVENTS
    219: "effective",  # COUNT_EFFECTIVE_ERRORS
    221: "symbol",  # COUNT_SYMBOL_ERRORS
}


def nvlinks(host: Host, gpu: GpuHandle, capability: tuple[int, int] | None) -> tuple[bool, tuple[NvLink, ...]]:
    """(whether the driver told, the links that exist). A link whose partner is missing is there and not active."""
    known, states = _states(host, gpu)
    errors = _errors(host, gpu, [link for link, active in states.items() if active])
    return known, tuple(
        _active(host, gpu, link, capability, errors.get(link)) if active else NvLink(link=link, active=False)
        for link, active in states.items()
    )


def _states(host: Host, gpu: GpuHandle) -> tuple[bool, dict[int, bool]]:
    states: dict[int, bool] = {}
    for link in range(LINKS_MAX):
        try:
            state = host.nvml("nvmlDeviceGetNvLinkState", gpu, link)
        except NvmlError as error:
            if error.name == "NOT_SUPPORTED" and link == 0:
                return True, {}
            if error.name not in ("INVALID_ARGUMENT", "NOT_SUPPORTED"):
                return False, states
            continue
        if state not in (0, 1):
            return False, states
        states[link] = bool(state)
    return True, states


def _active(
    host: Host, gpu: GpuHandle, link: int, capability: tuple[int, int] | None, errors: dict[str, int] | None
) -> NvLink:
    version = _ask(host, "nvmlDeviceGetNvLinkVersion", gpu, link)
    remote = _ask(host, "nvmlDeviceGetNvLinkRemotePciInfo", gpu, link)
    return NvLink(
        link=link,
        active=True,
        version=_generation(version, capability),
        remote_kind=_REMOTE_KINDS.get(_ask(host, "nvmlDeviceGetNvLinkRemoteDeviceType", gpu, link)),
        remote_bus_id=sysfs_bus_id(remote["busId"]) if remote else None,
        errors=errors,
    )


def _generation(version: Any, capability: tuple[int, int] | None) -> int | None:
    """H100 answers 7 (5.0) for its fourth generation."""
    generation = _GENERATIONS.get(version)
    return 4 if generation == 5 and capability is not None and capability[0] == 9 else generation


def _errors(host: Host, gpu: GpuHandle, links: list[int]) -> dict[int, dict[str, int]]:
    """Error counters by link: all of them in one call, else one by one as drivers before Hopper want it."""
    found: dict[int, dict[str, int]] = {}
    if links:
        wanted = [(field, link) for link in links for field in _ERROR_FIELDS]
        values = _ask(host, "nvmlDeviceGetFieldValues", gpu, *(f"{field}:{link}" for field, link in wanted)) or ()
        for (field, link), value in zip(wanted, values, strict=False):
            if isinstance(value, int):
                found.setdefault(link, {})[_ERROR_FIELDS[field]] = value
    return found or {link: counters for link in links if (counters := _old_errors(host, gpu, link))}


def _old_errors(host: Host, gpu: GpuHandle, link: int) -> dict[str, int]:
    counters = {name: _ask(host, "nvmlDeviceGetNvLinkErrorCounter", gpu, link, i) for i, name in enumerate(_ERRORS)}
    return {name: value for name, value in counters.items() if isinstance(value, int)}


def _ask(host: Host, symbol: str, gpu: GpuHandle, *arguments: int | str) -> Json:
    try:
        return host.nvml(symbol, gpu, *arguments)
    except NvmlError:
        return None
