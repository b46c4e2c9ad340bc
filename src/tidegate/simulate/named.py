"""Finds a workload by the name of a shipped trace or the path of a file."""

from __future__ import annotations

from pathlib import Path

from tidegate.simulate.shipped import TRACES
from tidegate.simulate.workload import Workload
from tidegate.simulate.workload_files import Columns, is_workload_file, read_workload


def named_workload(name: str, columns: Columns | None = None) -> Workload | None:
    """The shipped trace or the file called `name`; None where it is neither. `columns` concern files."""
    if name in TRACES:
        return TRACES[name].load()
    path = Path(name)
    return read_workload(path, columns) if is_workload_file(path) or exists(path) else None


def exists(path: Path) -> bool:
    """Whether there is such a path; False also for what cannot be one, such as a name that is too long."""
    try:
        return path.exists()
    except OSError:
        return False
