"""What endpoints answer, as FastAPI's response models, and the problems that each may answer with.

Handlers return finished responses: the models are what the OpenAPI document says of them, and the tests ask every
endpoint for what is allowed and what is not, and compare. Specification: OpenAPI 3.1; RFC 9457 for problems.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from fastapi import FastAPI, Security
from fastapi.openapi.utils import get_openapi
from fastapi.security import HTTPBearer
from pydantic import BaseModel, ConfigDict, Field

from agent.checks.verdict import Verdict
from agent.http.problem import MEDIA_TYPE
from contracts.finding import Finding

Responses = dict[int | str, dict[str, Any]]

COMMON = (400, 401, 403, 422, 429, 503)
_WORDS = {
    400: "A word that is not known here; says what is.", 401: "No token, or none that is known.",
    403: "Not allowed; says who may allow it.", 404: "Not here.", 409: "One is running, or another is kept.",
    413: "Larger than is read.", 422: "A parameter out of its bounds.", 429: "Too many of these.",
    500: "An error of the agent; its log says which.",
    503: "Not yet; Retry-After says when.", 507: "No room to keep it.",
}  # fmt: skip
_TEXT = {"schema": {"type": "string"}}
YAML: Responses = {200: {"content": {"application/yaml": {"schema": {}}}}}
TOKEN = [Security(HTTPBearer(auto_error=False, scheme_name="bearer"))]  # for the document: agent.http.access judges it


class Problem(BaseModel):
    """RFC 9457, with members of our own."""

    model_config = ConfigDict(extra="allow")

    type: str
    title: str
    status: int
    detail: str
    instance: str
    grant: str = Field(default="", description="How to be let in.")
    allowed: list[str] = []
    errors: list[dict[str, Any]] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """The gate's answer."""

    verdict: Verdict
    checks: tuple[Finding, ...]


class Version(BaseModel):
    """Which release answers, and on what it runs."""

    version: str
    python: str
    architecture: str = Field(description="As uname -m prints it.")


class Kept(BaseModel):
    """Whether a record is new here."""

    kept: Literal["now", "before"]


def problems(*more: int, common: tuple[int, ...] = COMMON) -> Responses:
    """The problem documents of an endpoint, beside those that all have."""
    found: Responses = {
        status: {"description": _WORDS[status], "content": {MEDIA_TYPE: {"schema": _REFERENCE}}}
        for status in sorted({*common, *more})
    }
    if 413 in found:  # Starlette refuses it before any handler
        found[413]["content"] = {"text/plain": _TEXT}
    return found


def texts(*media_types: str) -> Responses:
    """What an endpoint also answers as text."""
    return {200: {"content": dict.fromkeys(media_types, _TEXT)}}


_REFERENCE = {"$ref": "#/components/schemas/Problem"}


def install(app: FastAPI) -> None:
    """Add the schema of problems, which no route returns as its own answer, to the document."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            schemas = made.setdefault("components", {}).setdefault("schemas", {})
            schemas["Problem"] = Problem.model_json_schema()
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]
