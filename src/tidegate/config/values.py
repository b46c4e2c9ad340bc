"""What an option may hold, and the sections that more than one front shares."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, Strict

SECTION = ConfigDict(extra="forbid")

# TOML knows its types, so nothing is converted: "64" is no number and 1 is no truth value.
Switch = Annotated[bool, Strict()]
Whole = Annotated[int, Strict()]
Steps = Annotated[int, Strict(), Field(ge=0)]
Count = Annotated[int, Strict(), Field(ge=1)]
Share = Annotated[float, Strict(), Field(ge=0, lt=1)]
Seconds = Annotated[float, Strict(), Field(gt=0, allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1)]

_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def _bytes(value: Any) -> Any:
    """ "1.5GiB" as a number of bytes."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(B|KiB|MiB|GiB|TiB)\s*", value)
    if match is None:
        raise ValueError(f"must be a number of bytes or a size such as '512MiB' or '1.5GiB', not {value!r}")
    return int(float(match[1]) * _UNITS[match[2]])


def _no_promise(value: Any) -> Any:
    """ "none" takes a promise back that a class has by default."""
    return None if value == "none" else value


def _sendable(key: str) -> str:
    if re.fullmatch(r"[!-~]+", key) is None:
        raise ValueError("must be visible ASCII characters without spaces: no header can carry another key")
    return key


def _some_class(classes: tuple[str, ...]) -> tuple[str, ...]:
    if not classes:
        raise ValueError("must name a class: a key without any can ask for nothing; leave it out for all classes")
    return classes


Size = Annotated[Count, BeforeValidator(_bytes)]
Promise = Annotated[Seconds | None, BeforeValidator(_no_promise)]
Limit = Annotated[Count | None, BeforeValidator(_no_promise)]


@dataclass(frozen=True, slots=True)
class ApiKey:
    """`[[server.api_keys]]`: a key, whose it is, and what it may claim.

    tenant:  requests with this key are this tenant's, whatever they say; None leaves it to them
    classes: classes it may claim; None is all
    """

    __pydantic_config__ = SECTION

    key: Annotated[str, AfterValidator(_sendable)]
    tenant: Name | None = None
    classes: Annotated[tuple[Name, ...], AfterValidator(_some_class)] | None = None


def bare_keys(value: Any) -> Any:
    """A bare string is a key without bounds."""
    return tuple({"key": k} if isinstance(k, str) else k for k in value) if isinstance(value, list) else value
