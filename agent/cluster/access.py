"""Where the Kubernetes API server is, and who we are to it.

Specifications: the files of a pod's service account (kubernetes.io, "Accessing the Kubernetes API from a Pod"), the
kubeconfig file (client-go, tools/clientcmd/api/v1), and credential plugins (client.authentication.k8s.io).
"""

from __future__ import annotations

import base64
import json
import os
import ssl
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contracts import bounded
from contracts.yaml_text import YamlTextError, load_all

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
FILE_LIMIT_BYTES = 1 << 20
MOST_ALIASES = 16  # kubectl writes none
PLUGIN_SECONDS = 60
PLUGIN_TOKEN_SECONDS = 300  # the shortest-lived in use, EKS's, last 15 minutes


class AccessError(RuntimeError):
    """No API server to speak to, or no way in; says which file or setting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """One API server, and how to prove who we are."""

    server: str  # "https://10.0.0.1:443"
    tls: ssl.SSLContext | None = None  # None for plain http
    token: Callable[[], str | None] = lambda: None  # asked before each request: a pod's token is replaced every hour
    namespace: str = "default"
    source: str = ""  # where this was found, for error messages


def find(context: str | None = None, environment: Mapping[str, str] = os.environ) -> Access:
    """KUBECONFIG where it is set, else the pod's service account, else ~/.kube/config."""
    named = [Path(word) for word in environment.get("KUBECONFIG", "").split(os.pathsep) if word]
    if named:
        there = [path for path in named if path.exists()]  # of several, as kubectl does: what is missing is left out
        return from_kubeconfig(*(there or named[:1]), context=context)
    if (ACCOUNT / "token").exists() and environment.get("KUBERNETES_SERVICE_HOST"):
        return in_cluster(environment)
    home = Path(environment.get("HOME", "/")) / ".kube/config"
    if home.exists():
        return from_kubeconfig(home, context=context)
    raise AccessError("no Kubernetes API server: not in a pod, KUBECONFIG is not set, and there is no ~/.kube/config")


def in_cluster(environment: Mapping[str, str] = os.environ, account: Path = ACCOUNT) -> Access:
    """From the service account that is mounted into each pod."""
    host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise AccessError("KUBERNETES_SERVICE_HOST is not set: this is no pod")
    place = f"[{host}]" if ":" in host else host
    namespace = account / "namespace"
    return Access(
        server=f"https://{place}:{port}",
        tls=ssl.create_default_context(cafile=str(account / "ca.crt")),
        token=_token_file(account / "token"),
        namespace=_read(namespace).strip() if namespace.exists() else "default",
        source=str(account),
    )


def from_kubeconfig(*paths: Path, context: str | None = None) -> Access:
    """From kubeconfigs: certificate, token, token file or credential plugin of the current or the named context.

    Several files are merged as kubectl does: the first that has an entry of a name, or a current context, wins.
    """
    files = [(path, _mapping(path)) for path in paths]
    current = next((whole["current-context"] for _, whole in files if whole.get("current-context")), None)
    _, chosen = _named(files, "context", context or current)
    place, cluster = _named(files, "cluster", chosen.get("cluster"))
    home, user = _named(files, "user", chosen.get("user"))
    server = cluster.get("server")
    if not isinstance(server, str) or not server.startswith(("https://", "http://")):
        raise AccessError(f"{place}: server is {server!r}: must begin with https:// or http://")
    return Access(
        server=server.rstrip("/"),
        tls=_tls(place, cluster, home, user) if server.startswith("https://") else None,
        token=_token(home, user),
        namespace=chosen.get("namespace") or "default",
        source=os.pathsep.join(map(str, paths)),
    )


def _mapping(path: Path) -> dict[str, Any]:
    try:
        whole = next(iter(load_all(_read(path), most_aliases=MOST_ALIASES)), None)
    except YamlTextError as error:
        raise AccessError(f"{path}: {error}") from None
    if not isinstance(whole, dict):
        raise AccessError(f"{path}: is no kubeconfig")
    return whole


def _named(files: Sequence[tuple[Path, Mapping[str, Any]]], kind: str, name: Any) -> tuple[Path, dict[str, Any]]:
    """The entry of this name, and its file: paths in it are relative to that one."""
    for path, whole in files:
        listed = whole.get(f"{kind}s")
        for entry in listed if isinstance(listed, list) else ():
            if isinstance(entry, dict) and entry.get("name") == name:
                found = entry.get(kind)
                return path, found if isinstance(found, dict) else {}
    raise AccessError(f"{os.pathsep.join(str(path) for path, _ in files)}: no {kind} named {name!r}")


def _tls(place: Path, cluster: Mapping[str, Any], home: Path, user: Mapping[str, Any]) -> ssl.SSLContext:
    authority = _material(place, cluster, "certificate-authority")
    try:
        context = ssl.create_default_context(cadata=authority.decode() if authority else None)
        if cluster.get("insecure-skip-tls-verify") is True:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        certificate, key = _material(home, user, "client-certificate"), _material(home, user, "client-key")
        if certificate and key:
            with tempfile.NamedTemporaryFile(prefix="topoflight-") as file:  # OpenSSL reads files only; mode 0600
                file.write(certificate + b"\n" + key)
                file.flush()
                context.load_cert_chain(file.name)
    except (ssl.SSLError, UnicodeDecodeError) as error:
        both = os.pathsep.join(dict.fromkeys((str(place), str(home))))
        raise AccessError(f"{both}: a certificate or key cannot be used: {error}") from None
    return context


def _material(path: Path, entry: Mapping[str, Any], name: str) -> bytes | None:
    """`name`-data in base64, or the file that `name` names, relative to the kubeconfig."""
    data = entry.get(f"{name}-data")
    if data:
        try:
            return base64.b64decode(str(data), validate=True)
        except ValueError as error:
            raise AccessError(f"{path}: {name}-data is no base64: {error}") from None
    file = entry.get(name)
    return _read(path.parent / str(file)).encode() if file else None


def _token(path: Path, user: Mapping[str, Any]) -> Callable[[], str | None]:
    if user.get("token"):
        token = str(user["token"])
        return lambda: token
    if user.get("tokenFile"):
        return _token_file(path.parent / str(user["tokenFile"]))
    if isinstance(user.get("exec"), dict):
        return _plugin(path, user["exec"])
    return lambda: None


def _token_file(path: Path) -> Callable[[], str | None]:
    return lambda: _read(path).strip()


def _plugin(path: Path, wanted: Mapping[str, Any]) -> Callable[[], str | None]:
    """The token of a credential plugin, such as `aws eks get-token`, asked for again every few minutes."""
    held: list[tuple[float, str]] = []

    def token() -> str | None:
        if not held or time.monotonic() - held[0][0] > PLUGIN_TOKEN_SECONDS:
            held[:] = [(time.monotonic(), _run_plugin(path, wanted))]
        return held[0][1]

    return token


def _run_plugin(path: Path, wanted: Mapping[str, Any]) -> str:
    words = [str(wanted.get("command")), *map(str, wanted.get("args") or ())]
    extra = {str(e["name"]): str(e["value"]) for e in wanted.get("env") or ()}
    version = str(wanted.get("apiVersion", "client.authentication.k8s.io/v1"))
    asked = {"apiVersion": version, "kind": "ExecCredential", "spec": {"interactive": False}}
    environment = {**os.environ, **extra, "KUBERNETES_EXEC_INFO": json.dumps(asked)}
    try:
        done = subprocess.run(words, env=environment, capture_output=True, timeout=PLUGIN_SECONDS, check=True)
        return str(json.loads(done.stdout)["status"]["token"])
    except FileNotFoundError:
        raise AccessError(f"{path}: credential plugin {words[0]} is not installed") from None
    except subprocess.SubprocessError as error:
        raise AccessError(f"{path}: credential plugin {words[0]} failed: {type(error).__name__}") from None
    except (ValueError, KeyError, TypeError):
        raise AccessError(f"{path}: credential plugin {words[0]} printed no token") from None


def _read(path: Path) -> str:
    try:
        return bounded.read_text(path, FILE_LIMIT_BYTES)
    except (OSError, ValueError) as error:
        raise AccessError(f"{path}: {error}") from None
