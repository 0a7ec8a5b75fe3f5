"""POST /why: the verdict on the logs, traces and records of a run that are posted.

Specification: docs/why.md. What is posted goes as it came to the worker process, which reads it within the bounds of
the readers; nothing in it names a file, a host or a port that the agent would open.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import ClientDisconnect

from agent.http.access import POSTS_PER_MINUTE, Bucket
from agent.http.answers import respond
from agent.http.models import TOKEN, problems
from agent.http.problem import ProblemError
from agent.http.worker import Worker
from contracts import plain
from planner.why import Verdict

MOST_POSTED_BYTES = 2 << 20  # twelve a minute, which may all wait: 24 MiB
MOST_RANKS = 1024

_Text = Annotated[str, Field(max_length=MOST_POSTED_BYTES)]
_Rank = Annotated[str, Field(pattern="^[0-9]{1,6}$")]
_Word = Annotated[str, Field(max_length=4096)]


class Sources(BaseModel):
    """What POST /why takes: texts and documents as `topoflight why` reads them from files, and its options by name.

    `nodes` is a number here: what agents publish of nodes by name the command asks of the cluster, as its user may.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    logs: list[_Text] = Field(default=[], max_length=16)
    ras: list[_Text] = Field(default=[], max_length=2)
    diagnostics: list[_Text] = Field(default=[], max_length=16)
    manifest: _Text = ""
    states: list[dict[str, Any]] = Field(default=[], max_length=MOST_RANKS)
    traces: dict[_Rank, dict[str, Any]] = Field(default={}, max_length=MOST_RANKS)
    record: dict[str, Any] = {}
    recordings: list[dict[str, Any]] = Field(default=[], max_length=8)  # of the job's nodes, as `capture` writes them
    model: Annotated[str, Field(max_length=200)] = ""
    method: Literal["full", "lora", "qlora"] = "lora"
    machine: Annotated[str, Field(max_length=64)] = ""
    nodes: int | None = Field(default=None, ge=1, le=100_000)
    network: Annotated[str, Field(max_length=32)] = ""
    sequence_length: int = Field(default=2048, ge=1, le=10_000_000)
    lengths: _Word = ""
    global_batch: int | None = Field(default=None, ge=1, le=10_000_000)
    layout: _Word = ""
    steps: int | None = Field(default=None, ge=1, le=10**12)
    epochs: float | None = Field(default=None, gt=0, le=1e6)
    price: Annotated[str, Field(max_length=16)] = ""


def judged(body: bytes) -> Verdict:
    """The verdict on a posted body; called in the worker process. Raises RequestError."""
    import json

    from agent.advice.request import Request as Question
    from agent.base.inputs import InputError, RequestError
    from agent.why.diagnosis import Asked, answer

    try:
        sources = Sources.model_validate(plain.loads(body, unknown_numbers=True))
    except (plain.PlainError, UnicodeDecodeError) as error:
        raise RequestError(f"the body is no JSON: {error}") from None
    except ValidationError as error:
        found = [f"{'.'.join(map(str, e['loc']))[:64] or 'body'}: {e['msg']}" for e in error.errors()[:8]]
        raise RequestError("; ".join(found)) from None
    of_price = ("model", "method", "machine", "nodes", "network", "sequence_length", "lengths", "global_batch",
                "steps", "epochs", "price")  # fmt: skip
    request = Question.of(**{name: getattr(sources, name) or None for name in of_price}, allow_files=False)
    with tempfile.TemporaryDirectory(prefix="why-") as name:
        folder = Path(name)
        files = {kind: _written(folder, kind, getattr(sources, kind)) for kind in ("logs", "ras", "diagnostics")}
        manifest = _written(folder, "manifest", [sources.manifest] if sources.manifest else [])
        ranks = folder / "run" / "ranks"
        ranks.mkdir(parents=True)
        for number, state in enumerate(sources.states):
            (ranks / f"state_rank_{number}.json").write_text(json.dumps(state), encoding="utf-8")
        for rank, trace in sources.traces.items():
            (ranks / f"posted_trace_rank_{rank}").write_text(json.dumps(trace), encoding="utf-8")
        recordings = _written(folder, "recordings", [json.dumps(one) for one in sources.recordings], ".json")
        if sources.record:
            (folder / "run" / "flight.json").write_text(json.dumps(sources.record), encoding="utf-8")
        try:
            return answer(Asked(
                logs=files["logs"], ras=files["ras"], diagnostics=files["diagnostics"],
                request=replace(request, hosts=tuple(map(Path, recordings))),
                run=folder / "run" if sources.states or sources.traces or sources.record else None,
                layout=sources.layout,
                manifest=Path(manifest[0]) if manifest else None,
            ))  # fmt: skip
        except InputError as error:
            raise RequestError(str(error).replace(f"{name}/", "")) from None


def _written(folder: Path, kind: str, texts: list[str], suffix: str = "") -> tuple[str, ...]:
    paths = [folder / f"{kind}-{number}{suffix}" for number in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text, encoding="utf-8", errors="replace")
    return tuple(map(str, paths))


def install(app: FastAPI, worker: Worker) -> None:
    """Add the endpoint."""
    posts = Bucket(rate=POSTS_PER_MINUTE / 60, size=POSTS_PER_MINUTE)
    taken = {
        "requestBody": {"required": True, "content": {"application/json": {"schema": Sources.model_json_schema()}}}
    }

    @app.post("/why", tags=["facts"], operation_id="why_judge", max_body_size=MOST_POSTED_BYTES, dependencies=TOKEN,
              openapi_extra=taken, response_model=Verdict, responses=problems(413))  # fmt: skip
    async def judge(request: Request) -> Response:
        """The verdict on the sources that are posted. Needs a token. Keeps nothing."""
        if not posts.take():
            raise ProblemError(429, f"more than {POSTS_PER_MINUTE:.0f} a minute", headers={"Retry-After": "5"})
        try:
            body = await request.body()
        except ClientDisconnect:
            raise ProblemError(400, "the body did not come to its end") from None
        return respond(await worker.ask(request, "why", body=body))
