"""The Kubernetes API calls used by Topoflight: get, paged list, create, patch, apply.

The official client finds the API server and credentials (service account, kubeconfigs, certificates, tokens, credential
plugins, proxies) and sends requests. Retries, limits and streaming are implemented here. The library is imported with
the first Client, so that an agent without Kubernetes never loads it (docs/decisions/0009).

Specification: Kubernetes API concepts (pages), server-side apply, the Status kind of API errors.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import random
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from agent.base import version
from agent.base.options import InputError
from contracts import bounded

if TYPE_CHECKING:
    from kubernetes.client import Configuration

log = logging.getLogger(__name__)

Json = dict[str, Any]
JSON = "application/json"
APPLY = "application/apply-patch+yaml"  # JSON is valid YAML
WRITE = {"fieldManager": "topoflight", "fieldValidation": "Strict"}
DRY_RUN = {"dryRun": "All"}
PAGE = 100  # a GPU server's record has 20 KB; 500, the page size of client-go, would need 70 MiB once parsed
BODY_LIMIT_BYTES = 64 << 20
TOKEN_LIMIT_BYTES = 1 << 20
CONNECTIONS = 4  # kept open for reuse; the number of threads that send at the same time
TRIES = 5
TIMEOUT_SECONDS = 15.0
LONGEST_WAIT_SECONDS = 30.0
_WARNING = re.compile(r'299 \S+ "((?:[^"\\]|\\.)*)"')  # RFC 7234, 5.5, in the form that the API server writes
_RENEW = "; the token or certificate is missing, expired or of another cluster: renew the credentials"
_ROLE = r"; bind a role with the verb \1 on \2 to this user, then check as this user: kubectl auth can-i --list"
_HINTS = (  # what to do about a status with this text; a quota or admission webhook refuses with 403 as well
    (401, "", _RENEW), (403, "system:anonymous", _RENEW), (403, r'cannot (\w+) resource "([^"]+)"', _ROLE),
)  # fmt: skip
AGAIN = (429, 500, 502, 503, 504)  # status while the API server is busy, starting or behind a load balancer


# Reason of a failed call, by the API server's status. The metric label `reason` has no other values.
REASONS = {
    0: "unreachable", 400: "invalid", 401: "unauthorized", 403: "forbidden", 404: "missing", 409: "conflict",
    410: "expired", 422: "invalid", 429: "busy",
}  # fmt: skip


Tally = defaultdict[tuple[str, ...], float]
"""What a thread that asks the API server counts, by metric family and the values of its labels; that thread writes."""


class AccessError(RuntimeError):
    """There is no API server or no credential; the message names the file or setting."""


class ApiError(RuntimeError):
    """The API server refused the request, or could not be reached (status 0); the message never contains a token."""

    def __init__(self, status: int, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status, self.reason = status, REASONS.get(status, "server")  # an unlisted status is a server error
        self.retry_after = retry_after


def connect(
    context: str | None = None, environment: Mapping[str, str] = os.environ, *,
    on_warning: Callable[[str], None] = lambda _text: None,
) -> Client:  # fmt: skip
    """Create a client from KUBECONFIG if set, else from the pod's service account, else from ~/.kube/config.

    No request is sent yet, but a credential plugin may run. Raises AccessError.
    """
    from kubernetes.client import Configuration
    from kubernetes.config import ConfigException
    from kubernetes.config.incluster_config import SERVICE_TOKEN_FILENAME, load_incluster_config
    from yaml import YAMLError

    configuration = Configuration()
    token, source = Path(SERVICE_TOKEN_FILENAME), environment.get("KUBECONFIG", "")
    try:
        if source.strip(os.pathsep):
            namespace = _read_kubeconfig(configuration, source, context)
        elif token.exists() and environment.get("KUBERNETES_SERVICE_HOST"):
            source = str(token.parent)
            load_incluster_config(configuration)
            namespace_file = token.with_name("namespace")
            namespace = _read_text(namespace_file) if namespace_file.exists() else "default"
        elif (home := Path(environment.get("HOME", "/")) / ".kube/config").exists():
            source = str(home)
            namespace = _read_kubeconfig(configuration, source, context)
        else:
            reason = "not in a pod, KUBECONFIG is not set, and there is no ~/.kube/config"
            raise AccessError(f"no Kubernetes API server: {reason}")
    except (ConfigException, OSError) as error:
        raise AccessError(f"{source}: {error}") from None
    except (YAMLError, AttributeError, KeyError, TypeError, ValueError) as error:  # the library does not check types
        raise AccessError(f"{source}: is not a kubeconfig: {type(error).__name__}: {error}") from None
    return Client(configuration, namespace=namespace, on_warning=on_warning)


def _read_kubeconfig(configuration: Configuration, paths: str, context: str | None) -> str:
    """Fill in the configuration; return the namespace of the current or the named context.

    The library does not implement these kubectl rules: of several files, the first with a current context determines
    it; a token file is read before every request; it would ignore that a user impersonates another one.
    """
    from kubernetes.config.kube_config import KubeConfigLoader, KubeConfigMerger

    merged = KubeConfigMerger(paths)
    if merged.config is None:
        raise FileNotFoundError("No such file or directory")
    currents = (config.get("current-context") for config in merged.config_files.values())
    name = context or next(filter(None, currents), None)
    if name not in (contexts := [each["name"] for each in merged.config["contexts"].value]):
        kind = InputError if context else AccessError
        raise kind(f"{paths}: no context named {name!r}; there are: {', '.join(map(str, contexts)) or 'none'}")
    loader = KubeConfigLoader(merged.config, active_context=name, config_base_path=None)
    loader.load_and_set(configuration)
    active = loader.current_context["context"]
    if not configuration.host.startswith(("https://", "http://")):
        raise AccessError(f"{paths}: server is {configuration.host!r}: must begin with https:// or http://")
    entry = merged.config["users"].get_with_name(active.get("user"), safe=True)
    user = entry["user"].value if entry else {}
    if user.get("as"):
        raise AccessError(f"{paths}: the user impersonates {user['as']!r} (as), which this client does not support")
    if user.get("tokenFile") and not user.get("token"):
        token = Path(entry.path).parent / user["tokenFile"]
        configuration.refresh_api_key_hook = lambda one: one.api_key.update(BearerToken=f"Bearer {_read_text(token)}")
    if user.get("exec") and not (configuration.api_key or configuration.cert_file):
        command = user["exec"].get("command")
        raise AccessError(f"{paths}: the credential plugin {command} gave no credentials; its error is in the log")
    return active.get("namespace") or "default"


def _read_text(path: Path) -> str:
    return bounded.read_text(path, TOKEN_LIMIT_BYTES).strip()


class Client:
    """A connection to one API server. Instances can be shared between threads."""

    def __init__(
        self, configuration: Configuration, *, namespace: str = "default", timeout_seconds: float = TIMEOUT_SECONDS,
        tries: int = TRIES, on_warning: Callable[[str], None] = lambda _text: None,
    ) -> None:  # fmt: skip
        from kubernetes.client import ApiClient

        configuration.retries = False  # urllib3 would repeat requests that may have been executed, and follow redirects
        configuration.connection_pool_maxsize = CONNECTIONS
        self.namespace = namespace
        self.server = configuration.host
        self._on_warning = on_warning
        self._timeout, self._tries = timeout_seconds, tries
        self._api = ApiClient(configuration)
        self._api.user_agent = f"topoflight/{version()}"

    def close(self) -> None:
        """Close all connections."""
        self._api.close()

    def limited(self, *, tries: int, timeout_seconds: float | None = None) -> Client:
        """Return a client of the same server with other limits."""
        other = copy.copy(self)
        other._tries, other._timeout = tries, timeout_seconds or self._timeout
        return other

    def brief(self) -> Client:
        """Return a client for interactive calls: two attempts within 11 s (2.5 s to connect, 5 s to answer)."""
        return self.limited(tries=2, timeout_seconds=2.5)

    def token(self) -> str:
        """Return the bearer token of the next request; empty without one. Raises ApiError."""
        headers: dict[str, str] = {}
        self._authorize(headers)
        return headers.get("authorization", "").partition(" ")[2]

    def get(self, path: str) -> Json:
        """Read one object."""
        return self.request("GET", path)[1]

    def items(self, path: str, query: Mapping[str, Any] | None = None) -> Iterator[Json]:
        """Return all objects, page by page. If the list expires (410), it is returned once more from its start."""
        parameters, restarted = {**(query or {}), "limit": PAGE}, False
        while True:
            try:
                page = self.request("GET", path, query=parameters)[1]
            except ApiError as error:
                if error.status != 410 or restarted or "continue" not in parameters:
                    raise
                restarted = bool(parameters.pop("continue"))
                continue
            yield from page.get("items") or ()
            if not (following := (page.get("metadata") or {}).get("continue")):
                return
            parameters["continue"] = following

    def apply(self, path: str, document: Json, *, dry_run: bool = False) -> tuple[bool, Json]:
        """Server-side apply: set our fields to those of `document` and leave the fields of other managers.

        Returns whether the object was created, and the object.
        """
        query = {**WRITE, "force": "true", **(DRY_RUN if dry_run else {})}
        status, applied = self.request("PATCH", path, query=query, body=document, content_type=APPLY)
        return status == 201, applied

    def create(self, path: str, document: Json, *, repeatable: bool = False, dry_run: bool = False) -> Json:
        """Create an object with POST; retry after an unclear failure only if `repeatable` (reviews)."""
        query = {**WRITE, **(DRY_RUN if dry_run else {})}
        return self.request("POST", path, query=query, body=document, repeatable=repeatable)[1]

    def request(self, method: str, path: str, *, repeatable: bool = True, **options: Any) -> tuple[int, Json]:
        """Return the status and object of the first conclusive answer. Raises ApiError."""
        again = (0, *AGAIN) if repeatable else (429,)  # 429: refused before any change was made
        for attempt in range(self._tries - 1):
            try:
                return self._once(method, path, **options)
            except ApiError as error:
                if error.status not in again:
                    raise
                seconds = choose_backoff(attempt, error.retry_after)
                log.info("%s; again in %.1f s", error, seconds)
                time.sleep(seconds)
        return self._once(method, path, **options)

    def _once(
        self, method: str, path: str, *, query: Mapping[str, Any] | None = None, body: Json | None = None,
        content_type: str = JSON,
    ) -> tuple[int, Json]:  # fmt: skip
        from kubernetes.client import ApiException
        from urllib3.exceptions import HTTPError

        headers = {"Accept": JSON, "User-Agent": self._api.user_agent}
        headers |= {"Content-Type": content_type} if body else {}
        self._authorize(headers)
        url = self.server + path + ("?" + self._api.parameters_to_url_query(dict(query), None) if query else "")
        limits = (self._timeout, self._timeout * 2)  # to connect, and of a silence in the answer
        try:
            answer = self._api.call_api(method, url, headers, body, _request_timeout=limits).response
            raw = answer.read(BODY_LIMIT_BYTES + 1)
        except (HTTPError, ApiException) as error:  # the library raises the latter for TLS errors
            raise ApiError(0, f"{self.server} cannot be reached: {getattr(error, 'reason', None) or error}") from None
        answer.release_conn()
        if len(raw) > BODY_LIMIT_BYTES:
            raise ApiError(answer.status, f"{path}: the answer is larger than {BODY_LIMIT_BYTES} bytes")
        if not 200 <= answer.status < 300:
            raise _make_error(path, answer.status, raw, answer.headers)
        if (value := json_object(raw)) is None:
            raise ApiError(answer.status, f"{path}: the response is not a JSON object")
        for header in answer.headers.getlist("Warning"):
            for text in _WARNING.findall(header):
                self._on_warning(re.sub(r"\\(.)", r"\1", text))
        return answer.status, value

    def _authorize(self, headers: dict[str, str]) -> None:
        """Add the credentials, which the library renews when they expire. Raises ApiError."""
        from kubernetes.config import ConfigException

        try:
            self._api.update_params_for_auth(headers, [], ["BearerToken"], "", "", None)
        except (ConfigException, OSError, ValueError) as error:
            raise ApiError(0, f"the credentials for {self.server} cannot be read: {error}") from None


def choose_backoff(attempt: int, retry_after: float | None = None) -> float:
    """Return the pause before a retry: doubled from 0.5 s, with jitter so that agents spread; at least Retry-After."""
    spread = random.uniform(0.5, 1.5)  # noqa: S311 - no secret
    doubling = min(LONGEST_WAIT_SECONDS, 0.5 * 2.0 ** min(attempt, 16)) * spread
    return max(doubling, min(retry_after or 0.0, 10 * LONGEST_WAIT_SECONDS) * max(1.0, spread))


def make_path(group_version: str, resource: str, name: str = "", *, namespace: str | None = None, sub: str = "") -> str:
    """Return the URL path of a resource; names are quoted, so that no name can add path segments."""
    root = "/api/v1" if group_version == "v1" else f"/apis/{group_version}"
    parts = ["namespaces", quote(namespace, safe="")] if namespace else []
    parts += [resource] + ([quote(name, safe="")] if name else []) + ([sub] if sub else [])
    return "/".join([root, *parts])


def json_object(raw: bytes | str) -> Json | None:
    """Parse a JSON object; None for everything else."""
    try:
        value = json.loads(raw)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _make_error(path: str, status: int, raw: bytes, headers: Mapping[str, str]) -> ApiError:
    """Create an error from a Status document, or from the response of a proxy."""
    body = json_object(raw) or {"message": raw[:200].decode(errors="replace").strip()}
    unserved = status == 404 and not (body.get("details") or {}).get("name")
    text = f"the API server says {status}: {body.get('message')}"
    hints = (found.expand(hint) for code, words, hint in _HINTS if code == status and (found := re.search(words, text)))
    hint = f"; this cluster may lack the definition of {path}" if unserved else next(hints, "")
    after = headers.get("Retry-After", "")
    return ApiError(status, text + hint, retry_after=float(after) if after.isdecimal() else None)
