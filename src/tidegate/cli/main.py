"""The `tidegate` command: finds the subcommand, and turns how it ended into an exit code.

Each subcommand is a function in a file of its own, imported only when it is asked for, so that
`tidegate --help` imports neither torch nor a server. Exit codes: 0 done, 1 a fault of ours, 2 bad input,
130 interrupted; faults are one line on standard error.
"""

from __future__ import annotations

import os
import sys
import traceback
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException

from tidegate import __version__
from tidegate.cli.bare import help_without_command
from tidegate.cli.environment import debugging
from tidegate.errors import InputError

COMMANDS = {
    "serve": "tidegate.cli.serve:serve",
    "gateway": "tidegate.cli.gateway:gateway",
    "replay": "tidegate.cli.replay:replay",
    "simulate": "tidegate.cli.simulate:simulate",
    "capacity": "tidegate.cli.capacity:capacity",
    "tune": "tidegate.cli.tune:tune",
    "calibrate": "tidegate.cli.calibrate:calibrate",
    "report": "tidegate.cli.report:report",
    "scenario": "tidegate.cli.scenario:scenario",
    "cost": "tidegate.cli.cost:cost",
    "policies": "tidegate.cli.policies:policies",
    "traces": "tidegate.cli.traces:app",
    "models": "tidegate.cli.models:models",
    "hardware": "tidegate.cli.hardware:hardware",
    "predictor": "tidegate.cli.predictor:app",
    "config": "tidegate.cli.config:app",
}

INTERRUPTED = 130  # what typer makes of a KeyboardInterrupt


class LazyGroup(TyperGroup):
    """The subcommands of COMMANDS, each imported when it is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name].partition(":")
        target = getattr(import_module(module), attribute)
        if not isinstance(target, typer.Typer):
            single = typer.Typer(rich_markup_mode=None, add_completion=False)
            single.command(cmd_name)(target)
            target = single
        command = typer.main.get_command(target)
        command.name = cmd_name
        return command


app = typer.Typer(cls=LazyGroup, rich_markup_mode=None, add_completion=False, invoke_without_command=True)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Tidegate decides what an LLM server computes next."""
    help_without_command(ctx)


def main() -> None:
    """Run the command line in `sys.argv` and leave the process with its exit code."""
    try:
        code = app(prog_name="tidegate", standalone_mode=False)
        sys.stdout.flush()
        if code == INTERRUPTED:
            _complain("interrupted", code)
    except (InputError, TyperException) as e:
        code = _complain(e.format_message() if isinstance(e, TyperException) else str(e), 2)
    except typer.Abort:
        code = _complain("interrupted", INTERRUPTED)
    except BrokenPipeError:
        code = _reader_left()
    except SystemExit as e:  # how typer ends a command whose output nobody reads any more
        code = _reader_left() if isinstance(e.__context__, BrokenPipeError) else e.code
    except Exception as e:  # noqa: BLE001 - the last resort: whatever it is becomes exit code 1
        if debugging():
            traceback.print_exc()
        code = _complain(f"a fault of Tidegate's: {type(e).__name__}: {e} (TIDEGATE_DEBUG=1 shows where)", 1)
    sys.exit(code if isinstance(code, int) else 0)


def _complain(message: str, code: int) -> int:
    if message:
        print("tidegate: " + " ".join(message.split()), file=sys.stderr)  # noqa: T201 - standard error is the place
    return code


def _reader_left() -> int:
    """Whoever read our output has what it wanted. What Python flushes at exit must not complain again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return 0
