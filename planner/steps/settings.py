"""How a training step is laid out over GPUs: degrees of parallelism, attention's scheme and carrier, what is computed again."""

from dataclasses import dataclass
from enum import StrEnum

from shardroute.planner.ring.workloads import MAX_TOKENS
from shardroute.planner.steps.models import DenseModel
from shardroute.topologies.errors import InputError

# How far a batch such as 0.1 may be from a whole number of sequences, as it has no exact binary form.
_ROUNDING = 1e-9


class Scheme(StrEnum):
    """How context-parallel ranks get the keys and values of the others; by pass-q queries travel instead."""

    RING = "ring"
    ALL_GATHER = "all-gather"
    ULYSSES = "ulysses"
    HYBRID = "hybrid"
    PASS_Q = "pass-q"


class Carrier(StrEnum):
    """What carries a ring's hops: NCCL's send and receive, NCCL's put with signal, or NVSHMEM's put with a barrier."""

    NCCL = "nccl"
    NCCL_PUT = "nccl-put"
    NVSHMEM = "nvshmem"


class Recompute(StrEnum):
    """What the backward pass computes again: whole layers (MaxText's remat_policy: full), or nothing."""

    FULL = "full"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLayout:
    """One way to run a training step: cp x tp x fsdp GPUs, the tensor axis innermost, then context, then fsdp.

    ulysses      ranks of the context axis that exchange heads; the others form rings (1: a ring of all, cp: no ring)
    head_stride  KV heads that an all-gather takes at a time; None: all that a rank has
    batch        sequences a GPU: the global batch over all GPUs
    overlapped   hops run beside the attention of the block before; False: one after the other, as TransformerEngine's ring
                 was measured to run under XLA (on 4 GB200 the step took the sum of attention, send/recv and the rest)
    """

    seq: int
    cp: int
    tp: int = 1
    fsdp: int = 1
    scheme: Scheme = Scheme.RING
    ulysses: int = 1
    head_stride: int | None = None
    carrier: Carrier = Carrier.NCCL
    batch: float = 1.0
    recompute: Recompute = Recompute.FULL
    overlapped: bool = False

    @property
    def n_gpus(self) -> int:
        """GPUs of the step."""
        return self.cp * self.tp * self.fsdp

    @property
    def ring(self) -> int:
        """Ranks of one ring: 1 when nothing travels round."""
        return self.cp // self.ulysses if self.scheme in (Scheme.RING, Scheme.HYBRID, Scheme.PASS_Q) else 1

    @property
    def scheme_text(self) -> str:
        """The scheme with its degree: `hybrid 4`, `all-gather by 2 heads`; of one rank, `alone`."""
        if self.cp == 1:
            return "alone"
        if self.scheme is Scheme.HYBRID:
            return f"{self.scheme} {self.ulysses}"
        if self.head_stride is not None:
            return f"{self.scheme} by {self.head_stride} head{'s' if self.head_stride > 1 else ''}"
        return str(self.scheme)

    def gathers(self, n_kv_heads: int) -> int:
        """All-gathers of one pass over a layer, of a model with so many KV heads."""
        return 1 if self.head_stride is None else n_kv_heads // self.tp // self.head_stride

    @property
    def sequences(self) -> float:
        """Sequences that one group of cp x tp GPUs works on together."""
        return self.batch * self.cp * self.tp

    @property
    def tokens(self) -> float:
        """Tokens of all its sequences that one GPU holds."""
        return self.sequences * self.seq / self.cp


def check_layout(model: DenseModel, layout: StepLayout) -> None:
    """Raise InputError, with the reason, when the model can't be run so."""
    cp, tp, u = layout.cp, layout.tp, layout.ulysses
    for name, value in (("seq", layout.seq), ("cp", cp), ("tp", tp), ("fsdp", layout.fsdp), ("ulysses", u)):
        if value < 1:
            raise InputError(f"{name} {value}: expected a whole number from 1")
    if not 0 < layout.batch < float("inf"):
        raise InputError(f"batch {layout.batch}: expected sequences a GPU, above 0")
    if max(layout.seq, layout.batch * layout.seq) > MAX_TOKENS:
        raise InputError(f"seq {layout.seq} and batch {layout.batch:g}: expected at most 2^40 tokens of a sequence and a GPU")
    if abs(layout.sequences - max(round(layout.sequences), 1)) > _ROUNDING * layout.sequences:
        raise InputError(
            f"batch {layout.batch:g}: cp {cp} x tp {tp} GPUs then share {layout.sequences:g} sequences; expected a whole number, "
            f"so a batch that is a multiple of 1/{cp * tp}"
        )
    if cp > 1 and layout.seq % (2 * cp):
        raise InputError(
            f"seq {layout.seq} isn't divisible by 2 x cp = {2 * cp}: each rank holds two chunks, so that causal work is even; "
            f"pad it to {-(-layout.seq // (2 * cp)) * 2 * cp}"
        )
    if model.n_heads % tp or model.n_kv_heads % tp:
        raise InputError(
            f"tp {tp} doesn't divide the {model.n_heads} heads and {model.n_kv_heads} KV heads of {model.name}"
        )
    if cp % u:
        raise InputError(f"ulysses {u} doesn't divide cp {cp}")
    if (model.n_kv_heads // tp) % u:
        raise InputError(
            f"ulysses {u} doesn't divide the {model.n_kv_heads // tp} KV heads that a rank of tp {tp} has: Ulysses gives "
            "each rank whole heads; use a smaller degree, with a ring across"
        )
    expected = {
        Scheme.RING: u == 1, Scheme.ALL_GATHER: u == 1, Scheme.ULYSSES: u == cp, Scheme.HYBRID: 1 < u < cp, Scheme.PASS_Q: u == 1
    }  # fmt: skip
    if not expected[layout.scheme]:
        raise InputError(f"scheme {layout.scheme} doesn't go with ulysses {u} of cp {cp}: 1 for ring, all-gather and pass-q, cp "
                         "for ulysses, between them for hybrid")
    stride, held = layout.head_stride, model.n_kv_heads // tp
    if stride is not None and layout.scheme is not Scheme.ALL_GATHER:
        raise InputError(f"a head stride is for scheme all-gather only; {layout.scheme} has none")
    if stride is not None and (stride < 1 or held % stride):
        raise InputError(f"head stride {stride} doesn't divide the {held} KV heads that a rank of tp {tp} has")
    if layout.carrier is not Carrier.NCCL and layout.ring == 1 and not (layout.scheme is Scheme.RING and cp == 1):
        raise InputError(f"carrier {layout.carrier} carries the hops of a ring; scheme {layout.scheme} has none")
