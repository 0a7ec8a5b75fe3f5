"""A host's answers in a file (`probes.wire`): captured on a customer's machine, replayed without the hardware.

A question without a recorded answer gets "not there", so that a newer probe reads an older recording.
"""

from __future__ import annotations

import base64
import errno
import gzip
import os
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from contracts import bounded
from contracts.plain import PlainError
from contracts.plain import loads as plain
from contracts.redaction import without_secrets
from probes.host.nvml import ERROR_CODES, failure
from probes.host.protocol import GpuHandle, Host, NvmlError
from probes.wire import KIND, METHODS, SCHEMA_VERSION, Json, RecordingError

BUNDLE_LIMIT_BYTES = 512 << 20  # unpacked, of all hosts
PACKED_LIMIT_BYTES = 128 << 20
SIZE_LIMIT_BYTES = 32 << 20  # unpacked; a 16-GPU host takes about 1 MB, and parsed data some 20 times the text
MOST_VALUES = 8_000_000  # of all recordings in a bundle; a host of 16 GPUs has some 20,000, each of up to 100 bytes
_IN_BUNDLE = re.compile(r"[^/]+/recording\.json")

T = TypeVar("T")


def question(*arguments: GpuHandle | int | str) -> str:
    """The key of a question in the file: its arguments, a GPU as "gpu3"."""
    return ",".join(f"gpu{a.index}" if isinstance(a, GpuHandle) else str(a) for a in arguments)


class RecordingHost:
    """Passes every question on and keeps the answer, errors included, secrets left out."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.answers: dict[str, dict[str, Json]] = {}

    def __getattr__(self, method: str) -> Callable[..., Any]:
        """Every question of `Host` is passed on in the same way."""
        if method not in METHODS:
            raise AttributeError(method)

        def ask(*arguments: GpuHandle | int | str) -> Any:
            try:
                answer = getattr(self.host, method)(*arguments)
            except (OSError, NvmlError, ImportError) as error:
                self._record(method, arguments, _error_answer(error, arguments))
                raise
            packed = base64.b64encode(zlib.compress(answer, 9)).decode() if isinstance(answer, bytes) else answer
            self._record(method, arguments, without_secrets(packed))
            return answer

        return ask

    def _record(self, method: str, arguments: tuple[GpuHandle | int | str, ...], answer: Json) -> None:
        """NVML answers stand below their symbol, the others below their method."""
        if method == "nvml":
            symbols = self.answers.setdefault("nvml", {})
            symbols.setdefault(str(arguments[0]), {})[question(*arguments[1:])] = answer
        else:
            self.answers.setdefault(method, {})[question(*arguments)] = answer


def _answered(method: str, kind: Callable[[Any], T]) -> Callable[..., T]:
    """The question of `Host` of that name, whose recorded answer is of one kind."""

    def ask(self: RecordedHost, *arguments: int | str) -> T:
        return kind(self._answer(method, *arguments))

    return ask


class RecordedHost:
    """Answers from a recording; what is not in it is "not there"."""

    def __init__(self, content: dict[str, Json]) -> None:
        self.content = content
        self._answers: dict[str, dict[str, Json]] = content["answers"]

    def _answer(self, method: str, *arguments: GpuHandle | int | str) -> Any:
        answers, key = self._answers.get(method, {}), question(*arguments)
        if key not in answers:
            raise FileNotFoundError(errno.ENOENT, "not in the recording", f"{method}({key})")
        return _raised(without_secrets(answers[key]), key)

    read_text = _answered("read_text", str)
    list_dir = _answered("list_dir", tuple)
    resolve = _answered("resolve", str)
    usable = _answered("usable", bool)
    netlink = _answered("netlink", tuple)
    port_link = _answered("port_link", dict)
    rdma_netlink = _answered("rdma_netlink", tuple)
    kernel_log = _answered("kernel_log", tuple)

    def read_bytes(self, path: str, limit: int) -> bytes:
        """First bytes of a file."""
        return _unpack(self._answer("read_bytes", path, limit), limit)

    def exists(self, path: str) -> bool:
        """Whether the path exists; a path that answered another question does."""
        known = self._answers.get("exists", {})
        if path in known:
            return bool(known[path])
        others = (self._answers.get(m, {}).get(path) for m in ("read_text", "list_dir", "resolve"))
        return any(answer is not None and not _is_error(answer) for answer in others)

    def statvfs(self, path: str) -> tuple[int, int]:
        """(size, available) in bytes."""
        size, available = _numbers(self._answer("statvfs", path), path)
        return size or 0, available or 0

    def limit(self, name: str) -> tuple[int | None, int | None]:
        """(soft, hard) of the process that recorded."""
        return _numbers(self._answer("limit", name), name)

    def environment(self) -> dict[str, str]:
        """The recorder's environment; empty where it was not recorded."""
        return dict(without_secrets(self._answers.get("environment", {}).get("", {})))

    def identity(self) -> dict[str, Json]:
        """The recorded identity; at least hostname and time, from the file's own header."""
        header = {"hostname": self.content["hostname"], "time": self.content["captured_at"]}
        return {**header, **self._answers.get("identity", {}).get("", {})}

    def nvml(self, symbol: str, *arguments: GpuHandle | int | str) -> Json:
        """One recorded NVML call."""
        symbols = self._answers.get("nvml")
        if not symbols:
            raise failure(symbol, "LIBRARY_NOT_FOUND")
        answers, key = symbols.get(symbol, {}), question(*arguments)
        return _raised(without_secrets(answers.get(key, {"$nvml": "NOT_SUPPORTED"})), symbol)

    def verbs(self, what: str, *arguments: int | str) -> Json:
        """One recorded question to libibverbs."""
        return self._answer("verbs", what, *arguments)

    def cpu(self) -> dict[str, Json]:
        """Recorded psutil numbers; empty where they were not recorded."""
        return dict(self._answers.get("cpu", {}).get("", {}))


def _error_answer(error: Exception, arguments: tuple[GpuHandle | int | str, ...]) -> Json:
    if isinstance(error, NvmlError):
        answer: dict[str, Json] = {"$nvml": error.name}
        if error.code != ERROR_CODES.get(error.name):
            answer["code"] = error.code
        if arguments and error.symbol != arguments[0]:  # nvmlInit, or the look-up of the handle
            answer["symbol"] = error.symbol
        return answer
    if isinstance(error, ImportError):
        return {"$import": str(error)}
    number = error.errno if isinstance(error, OSError) and error.errno else errno.EIO
    name = errno.errorcode.get(number, str(number))
    path = str(arguments[0]) if arguments else ""
    if str(error) == str(OSError(number, os.strerror(number), path)):
        return {"$errno": name}
    return {"$errno": name, "text": without_secrets(getattr(error, "strerror", None) or str(error))}


def _unpack(text: str, limit: int) -> bytes:
    try:
        return zlib.decompressobj().decompress(base64.b64decode(text), limit)
    except (ValueError, zlib.error) as error:
        raise OSError(errno.EIO, f"bytes in the recording cannot be unpacked: {error}") from None


def _numbers(answer: Json, query: str) -> tuple[int | None, int | None]:
    """Two whole numbers, or None for each; a recording may hold anything."""
    if not isinstance(answer, list) or len(answer) != 2 or not all(type(n) in (int, type(None)) for n in answer):
        raise OSError(errno.EIO, "the recording holds no two numbers", query)
    return answer[0], answer[1]


def _is_error(answer: Json) -> bool:
    return isinstance(answer, dict) and not answer.keys().isdisjoint(("$errno", "$nvml", "$import"))


def _raised(answer: Json, query: str) -> Json:
    """The answer, or the error that it stands for."""
    if not _is_error(answer):
        return answer
    if "$nvml" in answer:
        code = answer.get("code", ERROR_CODES.get(answer["$nvml"], 999))
        raise NvmlError(str(answer.get("symbol", query)), code, answer["$nvml"])
    if "$import" in answer:
        raise ImportError(answer["$import"])
    name = answer["$errno"]
    numbered = isinstance(name, str) and name.isascii() and name.isdigit() and len(name) < 6
    number = getattr(errno, name) if name in errno.errorcode.values() else int(name) if numbered else errno.EIO
    raise OSError(number, answer.get("text", os.strerror(number)), query)


def load_all(path: str | Path) -> list[RecordedHost]:
    """Every recording of a file: one, or those of a bundle (zip, each `HOST/recording.json`).

    Raises RecordingError.
    """
    path = Path(path)
    if path.suffix != ".zip":
        return [load(path)]
    found, values = [], 0
    try:
        raw = bounded.read(path, PACKED_LIMIT_BYTES)
        for _, content in bounded.zip_files(raw, BUNDLE_LIMIT_BYTES, SIZE_LIMIT_BYTES, _IN_BUNDLE.fullmatch):
            values += sum(content.count(mark) for mark in (b",", b"[", b"{"))
            if values > MOST_VALUES:
                raise RecordingError(f"{path}: its recordings hold more than {MOST_VALUES} values")
            found.append(RecordedHost(_checked(plain(content), path)))
    except (bounded.ArchiveError, bounded.TooLargeError, PlainError) as error:
        raise RecordingError(f"{path}: not a bundle (topoflight bundle writes one): {error}") from None
    if not found:
        raise RecordingError(f"{path}: holds no recording (HOST/recording.json)")
    return found


def load(path: str | Path) -> RecordedHost:
    """Read a recording, plain or gzip. Raises RecordingError that names the file and what is allowed."""
    path = Path(path)
    try:
        with bounded.open_regular(path) as file:
            zipped = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            content = bounded.rest(gzip.GzipFile(fileobj=file) if zipped else file, SIZE_LIMIT_BYTES)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise RecordingError(f"{path}: not a whole gzip file ({error})") from None
    except bounded.TooLargeError as error:
        raise RecordingError(f"{path}: {error} unpacked, which no recording is") from None
    try:
        data = plain(content)
    except PlainError as error:
        raise RecordingError(f"{path}: {error}") from None
    return RecordedHost(_checked(data, path))


def _checked(data: Json, path: Path) -> dict[str, Json]:
    if not isinstance(data, dict) or data.get("kind") != KIND:
        raise RecordingError(f'{path}: not a recording: "kind" must be "{KIND}" (topoflight capture writes one)')
    version = data.get("schema_version")
    if not isinstance(version, int) or not 1 <= version <= SCHEMA_VERSION:
        raise RecordingError(f"{path}: schema_version is {version!r}; this release reads 1 to {SCHEMA_VERSION}")
    answers = data.get("answers")
    if not isinstance(answers, dict) or not all(isinstance(a, dict) for a in answers.values()):
        raise RecordingError(f'{path}: "answers" must be an object of objects')
    if not isinstance(data.get("hostname"), str) or not isinstance(data.get("captured_at"), int | float):
        raise RecordingError(f'{path}: "hostname" must be text and "captured_at" a number')
    if not all(isinstance(a, dict) for a in answers.get("nvml", {}).values()):
        raise RecordingError(f'{path}: "answers.nvml" must hold an object per symbol')
    identity = answers.get("identity", {}).get("", {})
    if not isinstance(identity, dict):
        raise RecordingError(f'{path}: "answers.identity" must hold an object')
    if not isinstance(identity.get("hostname", ""), str) or not isinstance(identity.get("time", 0), int | float):
        raise RecordingError(f'{path}: "answers.identity": "hostname" must be text and "time" a number')
    return data
