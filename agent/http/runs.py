"""POST /flights: a job that ran in a pod of this node leaves its record here too, where the node's page shows it.

Specification: flight.json of docs/finetune.md. Who posts is a job's service account, not the administrator: the record
is bounded in bytes and in values, because all stored ones are held in memory and open to every reader.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from agent.base import result_store as keep
from agent.http.access import POSTS_PER_MINUTE, Bucket
from agent.http.models import TOKEN, Kept, problems
from agent.http.problem import ProblemError
from agent.http.state import State
from contracts import plain
from contracts.run_record import RunRecord, dumps, record_of

log = logging.getLogger(__name__)

# 50 of these are kept, in the 64 MiB that deploy/daemonset gives the state folder; 4096 steps take 60 KiB
MOST_POSTED_BYTES = 512 << 10
MOST_VALUES = 16384  # 4096 steps, and evaluations beside them; a value takes some 100 bytes of memory

_Time = Annotated[str, Field(pattern="^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z$", max_length=20)]
_Text = Annotated[str, Field(max_length=4096)]
_Members = dict[str, Any]


class Record(BaseModel):
    """What POST /flights takes: a job's flight.json. Of other members those are kept that RunRecord has."""

    model_config = ConfigDict(extra="allow", strict=True)

    schema_version: Literal[1]  # contracts.run_record.RECORD_VERSION
    status: str = Field(pattern="^[a-z]{1,32}$")
    host: str = Field(min_length=1, max_length=253)
    started_at: _Time
    ended_at: _Time | None = None
    exit_code: int | None = Field(default=None, ge=0, le=255)
    reason: _Text | None = None
    notes: list[_Text] = Field(default=[], max_length=256)
    layout: _Members = {}
    forecast: _Members = {}
    measured: _Members = {}
    loss: _Members = {}
    model: _Members = {}
    communication: _Members | None = None
    parts: list[_Members] = Field(default=[], max_length=64)
    comparison: list[_Members] = Field(default=[], max_length=64)
    steps_done: int | None = Field(default=None, ge=0)
    step_seconds: list[float | None] = Field(default=[], max_length=4096)


def read(body: bytes) -> RunRecord:
    """The record. ProblemError 400 where it is no JSON of ours, 422 where a member is not what it should be."""
    if (values := sum(body.count(mark) for mark in (b",", b"[", b"{"))) > MOST_VALUES:  # before any is made
        raise ProblemError(422, f"the record holds {values} values: {MOST_VALUES} are taken")
    try:
        record = plain.loads(body, unknown_numbers=True)  # a loss may be NaN
    except (plain.PlainError, UnicodeDecodeError) as error:
        raise ProblemError(400, f"the body is no record of a flight: {error}") from None
    try:
        Record.model_validate(record)
    except ValidationError as error:
        found = [{"where": ".".join(map(str, e["loc"])) or "body", "message": e["msg"]} for e in error.errors()[:16]]
        detail = "; ".join(f"{e['where'][:64]}: {e['message']}" for e in found)
        raise ProblemError(422, detail, errors=found) from None
    made = record_of(record)
    if len(dumps(made)) > MOST_POSTED_BYTES:  # as it is kept, which may be longer than as it came
        raise ProblemError(422, f"the record takes more than {MOST_POSTED_BYTES} bytes to keep")
    return made


class Keeper:
    """Keeps each record once."""

    def __init__(self, state: State) -> None:
        self._state, self._lock = state, threading.Lock()

    def keep(self, record: RunRecord, who: str) -> bool:
        """Whether it is new here. ProblemError 409 where it cannot be kept beside what is, 507 without room."""
        folder = self._state.folder
        if folder is None or not folder.is_dir():
            raise ProblemError(409, "this agent keeps nothing: it has no state folder",
                               grant="start it with --state FOLDER, one that it may write into")  # fmt: skip
        with self._lock:
            for known in keep.flights((folder / keep.FLIGHTS_FOLDER,)):
                if keep.start_of(known) == keep.start_of(record):
                    if replace(known, posted_by=None) == replace(record, posted_by=None):
                        return False
                    raise ProblemError(409, f"another record of {str(record.host)[:64]}, started at "
                                            f"{record.started_at}, is kept here")  # fmt: skip
            if keep.keep_flight(replace(record, posted_by=who), folder) is None:
                raise ProblemError(
                    507, "the record could not be written into the state folder; the agent's log says why"
                )
        self._state.reread_flights()
        return True


def install(app: FastAPI, state: State) -> None:
    """Add the endpoint."""
    keeper, posts = Keeper(state), Bucket(rate=POSTS_PER_MINUTE / 60, size=POSTS_PER_MINUTE)
    taken = {"requestBody": {"required": True, "content": {"application/json": {"schema": Record.model_json_schema()}}}}

    @app.post("/flights", tags=["facts"], operation_id="flight_keep", status_code=201, max_body_size=MOST_POSTED_BYTES,
              openapi_extra=taken, dependencies=TOKEN, response_model=Kept,
              responses={200: {"model": Kept, "description": "It was kept before."}, **problems(409, 413, 507)},
              )  # fmt: skip
    async def flight(request: Request) -> JSONResponse:
        """Keep the record of a fine-tune job that ran on this node. Needs a token. GET /flights shows it."""
        who = request.state.user
        if not posts.take():
            raise ProblemError(429, f"more than {POSTS_PER_MINUTE:.0f} records a minute", headers={"Retry-After": "5"})
        try:
            body = await request.body()
        except ClientDisconnect:
            raise ProblemError(400, "the body did not come to its end") from None
        new = await run_in_threadpool(lambda: keeper.keep(read(body), who))
        log.info("POST /flights by %s: kept %s", who, "now" if new else "before")
        headers = {"Location": "/flights", "Cache-Control": "no-store"}
        return JSONResponse({"kept": "now" if new else "before"}, status_code=201 if new else 200, headers=headers)
