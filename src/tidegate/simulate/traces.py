"""The one way to a workload: shipped traces, files and synthetic kinds, reshaped and merged as an expression says."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from pydantic import ValidationError

from tidegate.errors import InputError
from tidegate.simulate.expression import Part, apply_steps, parse_part, refuse_unknown
from tidegate.simulate.named import named_workload
from tidegate.simulate.nearest import nearest
from tidegate.simulate.reshape import merged
from tidegate.simulate.seeds import SeedKey
from tidegate.simulate.sharing import Families, Sessions
from tidegate.simulate.shipped import TRACES
from tidegate.simulate.synthetic import Burst, Closed, Gamma, OnOff, Poisson, Steady, Synthetic
from tidegate.simulate.workload import Workload
from tidegate.simulate.workload_files import Columns

__all__ = ["KINDS", "TRACES", "load_workload"]

KINDS: dict[str, type[Synthetic]] = {
    kind.kind: kind for kind in (Poisson, Steady, Gamma, OnOff, Burst, Closed, Families, Sessions)
}


def load_workload(
    parts: str | Sequence[str],
    *,
    columns: Mapping[str, str] | None = None,
    unit: str | None = None,
    seed: int = 0,
    closed_loops: bool = False,
) -> Workload:
    """The workload that `parts` describe together; a text alone is one part.

    columns: column by field, for files whose columns have other names; a part's own `map.` items go first
    unit:    of the numeric arrivals of files: s, ms, us or ns; None tells it from their size
    seed:    of all that is decided by lot. The first part draws from it, each later one from a stream of its own,
             unless it has a seed of its own, which draws the same in any place
    closed_loops: whether the caller drives closed loops (`Workload.loops`); where not, they are refused

    Raises InputError for whatever is wrong with an expression or a file, in one line.
    """
    texts = [parts] if isinstance(parts, str) else list(parts)
    if not texts:
        raise InputError("no workload is named")
    written = [parse_part(text, _is_known) for text in texts]
    if (columns or unit) and all(_is_known(part.source) for part in written):
        raise InputError(f"a map of columns or a unit needs a file, and {' '.join(texts)} names none")
    shared = Columns(columns, unit)
    workload = merged([_load(part, shared, (seed, number)) for number, part in enumerate(written)])
    if workload.loops and not closed_loops:
        raise InputError(f"{' '.join(texts)}: a closed loop has no arrivals of its own, which this command needs")
    if not workload.total:
        raise InputError(f"{' '.join(texts)}: no request is left")
    return workload


def _is_known(name: str) -> bool:
    return name in TRACES or name in KINDS


def _load(part: Part, shared: Columns, key: SeedKey) -> tuple[Hashable, Workload]:
    """The part's workload, and its source, which tells whose hash ids name the same blocks."""
    if part.seed is not None:
        key = (part.seed, 0)
    kind = KINDS.get(part.source)
    if kind is not None:
        source: Hashable = (part.source, *sorted(part.keys.items()), key)
        workload = _synthetic(part, kind, key)
    else:
        source, workload = part.source, _named(part, shared)
    return source, apply_steps(workload, part, key)


def _synthetic(part: Part, kind: type[Synthetic], key: SeedKey) -> Workload:
    refuse_unknown(part, tuple(kind.model_fields))
    _refuse_columns(part)
    try:
        return kind.model_validate(dict(part.keys)).workload(key)
    except ValidationError as e:
        raise InputError(f"{part.text}: {_complaint(e)}") from e
    except InputError as e:
        raise InputError(f"{part.text}: {e}") from e


def _complaint(e: ValidationError) -> str:
    """The first thing that is wrong with the keys of a synthetic kind."""
    first = e.errors()[0]
    where = ".".join(str(at) for at in first["loc"])
    if first["type"] == "missing":
        return f"{where}= is missing"
    message = first["msg"].removeprefix("Value error, ").replace("Input should be", "must be").partition(", unable")[0]
    if first["type"] != "value_error":
        message += f", not {first['input']}"
    return f"{where}: {message}" if where else message


def _named(part: Part, shared: Columns) -> Workload:
    refuse_unknown(part, ("unit", "map.FIELD"))
    if part.source in TRACES:
        _refuse_columns(part)
    own = Columns({**shared.named, **part.map}, part.unit or shared.unit) if part.map or part.unit else shared
    workload = named_workload(part.source, own)
    if workload is not None:
        return workload
    known = (*TRACES, *KINDS)
    hint = nearest(part.source, known)
    raise InputError(
        f"no workload {part.source!r}: name a .jsonl or .csv file, or a shipped trace ({', '.join(TRACES)}), "
        f"or a synthetic kind ({', '.join(KINDS)})" + (f"; {hint}" if hint.startswith("did") else "")
    )


def _refuse_columns(part: Part) -> None:
    if part.map or part.unit:
        raise InputError(f"{part.text}: map. and unit= concern files, and {part.source} is none")
