"""The job tells the agent of its node how the run ended: a real agent, and agents that are none."""

import json
import socket
import threading
import time
from pathlib import Path

import pytest
import resident
import torch
from rigs.command import interpreter
from rigs.serving import answering
from rigs.tables import ROOT, each_row

from contracts.job_config import JobPlan
from contracts.layout import Layout
from finetune import post
from finetune.recorder import Recorder

pytestmark = pytest.mark.ranks

MACHINE = ROOT / "tests/machines/titan-rtx-2x-nv2.json"
TOKEN = "hunter2-hunter2-hunter2-hunter2"  # noqa: S105 - of this test


@pytest.fixture
def token_file(tmp_path, monkeypatch):
    """The token as a volume of the pod holds it."""
    path = tmp_path / "token"
    path.write_text(TOKEN)
    monkeypatch.setenv("TOPOFLIGHT_AGENT_TOKEN_FILE", str(path))
    monkeypatch.delenv("RANK", raising=False)
    return path


@pytest.fixture
def note_of(tmp_path, token_file, monkeypatch, caplog):
    """End a run and tell the agent at `url`; what the record notes."""

    def end(url, **more):
        monkeypatch.setenv("TOPOFLIGHT_AGENT", url)
        recorder = Recorder(tmp_path, JobPlan(), Layout(world_size=1), torch.device("cpu"))
        recorder.end("complete", 0)
        post.upload_run_record(recorder, **more)
        written = json.loads((tmp_path / "run.json").read_text())
        assert TOKEN not in caplog.text + json.dumps(written)
        assert (written["status"], written["exit_code"]) == ("complete", 0)
        if written["notes"]:
            assert "the agent does not have this run's record" in caplog.text
        return " ".join(written["notes"])

    return end


def test_the_record_is_sent_with_the_token(note_of, tmp_path, monkeypatch):
    """To /runs, as it is in the folder; again after a 503, as before the first scan; through no proxy."""
    with answering() as (proxy, passed), answering((503, {}, b""), (201, {}, b"{}")) as (url, asked):
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy)
        assert note_of(url + "/") == ""
        assert passed == []
        _, sent = asked
    assert (sent.path, dict(sent.headers)["Authorization"]) == ("/runs", f"Bearer {TOKEN}")
    assert json.loads(sent.body) == json.loads((tmp_path / "run.json").read_text())


@each_row("status", [301, 302, 303, 307, 308, 403])
def test_a_refusal_is_told_by_its_status_and_no_redirect_is_followed(note_of, status):
    """Neither by the token nor by the record."""
    with answering() as (elsewhere, asked), answering((status, {"Location": elsewhere}, b"")) as (url, _):
        assert note_of(url).endswith(f"it answered {status}")
        assert asked == []


@each_row("content", [None, b"", b"a b", b"a\r\nX-Other: b", b"\xff\xfe", b"t" * 20_000])
def test_a_token_file_that_holds_none_sends_nothing(note_of, token_file, content):
    """No header is made of it, and none of it is told."""
    token_file.unlink(missing_ok=True)
    if content is not None:
        token_file.write_bytes(content)
    with answering() as (url, asked):
        note = note_of(url)
        assert "TOPOFLIGHT_AGENT_TOKEN_FILE" in note and "X-Other" not in note
        assert asked == []


NO_ADDRESSES = ("file:///etc/passwd", "agent", "http://", "ftp://a", "http://u:secret@a", "http://[a", "http://a\r\nb")
NO_PLACES = ("http://127.0.0.1:99999", f"http://{'a' * 70}.b", "http://..:1")


@each_row(
    ("url", "words"),
    [*((url, "must be http://HOST:PORT or https://HOST:PORT") for url in NO_ADDRESSES),
     *((url, "the agent does not have this record") for url in NO_PLACES)],
)  # fmt: skip
def test_an_address_name_or_port_that_cannot_be_is_a_note(note_of, url, words):
    """Whatever the libraries below make of it; without repeating an address, which may hold a password."""
    note = note_of(url)
    assert words in note and "secret" not in note


def test_nobody_there_is_a_note(note_of):
    """A node without an agent."""
    with socket.socket() as bound:  # and not listened on: no other process can take the port meanwhile
        bound.bind(("127.0.0.1", 0))
        assert "refused" in note_of(f"http://127.0.0.1:{bound.getsockname()[1]}")


def test_an_agent_that_never_answers_holds_the_job_up_for_a_bounded_time(note_of):
    """It takes the connection and says nothing, or a byte now and then for ever."""
    with socket.create_server(("127.0.0.1", 0)) as silent:

        def trickle():
            connection, _ = silent.accept()
            with connection:
                while True:
                    try:
                        connection.sendall(b"H")
                    except OSError:
                        return
                    time.sleep(0.2)

        threading.Thread(target=trickle, daemon=True).start()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert "no answer within 1 s" in note_of(url, seconds=1.0)


def test_only_rank_0_tells(note_of, monkeypatch):
    """And nobody where no agent is named."""
    with answering() as (url, asked):
        assert note_of("") == ""
        monkeypatch.setenv("TOPOFLIGHT_AGENT", url)
        monkeypatch.setenv("RANK", "1")
        layout = Layout(world_size=2, dp_shard=2)
        post.upload_run_record(Recorder(Path("nowhere"), JobPlan(), layout, torch.device("cpu")))
        assert asked == []


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.timeout(600)
def test_a_job_s_record_stands_in_the_agents_runs(tmp_path, token_file):
    """A real agent and a real job."""
    tokens, out = tmp_path / "tokens", tmp_path / "run"
    tokens.write_text(TOKEN + "\n")
    tokens.chmod(0o600)
    (tmp_path / "state").mkdir()
    with resident.agent(tmp_path, f"--host={MACHINE}", "--interval=3600", f"--token-file={tokens}") as (_, port, _):
        url = f"http://127.0.0.1:{port}"
        words = ("max_steps=2", "dataset_rows=64", "eval_strategy=no", "save_strategy=no", f"output_dir={out}")
        job = interpreter("-m", "finetune.train", *words, seconds=500, TOPOFLIGHT_AGENT=url)
        stored = json.loads(resident.get(port, "/runs")[1])
    assert job.returncode == 0, job.stderr
    assert stored == [{**json.loads((out / "run.json").read_text()), "posted_by": "token-file"}]
    assert (stored[0]["status"], stored[0]["steps_done"]) == ("complete", 2)
    assert "does not have" not in job.stderr and TOKEN not in job.stdout + job.stderr + str(stored)
