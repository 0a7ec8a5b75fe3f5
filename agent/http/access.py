"""Access to the HTTP agent: which client may use which endpoint, and how long a connection may wait for its client.

Reads are open by default. Requests that generate load or store data need a bearer token. In a cluster the API server
checks the token: first TokenReview (authentication.k8s.io/v1, with this agent's audience, so that a token for another
service is rejected), then SubjectAccessReview (authorization.k8s.io/v1, nonResourceAttributes). Outside a cluster, a
file of tokens is used. Without either, these endpoints are closed. Tokens are never logged or stored: results are
cached for some seconds under the token's SHA-256.

A token is checked before the body is read. If the API server hangs, only requests with a token that is not cached are
delayed. The NetworkPolicy in deploy/daemonset limits which clients can connect.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import math
import re
import shlex
import stat
import time
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

import h11
from starlette.concurrency import run_in_threadpool
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from agent.base import raise_as
from agent.cluster.client import ApiError, Client, make_path
from agent.http.worker import ProblemError
from contracts import bounded
from contracts.redaction import without_secrets

PROBES = ("/healthz", "/readyz")  # used by the kubelet, which sends no token
HEAD_BYTES = 16384  # request line and headers; a bearer token may use most of it
KEEP_ALIVE_SECONDS = 65  # longer than a scrape interval of one minute, the usual one
_CHECK_SECONDS = 1.0
_ROOM_SECONDS = 0.05
AUDIENCE = "topoflight"
CACHE_SECONDS = 10.0  # as long as kube-apiserver caches a refusal; a revoked token stays valid this long
MAX_CACHED = 1024
LONGEST_TOKEN = 16384
_MAX_TOKEN_BYTES = 1 << 20  # size of a token file
READS = ("GET", "HEAD")
CHALLENGE = {"WWW-Authenticate": 'Bearer realm="topoflight"'}
PROBLEM_TYPE = "application/problem+json"
_NOT_KNOWN = "the token is not known, has expired, or was made for another audience"


def make_problem(
    request: Request, status: int, detail: str, headers: dict[str, str] | None = None, **members: Any
) -> JSONResponse:
    """Create one problem document."""
    body = {"type": "about:blank", "title": HTTPStatus(status).phrase, "status": status, "detail": detail,
            "instance": request.url.path, **members}  # fmt: skip
    return JSONResponse(without_secrets(body), status_code=status, media_type=PROBLEM_TYPE, headers=headers)


class TokenChecker:
    """Checks bearer tokens; raises ProblemError 401, 403 or 503."""

    def __init__(
        self, *, client: Client | None = None, token_file: Path | None = None, audience: str = AUDIENCE,
        reads_open: bool = True,
    ) -> None:  # fmt: skip
        self._client, self._file, self._audience = client, token_file, audience
        self.reads_open = reads_open
        self._cache: dict[tuple[str, str, str], tuple[float, str | ProblemError]] = {}
        self._lock = asyncio.Lock()

    async def authorize(self, connection: HTTPConnection, *, path: str, verb: str) -> str:
        """Return the caller's name, if the token of the request permits `verb` (get, post) on `path`.

        If the result is not cached, the token is checked in a thread, one token at a time: the API server may be slow.
        """
        token = self._token(connection.headers.get("authorization"), path, verb)
        key = hashlib.sha256(token.encode()).hexdigest(), path, verb
        outcome = self._get_cached(key)
        if outcome is None:
            async with self._lock:
                outcome = self._get_cached(key) or await self._decide(key, token)
        if isinstance(outcome, ProblemError):
            raise outcome.with_traceback(None)
        return outcome

    def _get_cached(self, key: tuple[str, str, str]) -> str | ProblemError | None:
        cached_at, outcome = self._cache.get(key, (-math.inf, None))
        return outcome if time.monotonic() - cached_at < CACHE_SECONDS else None

    async def _decide(self, key: tuple[str, str, str], token: str) -> str | ProblemError:
        """Return the caller's name, or the refusal, and cache it. Raises ProblemError 503, which is not cached."""
        if self._client:
            outcome = await run_in_threadpool(self._review, self._client, token, *key[1:])
        else:
            outcome = await run_in_threadpool(self._check_file, token)
        if len(self._cache) >= MAX_CACHED:
            self._cache.clear()
        self._cache[key] = time.monotonic(), outcome
        return outcome

    def _token(self, authorization: str | None, path: str, verb: str) -> str:
        if self._client is None and self._file is None:
            raise ProblemError(
                403, f"{verb.upper()} {path} needs a token. Authentication is not configured on this agent",
                grant="start it with --token-file FILE, or in a cluster with --token-review",
            )  # fmt: skip
        scheme, _, token = (authorization or "").partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not token or len(token) > LONGEST_TOKEN or not token.isascii():
            raise self._refused(f"{verb.upper()} {path} needs a bearer token")
        return token

    def _refused(self, detail: str = _NOT_KNOWN) -> ProblemError:
        command = f"kubectl create token SERVICEACCOUNT --audience {self._audience}"
        how = command if self._client else "a line of the file named by --token-file"
        return ProblemError(401, detail, headers=CHALLENGE, grant=f"{how}, as Authorization: Bearer TOKEN")

    def _check_file(self, token: str) -> str | ProblemError:
        """Check a token against the file (one per line); it is read each time, so that a removed token expires soon."""
        assert self._file is not None  # noqa: S101 - `_token` has made sure
        with raise_as(partial(ProblemError, 503), ValueError, "the token file cannot be used: "):
            lines = read_tokens(self._file)
        sent = token.encode()
        matches = sum(hmac.compare_digest(line.encode(), sent) for line in lines)  # all lines, each in constant time
        return "token-file" if matches else self._refused()

    def _review(self, client: Client, token: str, path: str, verb: str) -> str | ProblemError:
        def status_of(group: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
            review = {"apiVersion": f"{group}/v1", "kind": kind, "spec": spec}
            created = client.create(make_path(f"{group}/v1", f"{kind.lower()}s"), review, repeatable=True)
            return created.get("status") or {}

        try:
            spec = {"token": token, "audiences": [self._audience]}
            reviewed = status_of("authentication.k8s.io", "TokenReview", spec)
            # a server without audience support returns none: the token is then not proven to be for this agent
            if reviewed.get("authenticated") is not True or self._audience not in (reviewed.get("audiences") or ()):
                return self._refused()
            user = reviewed.get("user") or {}
            name = str(user.get("username", ""))
            who = {"user": name, **{key: user[key] for key in ("groups", "uid", "extra") if user.get(key)}}
            access = {**who, "nonResourceAttributes": {"path": path, "verb": verb}}
            allowed = status_of("authorization.k8s.io", "SubjectAccessReview", access).get("allowed") is True
        except ApiError as error:
            raise ProblemError(503, f"the API server did not review the token ({error.reason})",
                               headers={"Retry-After": "5"}) from None  # fmt: skip
        if not allowed:
            return ProblemError(403, f"{name} may not {verb} {path}", grant=describe_grant(name, verb, path))
        return name


class TokenMiddleware:
    """ASGI middleware that checks the token before the body is read.

    Reads need a token if `tokens` requires it; every other method needs one, also on a path that does not exist.
    """

    def __init__(self, app: ASGIApp, tokens: TokenChecker) -> None:
        self._app, self._tokens = app, tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward the request with the caller's name in its state, or reject it."""
        is_read = scope["type"] != "http" or scope["method"] in READS
        is_open = is_read and (self._tokens.reads_open or scope["type"] != "http" or scope["path"] in PROBES)
        if not is_open:
            request = Request(scope)
            verb = "get" if is_read else scope["method"].lower()
            try:
                request.state.user = await self._tokens.authorize(request, path=scope["path"], verb=verb)
            except ProblemError as error:
                refusal = make_problem(request, error.status, error.detail, error.headers, **error.members)
                await refusal(scope, receive, send)
                return
        await self._app(scope, receive, send)


def describe_grant(user: str, verb: str, path: str) -> str:
    """Return the two commands that grant this permission, with object names that are unique per user and path."""
    who = hashlib.sha256(f"{user} {verb}".encode()).hexdigest()[:8]  # a user's name holds what an object's may not
    role = "-".join(["topoflight-load", *re.findall(r"[a-z0-9]+", path.lower()), who])
    return (
        f"kubectl create clusterrole {role} --verb={verb} --non-resource-url={path} && "
        f"kubectl create clusterrolebinding {role} --clusterrole={role} --user={shlex.quote(user)}"
    )


def read_tokens(path: Path) -> list[str]:
    """Read the tokens of a file that only its owner (or group) may read. Raises ValueError."""
    with raise_as(ValueError, (OSError, ValueError), f"{path}: "):
        if path.stat().st_mode & (stat.S_IROTH | stat.S_IWOTH):
            raise ValueError("may be read or written by everyone; restrict it with chmod 640")
        lines = [line.strip() for line in bounded.read(path, _MAX_TOKEN_BYTES).decode("ascii").splitlines()]
    tokens = [line for line in lines if line and not line.startswith("#")]
    if not tokens:
        raise ValueError(f"{path}: contains no token; allowed: one token of at least 16 characters per line")
    if any(len(token) < 16 for token in tokens):
        raise ValueError(f"{path}: a token is shorter than 16 characters")
    return tokens


# One connection: every wait for the client is limited, and health checks are always served.
# uvicorn's `limit_concurrency` answers 503 for every path, health checks included, and its keep-alive timer starts only
# after the first response. Here a new connection replaces one that waits for its client, if the limit is reached.


class LimitedProtocol(H11Protocol):
    """One client connection."""

    most_connections = 512  # each uses about 20 KiB while open
    most_over_limit = 32  # additional ones if all of those are busy; only health checks use them
    # Longest wait for the first request's head, a later head, a body, and for the client to read a response
    seconds = {"head": 20.0, "next head": KEEP_ALIVE_SECONDS + 20.0, "body": 20.0, "reader": 30.0}  # noqa: RUF012

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._application, self.app = self.app, self._answer_within_limits
        self._wait: tuple[str | None, object] = "", None
        self.since = 0.0  # start of the current wait
        self.was_read = False  # whether data that arrived with the connection has been read

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept the connection; if the limit is reached, close another one."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # so that a response the client does not read is detected
        self._check_wait()
        self.loop.call_later(_ROOM_SECONDS, self._make_room)  # delayed so that received data is read first

    def _make_room(self) -> None:
        """If the limit is exceeded, end the connection that has waited longest for its client.

        If no other connection waits, only this one can be ended, and only after its request is answered.
        """
        self.was_read = True
        over = len(self.connections) - self.most_connections
        if over <= 0 or self.transport.is_closing():
            return
        waiting = [connection for connection in self._list_others() if connection.was_read and connection.awaited()]
        if waiting:
            min(waiting, key=lambda connection: connection.since).end()
        elif over > self.most_over_limit:
            if self.awaited():
                self.end()
            else:
                self.loop.call_later(_ROOM_SECONDS, self._make_room)

    def _list_others(self) -> list[LimitedProtocol]:
        return [one for one in self.connections if isinstance(one, LimitedProtocol) and one is not self]

    def awaited(self) -> str | None:
        """Return what the client must do next; None while the application works."""
        if self.flow.write_paused:
            return "reader"
        if self.cycle is None or self.cycle.response_complete:
            return "next head" if self.cycle else "head"
        return "body" if self.conn.their_state is h11.SEND_BODY else None

    def _check_wait(self) -> None:
        """Check every second, and close the connection if one wait within one request has taken too long."""
        if self.transport.is_closing():
            return
        wait, now = (self.awaited(), self.cycle), self.loop.time()
        if wait != self._wait:
            self._wait, self.since = wait, now
        elif wait[0] is not None and now - self.since > self.seconds[wait[0]]:
            self.end()
            return
        self.loop.call_later(_CHECK_SECONDS, self._check_wait)

    def end(self) -> None:
        """Close the connection immediately."""
        self.connections.discard(self)
        self.transport.abort()

    async def _answer_within_limits(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Reject a request with an ambiguous body length, and all but health checks if the limit is reached."""
        names = {name for name, _ in scope["headers"]}
        framed_twice = b"content-length" in names or scope["http_version"] == "1.0"  # RFC 9112, 6.1
        is_full = len(self.connections) > self.most_connections and scope["path"] not in PROBES
        status = 0
        if b"transfer-encoding" in names and framed_twice:
            status = 400
            detail = "Transfer-Encoding with Content-Length, or in HTTP/1.0: where the body ends is ambiguous"
        elif sum(len(name) + len(value) for name, value in scope["headers"]) > HEAD_BYTES:  # h11 bounds split ones
            status, detail = 400, f"the headers have more than {HEAD_BYTES} bytes"
        elif is_full and sum(not one.awaited() for one in self._list_others()) >= self.most_connections:
            status, detail = 503, f"{self.most_connections} connections are in use"
        if status:
            headers = {"Connection": "close", **({"Retry-After": "5"} if status == 503 else {})}
            await make_problem(Request(scope), status, detail, headers)(scope, receive, send)
        else:
            await self._application(scope, receive, send)
