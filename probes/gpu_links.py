"""NVLinks of one GPU.

Specification: NVML API reference, NvLink methods and NVML_FI_DEV_NVLINK_* fields. State 0 is a link without a partner:
a bridge that is not fitted, or a broken one; INVALID_ARGUMENT ends the list; NOT_SUPPORTED on link 0 means no NVLink.
"""

from __future__ import annotations

from typing import Any

from probes.gpu_types import NvLink
from probes.host import GpuHandle, Host, Json, NvmlError
from probes.nvml import sysfs_bus_id

LINKS_MAX = 36  # NVML_NVLINK_MAX_LINKS

_REMOTE_KINDS = {0: "gpu", 1: "cpu", 2: "nvswitch"}  # nvmlIntNvLinkDeviceType_t; 1 is IBM's NPU
_GENERATIONS = {1: 1, 2: 2, 3: 2, 4: 3, 5: 3, 6: 4, 7: 5, 8: 6}  # nvmlNvlinkVersion_t: 1.0 2.0 2.2 3.0 3.1 4.0 5.0 6.0
_ERRORS = ("replay", "recovery", "crc_flit", "crc_data")  # nvmlNvLinkErrorCounter_t 0 to 3, until Hopper
_ERROR_FIELDS = {  # NVML_FI_DEV_NVLINK_*, scope is the link; Blackwell and later
    208: "receive",  # COUNT_RCV_ERRORS
    214: "recovery_failed",  # COUNT_LINK_RECOVERY_FAILED_EVENTS
    219: "effective",  # COUNT_EFFECTIVE_ERRORS
    221: "symbol",  # COUNT_SYMBOL_ERRORS
}


def nvlinks(host: Host, gpu: GpuHandle, capability: tuple[int, int] | None) -> tuple[bool, tuple[NvLink, ...]]:
    """(whether the driver told, the links that exist). A link whose partner is missing is there and not active."""
    links: list[NvLink] = []
    for number in range(LINKS_MAX):
        try:
            state = host.nvml("nvmlDeviceGetNvLinkState", gpu, number)
        except NvmlError as error:
            if error.name in ("INVALID_ARGUMENT", "NOT_SUPPORTED"):
                return True, tuple(links)
            return False, tuple(links)
        if state not in (0, 1):
            return False, tuple(links)
        links.append(_active(host, gpu, number, capability) if state else NvLink(link=number, active=False))
    return True, tuple(links)


def _active(host: Host, gpu: GpuHandle, link: int, capability: tuple[int, int] | None) -> NvLink:
    version = _ask(host, "nvmlDeviceGetNvLinkVersion", gpu, link)
    remote = _ask(host, "nvmlDeviceGetNvLinkRemotePciInfo", gpu, link)
    return NvLink(
        link=link,
        active=True,
        version=_generation(version, capability),
        remote_kind=_REMOTE_KINDS.get(_ask(host, "nvmlDeviceGetNvLinkRemoteDeviceType", gpu, link)),
        remote_bus_id=sysfs_bus_id(remote["busId"]) if remote else None,
        errors=_errors(host, gpu, link),
    )


def _generation(version: Any, capability: tuple[int, int] | None) -> int | None:
    """H100 answers 7 (5.0) for its fourth generation."""
    generation = _GENERATIONS.get(version)
    return 4 if generation == 5 and capability is not None and capability[0] == 9 else generation


def _errors(host: Host, gpu: GpuHandle, link: int) -> dict[str, int] | None:
    counters = {name: _ask(host, "nvmlDeviceGetNvLinkErrorCounter", gpu, link, i) for i, name in enumerate(_ERRORS)}
    known = {name: value for name, value in counters.items() if isinstance(value, int)}
    if known:
        return known
    answers = _ask(host, "nvmlDeviceGetFieldValues", gpu, *(f"{field}:{link}" for field in _ERROR_FIELDS)) or ()
    return {_ERROR_FIELDS[a["field"]]: a["value"] for a in answers if a["code"] == 0} or None


def _ask(host: Host, symbol: str, gpu: GpuHandle, *arguments: int | str) -> Json:
    try:
        return host.nvml(symbol, gpu, *arguments)
    except NvmlError:
        return None
