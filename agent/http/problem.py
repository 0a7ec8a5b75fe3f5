"""Errors over HTTP as RFC 9457 problem documents."""

from __future__ import annotations

import difflib
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

MEDIA_TYPE = "application/problem+json"


class ProblemError(Exception):
    """A request that cannot be answered; becomes a problem document."""

    def __init__(self, status: int, detail: str, *, headers: dict[str, str] | None = None, **more: Any) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.headers = headers
        self.more = more


def response(
    request: Request, status: int, detail: str, headers: dict[str, str] | None = None, **more: Any
) -> JSONResponse:
    """One problem document."""
    body = {
        "type": "about:blank",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": detail,
        "instance": request.url.path,
        **more,
    }
    return JSONResponse(body, status_code=status, media_type=MEDIA_TYPE, headers=headers)


def refuse_unknown_parameters(request: Request) -> None:
    """Dependency of every route: a query parameter that the route does not declare is refused, never ignored."""
    if not request.query_params:
        return
    paths = request.app.openapi()["paths"]  # made once, and only where parameters are given
    operation = paths.get(request.scope["route"].path, {}).get(request.method.lower(), {})
    known = [one["name"] for one in operation.get("parameters", ()) if one["in"] == "query"]
    for name in request.query_params:
        if name in known:
            continue
        close = difflib.get_close_matches(name[:64], known, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        allowed = f"must be one of {', '.join(known)}" if known else "this path takes none"
        raise ProblemError(400, f"unknown parameter {name[:64]!r}: {allowed}{hint}", allowed=known)


def install(app: FastAPI) -> None:
    """Make every error of the application a problem document."""

    @app.exception_handler(ProblemError)
    async def problem(request: Request, error: ProblemError) -> JSONResponse:
        return response(request, error.status, error.detail, error.headers, **error.more)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        headers = dict(error.headers) if error.headers else None
        return response(request, error.status_code, str(error.detail), headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        errors = [{"where": ".".join(map(str, e["loc"])), "message": e["msg"]} for e in error.errors()]
        detail = "; ".join(f"{e['where']}: {e['message']}" for e in errors)
        return response(request, 422, detail, errors=errors)
