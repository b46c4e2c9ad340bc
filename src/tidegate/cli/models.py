"""`tidegate models`: what `model.name` may name, and fetching one ahead of time."""

from __future__ import annotations

from typing import Annotated

import typer


def models(
    fetch: Annotated[
        str | None, typer.Option(metavar="NAME", help="Bring a model into the cache, and print where it lies.")
    ] = None,
    verify: Annotated[bool, typer.Option(help="With --fetch: check the hashes of what is cached, too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the models that Tidegate knows by name. A directory, a .gguf file or a hub id will do as well."""
    from tidegate.cli.environment import cache_dir
    from tidegate.cli.output import print_json, print_table
    from tidegate.errors import InputError, MissingExtra

    try:
        from tidegate.executors.torch.weights import DEFAULT_MODEL, PACKAGED, ensure_model, is_intact
    except ImportError as e:
        raise MissingExtra(f"models need {e.name}: pip install 'tidegate[torch]'") from e
    if fetch is not None:
        files = ensure_model(fetch, cache_dir(), verify=verify)
        print_json({"name": files.name, "path": str(files.path)}) if as_json else typer.echo(files.path)
        return
    if verify:
        raise InputError("--verify goes with --fetch NAME")
    rows = [
        {
            "name": name,
            "default": name == DEFAULT_MODEL,
            "cached": is_intact(cache_dir() / name, model.gguf_sha256, verify=False),
            "source": model.requirement,
        }
        for name, model in PACKAGED.items()
    ]
    if as_json:
        print_json(rows)
        return
    print_table(
        [
            row | {"default": "default" if row["default"] else "", "cached": "yes" if row["cached"] else "no"}
            for row in rows
        ]
    )
