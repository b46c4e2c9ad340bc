"""`tidegate cost`: what it costs to swap a request's KV out and back, and to compute it again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from tidegate.executors.sim.cost import CostModel
    from tidegate.executors.sim.models import ModelShape
    from tidegate.executors.sim.swap import Price, SwapOrRecompute

# Rough figures that are often quoted for LLaMA-13B, 512 tokens and PCIe 4; shown beside what the model computes.
QUOTED_MODEL, QUOTED_TOKENS = "llama-13b", 512
QUOTED = {
    "KV": "about 400 MB",
    "swap, one way": "12.5 ms",
    "recompute": "15-30 ms",
    "host, swap": "400 MB",
    "host, ids": "about 2 KB",
}


def cost(
    ctx: typer.Context,
    model: Annotated[
        str | None, typer.Option(help="A shape of --list, or the path of a config.json or its folder (./NAME).")
    ] = None,
    tokens: Annotated[
        list[int] | None, typer.Option(min=1, help="Tokens of the request; may be repeated for a table.")
    ] = None,
    hardware: Annotated[
        str, typer.Option(help="A name of `tidegate hardware`, or a .toml of `tidegate calibrate`.")
    ] = "a100",
    link_gbps: Annotated[
        float | None, typer.Option(help="Gigabytes per second of each GPU's link, one way; the hardware's without.")
    ] = None,
    tp: Annotated[int, typer.Option(help="GPUs that share the model (tensor parallel degree).")] = 1,
    chunk: Annotated[int | None, typer.Option(help="Tokens of one prefill step; all at once without.")] = None,
    cached_share: Annotated[float, typer.Option(help="Share of the tokens that the prefix cache still holds.")] = 0.0,
    queue_ms: Annotated[float, typer.Option(help="Milliseconds that each copy waits for the link.")] = 0.0,
    layers: Annotated[
        int | None, typer.Option(help="Layers. This and what follows: a shape of your own, or changes to --model's.")
    ] = None,
    hidden: Annotated[int | None, typer.Option(help="Width of the residual stream.")] = None,
    heads: Annotated[int | None, typer.Option(help="Query heads.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="Key/value heads; as many as --heads without.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Width of a head; --hidden / --heads without.")] = None,
    intermediate: Annotated[int | None, typer.Option(help="Width of the gated MLP.")] = None,
    vocab: Annotated[int | None, typer.Option(help="Tokens of the vocabulary.")] = None,
    dtype_bytes: Annotated[int | None, typer.Option(help="Bytes of a weight and of a KV number.")] = None,
    listing: Annotated[bool, typer.Option("--list", help="List the model shapes known by name.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; a list for several --tokens.")] = False,
) -> None:
    """Swap or recompute: bytes, seconds, and from which length on swapping is the cheaper way.

    Computed by a formula for one request alone (docs/cost.md); nothing is run.
    """
    from tidegate.cli.output import print_json
    from tidegate.errors import InputError
    from tidegate.executors.sim.cost import CostModel
    from tidegate.executors.sim.swap import SwapOrRecompute
    from tidegate.simulate.hardware_file import named_hardware

    if listing:
        _refuse_others(ctx)
        _list_shapes(as_json)
        return
    if not tokens:
        raise InputError("name the tokens of the request by --tokens N, once or several times")
    given = {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate": intermediate,
        "vocab": vocab,
        "dtype_bytes": dtype_bytes,
    }
    shape = _shape(model, {name: value for name, value in given.items() if value is not None})
    link = None if link_gbps is None else link_gbps * 1e9
    ways = SwapOrRecompute(
        CostModel(named_hardware(hardware), shape, tp), link, queue_ms / 1e3, cached_share=cached_share, chunk=chunk
    )
    prices = [ways.price(n) for n in tokens]
    if as_json:
        documents = [_document(ways, price) for price in prices]
        print_json(documents[0] if len(documents) == 1 else documents)
    else:
        _show(ways, prices)


def _refuse_others(ctx: typer.Context) -> None:
    """Raise InputError for what was said beside --list and --json: it would do nothing."""
    from tidegate.errors import InputError

    for parameter in ctx.command.params:
        source = ctx.get_parameter_source(parameter.name or "")
        if source is not None and source.name == "COMMANDLINE" and parameter.name not in ("listing", "as_json"):
            raise InputError(f"{parameter.opts[0]} does nothing with --list, which only --json goes with")


def _shape(model: str | None, given: dict[str, Any]) -> ModelShape:
    """The shape that the options describe: a preset, a config.json, or numbers, which also change either."""
    from tidegate.errors import InputError
    from tidegate.executors.sim.models import MODELS, ModelShape, find_model

    if model is not None:
        shape = _read_config(Path(model)) if "/" in model or model.endswith(".json") else find_model(model)
        return replace(shape, name=f"{shape.name} (changed)", **given) if given else shape
    needed = ("layers", "hidden", "heads", "intermediate", "vocab")
    missing = ", ".join(f"--{name}" for name in needed if name not in given)
    if missing:
        raise InputError(
            f"name a model by --model ({', '.join(MODELS)}, or a config.json), or give its shape: {missing} missing"
        )
    heads = given["heads"]
    defaults = {"kv_heads": heads, "head_dim": given["hidden"] // max(heads, 1)}
    return ModelShape("custom", **(defaults | given))


def _read_config(path: Path) -> ModelShape:
    from tidegate.errors import InputError
    from tidegate.executors.sim.hf_config import shape_from_config

    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}; `tidegate cost --list` lists shapes by name") from None
    except ValueError as error:  # no JSON, or no UTF-8
        raise InputError(f"{file} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise InputError(f"{file} is not a config.json: it holds no object")
    return shape_from_config(config, file.parent.name if file.name == "config.json" and file.parent.name else file.name)


def _list_shapes(as_json: bool) -> None:
    from dataclasses import asdict

    from tidegate.cli.output import print_json, print_table
    from tidegate.executors.sim.models import ALIASES, MODELS

    rows = [
        asdict(shape)
        | {
            "linear_parameters": shape.linear_parameters,
            "weight_bytes": shape.weight_bytes,
            "kv_bytes_per_token": shape.kv_bytes_per_token,
            "aliases": [alias for alias, name in ALIASES.items() if name == shape.name],
        }
        for shape in MODELS.values()
    ]
    if as_json:
        print_json(rows)
    else:
        print_table([row | {"aliases": ", ".join(row["aliases"])} for row in rows])


def _document(ways: SwapOrRecompute, price: Price) -> dict[str, Any]:
    hardware = ways.cost.hardware
    return {
        "model": ways.cost.model.name,
        "hardware": hardware.name,
        "tp": ways.cost.tp,
        "link_bytes_per_s": ways.link,
        "queue_s": ways.queue_s,
        "cached_share": ways.cached_share,
        "chunk": ways.chunk,
        **price._asdict(),
        "break_even_tokens": ways.break_even(),
        "validated": hardware.validated,
        "fitted_on": hardware.fitted_on,
    }


def _show(ways: SwapOrRecompute, prices: Sequence[Price]) -> None:
    from tidegate.cli.output import print_table

    cost = ways.cost
    rows = []
    for price in prices:
        rows.append(_row(price, cost.hardware.validated))
        if (cost.model.name, price.tokens) == (QUOTED_MODEL, QUOTED_TOKENS):
            rows.append(dict.fromkeys(rows[-1]) | QUOTED | {"tokens": price.tokens, "figures": "often quoted"})
    print_table(rows, title=_title(ways))
    typer.echo("")
    typer.echo(_break_even(ways))
    for note in _notes(cost, max(prices)):
        typer.echo(note)


def _title(ways: SwapOrRecompute) -> str:
    cost = ways.cost
    title = f"{cost.model.name} on {cost.tp} x {cost.hardware.name}, link {_number(ways.link / 1e9)} GB/s"
    if ways.queue_s:
        title += f", {_seconds(ways.queue_s)} queue"
    if ways.cached_share:
        title += f", {ways.cached_share:.0%} cached"
    if ways.chunk:
        title += f", chunks of {ways.chunk}"
    return title


def _row(price: Price, validated: bool) -> dict[str, Any]:
    return {
        "tokens": price.tokens,
        "KV": _bytes(price.kv_bytes),
        "swap, one way": _seconds(price.swap_one_way_s),
        "round trip": _seconds(price.swap_round_trip_s),
        "recompute": _seconds(price.recompute_s),
        "recompute/token": _seconds(price.recompute_s / price.tokens),
        "cheaper": price.cheaper,
        "host, swap": _bytes(price.host_bytes),
        "host, ids": _bytes(price.token_id_bytes),
        "figures": "computed" if validated else "computed, unvalidated",
    }


def _break_even(ways: SwapOrRecompute) -> str:
    from tidegate.executors.sim.swap import LONGEST

    tokens = ways.break_even()
    if tokens is None:
        return f"break-even: none; at {LONGEST:,} tokens recomputing is still the cheaper way"
    if tokens == 1:
        return f"break-even: 1 token; a swap's round trip is cheaper at every length up to {LONGEST:,}"
    return (
        f"break-even: from {tokens:,} tokens on a swap's round trip is cheaper at every length (up to {LONGEST:,}); "
        "at some shorter ones recomputing is"
    )


def _notes(cost: CostModel, longest: Price) -> Iterator[str]:
    hardware, model = cost.hardware, cost.model
    if hardware.validated:
        yield f"{hardware.name}: fitted on {hardware.fitted_on}; other models are extrapolated"
    else:
        yield f"{hardware.name}: unvalidated; nothing was fitted, so take its seconds for an order of magnitude"
    if cost.tp > 1:
        yield f"tp {cost.tp}: each GPU has a link of its own; communication between GPUs is not counted"
    memory, needed = cost.tp * hardware.memory_bytes, model.weight_bytes + longest.kv_bytes
    if needed > memory:
        yield f"does not fit: weights and KV are {_bytes(needed)}, memory is {_bytes(memory)} (more --tp?)"


def _bytes(amount: float) -> str:
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if amount >= size:
            return f"{_number(amount / size)} {unit}"
    return f"{amount:g} B"


def _seconds(seconds: float) -> str:
    for size, unit in ((1, "s"), (1e-3, "ms")):
        if seconds >= size:
            return f"{_number(seconds / size)} {unit}"
    return f"{_number(seconds / 1e-6)} us"


def _number(value: float) -> str:
    """Three significant digits, and all of those before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
