"""Hand on a run record: to the agent of this node, and in short to the kubelet.

Rank 0 sends POST /runs (docs/reference/http-api.md) at its end; `finetune.pod` writes the termination message.

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
from pathlib import Path
from typing import TYPE_CHECKING

import urllib3

from contracts import bounded, plain, run_record

if TYPE_CHECKING:
    from finetune.recorder import Recorder

log = logging.getLogger(__name__)

WHOLE_SECONDS = 20.0  # the default terminationGracePeriodSeconds of a pod is 30 s
ONE_SECONDS = 5.0
TRIES = 3
PAUSE_SECONDS = 2.0  # for an agent that restarts or has not scanned yet
BUSY = (429, 503)
TERMINATION_LOG = Path("/dev/termination-log")  # the kubelet takes 4096 bytes of it into the pod's status
_MAX_TOKEN_BYTES = 16384
_URL = re.compile(r"https?://([A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?/?")
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]+")  # RFC 6750; a line break, for example, would start another header


def upload_run_record(recorder: Recorder, *, seconds: float = WHOLE_SECONDS) -> None:
    """Send the finished record where an agent is configured. Return within `seconds`; raise nothing."""
    if not recorder.writes:
        return
    if text := send(run_record.dumps(recorder.record).encode(), seconds):
        log.warning("the agent does not have this run's record: %s", text)
        recorder.note(f"TOPOFLIGHT_AGENT: the agent does not have this record: {text}")
        with contextlib.suppress(OSError):
            recorder.write()


def send(body: bytes, seconds: float) -> str:
    """Send a record where an agent is configured. Return within `seconds` why the agent does not have it, or ""."""
    url = os.environ.get("TOPOFLIGHT_AGENT", "")
    if not url:
        return ""
    answers: list[str] = []
    # a thread, because neither name resolution nor an answer that arrives byte by byte has a time limit of its own
    thread = threading.Thread(target=lambda: answers.append(_send(url, body)), name="run record upload", daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else f"no answer within {seconds:.0f} s"


def main(path: str) -> int:
    """Send the record in this file. Return 1, with a line on stderr, where the agent does not have it afterwards."""
    try:
        why = send(bounded.read(path, run_record.MAX_RECORD_BYTES), ONE_SECONDS)  # the launcher may be ended soon
    except (OSError, ValueError) as error:
        why = str(error)
    if why:
        print(f"the agent does not have this run's record: {why}", file=sys.stderr)  # noqa: T201 - the command's own message
    return int(bool(why))


def find_write_time(output: Path | None) -> float:
    """A moment after the record that lies there was written, by the clock that wrote it; 0.0: there is none."""
    try:
        return (output / "run.json").stat().st_mtime + 1e-6 if output else 0.0
    except OSError:
        return 0.0


def write_termination_message(record: Path, place: Path, why: str = "", began: float = 0.0) -> None:
    """Write the record in short as this container's termination message: kubectl shows it, compare-networks reads it.

    `why` is the reason where the ranks failed before they could write a record; one from before `began` is not theirs.
    """
    run = run_record.read_since(record, began) or (run_record.RunRecord(status="failed", reason=why) if why else None)
    if run is None:
        return
    short = {
        "status": run.status, "reason": (run.reason or "")[:500] or None, "started_at": run.started_at,
        "host": run.host, "steps_done": run.steps_done, "transports": run.transports[:12],
        "measured": {"step_seconds": run.measured.step_seconds, "counted_steps": run.measured.counted_steps},
        "nccl": {"interfaces": run.nccl.interfaces[:12]} if run.nccl else None,
        "plan": {"forecast": {"step_seconds": plain.write(run.plan.forecast.step_seconds)}},
    }  # fmt: skip
    with contextlib.suppress(OSError):  # the record itself is in the output folder
        place.write_text(json.dumps(short)[:4096])


def _send(url: str, body: bytes) -> str:
    """Return why the agent at `url` does not have the record, without the token; "" where it has."""
    if not _URL.fullmatch(url):
        return "TOPOFLIGHT_AGENT must be http://HOST:PORT or https://HOST:PORT"
    token, path = "", os.environ.get("TOPOFLIGHT_AGENT_TOKEN_FILE")
    if path:
        try:
            token = bounded.read(path, _MAX_TOKEN_BYTES).decode("ascii", errors="replace").strip()
        except (OSError, bounded.TooLargeError) as error:
            return f"TOPOFLIGHT_AGENT_TOKEN_FILE: {error}"
        if not _TOKEN.fullmatch(token):
            return f"TOPOFLIGHT_AGENT_TOKEN_FILE: {path} holds no bearer token"
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {token}"} if token else {})}
    # urllib3 logs a retry with what the peer answered, in which a peer may repeat the token
    logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)
    retries = urllib3.Retry(
        TRIES - 1, status_forcelist=BUSY, allowed_methods=None, backoff_factor=PAUSE_SECONDS, raise_on_status=False,
        respect_retry_after_header=False,
    )  # fmt: skip
    try:
        answer = urllib3.PoolManager().request(
            "POST", f"{url.rstrip('/')}/runs", body=body, headers=headers, timeout=ONE_SECONDS, retries=retries,
            redirect=False, preload_content=False,
        )  # fmt: skip
        problem = "" if answer.status < 300 else f"it answered {answer.status}"
    except urllib3.exceptions.HTTPError as error:
        problem = str(error)
    hidden = problem.replace(token, "TOKEN") if token else problem
    return "".join(c if c.isprintable() else " " for c in hidden[:400])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
