"""`tidegate traces`: what ships."""

from __future__ import annotations

from typing import Annotated

import typer


def traces(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the workload traces that ship with Tidegate."""
    from tidegate.cli.output import print_json, print_table
    from tidegate.simulate.traces import TRACES

    rows = []
    for trace in TRACES.values():
        workload = trace.load()
        rows.append(
            {
                "name": trace.name,
                "requests": len(workload),
                "duration_s": round(workload.duration_s, 1),
                "rate_s": round(workload.rate, 2),
                "prompt_tokens": sum(r.prompt_tokens for r in workload),
                "output_tokens": sum(r.output_tokens for r in workload),
                "licence": trace.licence,
                "cite": trace.cite,
            }
        )
    if as_json:
        print_json(rows)
    else:
        print_table(rows)
