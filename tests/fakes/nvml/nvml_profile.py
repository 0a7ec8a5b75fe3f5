"""Turns the NVML answers of a recording into the profile of the fake NVML, and builds the fake."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

from probes.host import Json
from probes.nvml import ERROR_CODES

SOURCE = Path(__file__).with_name("fake_nvml.c")
LIBRARY = "libnvidia-ml.so.1"  # the name that pynvml loads


def build(folder: Path) -> Path:
    """Compile the fake; its folder goes into LD_LIBRARY_PATH."""
    library = folder / LIBRARY
    command = ["cc", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", str(library), str(SOURCE)]
    subprocess.run(command, check=True)
    return library


def profile(nvml: dict[str, dict[str, Json]]) -> str:
    """One line an answer; see fake_nvml.c."""
    return "".join(f"{line}\n" for symbol, answers in nvml.items() for line in _lines(symbol, answers))


def _lines(symbol: str, answers: dict[str, Json]) -> Iterator[str]:
    for question, answer in answers.items():
        if symbol == "nvmlDeviceGetFieldValues" and isinstance(answer, list):
            gpu, *fields = question.split(",")
            for field, value in zip(fields, answer, strict=True):
                number, _, scope = field.partition(":")
                yield f"{symbol}\t{gpu},{number},{scope or 0}\t{'!3' if value is None else value}"
        else:
            yield f"{symbol}\t{question}\t{_value(symbol, answer)}"


def _value(symbol: str, answer: Json) -> str:
    if isinstance(answer, dict) and "$nvml" in answer:
        return f"!{answer.get('code', ERROR_CODES[answer['$nvml']])}"
    if isinstance(answer, str):
        return f'"{answer}'
    if "PciInfo" in symbol:
        return f'"{answer["busId"]}'
    if "FabricInfo" in symbol:
        return _numbers([*answer["clusterUuid"], *(answer[k] for k in ("status", "cliqueId", "state", "healthMask"))])
    if symbol == "nvmlDeviceGetComputeRunningProcesses":
        return _numbers([len(answer), *(n for p in answer for n in (p["pid"], p["usedGpuMemory"]))])
    if symbol == "nvmlDeviceGetRetiredPages":
        return _numbers([len(answer), *answer])
    if "MemoryInfo" in symbol:  # total, free, used: also of BAR1
        return _numbers(list(answer.values()))
    if isinstance(answer, dict):
        return _numbers(list(answer.values()))
    return _numbers(answer if isinstance(answer, list) else [answer])


def _numbers(values: list[int]) -> str:
    return " ".join(str(int(value)) for value in values)


def restore_files(answers: dict[str, dict[str, Json]], root: Path) -> None:
    """Write the recorded text files below /sys/bus/pci and the folders' names, as far as the gpu probe reads them."""
    for name in answers["list_dir"].get("/sys/bus/pci/devices", ()):
        (root / "sys/bus/pci/devices" / name).mkdir(parents=True)
    for path, text in answers["read_text"].items():
        if path.startswith("/sys/bus/pci/devices/") and isinstance(text, str):
            target = root / path.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
