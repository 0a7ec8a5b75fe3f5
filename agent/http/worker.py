"""Answer expensive questions in a separate process: recommendations, what-if, and documents about the cluster.

The event loop and /metrics share no Python interpreter with the planner. One worker process (`main`, below) is
started by the first question and answers one at a time. It is killed and replaced if a question takes too long or no
client waits for it any more, and ends by itself after some idle minutes. Each view is sent to it once. Reasons and
costs: docs/decisions/0010.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import re
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from agent.advice import advise
from agent.advice.request import Request as AdviceRequest
from agent.base import log_to_stderr, output
from agent.base.options import RequestError, question_model
from agent.checks.view import View
from agent.cluster.client import AccessError, ApiError, Client, connect
from agent.cluster.nodes import Fleet, make_record, make_row
from collectives.bench import processes
from contracts.redaction import without_secrets

if TYPE_CHECKING:
    from starlette.requests import Request

log = logging.getLogger(__name__)

MAX_WAITING = 256  # different questions; equal questions share one answer
MAX_SECONDS = 60.0  # for one question, including the start and imports of Python: a faulty node is slow
ABANDONED_SECONDS = 1.0  # time that a question without a waiting client may still take before its process is killed
IDLE_SECONDS = 600.0
COMMAND = (sys.executable, "-P", "-c", "from agent.http.worker import main; main()")
_LOOK_SECONDS = 0.1
_NICENESS = 10  # scrapes have priority over plans
LIST_SECONDS = 10.0  # the page asks again every 30 s; a list of 1,000 GPU servers has 20 MB
ONLY_THIS_NODE = "only the node of this agent; on Kubernetes, agents started with --publish show every node"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A complete response."""

    body: bytes
    media_type: str
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


class ProblemError(Exception):
    """A request that cannot be answered; it becomes a problem document."""

    def __init__(self, status: int, detail: str, *, headers: dict[str, str] | None = None, **members: Any) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.headers = headers
        self.members = members


def _make_busy_error(detail: str) -> ProblemError:
    return ProblemError(503, detail, headers={"Retry-After": "5"})


@dataclass(slots=True, kw_only=True, eq=False)
class _Question:
    """One question, and the number of clients that wait for its answer."""

    name: str
    arguments: Mapping[str, Any]
    view: View | None
    answered: Future[Answer] = field(default_factory=Future)
    waiting: int = 0


def make_document(value: Any) -> Answer:
    """Return a dataclass, or lists and mappings of dataclasses, as a JSON document without secrets."""
    text = json.dumps(without_secrets(output.to_document(value)), indent=1)
    return Answer(body=f"{text}\n".encode(), media_type="application/json")


def make_page(html: str, status: int = 200) -> Answer:
    """Return a page, with the policy that allows its scripts."""
    from agent.http import pages

    return Answer(body=html.encode(), media_type="text/html", status=status, headers=pages.make_headers())


class _WorkerProcess:
    """The worker process, and the data already sent to it. It belongs to one thread and ends with it."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        package = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
        with theirs:
            self._process = subprocess.Popen(
                processes.tie_to_parent([*COMMAND, str(theirs.fileno()), str(IDLE_SECONDS)]),
                pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                start_new_session=True, env=os.environ | {"PYTHONPATH": path},
            )  # fmt: skip
        self._pipe = Connection(ours.detach())
        if not self._pipe.poll(MAX_SECONDS):
            self.kill()
            raise TimeoutError(f"the worker process has not started within {MAX_SECONDS:.0f} s")
        self._pipe.recv_bytes()
        self._view: View | None = None

    def ask(self, question: _Question) -> Answer:
        """Return the answer. ProblemError if refused, TimeoutError if it is too slow or no client waits any more.

        Raises EOFError or OSError if the process has ended. The answer is text and bytes and is never unpickled.
        """
        until = time.monotonic() + MAX_SECONDS
        if question.view is not None and question.view is not self._view:
            self._pipe.send(("view", replace(question.view, runs=())))
            self._view = question.view
        self._pipe.send((question.name, dict(question.arguments)))
        while not self._pipe.poll(_LOOK_SECONDS):
            if not question.waiting:
                until = min(until, time.monotonic() + ABANDONED_SECONDS)
            if time.monotonic() > until:
                raise TimeoutError(f"the question takes longer than {MAX_SECONDS:.0f} s: request less")
        header, body = json.loads(self._pipe.recv_bytes()), self._pipe.recv_bytes()
        if "detail" in header:
            raise ProblemError(**header)
        return Answer(body=body, **header)

    def has_ended(self) -> bool:
        """Return whether it has ended, as it does after idle minutes."""
        return self._process.poll() is not None

    def kill(self) -> None:
        """Kill it now; the thread that waits for its answer gets EOFError."""
        self._process.kill()
        self._process.wait()


class Worker:
    """Sends expensive questions from one event loop to one thread, which starts the process and asks them in order."""

    def __init__(self) -> None:
        self._questions: dict[Hashable, _Question] = {}  # questions without an answer yet
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="worker")
        self._process: _WorkerProcess | None = None
        self._stopping = False

    async def ask(self, request: Request, name: str, *, view: View | None = None, **arguments: Any) -> Answer:
        """Return the answer to the question `name`; the arguments are plain and hashable.

        ProblemError: 503 if too many questions wait, it takes too long or the client disconnects; else the worker's.
        """
        key = name, tuple(sorted(arguments.items())), id(view)
        question = self._questions.get(key)
        if question is None:
            if self._stopping or len(self._questions) >= MAX_WAITING:
                raise _make_busy_error(f"{MAX_WAITING} such requests are already waiting")
            question = self._questions[key] = _Question(name=name, arguments=arguments, view=view)
            question.answered = self._thread.submit(self._answer, question)
            question.answered.add_done_callback(lambda _: self._questions.pop(key, None))
        question.waiting += 1
        answered, until = asyncio.wrap_future(question.answered), time.monotonic() + 2 * MAX_SECONDS
        # Retrieve an exception that arrives after the client disconnected; otherwise asyncio logs it with a traceback.
        answered.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            while not (await asyncio.wait((answered,), timeout=_LOOK_SECONDS))[0]:
                if await request.is_disconnected() or time.monotonic() > until:
                    raise _make_busy_error("the requests before this one took too long")
            if answered.cancelled():
                raise _make_busy_error("the agent ends")
            return answered.result()
        finally:
            question.waiting -= 1
            if not question.waiting:
                question.answered.cancel()  # if it has not started; `_WorkerProcess.ask` handles a running one

    def stop(self) -> None:
        """Stop the process and the thread; reject waiting clients."""
        self._stopping = True
        if (process := self._process) is not None:
            process.kill()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _answer(self, question: _Question) -> Answer:
        """Answer in the worker's thread. If the process ends for any reason, it is replaced."""
        try:
            if self._process is None or self._process.has_ended():
                self._process = _WorkerProcess()
            if self._stopping:
                raise _make_busy_error("the agent ends")
            return self._process.ask(question)
        except ProblemError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, the next question gets another process
            process, self._process = self._process, None
            if process is not None:
                process.kill()
            if isinstance(error, TimeoutError):
                raise _make_busy_error(str(error)) from None
            log.warning("the worker process has ended: %r", error)
            raise _make_busy_error("the worker process has ended: send the request again") from None


# The process: it answers one question at a time, from data sent to it. Each question is a function of the known data
# and plain arguments; its name is the name of the question. An invalid question raises ProblemError. An internal error
# is logged and answered with 500.


class WorkerData:
    """The data that the answers are made from: the agent's last scan, and the records of the cluster."""

    view: View  # sent with every question that needs it

    def __init__(self) -> None:
        self._client: Client | None = None
        self._fleet: Fleet | None = None  # None until the records have been listed
        self._listed_at = -math.inf
        self.error: str | None = None  # why the last list failed

    def fleet(self, source: str, interval: float) -> Fleet:
        """Return the records of all nodes of the cluster, or of this agent's node, scanned every `interval` seconds.

        Raises ProblemError 503 if the cluster's records have never been listed.
        """
        if source != "kubernetes":
            return Fleet([make_record(self.view, interval_seconds=interval)])
        if time.monotonic() - self._listed_at > LIST_SECONDS:
            self._list()
        if self._fleet is None:
            detail = f"the cluster's records cannot be read: {self.error}"
            raise ProblemError(503, detail, headers={"Retry-After": "10"})
        return self._fleet

    def _list(self) -> None:
        fleet = self._fleet or Fleet()
        try:
            self._client = self._client or connect().brief()
            fleet.read(self._client)
            self._fleet, self.error = fleet, None
        except (AccessError, ApiError) as error:
            self.error = str(error)
        self._listed_at = time.monotonic()


def recommendations(data: WorkerData, *, options: tuple[tuple[str, Any], ...], form: str) -> Answer:
    """Return environment and layout of this node, as JSON or as an export."""
    request = AdviceRequest.of(**dict(options), allow_files=False)
    advice = advise.advise_view(data.view, request)
    if form in advise.EXPORTS:
        return Answer(body=advise.export(advice, form, nodes=request.nodes or 1).encode(), media_type="text/plain")
    return make_document(advice)


def what_if(data: WorkerData, *, fields: tuple[tuple[str, str], ...]) -> Answer:
    """Return the page of layouts; the form is parsed here, so that the page can name an invalid field."""
    from agent.http import pages

    form, advice, refusal = dict(fields), None, ""
    try:
        advice = advise.advise_view(data.view, read_form(form)) if form.get("model") else None
    except RequestError as error:
        refusal = str(error)
    return make_page(pages.render_what_if_page(data.view, form, advice, refusal), 400 if refusal else 200)


def nodes(data: WorkerData, *, source: str, interval: float) -> Answer:
    """Return every node as a row, and the number of nodes per verdict; `list_error` is why the rows may be outdated."""
    now = time.time()
    rows = [make_row(record, now) for record in data.fleet(source, interval).records()]
    counts = dict(sorted(Counter(row["verdict"] for row in rows).items()))
    extra = {"note": ONLY_THIS_NODE} if source != "kubernetes" else {"list_error": data.error} if data.error else {}
    return make_document({"schema_version": 1, "source": source, "counts": counts, "nodes": rows, **extra})


def cluster_page(data: WorkerData, *, source: str, interval: float, node: str | None, search: str, page: int) -> Answer:
    """Return the page of all publishing nodes, or of one node by name. Raises ProblemError if the name is unknown."""
    from agent.http import pages

    fleet = data.fleet(source, interval)
    if node is None:
        page_text = pages.render_fleet_page(fleet, source=source, list_error=data.error, search=search, page=page)
        return make_page(page_text)
    record = fleet.record(node)
    if record is None:
        raise ProblemError(404, f"node={node}: no agent publishes a node of that name")
    return make_page(pages.render_published_page(fleet, record, source=source))


_FUNCTIONS: tuple[Callable[..., Answer], ...] = (recommendations, what_if, nodes, cluster_page)
QUESTIONS = {function.__name__: function for function in _FUNCTIONS}


def read_form(form: Mapping[str, str]) -> AdviceRequest:
    """Parse a form; an empty field counts as omitted. Raises RequestError that names an invalid field."""
    values = {name: text.strip() for name, text in form.items() if text.strip()}
    try:
        return AdviceRequest.of(**dict(question_model().model_validate(values)), allow_files=False)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name, allowed = str(first["loc"][0]), re.sub("^(Input|String) should", "must", first["msg"])
        raise RequestError(f"{name}={values[name][:40]}: {allowed}") from None


def answer(data: WorkerData, name: str, payload: Mapping[str, Any]) -> Answer | ProblemError:
    """Answer one question; every exception becomes a ProblemError."""
    try:
        return QUESTIONS[name](data, **payload)
    except ProblemError as error:
        return error
    except RequestError as error:
        return ProblemError(400, str(error))
    except Exception:
        log.exception("a question could not be answered: %s", name)
        return ProblemError(500, "the question could not be answered; the agent's log says why")


def send(pipe: Connection, result: Answer | ProblemError) -> None:
    """Send only texts and bytes, so that the agent never unpickles objects from the worker."""
    header: dict[str, Any] = {"status": result.status}
    if isinstance(result, ProblemError):
        header |= {"detail": result.detail, "headers": result.headers}
    else:
        header |= {"media_type": result.media_type, "headers": dict(result.headers)}
    pipe.send_bytes(json.dumps(header).encode())
    pipe.send_bytes(result.body if isinstance(result, Answer) else b"")


def main() -> None:
    """Serve requests on the file descriptor given on the command line until the other side closes it."""
    os.nice(_NICENESS)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # without memory, the kernel kills this and not the agent
    log_to_stderr()
    pipe, data = Connection(int(sys.argv[1])), WorkerData()
    pipe.send_bytes(b"ready")
    with contextlib.suppress(EOFError, ConnectionError):
        while pipe.poll(float(sys.argv[2])):  # longest idle time in seconds
            kind, payload = pipe.recv()
            if kind == "view":
                data.view = payload
            else:
                send(pipe, answer(data, kind, payload))
