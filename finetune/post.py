"""Hand on a run record: to the agent of this node, and in short to the kubelet.

POST /runs (docs/http.md), by rank 0 at the end of the job; the container's termination message, by `finetune.pod`.

`python -m finetune.post RUN.JSON` uploads the record of a job that was killed before it could upload its own.
Surface: TOPOFLIGHT_AGENT, the agent's URL, without which nothing is sent; TOPOFLIGHT_AGENT_TOKEN_FILE, the file of a
bearer token, read at the end because the kubelet renews it. The record is in the output folder in any case, so a failed
upload is a line of the log and a note of the record, and changes no exit code. The token is sent to that URL only:
proxies are not used and redirects are not followed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import urllib3

from contracts import bounded, run_record
from contracts.run_record import MOST_RECORD_BYTES, dumps

if TYPE_CHECKING:
    from finetune.recorder import Recorder

log = logging.getLogger(__name__)

WHOLE_SECONDS = 20.0  # a pod that is told to end has 30 s by default
ONE_SECONDS = 5.0
TRIES = 3
PAUSE_SECONDS = 2.0  # for an agent that restarts or has not scanned yet
BUSY = (429, 503)
TERMINATION_LOG = Path("/dev/termination-log")  # the kubelet takes 4096 bytes of it into the pod's status
_MOST_TOKEN_BYTES = 16384
_MOST_ANSWER_BYTES = 4096
_URL = re.compile(r"https?://([A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?/?")
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]+")  # RFC 6750; a line break, for example, would start another header


class UploadError(Exception):
    """The agent does not have the record. The message says why and never holds the token."""


def upload_run_record(recorder: Recorder, *, seconds: float = WHOLE_SECONDS) -> None:
    """Send the finished record where an agent is configured. Return within `seconds`; raise nothing."""
    if not recorder.writes:
        return
    if text := send(dumps(recorder.record).encode(), seconds):
        log.warning("the agent does not have this run's record: %s", text)
        recorder.note(f"TOPOFLIGHT_AGENT: the agent does not have this record: {text}")
        with contextlib.suppress(OSError):
            recorder.write()


def send(body: bytes, seconds: float) -> str:
    """Send a record where an agent is configured. Return within `seconds` why the agent does not have it, or ""."""
    url = os.environ.get("TOPOFLIGHT_AGENT", "")
    if not url:
        return ""
    why = [f"no answer within {seconds:.0f} s"]

    def send_once() -> None:
        try:
            _send(url, body)
            why.clear()
        except UploadError as error:
            why[:] = [str(error)]

    # a thread, because neither name resolution nor an answer that arrives byte by byte has a time limit of its own
    thread = threading.Thread(target=send_once, name="run record upload", daemon=True)
    thread.start()
    thread.join(seconds)
    return "".join(tuple(why))


def main(path: str) -> int:
    """Send the record in this file. Return 1, with a line on stderr, where the agent does not have it afterwards."""
    try:
        why = send(bounded.read(path, MOST_RECORD_BYTES), ONE_SECONDS)  # the launcher may be about to be ended too
    except (OSError, ValueError) as error:
        why = str(error)
    if why:
        print(f"the agent does not have this run's record: {why}", file=sys.stderr)  # noqa: T201 - the command's own message
    return int(bool(why))


def written_at(output: Path | None) -> float:
    """A moment after the record that lies there was written, by the clock that wrote it; 0.0: there is none."""
    try:
        return (output / "run.json").stat().st_mtime + 1e-6 if output else 0.0
    except OSError:
        return 0.0


def write_termination_message(record: Path, place: Path, why: str = "", began: float = 0.0) -> None:
    """Write the record in short as this container's termination message: kubectl shows it, compare-networks reads it.

    `why` is the reason where the ranks failed before they could write a record; one from before `began` is not theirs.
    """
    found = run_record.of_start(record, began) or (run_record.RunRecord(status="failed", reason=why) if why else None)
    if found is None:
        return
    with contextlib.suppress(OSError):  # the record itself is in the output folder
        due = found.forecast.step_seconds
        short = {
            "status": found.status, "reason": (found.reason or "")[:500] or None, "started_at": found.started_at,
            "host": found.host, "steps_done": found.steps_done, "transports": found.transports[:12],
            "measured": {"step_seconds": found.measured.step_seconds, "counted_steps": found.measured.counted_steps},
            "nccl": {"interfaces": found.nccl.interfaces[:12]} if found.nccl else None,
            "plan": {"forecast": {"step_seconds": {"low": due.low, "mid": due.mid, "high": due.high} if due else None}},
        }  # fmt: skip
        place.write_text(json.dumps(short)[:4096])


def _send(url: str, body: bytes) -> None:
    if not _URL.fullmatch(url):
        raise UploadError("TOPOFLIGHT_AGENT must be http://HOST:PORT or https://HOST:PORT")
    token = _read_token()
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {token}"} if token else {})}
    for left in reversed(range(TRIES)):
        try:
            # urllib3's own retries log what the peer answered, in which a peer may repeat the token
            answer = urllib3.PoolManager().request(
                "POST", f"{url.rstrip('/')}/runs", body=body, headers=headers, timeout=ONE_SECONDS, retries=False,
                preload_content=False,
            )  # fmt: skip
            if answer.status < 300:
                return
            why = f"it answered {answer.status}{_detail_of(answer)}"
            last = not left or answer.status not in BUSY
        except urllib3.exceptions.HTTPError as error:
            why, last = str(error), not left
        if last:
            raise UploadError(_printable(why, token))
        time.sleep(PAUSE_SECONDS)


def _read_token() -> str:
    path = os.environ.get("TOPOFLIGHT_AGENT_TOKEN_FILE")
    if not path:
        return ""
    try:
        token = bounded.read(Path(path), _MOST_TOKEN_BYTES).decode("ascii").strip()
    except OSError as error:
        raise UploadError(f"TOPOFLIGHT_AGENT_TOKEN_FILE: {error}") from None
    except ValueError:
        token = ""
    if not _TOKEN.fullmatch(token):
        raise UploadError(f"TOPOFLIGHT_AGENT_TOKEN_FILE: {path} holds no bearer token")
    return token


def _detail_of(answer: urllib3.BaseHTTPResponse) -> str:
    """The `detail` of a problem document (RFC 9457), or "" where the answer is none."""
    with contextlib.suppress(ValueError, urllib3.exceptions.HTTPError):
        document = json.loads(answer.read(_MOST_ANSWER_BYTES))
        if isinstance(document, dict) and isinstance(document.get("detail"), str):
            return f": {document['detail']}"
    return ""


def _printable(text: str, token: str) -> str:
    """Text of another program as one line of a log: at most 400 characters, printable, and without the token."""
    hidden = text.replace(token, "TOKEN") if token else text
    return "".join(c if c.isprintable() else " " for c in hidden[:400])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
