"""`shardroute validate`: published measurements beside what is predicted for them."""

from collections.abc import Sequence
from typing import Annotated, Final, Protocol

import typer

from shardroute.planner.cli.output import JsonFlag
from shardroute.planner.cli.program import app
from shardroute.planner.cli.ring_report import print_ring_report
from shardroute.planner.cli.validation_report import print_validation
from shardroute.topologies.errors import InputError


class Emulation(Protocol):
    """What runs plans on an emulated cluster, and prints them beside their predictions."""

    def __call__(self, *, cases: Sequence[str], namespaces: bool, repeats: int, json: bool) -> None: ...


# The running half, which planning can't import, puts its own here.
EMULATION: list[Emulation] = []
_REPEATS: Final = 3


@app.command("validate", rich_help_panel="Plan and predict")
def validate_command(
    collectives: Annotated[bool, typer.Option("--collectives", help="Only collectives and permutes.")] = False,
    refits: Annotated[bool, typer.Option("--refits", help="Only refits.")] = False,
    ring: Annotated[bool, typer.Option("--ring", help="Instead, training steps and attention over several GPUs.")] = False,
    rows: Annotated[bool, typer.Option("--rows", help="Every collective, and all that misses a goal.")] = False,
    ring_rows: Annotated[
        str | None, typer.Option("--ring-rows", help="With --ring: calls of your own, in the columns of docs/ring-steps.md.")
    ] = None,
    emulated: Annotated[
        bool, typer.Option("--emulated", help="Instead, plans run here, on a cluster emulated by processes; takes minutes.")
    ] = False,
    namespaces: Annotated[
        bool, typer.Option("--namespaces", help="With --emulated: links in network namespaces, see `emulate`; needs root.")
    ] = False,
    case: Annotated[
        list[str] | None, typer.Option("--case", help="With --emulated: only this change of layouts; may be given several times.")
    ] = None,
    repeats: Annotated[
        int | None, typer.Option("--repeats", help="With --emulated: how often each plan is run.", show_default=str(_REPEATS))
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Predict what was published, row by row, and say how far off each prediction is and which rows were fitted; then which goals
    are met, and what misses them.

    With --emulated, what is measured here and now: exit code 1 where predictions miss their goals.
    """
    if emulated:
        if collectives or refits or ring or rows or ring_rows is not None:
            raise InputError("--emulated is shown alone; leave --collectives, --refits, --ring, --rows and --ring-rows out")
        if not EMULATION:
            raise InputError("plans are run by shardroute.executors; start the program as `shardroute`")
        EMULATION[0](cases=case or (), namespaces=namespaces, repeats=_REPEATS if repeats is None else repeats, json=json)
        return
    if namespaces:
        raise InputError("--namespaces goes with --emulated")
    if case:
        raise InputError("--case goes with --emulated")
    if repeats is not None:
        raise InputError("--repeats goes with --emulated")
    if ring and (collectives or refits):
        raise InputError("--ring is shown alone; leave --collectives and --refits out")
    if ring:
        print_ring_report(json, ring_rows)
        return
    if ring_rows is not None:
        raise InputError("--ring-rows goes with --ring")
    both = collectives == refits
    print_validation(collectives or both, refits or both, rows, json)
