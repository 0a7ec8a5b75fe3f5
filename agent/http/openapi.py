"""What each door may answer, written into the OpenAPI document: status codes, media types, schemas.

Specification: OpenAPI 3.1; RFC 9457 for every error. Handlers return finished responses, so FastAPI cannot know; the
tests ask every door for what is allowed and what is not, and compare.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from agent.http.problem import MEDIA_TYPE

_CLOSED = (401, 403, 429)  # the token is missing or unknown, not allowed, or one of too many
_NOT_YET = (503,)  # no scan is done yet, nobody can judge the token, or too many ask at once
_ERRORS: dict[str, tuple[int, ...]] = {
    "page": (404, 422, *_CLOSED, *_NOT_YET),
    "cluster_page": (*_CLOSED, *_NOT_YET),
    "what_if": (422, *_CLOSED, *_NOT_YET),
    "healthz": (),
    "readyz": _NOT_YET,
    "metrics": (*_CLOSED, *_NOT_YET),
    "measurements": (400, 404, 422, *_CLOSED, *_NOT_YET),
    "benchmarks": (*_CLOSED, *_NOT_YET),
    "benchmark_start": (400, 409, 413, 422, 501, *_CLOSED, *_NOT_YET),
    "preflight_now": (400, 413, 422, *_CLOSED, *_NOT_YET),
    "flight_keep": (400, 409, 413, 422, 507, *_CLOSED, *_NOT_YET),
}
_OTHERS = (400, 422, *_CLOSED, *_NOT_YET)
_WORDS = {
    400: "A word that is not known here; says what is.", 401: "No token, or none that is known.",
    403: "Not allowed; says who may allow it.", 404: "Not here.", 409: "One is running, or another is kept.",
    413: "Larger than is read.", 422: "A parameter out of its bounds.", 429: "Too many of these.",
    501: "Not in this image.", 503: "Not yet; Retry-After says when.", 507: "No room to keep it.",
}  # fmt: skip
_TEXT = {"type": "string"}
_YAML = ("snapshot", "topology", "findings", "measurements", "flights", "nodes", "preflight", "recommendations")
_PROBLEM = {
    "title": "Problem", "type": "object", "description": "RFC 9457, with members of our own.",
    "required": ["type", "title", "status", "detail", "instance"],
    "properties": {
        "type": _TEXT, "title": _TEXT, "status": {"type": "integer"}, "detail": _TEXT, "instance": _TEXT,
        "grant": {"type": "string", "description": "How to be let in."},
        "allowed": {"type": "array", "items": _TEXT}, "errors": {"type": "array", "items": {"type": "object"}},
    },
}  # fmt: skip


def install(app: FastAPI) -> None:
    """Replace the application's document by one that is complete."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _completed(
                get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            )
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _completed(document: dict[str, Any]) -> dict[str, Any]:
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for unused in ("HTTPValidationError", "ValidationError"):  # FastAPI's own, which `problem` replaces
        schemas.pop(unused, None)
    schemas["Problem"] = _PROBLEM
    shown = _shown(schemas)
    for methods in document["paths"].values():
        for operation in methods.values():
            name = operation["operationId"]
            answers = operation["responses"]
            answers.pop("422", None)
            content = next(answers[code] for code in answers if code.startswith("2")).setdefault("content", {})
            if name in shown:
                content["application/json"] = {"schema": shown[name]}
            if name in _YAML:
                content["application/yaml"] = {"schema": {}}
            if name == "recommendations":
                content["text/plain"] = {"schema": _TEXT}
            if name == "metrics":
                content["application/openmetrics-text"] = {"schema": _TEXT}
            if name == "what_if":  # a form: an empty field is one left out, so that the handler reads them itself
                answers["400"] = {"description": _WORDS[400], "content": {"text/html": {"schema": _TEXT}}}
            for status in {*_ERRORS.get(name, _OTHERS), 400}:  # 400: an unknown parameter, which no endpoint takes
                answer = answers.setdefault(str(status), {"description": _WORDS[status], "content": {}})
                answer["content"][MEDIA_TYPE] = {"schema": {"$ref": "#/components/schemas/Problem"}}
                if status == 413:  # Starlette refuses it before any handler
                    answers["413"]["content"] = {"text/plain": {"schema": _TEXT}}
            operation["responses"] = dict(sorted(answers.items()))
            if name in ("benchmark_start", "preflight_now", "flight_keep"):
                operation["security"] = [{"bearer": []}]
    document["components"]["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
    return document


def _shown(schemas: dict[str, Any]) -> dict[str, Any]:
    """Schemas of the answers whose records are ours; the records themselves go into `schemas`."""
    from pydantic import TypeAdapter

    from agent.gate.verdict import Check, Verdict
    from collectives.bench.results import BenchResult
    from planner.advice import Recommendation

    made: dict[type, dict[str, Any]] = {}
    for kind in (Check, Verdict, BenchResult, Recommendation):
        schema = TypeAdapter(kind).json_schema(mode="serialization", ref_template="#/components/schemas/{model}")
        schemas.update(schema.pop("$defs", {}))
        schemas[kind.__name__] = schema
        made[kind] = {"$ref": f"#/components/schemas/{kind.__name__}"}
    checks = {"type": "array", "items": made[Check]}
    gate = {
        "type": "object", "required": ["verdict", "checks"],
        "properties": {"verdict": made[Verdict], "checks": checks},
    }  # fmt: skip
    return {
        "findings": checks, "preflight": gate, "preflight_now": gate, "measurements": made[BenchResult],
        "recommendations": made[Recommendation], "flights": {"type": "array", "items": {"type": "object"}},
    }  # fmt: skip
