"""Mistakes, each in one sentence that names the option and what is near it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from typing import Any, get_args, get_type_hints

from pydantic import ValidationError

from tidegate.config.options import Config


def sentence(error: ValidationError, whole: Any = Config) -> str:
    """The first of pydantic's complaints, as one sentence with the option's dotted path.

    A name that is none comes first: it is often that of one that is missing, misspelt. `whole` is what was read.
    """
    complaints = error.errors()
    first = next((c for c in complaints if c["type"] == "unexpected_keyword_argument"), complaints[0])
    path = tuple(part for part in first["loc"] if not (isinstance(part, str) and part.startswith("function-")))
    dotted = ".".join(map(str, path))
    if first["type"] == "unexpected_keyword_argument":
        return f"unknown option {dotted}{nearest(str(path[-1]), _options_at(whole, path[:-1]))}"
    if first["type"] == "missing":
        return f"{dotted} is missing"
    if first["type"] in ("dataclass_type", "dict_type"):
        return f"{dotted} must be a table, not {first['input']!r}"
    message = (
        first["msg"]
        .removeprefix("Value error, ")
        .replace("Input should be", "must be")
        .replace("String should have at least 1 character", "must not be empty")
        .replace("a valid tuple", "a list")
    )
    shown = "" if first["type"] == "value_error" else f", not {first['input']!r}"
    return f"{dotted} {message}{shown}"


def nearest(name: str, known: Mapping[str, Any]) -> str:
    """What follows a name that is none: the closest one there is, or all of them."""
    close = get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else f"; there are: {', '.join(sorted(known))}"


def _options_at(whole: Any, path: tuple[int | str, ...]) -> dict[str, Any]:
    """The options that may stand at a path of sections, names and list positions."""
    at = whole
    for part in path:
        if is_dataclass(at):
            at = get_type_hints(at)[str(part)]
        elif get_args(at):
            at = get_args(at)[-1] if not isinstance(part, int) else get_args(at)[0]
    return {f.name: f for f in fields(at)} if is_dataclass(at) else {}
