"""Training steps with ring attention as sequences grow: what NCCL, and what NVSHMEM, makes of the same hops."""

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from shardroute.planner.backends.rates import StepRates
from shardroute.planner.shares import Told, parts
from shardroute.planner.steps import Carrier, DenseModel, Network, StepLayout, predict_step
from shardroute.topologies.errors import InputError


class RingRow(msgspec.Struct, frozen=True, kw_only=True):
    """A step at one sequence length by one carrier; the field names are those of `study ring-vs-seq --json`, and stay.

    gain   how much faster than with NCCL, as a share; None for NCCL itself and where one of the two has no time
    fits   whether a GPU has room
    """

    seq: int
    carrier: str
    step_s: float | None = None
    gain: float | None = None
    tflops_per_gpu: float | None = None
    compute_s: float | None = None
    exposed_comm_s: float | None = None
    hop_s: float | None = None
    hop_sms: int | None = None
    memory_bytes: float | None = None
    fits: bool | None = None
    why_not: str = ""


class RingStudy(msgspec.Struct, frozen=True, kw_only=True):
    """Steps by sequence length and carrier."""

    study: str
    title: str
    trained: str
    calibration: str
    calibrated: bool
    rates: str
    notes: list[str]
    rows: list[RingRow]


def ring_rows(
    model: DenseModel,
    layout: StepLayout,
    seqs: Sequence[int],
    carriers: Sequence[Carrier],
    rates: StepRates,
    net: Network,
    progress: Told | None = None,
) -> list[RingRow]:
    """A row a length and carrier, in that order; `layout` gives the rest. Raises InputError, the first reason, where no row has a
    time.
    """
    rows: list[RingRow] = []
    told = iter(parts(progress, [1.0] * (len(seqs) * len(carriers))))
    for seq in seqs:
        of_seq = []
        for carrier in carriers:
            of_seq.append(_row(model, replace(layout, seq=seq, carrier=carrier), rates, net))
            next(told)(1.0)
        nccl_s = next((row.step_s for row in of_seq if row.carrier == Carrier.NCCL), None)
        rows += [_with_gain(row, nccl_s) for row in of_seq]
    if all(row.step_s is None for row in rows):
        raise InputError(rows[0].why_not)
    return rows


def _with_gain(row: RingRow, nccl_s: float | None) -> RingRow:
    if row.carrier == Carrier.NCCL or row.step_s is None or nccl_s is None:
        return row
    return msgspec.structs.replace(row, gain=nccl_s / row.step_s - 1)


def _row(model: DenseModel, layout: StepLayout, rates: StepRates, net: Network) -> RingRow:
    try:
        found = predict_step(model, layout, rates, net)
    except InputError as error:
        return RingRow(seq=layout.seq, carrier=layout.carrier, why_not=str(error))
    return RingRow(
        seq=layout.seq, carrier=layout.carrier, step_s=found.step_s, tflops_per_gpu=found.tflops_per_gpu,
        compute_s=found.compute_s, exposed_comm_s=found.exposed_s, hop_s=found.hop_s, hop_sms=found.n_sms,
        memory_bytes=found.memory.total, fits=found.memory.fits,
    )  # fmt: skip
