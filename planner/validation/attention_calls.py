"""Published calls of attention over several GPUs: a table read into checked values."""

import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from shardroute.planner.ring.workloads import MAX_TOKENS
from shardroute.planner.steps.works import BACKWARD_FLOPS
from shardroute.planner.validation.kernels import kernel_curves
from shardroute.planner.validation.shipped import TABLES
from shardroute.planner.validation.systems import ring_system
from shardroute.topologies.errors import InputError
from shardroute.topologies.files import read_file

_MOST_BYTES: Final = 2**24
# No kernel is shorter than a launch, and nobody waits for a year.
_LEAST_S: Final = 1e-7
_MOST_S: Final = 3.2e7
_COLUMNS: Final = (
    "id", "source", "system", "impl", "scheme", "layout", "ulysses", "direction", "mask", "cp", "nodes", "seq", "heads",
    "kv_heads", "head_dim", "batch", "kernel", "alone", "unit", "value", "skip",
)  # fmt: skip
_CLOSED: Final = {
    "scheme": ("ring", "all-gather", "ulysses", "hybrid", "group-cast"),
    "layout": ("zigzag", "contiguous", "striped", "balanced"),
    "direction": ("fwd", "bwd", "fwd+bwd"),
    "mask": ("full", "causal"),
}


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One published call. `alone_s`: the source's own time on one GPU for a cp-th of the sequence, 0 where it has none.

    `skip` says why nothing is predicted for it; the other fields may then be empty.
    """

    name: str
    source: str
    system: str
    impl: str
    scheme: str
    layout: str
    ulysses: int
    direction: str
    mask: str
    cp: int
    n_nodes: int
    seq: int
    heads: int
    kv_heads: int
    head_dim: int
    batch: int
    kernel: str
    alone_s: float
    measured_s: float
    skip: str

    @property
    def flops(self) -> float:
        """Operations of one GPU, forward, the causal half if so; the backward pass has 2.5 times as many."""
        square = 4.0 * self.batch * self.seq**2 * self.heads * self.head_dim / self.cp
        return square / 2 if self.mask == "causal" else square

    @property
    def tokens(self) -> int:
        """Tokens of one GPU."""
        return self.batch * self.seq // self.cp


def attention_calls() -> Iterator[AttentionCall]:
    """Every published call, in the order of the table."""
    yield from read_calls(TABLES / "ring_attention.csv")


def read_calls(path: str | Path) -> Iterator[AttentionCall]:
    """The calls of a table with the columns of ring_attention.csv. Raises InputError, with the line, for a bad one."""
    text = read_file(path, _MOST_BYTES).decode(errors="replace")
    table = csv.DictReader(io.StringIO(text, newline=""))
    try:
        missing = [name for name in _COLUMNS if name not in (table.fieldnames or ())]
    except csv.Error as error:
        raise InputError(f"{path}, line 1: {error}") from None
    if missing:
        raise InputError(f"{path}: column {missing[0]!r} is missing; expected {','.join(_COLUMNS)}")
    try:
        for row in table:
            yield _call(row)
    except (ValueError, TypeError, csv.Error) as error:
        raise InputError(f"{path}, line {table.line_num}: {error}") from None


def _call(row: dict[str, str]) -> AttentionCall:
    def number(key: str) -> int:
        return int(row[key] or 0)

    call = AttentionCall(
        name=row["id"], source=row["source"], system=row["system"], impl=row["impl"], scheme=row["scheme"],
        layout=row["layout"], ulysses=number("ulysses"), direction=row["direction"], mask=row["mask"], cp=number("cp"),
        n_nodes=number("nodes"), seq=number("seq"), heads=number("heads"), kv_heads=number("kv_heads"),
        head_dim=number("head_dim"), batch=number("batch"), kernel=row["kernel"], alone_s=0.0, measured_s=0.0, skip=row["skip"],
    )  # fmt: skip
    return call if call.skip else _timed(_checked(call), row["unit"], float(row["value"]), row["alone"])


def _timed(call: AttentionCall, unit: str, value: float, alone: str) -> AttentionCall:
    if not 0 < value < float("inf"):
        raise InputError(f"value {value}: expected a number above 0")
    if alone and float(alone) > 0:
        call = replace(call, alone_s=_sane(1 / float(alone), f"alone {alone}"))
    match unit:
        case "TFLOP/s/GPU":
            passes = {"fwd": 1.0, "bwd": BACKWARD_FLOPS, "fwd+bwd": 1 + BACKWARD_FLOPS}[call.direction]
            seconds = call.flops * passes / (value * 1e12)
        case "iter/s":
            seconds = 1 / value
        case "ms":
            seconds = value / 1e3
        case _:
            raise InputError(f"unit {unit!r}: expected TFLOP/s/GPU, iter/s or ms")
    return replace(call, measured_s=_sane(seconds, f"value {value:g}"))


def _sane(seconds: float, what: str) -> float:
    """The time of a call, if one can take so long. Raises InputError for what only a mistake can give."""
    if not _LEAST_S <= seconds <= _MOST_S:
        raise InputError(f"{what}: a call of {seconds:.3g} s; expected {_LEAST_S:g} to {_MOST_S:g} s")
    return seconds


def _checked(call: AttentionCall) -> AttentionCall:
    """The call, if something can be predicted for it. Raises InputError for what isn't known."""
    for name, known in _CLOSED.items():
        if getattr(call, name) not in known:
            raise InputError(f"{name} {getattr(call, name)!r}: expected one of {', '.join(known)}")
    ring_system(call.system)
    sizes = (call.cp, call.n_nodes, call.seq, call.heads, call.kv_heads, call.head_dim, call.batch, call.ulysses)
    if min(sizes) < 1 or call.cp % call.ulysses:
        raise InputError(f"{call.name}: expected sizes above 0, and ulysses to divide cp")
    if max(sizes) > MAX_TOKENS or call.batch * call.seq > MAX_TOKENS:
        raise InputError(f"{call.name}: expected sizes up to 2^40, and as many tokens at most")
    for what, whole, parts in (("cp", call.cp, call.n_nodes), ("seq", call.seq, call.cp), ("heads", call.heads, call.kv_heads)):
        if whole % parts:
            name = {"cp": "nodes", "seq": "cp", "heads": "kv_heads"}[what]
            raise InputError(f"{call.name}: {what} {whole} isn't divisible by {name} {parts}")
    if call.kernel:
        kernels = sorted({kernel.name for kernel in kernel_curves() if kernel.gpu == call.system})
        if call.kernel not in kernels:
            raise InputError(f"kernel {call.kernel!r}: on {call.system} there are charts of {', '.join(kernels) or 'none'}")
    return call
