"""The way to the API server: KUBECONFIG with several files, merged as kubectl merges them, and what a user may hold."""

import json
import os
import ssl
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from api_server import ApiServer, write_kubeconfig
from kubernetes.config import incluster_config
from rigs.command import python
from rigs.serving import Asked, answering

from agent.base.options import InputError
from agent.cluster.client import AccessError, ApiError, Client, connect, make_path
from agent.cluster.nodes import API_VERSION, PLURAL

NODES = make_path(API_VERSION, PLURAL)


def config(path: Path, *, current: str | None = None, **entries: dict[str, dict]) -> Path:
    """A kubeconfig with these contexts, clusters and users by name."""
    kinds = {"contexts": "context", "clusters": "cluster", "users": "user"}
    whole: dict = {
        kind: [{"name": name, kinds[kind]: value} for name, value in entries[kind].items()] for kind in entries
    }
    if current is not None:
        whole["current-context"] = current
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(whole))
    return path


def several(*paths: Path) -> dict[str, str]:
    return {"KUBECONFIG": os.pathsep.join(map(str, paths)), "HOME": "/nonexistent"}


def client_as(tmp_path: Path, user: dict, **cluster) -> Client:
    """A client by a kubeconfig with this one user."""
    path = config(
        tmp_path / "config", current="c", contexts={"c": {"cluster": "k", "user": "u"}},
        clusters={"k": {"server": "http://127.0.0.1:9", **cluster}}, users={"u": user},
    )  # fmt: skip
    return connect(environment=several(path))


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    """The clusters and a user in one file; contexts, the user's namesake and a token file in another folder."""
    first = config(
        tmp_path / "one/config", current="",
        clusters={"lab": {"server": "http://lab:1"}}, users={"ann": {"token": "of the first"}},
    )  # fmt: skip
    second = config(
        tmp_path / "two/config", current="work",
        contexts={"work": {"cluster": "lab", "user": "ann", "namespace": "team"},
                  "home": {"cluster": "lab", "user": "bob"}},
        clusters={"lab": {"server": "http://other:2"}},
        users={"ann": {"token": "of the second"}, "bob": {"tokenFile": "secret"}},
    )  # fmt: skip
    (tmp_path / "two/secret").write_text("from a file beside it\n")
    return first, second


@pytest.fixture
def heard():
    """The URL of a server that answers everything with an empty object, and what it was asked."""
    with answering() as found:
        yield found


def test_files_are_merged_as_kubectl_merges_them(tmp_path: Path, two: tuple[Path, Path]) -> None:
    """Of each name the first file that has it, whole; the first current context, where the library takes the last."""
    found = connect(environment=several(*two))
    assert (found.server, found.token(), found.namespace) == ("http://lab:1", "of the first", "team")
    turned = connect(environment=several(*reversed(two)))
    assert (turned.server, turned.token()) == ("http://other:2", "of the second")
    assert connect(environment=several(config(tmp_path / "mine", current="home"), *two)).namespace == "default"
    bare = config(tmp_path / "bare", users={"ann": {}})
    assert connect(environment=several(bare, *two)).token() == "", "nothing of the namesake is mixed in"
    assert connect("home", several(*two)).token() == "from a file beside it", "paths are relative to their own file"


def test_a_missing_file_is_left_out_and_a_broken_one_is_named(tmp_path: Path, two: tuple[Path, Path]) -> None:
    """As kubectl does; where none is there, all are named."""
    away, gone = tmp_path / "away", tmp_path / "gone"
    assert connect(environment=several(away, *two)).server == "http://lab:1"
    with pytest.raises(AccessError, match=f"{away}{os.pathsep}{gone}: .*No such file"):
        connect(environment=several(away, gone))
    for content in ("[1, 2]", "clusters: 7", "contexts: [a]", "a: [", "users: {a: b}"):
        away.write_text(content)
        with pytest.raises(AccessError, match=str(away)):
            connect(environment=several(away))


def test_what_leads_to_no_server_is_said(tmp_path: Path, two: tuple[Path, Path]) -> None:
    """A context in none of the files, an address that is no URL, before a token is sent; neither a pod nor a file."""
    with pytest.raises(InputError, match=f"{two[0]}{os.pathsep}{two[1]}: no context named 'x'"):
        connect("x", several(*two))
    with pytest.raises(AccessError, match="must begin with https://"):
        client_as(tmp_path, {"token": "t"}, server="ftp://x")
    with pytest.raises(AccessError, match=r"no Kubernetes API server: not in a pod"):
        connect(environment={"HOME": str(tmp_path)})


def test_impersonation_is_refused(tmp_path: Path) -> None:
    """Without the headers of `as` a request would have the rights of the user behind it."""
    with pytest.raises(AccessError, match="impersonates 'ann'"):
        client_as(tmp_path, {"token": "t", "as": "ann"})


def test_a_proxy_is_used(tmp_path: Path, heard: tuple[str, list[Asked]]) -> None:
    """proxy-url of the cluster: the server's own name is never looked up here."""
    client = client_as(tmp_path, {"token": "t"}, server="http://api.cluster.invalid:1", **{"proxy-url": heard[0]})
    assert client.get("/x") == {}
    assert ("Host", "api.cluster.invalid:1") in heard[1][0].headers


def plugin(tmp_path: Path, status: dict, code: int = 0) -> dict:
    """A user whose credential plugin answers with this, and counts how often it is asked."""
    path = tmp_path / "plugin"
    told = {"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": status}
    path.write_text(
        f"#!{sys.executable}\nimport pathlib, sys\nwith pathlib.Path({str(tmp_path / 'asked')!r}).open('a') as f:\n"
        f"    f.write('x')\nprint({json.dumps(told)!r})\nsys.exit({code})\n"
    )
    path.chmod(0o755)
    return {"exec": {"command": str(path), "apiVersion": "client.authentication.k8s.io/v1", "args": []}}


def test_a_credential_plugins_token_is_used_until_it_ends(tmp_path: Path) -> None:
    """One that holds is not asked for again; one that ends soon is, before the next request."""
    client = client_as(tmp_path, plugin(tmp_path, {"token": "t", "expirationTimestamp": "2126-01-01T00:00:00Z"}))
    assert [client.token() for _ in range(3)] == ["t"] * 3
    assert (tmp_path / "asked").read_text() == "x"
    client = client_as(tmp_path, plugin(tmp_path, {"token": "t", "expirationTimestamp": "2020-01-01T00:00:00Z"}))
    assert client.token() == "t" and (tmp_path / "asked").read_text() == "xxx"


def test_a_credential_plugin_that_fails_or_is_missing_is_named(tmp_path: Path) -> None:
    """And nothing goes out without credentials."""
    missing = {"exec": {"command": "no-such-plugin", "apiVersion": "client.authentication.k8s.io/v1"}}
    for user, name in ((missing, "no-such-plugin"), (plugin(tmp_path, {"token": "t"}, code=1), "plugin")):
        with pytest.raises(AccessError, match=f"{name} gave no credentials"):
            client_as(tmp_path, user)


def test_no_model_is_imported(tmp_path: Path, heard: tuple[str, list[Asked]]) -> None:
    """The models of every API group, and the asyncio twin of the client, would cost as much again."""
    path = write_kubeconfig(tmp_path / "config", heard[0])
    code = "import sys; from agent.cluster.client import connect; connect().get('/x'); print(*sys.modules)"
    loaded = python(code, **several(path)).stdout.split()
    assert "kubernetes.client.api_client" in loaded and len(heard[1]) == 1
    assert not [name for name in loaded if name.startswith(("kubernetes.client.models.", "kubernetes.client.api."))]
    assert not {"aiohttp", "kubernetes.aio"}.intersection(loaded)


def test_a_token_file_that_goes_is_an_api_error(tmp_path: Path) -> None:
    """Its name, and no traceback: a publisher waits and tries again."""
    token = tmp_path / "token"
    token.write_text("t\n")
    client = client_as(tmp_path, {"tokenFile": str(token)})
    token.unlink()
    with pytest.raises(ApiError, match=f"credentials for .* cannot be read: .*{token}") as caught:
        client.limited(tries=1).get("/x")
    assert caught.value.status == 0


def test_in_a_pod_the_service_account_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its token, its namespace, and the address that the kubelet put into the environment."""
    for name, content in (("token", "pod-token"), ("ca.crt", "x"), ("namespace", "ns\n")):
        (tmp_path / name).write_text(content)
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(tmp_path / "ca.crt"))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    found = connect(environment={"KUBERNETES_SERVICE_HOST": "fd00::1", "HOME": "/nonexistent"})
    assert (found.server, found.token(), found.namespace) == ("https://[fd00::1]:443", "pod-token", "ns")


def test_a_server_is_trusted_by_its_certificate_alone(tmp_path: Path) -> None:
    """One that nobody vouches for is refused by name, and is sent no token; with its authority it is answered."""
    words = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "1",
             "-subj", "/CN=api", "-addext", "subjectAltName=IP:127.0.0.1"]  # fmt: skip
    files = ["-keyout", str(tmp_path / "key.pem"), "-out", str(tmp_path / "ca.pem")]
    subprocess.run(["openssl", *words, *files], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "ca.pem", tmp_path / "key.pem")
    with ApiServer() as api:
        api._server.socket = context.wrap_socket(api._server.socket, server_side=True)
        way = {"server": api.url.replace("http:", "https:")}
        with pytest.raises(ApiError, match="certificate"):
            client_as(tmp_path, {"token": "agent-token"}, **way).limited(tries=1).get(NODES)
        assert api.requests == []
        trusting = client_as(tmp_path, {"token": "agent-token"}, **way, **{"certificate-authority": "ca.pem"})
        assert trusting.get(NODES)["items"] == []
