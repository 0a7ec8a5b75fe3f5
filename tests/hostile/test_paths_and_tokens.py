"""Paths stay in the folders given, tokens stay out of every output, and hostile names stay data.

Modules of the current folder are not imported by what we start; a user's own script keeps the folder it lies in.
"""

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import resident
import urllib3
import yaml
from hypothesis import given, settings, strategies as st
from rigs.agents import TOKEN, agent, bearer, token_file
from rigs.recorded import path_of
from rigs.tables import each_row
from scanned import scan

from agent.base import result_store
from agent.base.output import write_atomic
from collectives.bench import processes
from contracts.run_record import record_of
from planner.kubernetes.manifests import APIS, JobError, JobSpec, from_template, render
from planner.nccl_env.environment import RenderError, render_settings
from planner.nccl_env.situation import Reason, Setting
from probes.host import sysfs
from probes.host.recording import RecordedHost

MACHINE = "titan-rtx-2x-nv2"
EVIL = '<script>alert(1)</script>"\n# HELP x y\nx{a="b"} 1\n---\nkind: Evil\n'

# --- paths


def test_a_report_replaces_a_link_and_never_follows_it(tmp_path):
    """A user who may write into the report's folder cannot overwrite a file elsewhere."""
    victim, link = tmp_path / "victim", tmp_path / "report.json"
    victim.write_text("precious")
    link.symlink_to(victim)
    write_atomic(link, "new")
    assert (victim.read_text(), link.read_text(), link.is_symlink()) == ("precious", "new", False)


def test_no_text_of_a_run_record_is_part_of_its_file_name(tmp_path):
    """In the agent's state folder; the name has time and process id only."""
    record = record_of({"status": "../../../x", "host": "../../etc", "started_at": "/etc/passwd"})
    path = result_store.store_run(record, tmp_path)
    assert path is not None and path.parent == tmp_path / result_store.RUNS_FOLDER
    assert re.fullmatch(r"[\w.-]+\.json", path.name)


@each_row("name", ["..", ".", "a/b", "a\0b", "", "x" * 129, "a\n", "../x"])
def test_no_name_from_the_machine_leads_out_of_its_folder(name: str) -> None:
    """Names that may become part of a path under /sys."""
    assert sysfs.NAME.fullmatch(name) is None


def test_no_http_endpoint_opens_a_file(tmp_path):
    """A model may be a path on the command line; over HTTP it is a name, and no answer shows whether a file exists."""
    there = tmp_path / "config.json"
    there.write_text('{"model_type": "llama", "hidden_size": "TOKEN"}')
    client, answers, missing = agent(MACHINE), set(), tmp_path / "missing.json"
    for model in (str(there), str(tmp_path), str(missing), "../../../etc/passwd", "file:///etc/passwd"):
        for path in ("/recommendations", "/what-if"):
            answer = client.get(path, params={"model": model})
            assert answer.status_code == 400
            assert "TOKEN" not in answer.text
            answers.add(re.sub(r"'.*?'|&#39;.*?&#39;|value=\".*?\"", "", answer.text)[:60])
    assert len(answers) <= 2  # the same words whether the file is there or not
    for path in ("/../etc/passwd", "/%2e%2e/etc/passwd", "/static/../../etc/passwd", "//etc/passwd", "/docs/../../x"):
        assert client.get(path).status_code == 404


# --- names


def test_a_hostile_host_name_stays_text_in_every_format(tmp_path):
    """Page, metrics and JSON of a machine that calls itself a script, a metric and a document."""
    content = json.loads(path_of(MACHINE).read_text())
    content["hostname"] = content["answers"].setdefault("identity", {}).setdefault("", {})["hostname"] = EVIL
    record = {"status": EVIL, "model": {"name": EVIL}, "reason": EVIL, "layout": {"family": EVIL}, "host": EVIL}
    result_store.store_run(record_of(record), tmp_path)
    running = agent(scan(RecordedHost(content)), tmp_path)
    for path in ("/", "/what-if", "/cluster"):
        assert "<script>alert" not in running.get(path).text, path
    lines = running.get("/metrics").text.splitlines()
    assert 'x{a="b"} 1' not in lines and "# HELP x y" not in lines
    assert running.get("/snapshot").json()["hostname"] == EVIL


ANY = st.text(max_size=60)


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(words=st.lists(ANY, min_size=1, max_size=3), value=ANY, network=ANY, file=ANY)
def test_manifests_hold_any_text_as_data(words: list[str], value: str, network: str, file: str) -> None:
    """What is rendered reads back as exactly what was meant: no text opens a key, a document or a tag."""
    try:
        spec = JobSpec(
            name="job", image="i", nodes=2, processes_per_node=1, command=tuple(words), environment={"NCCL_X": value},
            networks=(network,), config_map="settings",
        )  # fmt: skip
        of_jobs = (one for api in APIS.values() for one in api(spec))
        documents = (*of_jobs, *from_template("config_map", spec=spec, files={"a.yaml": file}))
    except JobError:
        return
    try:
        text = render(documents)
    except (UnicodeEncodeError, yaml.YAMLError):
        return
    assert list(yaml.safe_load_all(text)) == [json.loads(json.dumps(document)) for document in documents]


@settings(max_examples=40, deadline=None)
@given(value=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=40))
def test_values_stay_values_in_shell_and_env_lists(value: str) -> None:
    """A value from a machine that calls its interface $(reboot) is set, not run."""
    setting = Setting(name="NCCL_SOCKET_IFNAME", value=value, reason=Reason(rule="r", evidence="e", source="s"))
    try:
        shell, listed = render_settings([setting], "shell"), render_settings([setting], "k8s")
    except RenderError:
        assert set(value) & set("\n\r\0")
        return
    done = subprocess.run(
        ["sh", "-c", f'{shell}printf %s "$NCCL_SOCKET_IFNAME"'], capture_output=True, check=True,
        env={"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8"},
    )  # fmt: skip
    assert done.stdout == value.encode()
    assert yaml.safe_load(listed) == [{"name": "NCCL_SOCKET_IFNAME", "value": value}]


# --- tokens


def test_no_token_leaves_the_agent(tmp_path):
    """A real agent with -vv; tokens in every place of a request; all of its output is searched."""
    tokens = token_file(tmp_path)
    port = resident.free_port()
    log = tmp_path / "log"
    command = [sys.executable, "-m", "agent.cli", "-vv", "serve", f"--host={path_of(MACHINE)}", f"--port={port}",
               "--reads=token", f"--token-file={tokens}", f"--state={tmp_path}"]  # fmt: skip
    answers = []
    with resident.process(command, log=log) as agent:
        url, wrong = f"http://127.0.0.1:{port}", TOKEN[::-1]
        pool = urllib3.PoolManager(retries=False)
        resident.wait(port, "/readyz", agent)
        for token in (TOKEN, wrong):
            for header in (f"Bearer {token}", f"bearer  {token} ", f"Basic {token}", token, f"Bearer {token}\tx"):
                for method, path in (("GET", "/snapshot"), ("GET", "/metrics"), ("POST", "/preflight"),
                                     ("POST", "/runs"), ("PUT", "/x")):  # fmt: skip
                    answers.append(pool.request(method, url + path, headers={"Authorization": header}, body=b"{}").data)
            answers.append(pool.request("GET", f"{url}/snapshot?access_token={token}").data)
            headers = {**bearer(), "Content-Type": "application/json", "Cookie": f"t={token}"}
            body = json.dumps({"token": token}).encode()
            answers.append(pool.request("POST", f"{url}/preflight", body=body, headers=headers).data)
            with socket.create_connection(("127.0.0.1", port)) as raw:
                raw.sendall(f"GET /snapshot HTTP/1.1\r\nAuthorization Bearer {token}\r\n\r\n".encode())
                answers.append(raw.recv(65536))
        good = {**bearer(), "Content-Type": "application/json"}
        answers.append(pool.request("POST", f"{url}/preflight", body=b"{}", headers=good).data)
        opened = pool.request("GET", f"{url}/snapshot", headers=bearer())
        assert opened.status == 200  # so that the right token was looked for
    output = log.read_bytes()
    assert b"by token-file" in output  # so that there was something to search
    for token in (TOKEN.encode(), wrong.encode()):
        assert token not in output
        assert not any(token in answer for answer in answers)


SHADOWED = ("torch", "numpy", "json")


def folder_with_modules(folder: Path) -> Path:
    """A current folder, whose modules leave a marker in it when they are imported."""
    folder.mkdir()
    for name in SHADOWED:
        (folder / f"{name}.py").write_text(f"open({str(folder / 'imported')!r}, 'a').write({name!r})\n")
    return folder


def test_a_process_tree_does_not_import_from_the_current_folder(tmp_path, monkeypatch):
    """Neither the Python that is started nor the one that it starts; the same Python without the tree does."""
    folder = folder_with_modules(tmp_path / "here")
    monkeypatch.chdir(folder)
    words = [sys.executable, "-c", "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import numpy'])"]
    with (tmp_path / "log").open("wb") as log:
        tree = processes.Tree(words, os.environ, log)
        ended = tree.wait(time.monotonic() + 60, threading.Event())
    assert ended == "" and not (folder / "imported").exists(), (tmp_path / "log").read_text()
    subprocess.run(words, check=True)
    assert (folder / "imported").exists()


JOB = ("--no-preflight", "--ranks", "1", "--output", "out")
ONE_STEP = ("--set", "max_steps=1", "--set", "dataset_rows=8", "--set", "eval_strategy=no")


@pytest.mark.ranks
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "words",
    [
        ("launch", *JOB, "--script", "{0}/own/train.py"),
        *(
            pytest.param(words, marks=pytest.mark.nightly)
            for words in (
                ("bench", "--quick", "--ranks", "1"),  # by processes.Tree, as above
                ("calibrate", "--model", "tiny-llama", "--budget", "60"),  # in the child process that bench has
                ("recommend", "--config", "{0}/config.yaml"),
                ("launch", *JOB, *ONE_STEP),
            )
        ),
    ],
    ids=lambda words: f"{words[0]} {words[-1]}".replace("/", ""),
)
def test_no_verb_imports_from_the_current_folder(tmp_path: Path, words: tuple[str, ...]) -> None:
    """Each verb that starts Python, from a folder of such modules; the script has its own module in its folder."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "helper.py").write_text("WORD = 'of its own folder'\n")
    (tmp_path / "own" / "train.py").write_text("import helper, torch\nprint(helper.WORD, torch.__version__)\n")
    (tmp_path / "rows.jsonl").write_text('{"text": "one"}\n')
    (tmp_path / "config.yaml").write_text(f"dataset_name: {tmp_path}/rows.jsonl\ntokenizer_name: builtin:bytes\n")
    folder = folder_with_modules(tmp_path / "here")
    environment = {**os.environ, "TOPOFLIGHT_STATE": str(tmp_path / "state"), "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, "-P", "-m", "agent.cli", *(word.format(tmp_path) for word in words)]
    done = subprocess.run(argv, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert not (folder / "imported").exists()
    assert "--script" not in words or "own folder" in (folder / "out" / "job.log").read_text()
