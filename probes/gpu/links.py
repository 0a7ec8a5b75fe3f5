"""NVLinks of one GPU.

Specification: NVML API reference, NvLink methods and NVML_FI_DEV_NVLINK_* fields. State 0 is a link without a partner:
a bridge that is not fitted, or a broken one. INVALID_ARGUMENT is a link that the board does not have, NOT_SUPPORTED on
link 0 a board without NVLink. Any other error says nothing of the link: its state, or where it ends, is unknown.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from probes.gpu.ask import Asker, does_not_apply
from probes.gpu.types import UNREAD, NvLink
from probes.host.nvml import sysfs_bus_id
from probes.host.protocol import NvmlError

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


@dataclass(slots=True)
class LinkStates:
    """Up (True), down (False) or unread (None) by link; `known` where the driver told of one, or that there is none."""

    known: bool
    states: dict[int, bool | None] = field(default_factory=dict)
    absent: bool = False  # NOT_SUPPORTED: the board has no NVLink
    unlisted: set[int] = field(default_factory=set)  # INVALID_ARGUMENT: no such link


def link_states(ask: Asker) -> LinkStates:
    """Ask every link that a board may have for its state."""
    found = LinkStates(known=True)
    for link in range(LINKS_MAX):
        if ask.link_count and len(found.states) >= ask.link_count:
            break  # the others are not there, and a slow driver need not say so one by one
        try:
            state = ask.host.nvml("nvmlDeviceGetNvLinkState", ask.handle, link)
        except NvmlError as error:
            if error.name == "NOT_SUPPORTED" and link == 0:
                return LinkStates(known=True, absent=True)
            if error.name in ("INVALID_ARGUMENT", "NOT_SUPPORTED"):
                found.unlisted.add(link)
            else:
                ask.note("nvmlDeviceGetNvLinkState", (link,), error.name)
                found.states[link] = None
            continue
        if state not in (0, 1):
            ask.note("nvmlDeviceGetNvLinkState", (link,), f"{state!s:.20}, no state")
        found.states[link] = {0: False, 1: True}.get(state)
    found.known = found.states == {} or any(state is not None for state in found.states.values())
    return found


def settle(found: LinkStates, of_twins: Iterable[LinkStates]) -> None:
    """Take the number of links from all GPUs of one model: beyond it an unread link is none, below it none is left out.

    Where no GPU of the model tells a link's state, nothing is known of that link, not even that it exists.
    """
    told = {link for twin in of_twins for link, state in twin.states.items() if state is not None}
    found.states = {link: state for link, state in found.states.items() if state is not None or link in told}
    if not found.absent:
        found.states |= dict.fromkeys(found.unlisted & told)
    found.states = dict(sorted(found.states.items()))
    found.known = found.known and (not told or bool(found.states) or found.absent)


def nvlinks(ask: Asker, states: dict[int, bool | None], capability: tuple[int, int] | None) -> tuple[NvLink, ...]:
    """The links that exist. A link whose partner is missing is there and not active; an unread one is None."""
    errors = _errors(ask, [link for link, active in states.items() if active])
    return tuple(
        _active(ask, link, capability, errors.get(link)) if active else NvLink(link=link, active=active)
        for link, active in states.items()
    )


def _active(ask: Asker, link: int, capability: tuple[int, int] | None, errors: dict[str, int] | None) -> NvLink:
    version = _ask(ask, "nvmlDeviceGetNvLinkVersion", link)
    remote = _ask(ask, "nvmlDeviceGetNvLinkRemotePciInfo", link)
    kind = _ask(ask, "nvmlDeviceGetNvLinkRemoteDeviceType", link)
    return NvLink(
        link=link,
        active=True,
        version=None if version == UNREAD else _generation(version, capability),
        remote_kind=UNREAD if kind == UNREAD else _REMOTE_KINDS.get(kind),
        remote_bus_id=UNREAD if remote == UNREAD else sysfs_bus_id(remote["busId"]) if remote else None,
        errors=errors,
    )


def _generation(version: Any, capability: tuple[int, int] | None) -> int | None:
    """H100 answers 7 (5.0) for its fourth generation."""
    generation = _GENERATIONS.get(version)
    return 4 if generation == 5 and capability is not None and capability[0] == 9 else generation


def _errors(ask: Asker, links: list[int]) -> dict[int, dict[str, int]]:
    """Error counters by link: all of them in one call, else one by one as drivers before Hopper want it."""
    found: dict[int, dict[str, int]] = {}
    if links:
        wanted = [(number, link) for link in links for number in _ERROR_FIELDS]
        values = ask.fields(*(f"{number}:{link}" for number, link in wanted))
        for (number, link), value in zip(wanted, values, strict=True):
            if value is not None:
                found.setdefault(link, {})[_ERROR_FIELDS[number]] = value
    return found or {link: counters for link in links if (counters := _old_errors(ask, link))}


def _old_errors(ask: Asker, link: int) -> dict[str, int]:
    counters = {name: _ask(ask, "nvmlDeviceGetNvLinkErrorCounter", link, i) for i, name in enumerate(_ERRORS)}
    return {name: value for name, value in counters.items() if isinstance(value, int)}


def _ask(ask: Asker, symbol: str, *arguments: int) -> Any:
    """The answer; None where a hypervisor or the board has none, UNREAD where the driver failed to say."""
    try:
        return ask.host.nvml(symbol, ask.handle, *arguments)
    except NvmlError as error:
        if does_not_apply(error) or error.name == "INVALID_ARGUMENT":
            return None
        ask.note(symbol, arguments, error.name)
        return UNREAD
