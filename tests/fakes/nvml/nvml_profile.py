"""Turns the NVML answers of a recording into the profile of the fake NVML, and builds the fake."""

import base64
import os
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path

from probes.host.nvml import ERROR_CODES
from probes.host.protocol import Json

SOURCE = Path(__file__).with_name("fake_nvml.c")
LIBRARY = "libnvidia-ml.so.1"  # the name that pynvml loads


def build(folder: Path) -> Path:
    """Compile the fake; its folder goes into LD_LIBRARY_PATH."""
    library = folder / LIBRARY
    words = f"cc -O1 -Wall -Wextra -Werror -shared -fPIC -Wl,-soname,{LIBRARY} -o".split()
    subprocess.run([*words, str(library), str(SOURCE)], check=True)
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
                told = "!3" if value is None else f"!{ERROR_CODES[value]}" if isinstance(value, str) else value
                yield f"{symbol}\t{gpu},{number},{scope or 0}\t{told}"
        elif symbol == "nvmlEventSetWait":
            yield f"{symbol}\t\t{_value(symbol, answer)}"
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
        keys = ("status", "cliqueId", "state", "healthMask", "healthSummary")
        return _numbers([*answer["clusterUuid"], *(answer[k] for k in keys if k in answer)])
    if symbol == "nvmlEventSetWait":
        return _numbers([n for event in answer["xids"] for n in event])
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
    """Write the recorded machine's files, links and folders below `root`; what could not be read is left out."""
    root.mkdir(parents=True, exist_ok=True)
    links = {p: t for p, t in answers.get("resolve", {}).items() if isinstance(t, str) and t != p}
    for path, target in sorted(links.items(), key=lambda link: link[0].count("/")):
        here, there = _below(root, path), root / target.lstrip("/")
        there.mkdir(parents=True, exist_ok=True)
        if not os.path.lexists(here):
            # Relative, as in sysfs: an absolute link would lead out of the root.
            here.symlink_to(os.path.relpath(there, here.parent.resolve()))
    for path, text in answers.get("read_text", {}).items():
        if isinstance(text, str):
            _below(root, path).write_text(text, encoding="utf-8")
    for question, packed in answers.get("read_bytes", {}).items():
        if isinstance(packed, str):
            _below(root, question.rpartition(",")[0]).write_bytes(zlib.decompress(base64.b64decode(packed)))
    for folder, names in answers.get("list_dir", {}).items():
        for name in names if isinstance(names, list) else ():
            if not os.path.lexists(entry := _below(root, f"{folder}/{name}")):
                entry.mkdir()
    for path, there_is in answers.get("exists", {}).items():
        if there_is is True and not os.path.lexists(entry := _below(root, path)):
            entry.mkdir()


def _below(root: Path, path: str) -> Path:
    """Where the path lies below the root; the folder it is in is there afterwards."""
    found = root / path.lstrip("/")
    found.parent.mkdir(parents=True, exist_ok=True)
    return found
