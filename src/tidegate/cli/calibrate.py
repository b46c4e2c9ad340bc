"""`tidegate calibrate`: fit the cost model to step logs, and say how far it is off on steps it has not seen."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from tidegate.simulate.calibration import Calibration, Constant


def calibrate(
    steplog: Annotated[list[Path], typer.Argument(metavar="STEPLOG...", help="Step logs, .parquet or .jsonl.")],
    model: Annotated[str, typer.Option(help="The model that ran (see `tidegate cost --list`).")],
    hardware_base: Annotated[
        str,
        typer.Option(
            help="A name of `tidegate hardware`, or a .toml: peaks, memory, link, and what the log leaves open."
        ),
    ] = "h100",
    tp: Annotated[int, typer.Option(help="GPUs that shared the model (tensor parallel degree).")] = 1,
    hold_out: Annotated[float, typer.Option(help="Share of the steps that is only predicted.")] = 0.3,
    out: Annotated[
        Path | None, typer.Option(help="Write the hardware to this .toml, for `tidegate simulate --hardware`.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Fit the time of a step to the step logs of an engine, real or simulated.

    The logs are of one model on one kind of hardware. docs/cost.md says what is fitted and how.
    """
    from tidegate.cli.output import print_json
    from tidegate.executors.sim.models import find_model
    from tidegate.observe.steplog import iter_steps
    from tidegate.simulate.calibration import calibrate as fit
    from tidegate.simulate.hardware_file import check_suffix, named_hardware, write_hardware
    from tidegate.simulate.step_costs import step_costs

    shape, base = find_model(model), named_hardware(hardware_base)
    if out is not None:
        check_suffix(out)
    steps = step_costs(row for path in steplog for row in iter_steps(path))
    found = fit(steps, shape, base, tp, hold_out, source=", ".join(path.name for path in steplog))
    if out is not None:
        write_hardware(found.hardware, out)
    if as_json:
        print_json(_document(found, shape.name, base.name, tp))
    else:
        _show(found, base.name, out)


def _document(found: Calibration, model: str, base: str, tp: int) -> dict[str, Any]:
    """The documented output of `--json` (docs/cost.md)."""
    from dataclasses import asdict

    return {
        "model": model,
        "tp": tp,
        "base": base,
        "fitted_steps": found.fitted,
        "guessed_steps": found.guessed,
        "constants": {
            c.name: {"base": c.base, "value": c.value, "identified": c.error is not None, "standard_error": c.error}
            for c in found.constants
        },
        "held_out": {kind: errors._asdict() for kind, errors in found.held_out.items()},
        "hardware": asdict(found.hardware),
    }


def _show(found: Calibration, base: str, out: Path | None) -> None:
    from tidegate.cli.output import print_table

    print_table(
        [
            {
                "constant": c.name,
                base: f"{c.base:.4g}",
                "fitted": f"{c.value:.4g}",
                "told by the log": "no, kept" if c.error is None else _error(c),
            }
            for c in found.constants
        ],
        f"{found.fitted:,} steps fitted, {base} where the log does not tell",
    )
    typer.echo("")
    print_table(
        [
            {"held out": kind, "steps": e.steps, "median error": _share(e.median), "p90": _share(e.p90)}
            | {"bias": _share(e.bias, "+")}
            for kind, e in found.held_out.items()
        ]
    )
    kept = [c.name for c in found.constants if c.error is None]
    if kept:
        typer.echo(f"{', '.join(kept)}: the log does not tell, so those of {base} are kept")
    if found.guessed:
        typer.echo(f"{found.guessed:,} steps do not say where their prompt chunks begin; taken for one from the start")
    if out is not None:
        typer.echo(f"written to {out}; t0 holds the host's time, so simulate without --host-overhead")


def _error(c: Constant) -> str:
    unit = " of a median step" if c.name == "t0" else ""
    return f"within {c.error:.1%}{unit}"


def _share(value: float | None, sign: str = "") -> str | None:
    return None if value is None else f"{value:{sign}.2%}"
