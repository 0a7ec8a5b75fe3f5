"""Errors over HTTP as RFC 9457 problem documents."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from contracts.redaction import without_secrets

if TYPE_CHECKING:  # the worker process refuses questions too, and serves no HTTP
    from fastapi import FastAPI, Request
    from fastapi.exceptions import RequestValidationError
    from starlette.exceptions import HTTPException
    from starlette.responses import JSONResponse

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
    from starlette.responses import JSONResponse

    body = {
        "type": "about:blank",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": detail,
        "instance": request.url.path,
        **more,
    }
    return JSONResponse(without_secrets(body), status_code=status, media_type=MEDIA_TYPE, headers=headers)


def install(app: FastAPI) -> None:
    """Make every error of the application a problem document."""
    from fastapi.exceptions import RequestValidationError
    from starlette.exceptions import HTTPException

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
