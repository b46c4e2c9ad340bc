"""`tidegate hardware`: the hardware that the cost model knows by name."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer


def hardware(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, in plain units and with all constants.")] = False,
) -> None:
    """List the hardware of `tidegate cost`: peaks, link, memory, and what its constants were fitted on."""
    from tidegate.cli.output import print_json, print_table
    from tidegate.executors.sim.hardware import HARDWARE

    if as_json:
        print_json([asdict(h) | {"validated": h.validated} for h in HARDWARE.values()])
        return
    print_table(
        [
            {
                "name": h.name,
                "bf16 TFLOP/s": f"{h.peak_flops / 1e12:g}",
                "memory TB/s": f"{h.memory_bandwidth / 1e12:g}",
                "memory GB": f"{h.memory_bytes / 1e9:g}",
                "link GB/s": f"{h.link_bandwidth / 1e9:g}",
                "fitted on": h.fitted_on,
            }
            for h in HARDWARE.values()
        ]
    )
