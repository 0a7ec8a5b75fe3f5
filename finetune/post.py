"""Tells the agent of this node how the run went: POST /flights (docs/http.md), by rank 0, at its end.

`python -m finetune.post FLIGHT.JSON` does it for a job that was killed before it could: its launcher's to run.
Surface: TOPOFLIGHT_AGENT, the agent's URL, without which nothing is sent; TOPOFLIGHT_AGENT_TOKEN_FILE, a bearer token,
read at the end because the kubelet renews it. The record stands in the output folder whatever happens here: what goes
wrong is a line of the log and of the record, and no exit code. The token goes to that URL alone: no proxy, no redirect.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import os
import re
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

from contracts import bounded
from contracts.run_record import MOST_RECORD_BYTES, dumps

if TYPE_CHECKING:
    from finetune.recorder import Recorder

log = logging.getLogger(__name__)

WHOLE_SECONDS = 20.0  # a pod that is told to end has 30 s by default
ONE_SECONDS = 5.0
TRIES = 3
PAUSE_SECONDS = 2.0  # an agent that restarts, or has no scan yet
AGAIN = (429, 503)
_MOST_TOKEN_BYTES = 16384
_MOST_ANSWER_BYTES = 4096
_URL = re.compile(r"https?://([A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?/?")
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]+")  # RFC 6750; anything else, a line's end say, would be another header


class _UntoldError(Exception):
    """The agent has not got the record; says why, and never holds the token."""


def tell(recorder: Recorder, *, seconds: float = WHOLE_SECONDS) -> None:
    """Send the record as it ended, where an agent is named; returns within `seconds`, and raises nothing."""
    if not recorder.writes:
        return
    if text := send(dumps(recorder.record).encode(), seconds):
        log.warning("the agent does not have this run's record: %s", text)
        recorder.note(f"TOPOFLIGHT_AGENT: the agent does not have this record: {text}")
        with contextlib.suppress(OSError):
            recorder.write()


def send(body: bytes, seconds: float) -> str:
    """Send a record, where an agent is named. Returns within `seconds` why the agent does not have it, else nothing."""
    url = os.environ.get("TOPOFLIGHT_AGENT", "")
    if not url:
        return ""
    why = [f"no answer within {seconds:.0f} s"]

    def once() -> None:
        try:
            _send(url, body)
            why.clear()
        except _UntoldError as error:
            why[:] = [str(error)]

    # a thread, because neither looking a name up nor an answer that comes byte by byte has a time limit of its own
    thread = threading.Thread(target=once, name="tell the agent", daemon=True)
    thread.start()
    thread.join(seconds)
    return "".join(tuple(why))


def main(path: str) -> int:
    """Send the record in this file; 1 and a line on stderr where the agent does not have it then."""
    try:
        why = send(bounded.read(path, MOST_RECORD_BYTES), ONE_SECONDS)  # its launcher may have been told to end too
    except (OSError, ValueError) as error:
        why = str(error)
    if why:
        print(f"the agent does not have this run's record: {why}", file=sys.stderr)  # noqa: T201 - the command's own message
    return int(bool(why))


def _send(url: str, body: bytes) -> None:
    if not _URL.fullmatch(url):
        raise _UntoldError("TOPOFLIGHT_AGENT must be http://HOST:PORT or https://HOST:PORT")
    token = _token()
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {token}"} if token else {})}
    request = urllib.request.Request(f"{url.rstrip('/')}/flights", data=body, headers=headers, method="POST")  # noqa: S310 - judged above
    for left in reversed(range(TRIES)):
        try:
            with _opener().open(request, timeout=ONE_SECONDS):
                return
        except urllib.error.HTTPError as error:
            if not left or error.code not in AGAIN:
                raise _UntoldError(_line(f"it answered {error.code}{_detail(error)}", token)) from None
        except (ValueError, OverflowError) as error:  # a name or a port that cannot be
            raise _UntoldError(_line(str(error), token)) from None
        except (OSError, http.client.HTTPException) as error:
            if not left:
                why = str(getattr(error, "reason", error)) or type(error).__name__
                raise _UntoldError(_line(why, token)) from None
        time.sleep(PAUSE_SECONDS)


def _opener() -> urllib.request.OpenerDirector:
    """Speaks HTTP to the address given and follows nothing: 3xx is an error as any other."""
    opener = urllib.request.OpenerDirector()
    for handler in (urllib.request.HTTPHandler(), urllib.request.HTTPSHandler(),
                    urllib.request.HTTPErrorProcessor(), urllib.request.HTTPDefaultErrorHandler()):  # fmt: skip
        opener.add_handler(handler)
    return opener


def _token() -> str:
    path = os.environ.get("TOPOFLIGHT_AGENT_TOKEN_FILE")
    if not path:
        return ""
    try:
        token = bounded.read(Path(path), _MOST_TOKEN_BYTES).decode("ascii").strip()
    except OSError as error:
        raise _UntoldError(f"TOPOFLIGHT_AGENT_TOKEN_FILE: {error}") from None
    except ValueError:
        token = ""
    if not _TOKEN.fullmatch(token):
        raise _UntoldError(f"TOPOFLIGHT_AGENT_TOKEN_FILE: {path} holds no bearer token")
    return token


def _detail(error: urllib.error.HTTPError) -> str:
    """What the problem document says; nothing where the answer is none."""
    with contextlib.suppress(OSError, ValueError, http.client.HTTPException):
        document = json.loads(error.read(_MOST_ANSWER_BYTES))
        if isinstance(document, dict) and isinstance(document.get("detail"), str):
            return f": {document['detail']}"
    return ""


def _line(text: str, token: str) -> str:
    """What another said, as a line of a log: cut, printable, and without the token where it gives that back."""
    hidden = text.replace(token, "TOKEN") if token else text
    return "".join(c if c.isprintable() else " " for c in hidden[:400])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
