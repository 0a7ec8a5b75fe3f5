"""Who may open which door of the HTTP agent.

Reads are open unless told otherwise; whatever makes load, or leaves something here, needs a bearer token. In a cluster
the API server judges it: TokenReview (authentication.k8s.io/v1, with our audience, so that a token made for another
service is no use here), then SubjectAccessReview (authorization.k8s.io/v1, nonResourceAttributes). Outside, a file of
tokens. With neither, the doors stay closed. No token is logged or kept: answers are remembered for some seconds under
its SHA-256.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import shlex
import stat
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from agent.cluster.client import ApiError, Client, path_of
from agent.http.problem import ProblemError
from contracts import bounded

AUDIENCE = "topoflight"
REMEMBERED_SECONDS = 10.0  # as long as kube-apiserver's own authorizer keeps a refusal, and what it costs to revoke
MOST_REMEMBERED = 1024
LONGEST_TOKEN = 16384
_MOST_TOKEN_BYTES = 1 << 20  # of a file of tokens
REVIEWS_PER_SECOND = 10.0
CHALLENGE = {"WWW-Authenticate": 'Bearer realm="topoflight"'}


@dataclass(frozen=True, slots=True)
class Answer:
    """What was decided about one token at one door."""

    user: str = ""
    problem: ProblemError | None = None


class Doors:
    """Judges bearer tokens; raises ProblemError 401, 403, 429 or 503."""

    def __init__(
        self, *, client: Client | None = None, token_file: Path | None = None, audience: str = AUDIENCE,
        reads_open: bool = True,
    ) -> None:  # fmt: skip
        self._client, self._file, self._audience = client, token_file, audience
        self.reads_open = reads_open
        self._answers: OrderedDict[tuple[str, str, str], tuple[float, Answer]] = OrderedDict()
        self._lock = threading.Lock()
        self._tokens = Bucket(rate=REVIEWS_PER_SECOND, size=2 * REVIEWS_PER_SECOND)

    def check(self, authorization: str | None, *, path: str, verb: str) -> str:
        """The caller's name, where `authorization` may `verb` (get, post) `path`."""
        if self._client is None and self._file is None:
            raise ProblemError(
                403, f"{verb.upper()} {path} needs a token, and is closed: this agent has nobody to ask about tokens",
                grant="start it with --token-file FILE, or in a cluster with --token-review",
            )  # fmt: skip
        scheme, _, token = (authorization or "").partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not token or len(token) > LONGEST_TOKEN or not token.isascii():
            raise ProblemError(401, f"{verb.upper()} {path} needs a bearer token", headers=CHALLENGE,
                               grant=self._how_to_get_one())  # fmt: skip
        key = hashlib.sha256(token.encode()).hexdigest(), path, verb
        with self._lock:
            at, answer = self._answers.get(key, (0.0, Answer()))
            known = at and time.monotonic() - at < REMEMBERED_SECONDS
        if not known:
            answer = self._from_file(token) if self._client is None else self._review(self._client, token, path, verb)
            with self._lock:
                self._answers[key] = time.monotonic(), answer
                while len(self._answers) > MOST_REMEMBERED:
                    self._answers.popitem(last=False)
        if answer.problem is not None:
            problem = answer.problem
            raise ProblemError(problem.status, problem.detail, headers=problem.headers, **problem.more)
        return answer.user

    def _how_to_get_one(self) -> str:
        if self._client is None:
            return "a line of the file named by --token-file, as Authorization: Bearer TOKEN"
        return f"kubectl create token SERVICEACCOUNT --audience {self._audience}, as Authorization: Bearer TOKEN"

    def _refused(self) -> Answer:
        detail = "the token is not known, has expired, or was made for another audience"
        return Answer(problem=ProblemError(401, detail, headers=CHALLENGE, grant=self._how_to_get_one()))

    def _from_file(self, token: str) -> Answer:
        """One token a line; read each time, so that a line taken out is out within seconds."""
        assert self._file is not None  # noqa: S101 - `check` has made sure
        try:
            lines = read_tokens(self._file)
        except (OSError, ValueError) as error:
            raise ProblemError(503, f"the token file cannot be used: {error}") from None
        given = token.encode()
        if sum(hmac.compare_digest(line.encode(), given) for line in lines):  # all of them, each in constant time
            return Answer(user="token-file")
        return self._refused()

    def _review(self, client: Client, token: str, path: str, verb: str) -> Answer:
        if not self._tokens.take():
            raise ProblemError(429, "too many tokens to review at once", headers={"Retry-After": "1"})
        try:
            reviewed = client.create(
                path_of("authentication.k8s.io/v1", "tokenreviews"),
                {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview",
                 "spec": {"token": token, "audiences": [self._audience]}},
                repeatable=True,
            ).get("status") or {}  # fmt: skip
            # a server that knows no audiences returns none: the token is then not proven to be ours
            if reviewed.get("authenticated") is not True or self._audience not in (reviewed.get("audiences") or ()):
                return self._refused()
            user = reviewed.get("user") or {}
            who = {key: user[key] for key in ("groups", "uid", "extra") if user.get(key)}
            name = str(user.get("username", ""))
            allowed = client.create(
                path_of("authorization.k8s.io/v1", "subjectaccessreviews"),
                {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview",
                 "spec": {"user": name, **who, "nonResourceAttributes": {"path": path, "verb": verb}}},
                repeatable=True,
            ).get("status") or {}  # fmt: skip
        except ApiError as error:
            why = f"HTTP {error.status}" if error.status else "it cannot be reached"
            raise ProblemError(503, f"the API server could not judge the token: {why}",
                               headers={"Retry-After": "5"}) from None  # fmt: skip
        if allowed.get("allowed") is True:
            return Answer(user=name)
        return Answer(problem=ProblemError(403, f"{name} may not {verb} {path}", grant=grant(name, verb, path)))


def grant(user: str, verb: str, path: str) -> str:
    """The two commands that let a user do this, under a name that no other user or path has: none exists already."""
    who = hashlib.sha256(f"{user} {verb}".encode()).hexdigest()[:8]  # a user's name holds what an object's may not
    role = "-".join(["topoflight-load", *re.findall(r"[a-z0-9]+", path.lower()), who])
    return (
        f"kubectl create clusterrole {role} --verb={verb} --non-resource-url={path} && "
        f"kubectl create clusterrolebinding {role} --clusterrole={role} --user={shlex.quote(user)}"
    )


def read_tokens(path: Path) -> list[str]:
    """The tokens of a file that only its owner (or group) may read. Raises ValueError."""
    if path.stat().st_mode & (stat.S_IROTH | stat.S_IWOTH):
        raise ValueError(f"{path} may be read or written by everyone: chmod 640")
    try:
        lines = [line.strip() for line in bounded.read(path, _MOST_TOKEN_BYTES).decode("ascii").splitlines()]
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    tokens = [line for line in lines if line and not line.startswith("#")]
    if any(len(token) < 16 for token in tokens):
        raise ValueError(f"{path}: a token is shorter than 16 characters")
    return tokens


class Bucket:
    """A token bucket: `rate` a second, at most `size` at once."""

    def __init__(self, *, rate: float, size: float) -> None:
        self._rate, self._size, self._level, self._at = rate, size, size, time.monotonic()
        self._lock = threading.Lock()

    def take(self) -> bool:
        """Whether one more is within the rate."""
        with self._lock:
            now = time.monotonic()
            self._level = min(self._size, self._level + (now - self._at) * self._rate)
            self._at = now
            if self._level < 1:
                return False
            self._level -= 1
            return True
