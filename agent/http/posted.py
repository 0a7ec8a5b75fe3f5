"""Endpoints for POST: store the record of a run, and run the gate on a new scan.

Specification: run.json in docs/reference/finetune-job.md. A record is posted by the service account of a job, not by an
administrator. Its size and number of values are limited, because all stored records are held in memory and every reader
can get them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import Body, FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from agent.base import result_store
from agent.base.output import document as plain_document
from agent.checks.groups import worst_first
from agent.checks.measured import ALL_CODES
from agent.checks.verdict import FailOn, GateError, judge, select
from agent.http.answers import TOKEN, Gate, StoreAnswer, body_of, complaints, problems
from agent.http.state import State
from agent.http.worker import ProblemError
from contracts import plain
from contracts.finding import Finding
from contracts.run_record import RunRecord, dumps, record_of

log = logging.getLogger(__name__)

# 50 of these are stored in the 64 MiB that deploy/daemonset gives the state folder; 4096 steps take 60 KiB
MOST_RECORD_BYTES = 512 << 10
MOST_VALUES = 16384  # 4096 steps and evaluations; each value uses about 100 bytes of memory

_Time = Annotated[str, Field(pattern="^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z$", max_length=20)]
_Text = Annotated[str, Field(max_length=4096)]
_Members = dict[str, Any]


class PostedRecord(BaseModel):
    """What POST /runs takes: a job's run.json. Members that RunRecord does not have are dropped."""

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


def read_record(body: bytes) -> RunRecord:
    """Parse the record. Raises ProblemError 400 if it is not such JSON, 422 if a member is invalid."""
    if (values := sum(body.count(mark) for mark in (b",", b"[", b"{"))) > MOST_VALUES:  # counted before parsing
        raise ProblemError(422, f"the record holds {values} values: {MOST_VALUES} are taken")
    try:
        record = plain.loads(body, unknown_numbers=True)  # a loss may be NaN
    except (plain.PlainError, UnicodeDecodeError) as error:
        raise ProblemError(400, f"the body is no record of a run: {error}") from None
    try:
        PostedRecord.model_validate(record)
    except ValidationError as error:
        found, detail = complaints(error, 16)
        raise ProblemError(422, detail, errors=found) from None
    try:
        made = record_of(record)
    except plain.MisfitError as error:
        raise ProblemError(422, f"the body is no record of a run: {error}") from None
    if len(dumps(made)) > MOST_RECORD_BYTES:  # as stored, which may be larger than received
        raise ProblemError(422, f"the record takes more than {MOST_RECORD_BYTES} bytes to keep")
    return made


class Preflight(BaseModel):
    """What POST /preflight takes: the gate's options."""

    model_config = ConfigDict(extra="forbid")

    require: list[Annotated[str, Field(max_length=128)]] = Field(default=[], max_length=256)
    skip: list[Annotated[str, Field(max_length=128)]] = Field(default=[], max_length=256)
    fail_on: FailOn = "fail"


def gate(checks: Iterable[Finding], require: Sequence[str], skip: Sequence[str], fail_on: FailOn) -> dict[str, Any]:
    """Return the gate's result for these checks. Raises ProblemError 400 for a check that does not exist."""
    try:
        found = select(checks, require=require, skip=skip, known=ALL_CODES)
    except GateError as error:
        raise ProblemError(400, str(error)) from None
    return {"verdict": judge(found, fail_on=fail_on), "checks": worst_first(found)}


def store_record(state: State, lock: threading.Lock, record: RunRecord, who: str) -> bool:
    """Store a record once in the state folder; return whether it is new.

    Raises ProblemError 409 if it conflicts with a stored record, 507 if there is no space.
    """
    folder = state.folder
    if folder is None or not folder.is_dir():
        raise ProblemError(409, "this agent stores nothing, because it has no state folder",
                           grant="start it with --state FOLDER, one that it may write into")  # fmt: skip
    with lock:
        for known in result_store.read_runs(folder):
            if result_store.start_of(known) == result_store.start_of(record):
                if replace(known, posted_by=None) == replace(record, posted_by=None):
                    return False
                raise ProblemError(409, f"another record of {str(record.host)[:64]}, started at "
                                        f"{record.started_at}, is stored here")  # fmt: skip
        if result_store.store_run(replace(record, posted_by=who), folder) is None:
            raise ProblemError(507, "the record could not be written into the state folder; the agent's log says why")
    state.reread_runs()
    return True


def install(app: FastAPI, state: State) -> None:
    """Add the endpoints to the application."""
    lock = threading.Lock()

    @app.post("/runs", tags=["facts"], status_code=201, max_body_size=MOST_RECORD_BYTES,
              openapi_extra=body_of(PostedRecord), dependencies=TOKEN, response_model=StoreAnswer,
              responses={200: {"model": StoreAnswer, "description": "Stored before."}, **problems(409, 413, 507)},
    )  # fmt: skip
    async def post_run(request: Request) -> JSONResponse:
        """Keep the record of a fine-tune job that ran on this node. Needs a token. GET /runs shows it."""
        who = request.state.user
        try:
            body = await request.body()
        except ClientDisconnect:
            raise ProblemError(400, "incomplete request body") from None
        new = await run_in_threadpool(lambda: store_record(state, lock, read_record(body), who))
        log.info("POST /runs by %s: kept %s", who, "now" if new else "before")
        headers = {"Location": "/runs", "Cache-Control": "no-store"}
        return JSONResponse({"kept": "now" if new else "before"}, status_code=201 if new else 200, headers=headers)

    @app.post("/preflight", tags=["gate"], response_model=Gate, dependencies=TOKEN,
              responses=problems(413))  # fmt: skip
    def preflight_now(request: Request, requested: Annotated[Preflight | None, Body()] = None) -> JSONResponse:
        """The gate over a scan made now. Needs a token."""
        log.info("POST %s by %s", request.url.path, request.state.user)
        wanted = requested or Preflight()
        options = wanted.require, wanted.skip, wanted.fail_on
        gate((), *options)  # reject invalid options before the scan
        return JSONResponse(
            plain_document(gate(state.refresh().checks, *options)), headers={"Cache-Control": "no-store"}
        )
