"""What a policy's name stands for: a preset that ships, or an object of the operator's own, `package.module:NAME`.

An own policy is code that this process runs. So only whoever starts the process can name one, on the command line
or in his configuration; a scenario file, which people pass around, cannot.
"""

from __future__ import annotations

import sys
from dataclasses import is_dataclass
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from types import ModuleType

from tidegate.core.policy import Policy
from tidegate.core.presets import PRESETS, Preset
from tidegate.errors import ConfigError


def is_own(name: str) -> bool:
    """Whether `name` names code of the operator's own."""
    return ":" in name


def find_policy(name: str) -> Preset | Policy:
    """The preset `name`; or for "package.module:NAME" what stands there: a `Preset`, an order class, or a `Policy`.

    An order class is a preset with the defaults of the composition. A module is looked for where Python looks,
    then in the working directory. Raises ConfigError in one sentence where there is nothing, or something else.
    """
    if not is_own(name):
        if name not in PRESETS:
            raise ConfigError(f"unknown policy {name!r}{_nearest(name, list(PRESETS))}")
        return PRESETS[name]
    module, _, attribute = name.partition(":")
    if not (attribute.isidentifier() and all(part.isidentifier() for part in module.split("."))):
        raise ConfigError(f"policy {name!r} is not of the form package.module:NAME")
    loaded = _load(module)
    if not hasattr(loaded, attribute):
        there = [n for n, value in vars(loaded).items() if _fault(value) is None and not n.startswith("_")]
        raise ConfigError(f"policy {name!r}: module {module} has no {attribute!r}{_nearest(attribute, there)}")
    found = getattr(loaded, attribute)
    fault = _fault(found)
    if fault is not None:
        raise ConfigError(f"policy {name!r}: {fault}")
    if isinstance(found, Preset | Policy):
        return found
    return Preset((found.__doc__ or name).strip().splitlines()[0], found)


def _load(module: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)  # last, so that a file that lies there hides nothing that is installed
    try:
        return import_module(module)
    except ModuleNotFoundError as e:
        if e.name is None or not f"{module}.".startswith(f"{e.name}."):
            raise ConfigError(f"policy module {module} needs a module that is not there: {e.name}") from e
        raise ConfigError(f"no module {e.name} for a policy, neither installed nor in {here}") from e
    except Exception as e:
        raise ConfigError(f"policy module {module} cannot be loaded: {type(e).__name__}: {e}") from e


def _fault(found: object) -> str | None:
    """Why `found` is no policy, None if it is one."""
    if isinstance(found, Policy):
        return None
    order = found.order if isinstance(found, Preset) else found
    if not isinstance(order, type):
        return f"must be a Preset, an order class or a Policy, not {type(found).__name__}"
    missing = [method for method in ("tier", "key") if not callable(getattr(order, method, None))]
    if missing:
        return f"class {order.__name__} is no order: it has no method {missing[0]}"
    if not is_dataclass(order):
        return f"class {order.__name__} must be a dataclass: its fields are the policy's parameters"
    return None


def _nearest(name: str, known: list[str]) -> str:
    if not known:
        return ""
    close = get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else f"; there are: {', '.join(sorted(known))}"
