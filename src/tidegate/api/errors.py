"""Errors that a client gets, in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil

from typing_extensions import TypedDict

from tidegate.core.request import FinishReason
from tidegate.errors import TidegateError

_REFUSALS = {"queue_full": 429, "deadline": 429, "draining": 503}

# Ends that are no answers: the status, and what the client is told.
_ENDS: dict[FinishReason, tuple[int, str]] = {
    FinishReason.TIMEOUT: (504, "the request waited as long as it was allowed to (queue_ttl) and was not begun"),
    FinishReason.DEPENDENCY_TIMEOUT: (
        504,
        "what the request waits for did not come in the time that it may wait",
    ),
    FinishReason.SHED: (503, "the request was given up: its deadline could not be met any more"),
    FinishReason.DISPLACED: (503, "the queue is full, and a more urgent request took this one's place in it"),
}

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class Error(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    error: Error


class ApiError(TidegateError):
    """A request that gets an answer other than 200. The message says what is wrong and how to mend it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> ErrorBody:
        kind = _TYPES.get(self.status) or ("invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def refused(reason: str, message: str, retry_after: float | None) -> ApiError:
    """The answer to a request that the door refuses; `reason` as in `errors.RequestRefused`, `retry_after` seconds."""
    headers = {} if retry_after is None else {"Retry-After": str(max(1, ceil(retry_after)))}
    return ApiError(_REFUSALS.get(reason, 400), message, code=reason, headers=headers)


def unserved(reason: FinishReason) -> ApiError:
    """The answer to a request that was accepted and ended without one."""
    status, message = _ENDS.get(reason, (503, f"the request was ended by the server: {reason.value}"))
    return ApiError(status, message, code=reason.value)
