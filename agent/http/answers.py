"""How an answer is given: in the requested format, rendered once for each view, in pieces where it is large."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Hashable
from typing import Annotated, Any

from fastapi import Query
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from agent.checks.view import View
from agent.http.problem import ProblemError
from agent.http.worker import Answer, Worker, document

Format = Annotated[str | None, Query(alias="format", description="Overrides the Accept header.", max_length=32)]
MOST_ANSWERS = 64
MOST_BYTES = 16 << 20
PIECE_BYTES = 128 << 10  # what one slow reader holds of a large answer; Starlette compresses such pieces in a thread


class Rendered:
    """Answers that follow from one view and the question alone: rendered once, and dropped with the view."""

    def __init__(self) -> None:
        self._view: View | None = None
        self._answers: OrderedDict[Hashable, Answer] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()
        self._rendering = threading.Lock()

    def get(self, view: View, key: Hashable) -> Answer | None:
        """What was rendered for this question; None where nothing was."""
        with self._lock:
            newer = self._view is None or view.made_at_monotonic >= self._view.made_at_monotonic
            if view is not self._view and newer:
                self._view, self._answers, self._bytes = view, OrderedDict(), 0
            if view is not self._view or key not in self._answers:
                return None
            self._answers.move_to_end(key)
            return self._answers[key]

    def put(self, view: View, key: Hashable, answer: Answer) -> None:
        """Store an answer, unless a newer view has come; those that were not asked for longest give way."""
        with self._lock:
            if view is not self._view or key in self._answers:
                return
            self._answers[key], self._bytes = answer, self._bytes + len(answer.body)
            while self._bytes > MOST_BYTES or len(self._answers) > MOST_ANSWERS:
                self._bytes -= len(self._answers.popitem(last=False)[1].body)

    async def of(
        self, request: Request, view: View, key: tuple[Hashable, ...], value: Callable[[], Any], form: str,
        worker: Worker,
    ) -> Response:  # fmt: skip
        """`value()` as JSON, made in a thread, or as YAML, which the worker makes of it: that takes long."""
        answer = await self.answer(view, key, lambda: document(value(), "json"))
        if form == "yaml":
            stored = self.get(view, (*key, form))
            if stored is None:
                stored = await worker.ask(request, "as_yaml", text=answer.body)
                self.put(view, (*key, form), stored)
            answer = stored
        return respond(answer)

    async def answer(self, view: View, key: Hashable, make: Callable[[], Answer]) -> Answer:
        """The stored answer, or the one that `make` gives in a thread: one question is rendered at a time."""
        answer = self.get(view, key)
        return answer if answer is not None else await run_in_threadpool(self._made, view, key, make)

    def _made(self, view: View, key: Hashable, make: Callable[[], Answer]) -> Answer:
        with self._rendering:
            answer = self.get(view, key)
            if answer is None:
                answer = make()
                self.put(view, key, answer)
            return answer


def form_of(request: Request, form: str | None) -> str:
    """json or yaml, by `?format=` or the Accept header. ProblemError 400 for any other."""
    wanted = form or ("yaml" if "yaml" in request.headers.get("accept", "") else "json")
    if wanted not in ("json", "yaml"):
        raise ProblemError(400, f"format={wanted}: must be json or yaml here", allowed=["json", "yaml"])
    return wanted


def respond(answer: Answer) -> Response:
    """The response; a large one goes out in pieces, so that slow readers share its bytes."""
    size = len(answer.body)
    headers = {"Cache-Control": "no-store", "Vary": "Accept", **answer.headers}
    if size <= PIECE_BYTES:
        return Response(answer.body, answer.status, headers, answer.media_type)
    return StreamingResponse(
        _pieces(answer), answer.status, {**headers, "Content-Length": str(size)}, answer.media_type
    )


async def _pieces(answer: Answer) -> AsyncIterator[bytes]:
    for first in range(0, len(answer.body), PIECE_BYTES):
        yield answer.body[first : first + PIECE_BYTES]
