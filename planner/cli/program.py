"""The program `shardroute` itself: its app, its version, how much it says, and how errors leave it."""

import inspect
import sys
import time
from collections.abc import Callable
from contextvars import copy_context
from functools import wraps
from importlib.metadata import version
from inspect import Parameter
from typing import Annotated

import typer

from shardroute.planner.cli.mistakes import Group
from shardroute.planner.cli.output import Speech, message_text, speak, tell
from shardroute.planner.cli.overwriting import keep_inputs
from shardroute.planner.cli.records import tell_records
from shardroute.topologies.errors import InputError, RunError, ShardrouteError
from shardroute.topologies.units import format_seconds

_PANEL = "What is said"
QuietFlag = Annotated[
    bool,
    typer.Option("--quiet", "-q", help="Print results only; on standard error nothing but errors.", rich_help_panel=_PANEL),
]
VerboseFlag = Annotated[
    bool,
    typer.Option(
        "--verbose", "-v", help="Say what was read and chosen, and how long each part took, on standard error.",
        rich_help_panel=_PANEL,
    ),
]  # fmt: skip


def let_speak(program: typer.Typer) -> None:
    """Give each command of the program and of its groups --quiet and --verbose; before the command's name they mean the same."""
    for info in (*program.registered_commands, program.registered_callback):
        if info is not None and info.callback is not None and "quiet" not in info.callback.__annotations__:
            info.callback = _speaking(info.callback)
    for group in program.registered_groups:
        if group.typer_instance is not None:
            let_speak(group.typer_instance)


def _speaking(command: Callable[..., object]) -> Callable[..., None]:
    """The command with the two flags behind its own options; Typer reads options off the signature."""
    signature = inspect.signature(command, eval_str=True)
    parameters = [parameter.replace(kind=Parameter.KEYWORD_ONLY) for parameter in signature.parameters.values()]
    for name, flag in (("quiet", QuietFlag), ("verbose", VerboseFlag)):
        parameters.append(Parameter(name, Parameter.KEYWORD_ONLY, default=False, annotation=flag))

    @wraps(command)
    def run(*, quiet: bool, verbose: bool, **given: object) -> None:
        if quiet and verbose:
            raise InputError("--quiet and --verbose don't go together; give one of them")
        if quiet or verbose:
            speak(Speech.QUIET if quiet else Speech.VERBOSE)
        keep_inputs(given)
        command(**given)

    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]  # inspect's own protocol
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


app = typer.Typer(
    name="shardroute",
    cls=Group,
    help="Plan, predict and run how large tensors move between GPUs.\n\n"
    "Start with `shardroute demo`, or plan a refit of your own: `shardroute plan --help`.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"shardroute {version('shardroute')}")
        raise typer.Exit


@app.callback()
def _program(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of the program as a whole."""


def main() -> None:
    """Run the command line; a mistake of the user's or a failed run ends in one message, never in a traceback."""
    let_speak(app)
    copy_context().run(_main)


def _main() -> None:
    began = time.perf_counter()
    try:
        with tell_records():
            app()
    except ShardrouteError as error:
        print(f"error: {message_text(error)}", file=sys.stderr)
        sys.exit(1 if isinstance(error, RunError) else 2)
    finally:
        tell(f"in all: {format_seconds(time.perf_counter() - began)}")
