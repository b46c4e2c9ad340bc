"""Everything that the command line reads from the environment.

TIDEGATE_CONFIG   the configuration file, where --config is not given
TIDEGATE_CACHE    folder for models; $XDG_CACHE_HOME/tidegate or ~/.cache/tidegate without it
TIDEGATE_API_KEY  key that `tidegate replay` sends
TIDEGATE_DEBUG    1 shows the traceback of a fault
"""

from __future__ import annotations

import os
from pathlib import Path


def config_path(given: Path | None) -> Path | None:
    """The configuration file to read: what was given on the command line, or TIDEGATE_CONFIG."""
    named = os.environ.get("TIDEGATE_CONFIG")
    return given or (Path(named) if named else None)


def cache_dir() -> Path:
    """Where downloads are kept. The folder may not exist yet."""
    named = os.environ.get("TIDEGATE_CACHE")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tidegate"


def api_key() -> str | None:
    """The key to send to a server that wants one."""
    return os.environ.get("TIDEGATE_API_KEY") or None


def debugging() -> bool:
    """Whether a fault shows its traceback."""
    return os.environ.get("TIDEGATE_DEBUG", "") not in ("", "0")
