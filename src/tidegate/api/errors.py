"""Errors that a client gets, in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Mapping

from typing_extensions import TypedDict

from tidegate.errors import TidegateError

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
