"""What gathering and broadcasting load onto a cluster, against resharding: by counting, and by plans."""

import msgspec

from shardroute.planner.studies.refits import RefitRow


class LoadEstimate(msgspec.Struct, frozen=True):
    """The two-phase estimate of one size; the field names are those of `study gather-vs-reshard --json`, and stay.

    All weights are gathered once from their shards into whole tensors, and once broadcast from there; resharding sends each byte
    once, to where it is needed. Counted for one copy of the model at the destination.
    """

    name: str
    n_parameters: float
    bytes_per_parameter: int
    gather_bytes: int
    broadcast_bytes: int
    two_phase_bytes: int
    reshard_bytes: int


class LoadStudy(msgspec.Struct, frozen=True, kw_only=True):
    """Estimates by size, and what plans of each size move where layouts and a machine were given."""

    study: str
    title: str
    calibration: str
    calibrated: bool
    notes: list[str]
    estimates: list[LoadEstimate]
    rows: list[RefitRow]


def estimate(name: str, n_parameters: float, bytes_per_parameter: int) -> LoadEstimate:
    """The two-phase estimate: 2.8e12 parameters of 2 bytes are gathered (5.6 TB) and broadcast (5.6 TB), 11.2 TB against 5.6."""
    n_bytes = round(n_parameters * bytes_per_parameter)
    return LoadEstimate(name, n_parameters, bytes_per_parameter, n_bytes, n_bytes, 2 * n_bytes, n_bytes)
