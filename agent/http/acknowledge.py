"""The endpoint by which a person acknowledges a finding of a node: who, by the token; why; and until when."""

from __future__ import annotations

import logging
import time
from typing import Annotated, Literal

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool

from agent.cluster import acknowledged
from agent.cluster.client import ApiError, Client, path_of
from agent.cluster.nodes import API_VERSION, PLURAL
from agent.http.access import POSTS_PER_MINUTE, Bucket
from agent.http.cluster import Cluster
from agent.http.models import TOKEN, problems
from agent.http.problem import ProblemError

log = logging.getLogger(__name__)


class Acknowledgement(BaseModel):
    """What POST /acknowledgements takes: a finding of a node as its record has it, a reason, and an end."""

    model_config = ConfigDict(extra="forbid")

    node: Annotated[str, Field(min_length=1, max_length=253)]
    code: Annotated[str, Field(min_length=1, max_length=128)]
    subject: Annotated[str, Field(max_length=128)] = ""
    reason: Annotated[str, Field(min_length=1, max_length=300)]
    until: AwareDatetime


class Acknowledged(BaseModel):
    """That it was written."""

    acknowledged: Literal["now"]


def install(app: FastAPI, cluster: Cluster) -> None:
    """Add the endpoint."""
    posts = Bucket(rate=POSTS_PER_MINUTE / 60, size=POSTS_PER_MINUTE)

    @app.post("/acknowledgements", tags=["gate"], operation_id="acknowledge", status_code=201, dependencies=TOKEN,
              response_model=Acknowledged, responses=problems(404, 409, 413))  # fmt: skip
    async def acknowledge(request: Request, body: Acknowledgement) -> JSONResponse:
        """Write who lives with a finding, why and until when, on the node's NodeTopology. Needs a token."""
        if not posts.take():
            raise ProblemError(429, f"more than {POSTS_PER_MINUTE:.0f} such requests a minute",
                               headers={"Retry-After": "5"})  # fmt: skip
        if cluster.client is None:
            raise ProblemError(409, "acknowledgements are kept on NodeTopologies, and this agent publishes none",
                               grant="start it with --publish")  # fmt: skip
        ahead = body.until.timestamp() - time.time()
        if not 0 < ahead <= acknowledged.LONGEST_SECONDS:
            longest = acknowledged.LONGEST_SECONDS / 86400
            raise ProblemError(422, f"until: must lie ahead, by {longest:.0f} days at most")
        client, who = cluster.client.brief(), request.state.user
        await run_in_threadpool(lambda: _write(client, body, who))
        log.info("POST /acknowledgements by %s: %s on %s", who, body.code, body.node)
        return JSONResponse({"acknowledged": "now"}, status_code=201, headers={"Cache-Control": "no-store"})


def _write(client: Client, body: Acknowledgement, who: str) -> None:
    path = path_of(API_VERSION, PLURAL, body.node)
    try:
        found = client.get(path)
        findings = (found.get("status") or {}).get("findings") or ()
        known = [f"{one.get('code')} {one.get('subject', '')}".strip() for one in findings]
        if (body.code, body.subject) not in {(one.get("code"), one.get("subject", "")) for one in findings}:
            raise ProblemError(404, f"{body.node} has no finding {body.code} {body.subject}".strip(), allowed=known)
        held = found["metadata"].get("annotations") or {}
        gone = acknowledged.over(held, time.time())
        made = acknowledged.document(
            body.code, body.subject, who=who, reason=body.reason, until=body.until.timestamp()
        )  # fmt: skip
        client.merge(path, {"metadata": {"annotations": {**dict.fromkeys(gone), **made}}})
    except ApiError as error:
        if error.status == 404:
            raise ProblemError(404, f"no agent publishes a node {body.node}") from None
        raise ProblemError(503, f"it could not be written: {error}", headers={"Retry-After": "5"}) from None
