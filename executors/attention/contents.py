"""What an attention run is given and what must come out: known inputs, and the comparison with attention on one device.

Rule: an input element follows from its tensor and its index in the whole tensor, so every rank fills its own part, and whoever
asks for the run makes the whole to compute what one device would. Outputs are compared element by element, as shares of the
largest magnitude in their tensor or of 1, whichever is more.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Final, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from shardroute.executors.attention.floats import HOST_DTYPES, decode, encode
from shardroute.executors.attention.references import MAX_REFERENCE_FLOPS, Doubles, one_device, reference_flops
from shardroute.executors.attention.seam import Arithmetic
from shardroute.executors.interpreting.memories import Holdings
from shardroute.executors.interpreting.patterns import COMPARING, Finding, find_strays, scatter
from shardroute.planner.plans import Plan
from shardroute.planner.ring.tensors import Pass
from shardroute.planner.ring.workloads import LSE, Attention
from shardroute.planner.shares import Told, part, parts, untold
from shardroute.topologies.errors import InputError

# What rounding may amount to where sums are kept in the dtype and it is wide.
TOLERANCES: Final[Mapping[str, float]] = {"f32": 1e-5, "f64": 1e-10}
# Where it is narrow, so many times what one device is off that rounds every product to it, as FlashAttention's tests allow
# (Dao-AILab/flash-attention, tests/test_flash_attn.py): of o and lse, and of gradients.
_TIMES: Final[Mapping[str, float]] = {"o": 2.0, LSE: 2.0, "dq": 3.0, "dk": 3.0, "dv": 3.0}
# And what is added up over ranks is rounded on each of them, by half a unit in the last place.
ROUNDING: Final[Mapping[str, float]] = {"bf16": 2.0**-9, "f16": 2.0**-12}
# How often as long as in float64 one device takes that rounds: 0.7 to 1.6 (2026-12-01).
NARROW: Final = 1.0
# In what each arithmetic computes.
DTYPES_OF: Final[Mapping[Arithmetic, Sequence[str]]] = {
    Arithmetic.NUMPY: ("f32", "f64"),
    Arithmetic.TORCH: ("bf16", "f16", "f32", "f64"),
}
# Inputs lie evenly in -2 to 2, so that scores (their products over sqrt(width)) differ enough for softmax to matter.
_SPAN: Final = 4.0

_HEAD, _EXPECTED = "contents.head", "contents.expected."


class _Head(msgspec.Struct):
    attention: Attention
    tensors: list[tuple[str, str]]
    arithmetic: Arithmetic
    allowed: dict[str, float]


@dataclass(frozen=True, slots=True, eq=False)
class Contents:
    """Of one plan: its call, its tensors (name, dtype) and, by tensor, what one device computes, flat and row-major.

    `expected` has the outputs that are compared, and o and lse where the plan is given them; none where comparing would take too
    long; `allowed` by what share each of these may differ. `about` says against what, or why not.
    """

    attention: Attention
    tensors: Sequence[tuple[str, str]]
    expected: Mapping[str, Doubles]
    allowed: Mapping[str, float] = field(default_factory=dict)
    about: str = ""
    arithmetic: Arithmetic = Arithmetic.NUMPY

    def columns(self) -> dict[str, NDArray[np.generic]]:
        """All of it as arrays, to be shared with ranks."""
        head = {
            "attention": asdict(self.attention), "tensors": self.tensors, "arithmetic": self.arithmetic,
            "allowed": dict(self.allowed),
        }  # fmt: skip
        text = np.frombuffer(msgspec.json.encode(head), np.uint8)
        return {_HEAD: text} | {_EXPECTED + name: array for name, array in self.expected.items()}

    @classmethod
    def of(cls, columns: Mapping[str, NDArray[np.generic]]) -> Self | None:
        """The contents that `columns` took apart, if they are there."""
        if _HEAD not in columns:
            return None
        head = msgspec.json.decode(columns[_HEAD].tobytes(), type=_Head)
        expected = {
            name.removeprefix(_EXPECTED): array.astype(np.float64, copy=False)
            for name, array in columns.items()
            if name.startswith(_EXPECTED)
        }
        return cls(head.attention, head.tensors, expected, head.allowed, arithmetic=head.arithmetic)

    @property
    def tolerance(self) -> float:
        """The share by which an element of any tensor may differ at most."""
        return max(self.allowed.values(), default=0.0)

    def fill(self, arena: NDArray[np.uint8], holdings: Holdings, rank: int, told: Told = untold) -> None:
        """Write the inputs into every source fragment of the rank."""
        for row in holdings.each(rank, told, target=False):
            name, dtype = self.tensors[int(holdings.tensor[row])]
            index = _index(holdings, row)
            given = self.expected[name][index] if name in ("o", LSE) else values(name, index)
            _view(arena, holdings, row, dtype)[...] = encode(given, dtype)

    def verify(
        self, arena: NDArray[np.uint8], holdings: Holdings, rank: int, target_at: int, slots_at: int, told: Told = untold
    ) -> tuple[Finding, float]:
        """Compare the rank's outputs where something is expected; what was found, and the largest difference."""
        n_bytes = n_wrong = 0
        tensor = first = -1
        worst = 0.0
        largest = {name: magnitude(expected) for name, expected in self.expected.items()}
        for row in holdings.each(rank, part(told, 0.0, COMPARING), target=True):
            number = int(holdings.tensor[row])
            name, dtype = self.tensors[number]
            if name not in self.expected:
                continue
            index, view = _index(holdings, row), _view(arena, holdings, row, dtype)
            off = difference(decode(view, dtype), self.expected[name][index]) / largest[name]
            n_bytes += view.nbytes
            worst = max(worst, float(off.max(initial=0.0)))
            wrong = ~(off <= self.allowed[name])
            if wrong.any():
                n_wrong += int(np.count_nonzero(wrong)) * view.itemsize
                if tensor < 0:
                    tensor, first = number, int(index[wrong].min())
        n_stray, stray = find_strays(arena, holdings, rank, target_at, slots_at)
        return Finding(n_bytes, n_wrong, tensor, first, n_stray, stray), worst


def contents_of(
    plan: Plan, arithmetic: Arithmetic = Arithmetic.NUMPY, *, compare: bool = True, told: Told | None = None
) -> Contents:
    """The contents for a run of a plan that computes attention; with compare=False nothing is expected. `told` is told the share
    that is done of what one device computes.

    Outputs that one device would take minutes for are not compared. Raises InputError for dtypes that the arithmetic doesn't
    compute in, and for a backward pass that has to be given the o and lse of a call of that size.
    """
    attention = plan.attention
    assert attention is not None
    for tensor in plan.problem.tensors:
        if tensor.dtype not in DTYPES_OF[arithmetic]:
            raise InputError(
                f"tensor {tensor.name} is {tensor.dtype}, and {arithmetic} computes attention in "
                f"{' or '.join(DTYPES_OF[arithmetic])}; run it with --arithmetic torch, or plan with --dtype f32"
            )
    what = Pass(dict(plan.problem.about)["pass"])
    tensors = [(tensor.name, tensor.dtype) for tensor in plan.problem.tensors]
    if not compare and what is not Pass.BACKWARD:
        return Contents(attention, tensors, {}, {}, "not compared, as asked", arithmetic)
    n_flops = reference_flops(attention, what)
    if n_flops > MAX_REFERENCE_FLOPS:
        if what is Pass.BACKWARD:
            raise InputError(
                "a backward pass is given the o and lse that one device computes, which takes too long for this call; plan "
                f"--pass {Pass.RECOMPUTE}, which computes them on its ranks"
            )
        why = f"not compared: one device takes {n_flops:.2g} FLOP, and above {MAX_REFERENCE_FLOPS:.0e} comparing is left out"
        return Contents(attention, tensors, {}, {}, why, arithmetic)
    inputs, backward, dtype = _inputs(plan, attention), what is not Pass.FORWARD, attention.dtype
    exactly, narrowly = parts(told, (1.0, 0.0 if dtype in TOLERANCES else NARROW))
    found = one_device(attention, inputs, backward=backward, told=exactly)
    expected = {name: array.ravel() for name, array in found.items()}
    if dtype in TOLERANCES:
        allowed = dict.fromkeys(expected, TOLERANCES[dtype])
    else:
        narrow = one_device(
            attention, inputs, backward=backward, rounded=lambda x: decode(encode(x, dtype), dtype), told=narrowly
        )
        allowed = {
            name: _TIMES[name] * float(difference(narrow[name].ravel(), exact).max(initial=0.0)) / magnitude(exact)
            + attention.n_ranks * ROUNDING[dtype]
            for name, exact in expected.items()
        }
    return Contents(attention, tensors, expected, allowed, "attention on one device in float64", arithmetic)


def _inputs(plan: Plan, attention: Attention) -> dict[str, Doubles]:
    """q, k, v and, if it is given, do: whole, as [batch, tokens, heads, width], rounded as the ranks hold them."""
    inputs = {}
    for tensor in plan.problem.tensors:
        if tensor.name in ("q", "k", "v", "do"):
            shape = (attention.batch, attention.n_tokens, *tensor.shape[-2:])
            given = values(tensor.name, np.arange(tensor.n_elements))
            inputs[tensor.name] = decode(encode(given, tensor.dtype), tensor.dtype).reshape(shape)
    return inputs


def values(tensor: str, index: NDArray[np.int64]) -> Doubles:
    """The input elements of a tensor at these row-major indices."""
    seed = scatter(np.array([int.from_bytes(tensor.encode(), "little")], dtype=np.uint64))
    share = (scatter(index.astype(np.uint64) + seed) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return np.asarray((share - 0.5) * _SPAN)


def difference(got: Doubles, expected: Doubles) -> Doubles:
    """How far each element is from what it should be; 0 where both are the same infinity, and NaN is far from everything."""
    with np.errstate(invalid="ignore"):
        off = np.abs(got - expected)
    return np.where(got == expected, 0.0, np.where(np.isnan(off), np.inf, off))


def magnitude(expected: Doubles) -> float:
    """The largest magnitude of a tensor's finite elements, at least 1."""
    finite = expected[np.isfinite(expected)]
    return max(1.0, float(np.abs(finite).max(initial=0.0)))


def _index(holdings: Holdings, row: int) -> NDArray[np.int64]:
    """The row-major index in the whole tensor of each element of a fragment."""
    box = int(holdings.box[row])
    index = np.zeros((1,) * holdings.lo.shape[1], dtype=np.int64)
    for dim, (lo, n, step) in enumerate(zip(holdings.lo[box], holdings.extent[box], holdings.index_stride[box], strict=True)):
        along = (np.arange(n) + lo) * step
        index = index + along.reshape(-1, *(1,) * (holdings.lo.shape[1] - dim - 1))
    return index


def _view(arena: NDArray[np.uint8], holdings: Holdings, row: int, dtype: str) -> NDArray[np.generic]:
    box = int(holdings.box[row])
    shape, strides = tuple(holdings.extent[box].tolist()), tuple(holdings.stride[box].tolist())
    return np.ndarray(shape, HOST_DTYPES[dtype], arena.data, int(holdings.address[row]), strides)
