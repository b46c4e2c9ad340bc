"""Hardware in a TOML file: what `tidegate calibrate` writes and `--hardware FILE.toml` reads.

The keys are the fields of `Hardware`, in its units (FLOP/s, bytes/s, bytes, seconds).
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from math import inf
from pathlib import Path
from typing import Any

import tomli_w

from tidegate.errors import InputError
from tidegate.executors.sim.hardware import Hardware, find_hardware
from tidegate.simulate.nearest import nearest

SUFFIX = ".toml"
_FIELDS = {f.name: f for f in fields(Hardware)}
_TEXTS = ("name", "fitted_on")
_SHARES = ("e1", "e2", "e3", "e4")


def named_hardware(name: str) -> Hardware:
    """The preset called `name`, or the hardware in the file of that path where it ends in .toml.

    Raises InputError for an unknown name, and for a file that cannot be read or describes no hardware.
    """
    return read_hardware(Path(name)) if name.endswith(SUFFIX) else find_hardware(name)


def read_hardware(path: Path) -> Hardware:
    """The hardware that a file describes. Raises InputError that names the file and the key."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:  # no TOML, or no UTF-8
        raise InputError(f"{path} is not TOML: {error}") from error
    for key in values:
        if key not in _FIELDS:
            raise InputError(f"{path}: unknown key {key!r}; {nearest(key, list(_FIELDS))}")
    missing = [name for name, f in _FIELDS.items() if f.default is MISSING and name not in values]
    if missing:
        raise InputError(f"{path}: missing {', '.join(missing)}")
    return Hardware(**{key: _checked(path, key, value) for key, value in values.items()})


def write_hardware(hardware: Hardware, path: Path) -> None:
    """Write a file that `read_hardware` reads. Raises InputError for a path that cannot be written."""
    check_suffix(path)
    try:
        path.write_text(tomli_w.dumps(asdict(hardware)), encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from error


def check_suffix(path: Path) -> None:
    """Raise InputError where `--hardware` would take the path for a preset's name; call it before long work."""
    if path.suffix != SUFFIX:
        raise InputError(f"{path}: hardware is written as {SUFFIX}")


def _checked(path: Path, key: str, value: Any) -> Any:
    if key in _TEXTS:
        if not isinstance(value, str) or not value:
            raise InputError(f"{path}: {key} must be a text, not {value!r}")
        return value
    if not isinstance(value, int | float) or isinstance(value, bool) or not _limits_allow(key, value):
        raise InputError(f"{path}: {key} must be {_WORDS.get(key, 'a number above 0')}, not {value!r}")
    return float(value)


_WORDS: Mapping[str, str] = {
    **dict.fromkeys(_SHARES, "above 0 and at most 1"),
    "t0": "0 or more seconds",
    "p": "a number of at least 1",
}


def _limits_allow(key: str, value: float) -> bool:
    if key in _SHARES:
        return 0 < value <= 1
    if key == "t0":
        return 0 <= value < inf
    return (1 if key == "p" else 0) <= value < inf and value > 0
