"""XLA's own rules for its backends, by version: a port of CollectiveBackendAssigner, and the flags that bring them about.

Source: openxla/xla, xla/service/gpu/transforms/collectives/collective_backend_assigner.cc (from JAX 0.9.1 under
xla/backends/gpu/transforms/collectives/), as pinned by each JAX release. NVSHMEM came with JAX 0.6.2 and was taken out for
0.10.2; put and signal of NCCL (the mode of collective permutes) followed. Rule sets are named by the JAX release.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from shardroute.planner.choice.operations import Operation, Version
from shardroute.topologies.collectives import Collective
from shardroute.topologies.errors import InputError

# kDefaultThresholdInBytes; compared strictly, and not a flag.
THRESHOLD_BYTES: Final = 16 * 2**20
# The one pass takes these and no other operation.
_ASSIGNED: Final = (Collective.ALL_REDUCE, Collective.PERMUTE)


class Assigned(StrEnum):
    """What XLA's rules give an operation: NVSHMEM, or its default, NCCL."""

    NVSHMEM = "nvshmem"
    NCCL = "nccl"


class Wanted(StrEnum):
    """What flags are asked for: NCCL as by default, NVSHMEM, NCCL's one-sided puts, or its kernels on symmetric windows."""

    NCCL = "nccl"
    NVSHMEM = "nvshmem"
    PUTS = "puts"
    SYMMETRIC = "symmetric"


@dataclass(frozen=True, slots=True)
class RuleSet:
    """The rules of one release.

    slices      whether a program that fits one NVLink slice qualifies (from 0.8.1)
    all_sizes   whether permutes of any size do (from 0.7.2); before, only below the threshold
    nvshmem     whether the backend exists
    modes       whether permutes have a mode: private, symmetric, peer (from 0.10.1; all-gathers from 0.10.2)
    """

    release: Version
    slices: bool
    all_sizes: bool
    nvshmem: bool
    modes: bool

    @property
    def name(self) -> str:
        """As the command line takes it."""
        return f"xla-{self.release}"


# Releases at which the rules changed, oldest first; each holds until the next.
_CHANGES: Final = (
    (Version((0, 6, 2)), False, False, True, False),
    (Version((0, 7, 2)), False, True, True, False),
    (Version((0, 8, 1)), True, True, True, False),
    (Version((0, 10, 1)), True, True, True, True),
    (Version((0, 10, 2)), False, False, False, True),
)
RULE_SETS: Final = tuple(RuleSet(*change) for change in _CHANGES)
# The debug options of that time have the flag beside NVSHMEM's; older ones weren't read.
_SYMMETRIC_BUFFERS_SINCE: Final = Version((0, 8, 1))
# The newest release whose source this was read from.
NEWEST_READ: Final = Version((0, 11, 1))


def rule_set(name: str) -> RuleSet:
    """The rules of "xla-0.8.1"; of a release between two changes, those of the earlier one.

    Raises InputError for a name that isn't one, and for releases outside of those whose rules are known.
    """
    if not name.startswith("xla-"):
        raise InputError(f"rules {name!r}: expected xla- and a JAX release, such as xla-0.8.1")
    release = Version.of(name.removeprefix("xla-"))
    if release < RULE_SETS[0].release or release > NEWEST_READ:
        raise InputError(f"rules {name!r}: known are the releases from {RULE_SETS[0].name} to xla-{NEWEST_READ}")
    found = [rules for rules in RULE_SETS if release >= rules.release][-1]
    return RuleSet(release, found.slices, found.all_sizes, found.nvshmem, found.modes)


def assign(rules: RuleSet, operation: Operation, slice_size: int) -> tuple[Assigned, str]:
    """The backend that XLA gives an operation when NVSHMEM is enabled, and the rule that decided.

    slice_size: GPUs of an NVLink domain as the runtime knows it, 0 for unknown (the default of the GPU client).
    """
    if not rules.nvshmem:
        return Assigned.NCCL, f"{rules.name}: this release has no NVSHMEM collectives"
    if operation.op not in _ASSIGNED:
        return Assigned.NCCL, f"{rules.name}: only {' and '.join(_ASSIGNED)} can go to NVSHMEM"
    small = operation.output_bytes < THRESHOLD_BYTES
    if not small and (operation.op is Collective.ALL_REDUCE or not rules.all_sizes):
        return Assigned.NCCL, f"{rules.name}: {operation.output_bytes} bytes aren't below {THRESHOLD_BYTES}"
    return _reach(rules, operation, slice_size)


def flags(rules: RuleSet, operation: Operation, wanted: Wanted) -> list[str] | None:
    """XLA_FLAGS with which the release runs the operation as wanted; None where no flag of it does.

    The modes are those of DebugOptions.CollectivesMode: private (the default: send and receive), symmetric (puts with signals,
    where the NCCL that XLA is built with has them), peer.
    """
    match wanted:
        case Wanted.NCCL:
            return ["--xla_gpu_experimental_enable_nvshmem=false"] if rules.nvshmem else []
        case Wanted.NVSHMEM:
            return ["--xla_gpu_experimental_enable_nvshmem=true"] if rules.nvshmem else None
        case Wanted.PUTS:
            if operation.op is Collective.PERMUTE and rules.modes:
                # Where there is NVSHMEM too, it would take the permute before the mode counts.
                off = ["--xla_gpu_experimental_enable_nvshmem=false"] if rules.nvshmem else []
                return [*off, "--xla_gpu_collective_permute_mode=symmetric"]
            if operation.op is Collective.ALL_GATHER and rules.modes and not rules.nvshmem:
                return ["--xla_gpu_all_gather_mode=symmetric"]
            return None
        case Wanted.SYMMETRIC:
            known = rules.release >= _SYMMETRIC_BUFFERS_SINCE
            return ["--xla_gpu_experimental_enable_nccl_symmetric_buffers=true"] if known else None


def hazards(operation: Operation, slice_size: int) -> list[str]:
    """What can go wrong when XLA runs the operation on NVSHMEM, from its source; empty where nothing is known to.

    slice_size: GPUs of an NVLink domain, 0 for unknown.
    """
    found = []
    if slice_size and not operation.stays_within(slice_size):
        found.append(
            f"its ranks are in several NVLink domains of {slice_size}: XLA's barrier is over the team of one domain "
            "(NVSHMEM_TEAM_SHARED), so a rank may read what hasn't arrived"
        )
    if operation.devices_per_process != 1:
        found.append(f"{operation.devices_per_process} devices a process: XLA's NVSHMEM ends the program unless each has one")
    if operation.op is Collective.ALL_REDUCE and not operation.is_world:
        found.append(
            f"groups of {len(operation.largest)} of {operation.n_devices} devices: XLA reduces over NVSHMEM_TEAM_SHARED, "
            "whatever the group, so the result would be wrong"
        )
    if operation.is_partial:
        found.append("some devices have no source or no target: a rank without a source skips the barrier, the rest hang")
    if operation.op is Collective.PERMUTE and operation.dtype not in PUT_DTYPES:
        found.append(f"{operation.dtype}: XLA has no put of this dtype and fails at run time, not before")
    return found


# nvshmem_collective_permute_thunk.cc has a put for these alone.
PUT_DTYPES: Final = ("f16", "bf16", "f32", "f64", "s32", "u32", "s64", "u64")


def _reach(rules: RuleSet, operation: Operation, slice_size: int) -> tuple[Assigned, str]:
    n, width = operation.n_devices, operation.devices_per_process
    if width == 1:
        return Assigned.NVSHMEM, f"{rules.name}: one device a process"
    if operation.stays_within(width):
        return Assigned.NVSHMEM, f"{rules.name}: each group lies within one process"
    if rules.slices and n <= slice_size:
        return Assigned.NVSHMEM, f"{rules.name}: the program's {n} devices fit in a slice of {slice_size}"
    if rules.slices and slice_size:
        return Assigned.NCCL, f"{rules.name}: {width} devices a process, and {n} devices don't fit in a slice of {slice_size}"
    return Assigned.NCCL, f"{rules.name}: {width} devices a process, and groups span processes"
