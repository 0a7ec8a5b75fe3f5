"""One GPU's questions to NVML: what was answered, what does not apply, and what was left unread and why.

Specification: NVML API reference (nvml.h), the return codes of each function. NOT_SUPPORTED is an answer: the board has
no such thing. Every other error leaves the fact unknown, and is kept with the question that it answered.
"""

from __future__ import annotations

from typing import Any

from probes.host.protocol import GpuHandle, Host, NvmlError

LOST = frozenset({"GPU_IS_LOST", "RESET_REQUIRED"})
_NOT_THERE = frozenset({"NOT_SUPPORTED", "VGPU_ECC_NOT_SUPPORTED", "FREQ_NOT_SUPPORTED", "NO_DATA"})
"""The board, its mode or its InfoROM has none: nothing is left to know."""

# An older driver lacks these functions, or knows an older form of their structure; all others are of every driver that
# the fields of `probes.gpu.types` are read from.
_RECENT = frozenset(
    {
        "nvmlDeviceGetSramEccErrorStatus", "nvmlDeviceGetC2cModeInfoV", "nvmlDeviceGetGpuFabricInfoV",
        "nvmlDeviceGetGpuFabricInfo", "nvmlDeviceGetNumaNodeId", "nvmlDeviceGetTemperatureV",
        "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetRowRemapperHistogram", "nvmlDeviceGetMemoryAffinity",
        "nvmlDeviceGetDefaultEccMode", "nvmlDeviceGetFieldValues", "nvmlDeviceGetRemappedRows",
    }
)  # fmt: skip
_OLD_DRIVER = frozenset({"FUNCTION_NOT_FOUND", "ARGUMENT_VERSION_MISMATCH", "DEPRECATED"})


def does_not_apply(error: NvmlError) -> bool:
    """Whether the error says that this board or this driver has no such thing."""
    return error.name in _NOT_THERE or (error.name in _OLD_DRIVER and error.symbol in _RECENT)


class Asker:
    """One GPU's questions: what it does not answer, or answers with nonsense, is None."""

    def __init__(self, host: Host, handle: GpuHandle) -> None:
        self.host, self.handle = host, handle
        self.lost: str | None = None
        self.link_count: int | None = None  # NVLinks of the board, where the driver counts them
        self.unread: dict[str, None] = {}  # "nvmlDeviceGetTemperature(0) = TIMEOUT", once each

    def __call__(self, symbol: str, *arguments: GpuHandle | int | str) -> Any:
        """The answer; None where there is none, and `unread` or `lost` says why."""
        try:
            return self.host.nvml(symbol, self.handle, *arguments)
        except NvmlError as error:
            if error.name in LOST:
                self.lost = f"{error.name} ({error.symbol})"
            elif not does_not_apply(error):
                self.note(symbol, arguments, error.name)
            return None

    def either(self, first: tuple[Any, ...], second: tuple[Any, ...]) -> Any:
        """The answer to the first spelling of a question, else to the second; each (symbol, arguments...)."""
        known = dict(self.unread)
        answer = self(*first)
        if answer is None and (answer := self(*second)) is not None:
            self.unread = known
        return answer

    def note(self, symbol: str, arguments: tuple[GpuHandle | int | str, ...], why: str) -> None:
        """Keep that a question was not answered."""
        words = ", ".join(f"GPU{a.index}" if isinstance(a, GpuHandle) else str(a) for a in arguments[:3])
        words += f", {len(arguments) - 3} more" if len(arguments) > 3 else ""
        self.unread[f"{symbol}({words}) = {why}" if words else f"{symbol} = {why}"] = None

    def number(self, symbol: str, *arguments: int | str, scale: float = 1.0) -> float | None:
        """A number in base units."""
        answer = self(symbol, *arguments)
        return answer * scale if isinstance(answer, int | float) else None

    def count(self, symbol: str, *arguments: int | str) -> int | None:
        """A whole number."""
        answer = self(symbol, *arguments)
        return answer if isinstance(answer, int) else None

    def field(self, symbol: str, name: str) -> Any:
        """One field of a structure."""
        answer = self(symbol)
        return answer.get(name) if isinstance(answer, dict) else None

    def fields(self, *fields: int | str) -> list[int | None]:
        """Values of nvmlDeviceGetFieldValues in the same order; each field has a return code of its own."""
        values = self("nvmlDeviceGetFieldValues", *fields)
        if not isinstance(values, list) or len(values) != len(fields):
            return [None] * len(fields)
        for field, value in zip(fields, values, strict=True):
            if isinstance(value, str):  # the name of an error
                self.note("nvmlDeviceGetFieldValues", (field,), value)
        return [value if isinstance(value, int) else None for value in values]
