"""`shardroute layout`: what every rank, or one of them, holds of a model or of a user's own layout."""

import re
from collections.abc import Iterable, Sequence
from typing import Annotated, Final

import msgspec
import typer

from shardroute.planner.arguments import ranges_text
from shardroute.planner.cli.options import about, check_known, inventory_of, model_of, spec_of
from shardroute.planner.cli.output import JsonFlag, print_facts, print_json, print_table, progress
from shardroute.planner.cli.program import app
from shardroute.planner.cli.requests import MtpOption, PrecisionOption
from shardroute.planner.exchange import Inventory, layout_schema, save_layout
from shardroute.planner.layouts import CONVENTIONS, lay_out
from shardroute.planner.layouts.holdings import Holding, Totals, holdings, totals
from shardroute.planner.shares import parts
from shardroute.topologies.errors import InputError
from shardroute.topologies.units import format_bytes

# What laying out takes, looking at what lies in each buffer, and adding up: of DeepSeek-V3 for 16,384 to a million ranks.
_LAYING: Final = (0.65, 0.25, 0.1)


class RankTotal(msgspec.Struct, frozen=True):
    """What a rank holds; the field names are those of `layout --json`, and stay."""

    rank: int
    n_tensors: int
    n_bytes: int


class HeldBox(msgspec.Struct, frozen=True):
    """A box that a rank holds, and its place in a buffer, in elements."""

    tensor: str
    dtype: str
    lo: tuple[int, ...]
    hi: tuple[int, ...]
    n_bytes: int
    buffer: str
    offset: int
    strides: tuple[int, ...]
    buffer_size: int


class RankLayout(msgspec.Struct, frozen=True):
    """All that one rank holds; the field names are those of `layout --rank N --json`, and stay."""

    rank: int
    n_bytes: int
    n_buffer_bytes: int
    holds: list[HeldBox]


@app.command("layout", rich_help_panel="Plan and predict")
def layout_command(
    from_json: Annotated[str | None, typer.Option("--from-json", help="A layout file of your own, or a checkpoint.")] = None,
    model: Annotated[str | None, typer.Option("--model", help="A shipped model, or the path of a config.json.")] = None,
    spec: Annotated[str | None, typer.Option("--spec", help='With --model: its layout, "TP8 x DP16".')] = None,
    convention: Annotated[
        str | None,
        typer.Option(
            "--convention", help=f"With --model: who stores it so; one of {', '.join(sorted(CONVENTIONS))}. Default: vllm."
        ),
    ] = None,
    scale: Annotated[
        int | None, typer.Option("--scale", help="With --model: shrink every matrix by this factor (a square).")
    ] = None,
    mtp: MtpOption = False,
    precision: PrecisionOption = None,
    rank: Annotated[int | None, typer.Option("--rank", help="Show each fragment that this rank holds.")] = None,
    output: Annotated[str | None, typer.Option("--output", "-o", help="Write the layout to this JSON file.")] = None,
    json_schema: Annotated[bool, typer.Option("--json-schema", help="Print the JSON Schema of layout files.")] = False,
    json: JsonFlag = False,
) -> None:
    """Show what every rank holds, or with --rank what one of them holds: buffers, tensors, boxes and bytes.

    shardroute layout --model qwen3-235b-a22b --spec "TP8 x DP16" --convention vllm --rank 5
    """
    if json_schema:
        print_json(layout_schema())
        return
    if from_json is not None:
        of_model = {
            "--model": model, "--spec": spec, "--convention": convention, "--scale": scale, "--mtp": mtp or None,
            "--precision": precision,
        }  # fmt: skip
        given = [name for name, value in of_model.items() if value is not None]
        if given:
            raise InputError(f"--from-json doesn't go with {given[0]}: a layout is a file's or a model's")
        title, inventory = from_json, inventory_of("--from-json", from_json)
        sums = totals(inventory.tensors, inventory.layout)
    elif model is None or spec is None:
        raise InputError('nothing to lay out: give --from-json FILE, or --model NAME with --spec "TP8 x DP16"')
    else:
        loaded = model_of(model, 1 if scale is None else scale, mtp=mtp, precision=precision)
        parsed, stored_by = spec_of("--spec", spec), "vllm" if convention is None else convention
        check_known("--convention", stored_by, sorted(CONVENTIONS))
        title = f"{loaded.name}: {parsed} ({stored_by})"
        with progress("laying out") as done:
            laid, checked, added = parts(done, _LAYING)
            inventory = Inventory(loaded.tensors, lay_out(stored_by, loaded, parsed, progress=laid).layout)
            checked(1.0)
            sums = totals(inventory.tensors, inventory.layout)
            added(1.0)
    if output is not None:
        with about("--output"), progress(f"writing {output}") as done:
            save_layout(inventory, output, done)
    if rank is not None:
        if rank not in sums.rank:
            raise InputError(f"--rank {rank} holds nothing; ranks {ranges_text(sums.rank.tolist())} do")
        _show_rank(title, rank, holdings(inventory.tensors, inventory.layout, rank), json)
    elif json:
        rows = zip(sums.rank.tolist(), sums.n_tensors.tolist(), sums.n_bytes.tolist(), strict=True)
        print_json([RankTotal(*row) for row in rows])
    else:
        print_facts(f"{title}\n", [])
        print_table(["ranks", "tensors", "bytes a rank"], _alike(sums), right=["tensors", "bytes a rank"])
        whole = sum(tensor.n_bytes for tensor in inventory.tensors)
        print_facts("", [("tensors", f"{len(inventory.tensors):,} of {format_bytes(whole)}"), ("ranks", f"{len(sums.rank):,}")])


def _show_rank(title: str, rank: int, held: Sequence[Holding], json: bool) -> None:
    buffers = {h.buffer: h.buffer_size * h.tensor.itemsize for h in held}
    if json:
        boxes = [
            HeldBox(h.tensor.name, h.tensor.dtype, h.lo, h.hi, h.n_bytes, h.buffer, h.offset, h.strides, h.buffer_size)
            for h in held
        ]
        print_json(RankLayout(rank, sum(h.n_bytes for h in held), sum(buffers.values()), boxes))
        return
    print_facts(f"{title}, rank {rank}\n", [])
    print_table(["buffer, and the tensors in it", "bytes each"], _folded(held), right=["bytes each"])
    print_facts(
        "",
        [
            ("buffers", f"{len(buffers):,} of {format_bytes(sum(buffers.values()))}, padding included"),
            ("tensors", f"{len({h.tensor.name for h in held}):,}, {format_bytes(sum(h.n_bytes for h in held))}"),
        ],
    )


def _folded(held: Iterable[Holding]) -> list[list[str]]:
    """A row for each buffer, under it one for each fragment; buffers alike but for the first number in names fold into one."""
    in_buffer: dict[str, list[Holding]] = {}
    for h in held:
        in_buffer.setdefault(h.buffer, []).append(h)
    alike: dict[tuple[object, ...], list[str]] = {}
    for buffer, inside in in_buffer.items():
        contents = tuple((_without_number(h.tensor.name), h.tensor.dtype, h.lo, h.hi, h.offset) for h in inside)
        alike.setdefault((_without_number(buffer), inside[0].buffer_size, contents), []).append(buffer)
    rows = []
    for buffers in alike.values():
        inside = in_buffer[buffers[0]]
        n_bytes = format_bytes(inside[0].buffer_size * inside[0].tensor.itemsize)
        rows.append([_with_numbers(buffers), n_bytes])
        for i, h in enumerate(inside):
            names = [in_buffer[buffer][i].tensor.name for buffer in buffers]
            box = "[" + ", ".join(f"{a}:{b}" for a, b in zip(h.lo, h.hi, strict=True)) + "]"
            place = f"{box} of {h.tensor.shape}, {h.tensor.dtype}" + (f", at element {h.offset}" if h.offset else "")
            name = "" if names == buffers else f"  {_with_numbers(names)}\n"
            rows.append([f"{name}    {place}", format_bytes(h.n_bytes)])
    return rows


def _without_number(name: str) -> str:
    return re.sub(r"\d+", "#", name, count=1)


def _with_numbers(names: Sequence[str]) -> str:
    """`layers.{0-3,7}.w` for names that differ in their first number."""
    if len(set(names)) == 1:
        return names[0]
    numbers = sorted(int(found[0]) for name in names if (found := re.search(r"\d+", name)))
    return re.sub(r"\d+", f"{{{ranges_text(numbers)}}}", names[0], count=1)


def _alike(sums: Totals) -> list[list[str]]:
    """A row for each set of ranks with equal sums, by their first rank."""
    groups: dict[tuple[int, int], list[int]] = {}
    for rank, n_tensors, n_bytes in zip(sums.rank.tolist(), sums.n_tensors.tolist(), sums.n_bytes.tolist(), strict=True):
        groups.setdefault((n_tensors, n_bytes), []).append(rank)
    return [[ranges_text(ranks), f"{n:,}", format_bytes(n_bytes)] for (n, n_bytes), ranks in groups.items()]
