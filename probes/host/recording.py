"""Recordings (`probes.wire`): capture all answers of a host to a file, and replay them without the hardware.

If a recording has no answer to a query, the answer is "not found", so that newer probes can read older recordings.
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
from contracts.plain import PlainError, loads as plain
from contracts.redaction import without_secrets
from probes.host.nvml import ERROR_CODES, failure
from probes.host.protocol import GpuHandle, Host, NvmlError
from probes.wire import KIND, METHODS, SCHEMA_VERSION, Json, RecordingError

BUNDLE_LIMIT_BYTES = 512 << 20  # decompressed, for all hosts
PACKED_LIMIT_BYTES = 128 << 20
SIZE_LIMIT_BYTES = 32 << 20  # decompressed; a host with 16 GPUs needs about 1 MB; parsed data takes about 20 times that
MAX_VALUES = 8_000_000  # in all recordings of a bundle; a host with 16 GPUs has about 20,000, each up to 100 bytes
_IN_BUNDLE = re.compile(r"[^/]+/recording\.json")

T = TypeVar("T")


def format_question(*arguments: GpuHandle | int | str) -> str:
    """Return the key of a query in the file: its arguments, with a GPU handle as "gpu3"."""
    return ",".join(f"gpu{a.index}" if isinstance(a, GpuHandle) else str(a) for a in arguments)


class RecordingHost:
    """Forwards every query to another host and keeps the answers, including errors, without secrets."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.answers: dict[str, dict[str, Json]] = {}

    def __getattr__(self, method: str) -> Callable[..., Any]:
        """Return a method that forwards any query of `Host`."""
        if method not in METHODS:
            raise AttributeError(method)

        def ask(*arguments: GpuHandle | int | str) -> Any:
            try:
                answer = getattr(self.host, method)(*arguments)
            except (OSError, NvmlError, ImportError) as error:
                self._record(method, arguments, _encode_error(error, arguments))
                raise
            packed = base64.b64encode(zlib.compress(answer, 9)).decode() if isinstance(answer, bytes) else answer
            self._record(method, arguments, without_secrets(packed))
            return answer

        return ask

    def _record(self, method: str, arguments: tuple[GpuHandle | int | str, ...], answer: Json) -> None:
        """Store an answer: NVML answers below their symbol, others below their method."""
        if method == "nvml":
            symbols = self.answers.setdefault("nvml", {})
            symbols.setdefault(str(arguments[0]), {})[format_question(*arguments[1:])] = answer
        else:
            self.answers.setdefault(method, {})[format_question(*arguments)] = answer


def _make_query(method: str, kind: Callable[[Any], T]) -> Callable[..., T]:
    """Return the `Host` method of this name, whose recorded answer is converted with `kind`."""

    def ask(self: RecordedHost, *arguments: int | str) -> T:
        return kind(self._get_answer(method, *arguments))

    return ask


def _parse_numbers(answer: Json) -> tuple[int | None, int | None]:
    """Return two integers or None; a recording may contain anything."""
    if not isinstance(answer, list) or len(answer) != 2 or not all(type(n) in (int, type(None)) for n in answer):
        raise OSError(errno.EIO, "the recording holds no two numbers")
    return answer[0], answer[1]


class RecordedHost:
    """Answers from a recording. A query without a recorded answer raises FileNotFoundError."""

    def __init__(self, content: dict[str, Json]) -> None:
        self.content = content
        self._answers: dict[str, dict[str, Json]] = content["answers"]

    def _get_answer(self, method: str, *arguments: GpuHandle | int | str) -> Any:
        answers, key = self._answers.get(method, {}), format_question(*arguments)
        if key not in answers:
            raise FileNotFoundError(errno.ENOENT, "not in the recording", f"{method}({key})")
        return _raise_error(without_secrets(answers[key]), key)

    read_text = _make_query("read_text", str)
    list_dir = _make_query("list_dir", tuple)
    resolve = _make_query("resolve", str)
    usable = _make_query("usable", bool)
    netlink = _make_query("netlink", tuple)
    port_link = _make_query("port_link", dict)
    kernel_log = _make_query("kernel_log", tuple)
    verbs = _make_query("verbs", lambda answer: answer)
    statvfs = _make_query("statvfs", _parse_numbers)
    limit = _make_query("limit", _parse_numbers)

    def read_bytes(self, path: str, limit: int) -> bytes:
        """Return the first bytes of a file."""
        return _unpack(self._get_answer("read_bytes", path, limit), limit)

    def exists(self, path: str) -> bool:
        """Whether the path exists: recorded directly, or implied by another recorded answer for this path."""
        answers = self._answers.get("exists", {})
        if path in answers:
            return bool(answers[path])
        others = (self._answers.get(m, {}).get(path) for m in ("read_text", "list_dir", "resolve"))
        return any(answer is not None and not _is_error(answer) for answer in others)

    def environment(self) -> dict[str, str]:
        """Return the environment of the recording process; empty if it was not recorded."""
        return dict(without_secrets(self._answers.get("environment", {}).get("", {})))

    def identity(self) -> dict[str, Json]:
        """Return the recorded identity; hostname and time are always present, from the file header."""
        header = {"hostname": self.content["hostname"], "time": self.content["captured_at"]}
        return {**header, **self._answers.get("identity", {}).get("", {})}

    def nvml(self, symbol: str, *arguments: GpuHandle | int | str) -> Json:
        """Return the answer to one recorded NVML call."""
        symbols = self._answers.get("nvml")
        if not symbols:
            raise failure(symbol, "LIBRARY_NOT_FOUND")
        answers, key = symbols.get(symbol, {}), format_question(*arguments)
        return _raise_error(without_secrets(answers.get(key, {"$nvml": "NOT_SUPPORTED"})), symbol)

    def cpu(self) -> dict[str, Json]:
        """Return psutil's recorded numbers; empty if they were not recorded."""
        return dict(self._answers.get("cpu", {}).get("", {}))


def _encode_error(error: Exception, arguments: tuple[GpuHandle | int | str, ...]) -> Json:
    if isinstance(error, NvmlError):
        answer: dict[str, Json] = {"$nvml": error.name}
        if error.code != ERROR_CODES.get(error.name):
            answer["code"] = error.code
        if arguments and error.symbol != arguments[0]:  # nvmlInit, or the lookup of the handle
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


def _is_error(answer: Json) -> bool:
    return isinstance(answer, dict) and not answer.keys().isdisjoint(("$errno", "$nvml", "$import"))


def _raise_error(answer: Json, query: str) -> Json:
    """Return the answer, or raise the error that it represents."""
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
    """Load every recording in a file: a single one, or a bundle (zip with `HOST/recording.json` entries).

    Raises RecordingError.
    """
    path = Path(path)
    if path.suffix != ".zip":
        return [load(path)]
    hosts, value_count = [], 0
    try:
        raw = bounded.read(path, PACKED_LIMIT_BYTES)
        for _, content in bounded.zip_files(raw, BUNDLE_LIMIT_BYTES, SIZE_LIMIT_BYTES, _IN_BUNDLE.fullmatch):
            value_count += sum(content.count(mark) for mark in (b",", b"[", b"{"))
            if value_count > MAX_VALUES:
                raise RecordingError(f"{path}: its recordings hold more than {MAX_VALUES} values")
            hosts.append(RecordedHost(_check_content(plain(content), path)))
    except (bounded.ArchiveError, bounded.TooLargeError, PlainError) as error:
        raise RecordingError(f"{path}: not a bundle (topoflight bundle writes one): {error}") from None
    if not hosts:
        raise RecordingError(f"{path}: holds no recording (HOST/recording.json)")
    return hosts


def load(path: str | Path) -> RecordedHost:
    """Load a recording, plain or gzip. Raises RecordingError, which names the file and the allowed format."""
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
        hint = "topoflight capture writes one; `topoflight topo --from` reads a matrix of nvidia-smi"
        raise RecordingError(f"{path}: not a recording ({hint}): {error}") from None
    return RecordedHost(_check_content(data, path))


def _check_content(data: Json, path: Path) -> dict[str, Json]:
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
