"""A Kubernetes client for the few calls that the product makes: get, list in pages, watch, create, patch, apply.

The official client's models cost a resident process several times the memory of this (docs/decisions). Specification:
Kubernetes API concepts (pages, watch, bookmarks, 410), server-side apply, and the Status kind of API errors.
"""

from __future__ import annotations

import json
import logging
import random
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import quote, urlencode

import urllib3
from urllib3.exceptions import HTTPError

from agent.cluster.access import Access, AccessError
from agent.version import VERSION

log = logging.getLogger(__name__)

Json = dict[str, Any]
APPLY = "application/apply-patch+yaml"  # JSON is YAML
MERGE = "application/merge-patch+json"
FIELD_MANAGER = "topoflight"
PAGE = 500  # client-go's own page size
BODY_LIMIT_BYTES = 64 << 20
LINE_LIMIT_BYTES = 4 << 20  # one watch event; etcd holds no object above 1.5 MiB
TRIES = 5
LONGEST_WAIT_SECONDS = 30.0
BRIEF_SECONDS = 5.0
_WARNING = re.compile(r'299 \S+ "((?:[^"\\]|\\.)*)"')  # RFC 7234, 5.5, as the API server writes it
AGAIN = (429, 500, 502, 503, 504)  # what the API server answers while it is busy, starting or behind a balancer


class ApiError(RuntimeError):
    """The API server refused, or could not be reached (status 0); the message never holds a token."""

    def __init__(self, status: int, message: str, *, reason: str = "", retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.retry_after = retry_after


class Client:
    """Speaks to one API server. Safe to share between threads."""

    def __init__(
        self, access: Access, *, timeout_seconds: float = 15.0, tries: int = TRIES,
        on_warning: Callable[[str], None] = lambda _text: None,
    ) -> None:  # fmt: skip
        self.access = access
        self._on_warning = on_warning
        self._timeout = timeout_seconds
        self._tries = tries
        self._stop = threading.Event()
        more: dict[str, Any] = {"ssl_context": access.tls} if access.tls else {}
        self._pool = urllib3.PoolManager(num_pools=2, maxsize=4, retries=False, **more)

    def close(self) -> None:
        """End waiting between tries, and let connections go."""
        self._stop.set()
        self._pool.clear()

    def once(self) -> Client:
        """The same server and limits, each call tried once: for callers that wait by themselves."""
        return Client(self.access, timeout_seconds=self._timeout, tries=1, on_warning=self._on_warning)

    def brief(self) -> Client:
        """The same server, asked twice and soon given up: for calls that someone waits for, who can come again."""
        return Client(self.access, timeout_seconds=BRIEF_SECONDS, tries=2, on_warning=self._on_warning)

    def get(self, path: str, query: Mapping[str, Any] | None = None) -> Json:
        """One object, or one page."""
        return self.request("GET", path, query=query)

    def pages(self, path: str, query: Mapping[str, Any] | None = None) -> Iterator[tuple[list[Json], str]]:
        """Items page by page, each with the resource version to watch from."""
        wanted = {**(query or {}), "limit": PAGE}
        while True:
            page = self.get(path, wanted)
            about = page.get("metadata") or {}
            yield list(page.get("items") or ()), str(about.get("resourceVersion", ""))
            if not about.get("continue"):
                return
            wanted["continue"] = about["continue"]

    def apply(self, path: str, document: Json, *, force: bool = True, dry_run: bool = False) -> Json:
        """Server-side apply: our fields become `document`'s, those of others stay."""
        return self._apply(path, document, force=force, dry_run=dry_run)[1]

    def applied(self, path: str, document: Json, *, dry_run: bool = False) -> bool:
        """As `apply`; whether this made the object, which was not there before."""
        return self._apply(path, document, force=True, dry_run=dry_run)[0] == 201

    def _apply(self, path: str, document: Json, *, force: bool, dry_run: bool) -> tuple[int, Json]:
        query: dict[str, Any] = {
            "fieldManager": FIELD_MANAGER,
            "force": str(force).lower(),
            "fieldValidation": "Strict",
        }
        if dry_run:
            query["dryRun"] = "All"
        return self._tried("PATCH", path, query=query, body=document, content_type=APPLY, repeatable=True)

    def merge(self, path: str, document: Json) -> Json:
        """A JSON merge patch."""
        return self.request(
            "PATCH", path, query={"fieldManager": FIELD_MANAGER}, body=document, content_type=MERGE
        )  # fmt: skip

    def create(self, path: str, document: Json, *, repeatable: bool = False, dry_run: bool = False) -> Json:
        """POST; tried again after an unclear failure only where twice is as good as once (reviews)."""
        query = {"fieldManager": FIELD_MANAGER, "fieldValidation": "Strict", **({"dryRun": "All"} if dry_run else {})}
        return self.request("POST", path, query=query, body=document, repeatable=repeatable)

    def request(
        self, method: str, path: str, *, query: Mapping[str, Any] | None = None, body: Json | None = None,
        content_type: str = "application/json", repeatable: bool = True,
    ) -> Json:  # fmt: skip
        """One call with its retries. Raises ApiError."""
        return self._tried(method, path, query=query, body=body, content_type=content_type, repeatable=repeatable)[1]

    def delete(self, path: str) -> Json:
        """Delete an object after what it owns: once it is gone, its pods are."""
        return self.request("DELETE", path, query={"propagationPolicy": "Foreground"})

    def _tried(
        self, method: str, path: str, *, query: Mapping[str, Any] | None, body: Json | None, content_type: str,
        repeatable: bool,
    ) -> tuple[int, Json]:  # fmt: skip
        """The status and the object of the first try that is answered for good."""
        for attempt in range(self._tries):
            try:
                return self._once(method, path, query, body, content_type)
            except ApiError as error:
                clear = error.status == 429  # refused before anything was done
                if attempt + 1 == self._tries or not (clear or (repeatable and error.status in (0, *AGAIN))):
                    raise
                self._wait(attempt, error)
        raise AssertionError("unreachable")

    def watch(self, path: str, resource_version: str, *, seconds: int = 300) -> Iterator[Json]:
        """Events since `resource_version`, until the server ends the watch. Raises ApiError, 410 when it is too old."""
        query = {
            "watch": "true", "allowWatchBookmarks": "true", "resourceVersion": resource_version,
            "timeoutSeconds": seconds,
        }  # fmt: skip
        limits = urllib3.Timeout(connect=self._timeout, read=seconds + self._timeout)
        try:
            answer = self._pool.urlopen(
                "GET", self._url(path, query), headers=self._headers(None), preload_content=False, timeout=limits,
                redirect=False,
            )  # fmt: skip
        except HTTPError as error:
            raise ApiError(0, f"{self.access.server} cannot be reached: {_words(error)}") from None
        try:
            if answer.status != 200:
                raise _refusal(answer.status, answer.read(BODY_LIMIT_BYTES), answer.headers)
            yield from _events(answer)
        except HTTPError as error:
            raise ApiError(0, f"the watch broke off: {_words(error)}") from None
        finally:
            answer.close()
            answer.release_conn()

    def _once(
        self, method: str, path: str, query: Mapping[str, Any] | None, body: Json | None, content_type: str
    ) -> tuple[int, Json]:
        data = json.dumps(body).encode() if body is not None else None
        try:
            answer = self._pool.urlopen(
                method, self._url(path, query), body=data, headers=self._headers(content_type if data else None),
                preload_content=False, timeout=urllib3.Timeout(connect=self._timeout, read=self._timeout * 2),
                redirect=False,
            )  # fmt: skip
            raw = answer.read(BODY_LIMIT_BYTES + 1)
            answer.release_conn()
        except HTTPError as error:
            raise ApiError(0, f"{self.access.server} cannot be reached: {_words(error)}") from None
        if len(raw) > BODY_LIMIT_BYTES:
            raise ApiError(answer.status, f"{path}: the answer is larger than {BODY_LIMIT_BYTES} bytes")
        if not 200 <= answer.status < 300:
            raise _refusal(answer.status, raw, answer.headers)
        try:
            value = json.loads(raw)
        except ValueError:
            raise ApiError(answer.status, f"{path}: the answer is no JSON") from None
        if not isinstance(value, dict):
            raise ApiError(answer.status, f"{path}: the answer is no object")
        for header in answer.headers.getlist("Warning"):
            for text in _WARNING.findall(header):
                self._on_warning(re.sub(r"\\(.)", r"\1", text))
        return answer.status, value

    def _url(self, path: str, query: Mapping[str, Any] | None) -> str:
        return self.access.server + path + (f"?{urlencode(query)}" if query else "")

    def _headers(self, content_type: str | None) -> dict[str, str]:
        headers = {"Accept": "application/json", "User-Agent": f"topoflight/{VERSION}"}
        if content_type:
            headers["Content-Type"] = content_type
        try:
            token = self.access.token()
        except AccessError as error:
            raise ApiError(0, str(error)) from None
        if token:
            headers["Authorization"] = f"Bearer {token}"
        return headers

    def _wait(self, attempt: int, error: ApiError) -> None:
        seconds = backoff_seconds(attempt, error.retry_after)
        log.info("%s; again in %.1f s", error, seconds)
        if self._stop.wait(seconds):
            raise error


def backoff_seconds(attempt: int, retry_after: float | None = None) -> float:
    """Doubling from half a second, spread so that many agents do not come back at once; never before Retry-After."""
    spread = random.uniform(0.5, 1.5)  # noqa: S311 - no secret
    doubling = min(LONGEST_WAIT_SECONDS, 0.5 * 2.0 ** min(attempt, 16)) * spread
    return max(doubling, min(retry_after or 0.0, 10 * LONGEST_WAIT_SECONDS) * max(1.0, spread))


def path_of(group_version: str, resource: str, name: str = "", *, namespace: str | None = None, sub: str = "") -> str:
    """The URL path of a resource; names are quoted, so that none becomes a path of its own."""
    root = "/api/v1" if group_version == "v1" else f"/apis/{group_version}"
    words = ["namespaces", quote(namespace, safe="")] if namespace else []
    words += [resource] + ([quote(name, safe="")] if name else []) + ([sub] if sub else [])
    return "/".join([root, *words])


def _events(answer: Any) -> Iterator[Json]:
    left = b""
    for chunk in answer.stream(65536):
        *lines, left = (left + chunk).split(b"\n")
        if len(left) > LINE_LIMIT_BYTES:
            raise ApiError(0, f"a watch event is larger than {LINE_LIMIT_BYTES} bytes")
        for line in lines:
            if not line.strip():
                continue
            try:
                event = json.loads(line)
                kind, item = event["type"], event["object"]
            except (ValueError, KeyError, TypeError):
                raise ApiError(0, "the watch sent a line that is no event") from None
            if kind == "ERROR":
                raise ApiError(int(item.get("code") or 0), str(item.get("message", "watch error")),
                               reason=str(item.get("reason", "")))  # fmt: skip
            yield event


def _refusal(status: int, raw: bytes, headers: Mapping[str, str]) -> ApiError:
    """An error from a Status document, or from whatever a proxy sent in its place."""
    message, reason = f"HTTP {status}", ""
    try:
        value = json.loads(raw)
        message, reason = str(value.get("message") or message), str(value.get("reason") or "")
    except (ValueError, AttributeError):
        message = f"HTTP {status}: {raw[:200].decode(errors='replace')}"
    after = headers.get("Retry-After", "")
    return ApiError(status, message, reason=reason, retry_after=float(after) if after.isdecimal() else None)


def _words(error: Exception) -> str:
    return str(getattr(error, "reason", None) or error)
