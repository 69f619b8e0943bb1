"""The split of a cluster's GPUs between training and inference: how wide each side may be, and what a step of learning takes.

Rule: seconds of training and of generating are the user's own; here they are only divided by the GPUs that share them.
"""

from dataclasses import dataclass, replace

import msgspec

from shardroute.planner.layouts import Axis, ParallelSpec
from shardroute.planner.studies.refits import RefitRow
from shardroute.topologies.errors import InputError


@dataclass(frozen=True, slots=True)
class Split:
    """So many times the training layout's GPUs, so many inference replicas, and GPUs that are left over."""

    n_train: int
    n_infer: int
    times: int
    replicas: int
    idle: int


class SplitRow(msgspec.Struct, frozen=True, kw_only=True):
    """A split by one strategy; the field names are those of `study split --json`, and stay.

    train_s, rollout_s   the user's GPU seconds over the side's GPUs, None where they weren't given
    in_turn_s            training, refit and rollouts one after the other
    overlapped_s         training beside rollouts (of the weights before), then refit
    """

    n_train_gpus: int
    n_infer_gpus: int
    replicas: int
    n_idle_gpus: int
    from_spec: str
    refit: RefitRow
    train_s: float | None = None
    rollout_s: float | None = None
    in_turn_s: float | None = None
    overlapped_s: float | None = None


class SplitStudy(msgspec.Struct, frozen=True, kw_only=True):
    """Splits of the GPUs between training and inference."""

    study: str
    title: str
    moved: str
    n_gpus: int
    calibration: str
    calibrated: bool
    notes: list[str]
    rows: list[SplitRow]


def splits_of(n_gpus: int, n_train: int, n_infer: int, most: int) -> list[Split]:
    """The splits of `n_gpus` GPUs into whole multiples of a training layout's and of a replica's, fewest for training first.

    Of more than `most` those that are most even apart are kept, with the first and the last. Raises InputError where not even one
    of each fits.
    """
    n_times = (n_gpus - n_infer) // n_train
    if n_times < 1:
        raise InputError(
            f"{n_gpus} GPUs: the training layout takes {n_train} and one inference replica {n_infer}; "
            f"give {n_train + n_infer} GPUs or more, or smaller layouts"
        )
    every = list(range(1, n_times + 1))
    if n_times > most:
        every = sorted({1 + round(i * (n_times - 1) / (most - 1)) for i in range(most)})
    found = []
    for times in every:
        replicas = (n_gpus - times * n_train) // n_infer
        found.append(Split(times * n_train, replicas * n_infer, times, replicas, n_gpus - times * n_train - replicas * n_infer))
    return found


def widened(spec: ParallelSpec, n_ranks: int, times: int) -> ParallelSpec:
    """The training layout, which takes `n_ranks`, over `times` as many: more replicas of HSDP, more shards of FSDP, more DP."""
    if times == 1:
        return spec
    if spec.names(Axis.FSDP):
        axis = Axis.HSDP if spec.names(Axis.HSDP) else Axis.FSDP
        size = spec.size(axis)
    else:
        # A convention may infer DP, so it is what the ranks leave over.
        axis, size = Axis.DP, n_ranks // (spec.size(Axis.TP) * spec.size(Axis.CP) * spec.size(Axis.PP))
    others = [pair for pair in spec.axes if pair[0] is not axis]
    at = next((i for i, pair in enumerate(spec.axes) if pair[0] is axis), len(others))
    return replace(spec, axes=(*others[:at], (axis, size * times), *others[at:]))


def split_row(split: Split, from_spec: str, refit: RefitRow, train_gpu_s: float | None, rollout_gpu_s: float | None) -> SplitRow:
    """The row of a split: refit as predicted, training and rollouts as the user's GPU seconds over the GPUs of each side."""
    train_s = None if train_gpu_s is None else train_gpu_s / split.n_train
    rollout_s = None if rollout_gpu_s is None else rollout_gpu_s / split.n_infer
    in_turn_s = overlapped_s = None
    if train_s is not None and rollout_s is not None and refit.predicted_s is not None:
        in_turn_s = train_s + refit.predicted_s + rollout_s
        overlapped_s = max(train_s, rollout_s) + refit.predicted_s
    return SplitRow(
        n_train_gpus=split.n_train, n_infer_gpus=split.n_infer, replicas=split.replicas, n_idle_gpus=split.idle,
        from_spec=from_spec, refit=refit, train_s=train_s, rollout_s=rollout_s, in_turn_s=in_turn_s, overlapped_s=overlapped_s,
    )  # fmt: skip
