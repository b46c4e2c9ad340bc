"""Everything that goes wrong, in OpenAI's error shape."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from tidegate.api.errors import ApiError, ErrorBody, refused
from tidegate.errors import EngineDead, RequestRefused, TidegateError
from tidegate.server.schema import UNSUPPORTED

_TAGGED = "response_format"  # its form is named by its `type`
_LONGEST_PATH = 200  # characters


def as_api_error(error: Exception) -> ApiError:
    """The answer to any error: refusals at the door, a dead engine, and what nobody expected."""
    match error:
        case ApiError():
            return error
        case RequestRefused(reason=reason, retry_after=retry):
            return refused(reason, str(error), retry)
        case EngineDead():
            return ApiError(503, str(error), code="engine_dead")
        case RequestValidationError():
            return _invalid(error)
        case HTTPException():
            return _http(error)
    return ApiError(500, "the server made a mistake; its log says more", code="internal_error")


def _invalid(error: RequestValidationError) -> ApiError:
    """The fault of a body, path or header that does not fit its schema: the one farthest inside it.

    Where several forms are allowed each of them complains; the form that fits farthest was meant.
    """
    if isinstance(error.body, bytes):
        return ApiError(400, "the body was not read as JSON; send it with the header Content-Type: application/json")
    complaints = [(_path(e["loc"], error.body), e) for e in error.errors()]
    deepest = max(len(path) for path, _ in complaints)
    path, first = next(complaint for complaint in complaints if len(complaint[0]) == deepest)
    param = _shortened(".".join(path)) or None
    match first["type"]:
        case "json_invalid":
            return ApiError(400, f"the body is not JSON: {first['ctx']['error']} at character {first['loc'][-1]}")
        case "extra_forbidden":
            why = UNSUPPORTED.get(path[-1], "is not a parameter of this endpoint")
            return ApiError(400, f"{param} {why}", param=param, code="unsupported_parameter")
        case "missing" if param is None:
            return ApiError(400, "the body is missing; send JSON with Content-Type: application/json")
        case "value_error":
            return ApiError(400, str(first["ctx"]["error"]), param=param)
    messages = dict.fromkeys(e["msg"] for at, e in complaints if at == path)
    return ApiError(400, f"{param or 'the body'}: {', or: '.join(messages)}", param=param)


def _path(location: Sequence[Any], body: Any) -> list[str]:
    """Where in the body an error is: its location without the names of the forms that were tried."""
    path: list[str] = []
    at = body
    parts = list(location[1:])
    if parts[:1] == [_TAGGED]:
        del parts[1:2]  # the name of the form, which one of its fields may bear as well
    for part in parts:
        if (isinstance(at, list) and isinstance(part, int) and part < len(at)) or (isinstance(at, dict) and part in at):
            at = at[part]
        elif part != location[-1] or not isinstance(at, dict):
            continue
        path.append(str(part))
    return path


def _shortened(path: str) -> str:
    """A path as long as a person reads: names in it may be the client's own."""
    return path if len(path) <= _LONGEST_PATH else path[: _LONGEST_PATH - 1] + "…"


def _http(error: HTTPException) -> ApiError:
    match error.__cause__:
        case ApiError() as fault:
            return fault
        case UnicodeDecodeError():
            return ApiError(400, "the body is not UTF-8")
        case RecursionError():
            return ApiError(400, "the body is nested too deeply")
        case ValueError() as cause:
            return ApiError(400, f"the body is not JSON: {cause}")
    return ApiError(error.status_code, str(error.detail), headers=error.headers)


def install(app: FastAPI) -> None:
    """Answer every error of `app` in this shape."""

    async def answer(request: Request, error: Exception) -> JSONResponse:
        fault = as_api_error(error)
        return JSONResponse(fault.body, fault.status, fault.headers)

    for kind in (TidegateError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, answer)


def as_event(error: Exception) -> bytes:
    """The error as a server-sent event, for a stream that has begun."""
    return b"data: " + json.dumps(as_api_error(error).body).encode() + b"\n\n"


def responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """These statuses for an endpoint's OpenAPI description."""
    return {status: {"model": ErrorBody} for status in statuses}
