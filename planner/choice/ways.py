"""Ways to carry an operation, the rules of what is possible and correct, and what each is predicted to take.

Sources: NCCL 2.30.7 (src/enqueue.cc, graph/tuning.cc, sym_kernels.cc, ce_coll.cc, rma/rma_ce.cc), NVSHMEM 3.5.1, XLA as of
JAX 0.6.2 to 0.11.1, read in 2026-11.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from shardroute.planner.backends.channels import Path, PutLaw, channel_law, put_law
from shardroute.planner.backends.collective_sms import collective_sms
from shardroute.planner.backends.collectives import Group, collective_s
from shardroute.planner.backends.rates import shipped_channels
from shardroute.planner.choice.operations import DTYPE_BYTES, NEWEST, Libraries, Operation, Version
from shardroute.planner.choice.symmetric import symmetric_kernel
from shardroute.planner.choice.xla import PUT_DTYPES, RuleSet, hazards
from shardroute.topologies.calibrations import Calibration
from shardroute.topologies.collectives import Collective
from shardroute.topologies.errors import InputError
from shardroute.topologies.machines import Machine
from shardroute.topologies.units import format_count

# Published times are met to about this: the channel law is off by up to 11 % on XLA's tables of permutes.
MODEL_ERROR: Final = 0.15
# Nobody published what these take; the prediction is NCCL's own estimate, or derived from what the algorithm moves.
DERIVED_ERROR: Final = 1.0


class Way(StrEnum):
    """What carries an operation."""

    NCCL = "nccl"
    NCCL_PUT = "nccl-put"
    NCCL_COPY_ENGINE = "nccl-copy-engine"
    NCCL_SYMMETRIC = "nccl-symmetric"
    NVSHMEM_PUT = "nvshmem-put"
    NVSHMEM_REDUCE = "nvshmem-reduce"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Where an operation runs: machine, its measured costs, libraries, and XLA's rules if XLA is what calls them."""

    machine: Machine
    calibration: Calibration
    libraries: Libraries
    rules: RuleSet | None = None

    def group(self, operation: Operation) -> Group:
        """The largest group of the operation, device d on GPU d, domains filled one after the other."""
        ranks = operation.largest
        return Group(len(ranks), len({rank // self.machine.gpus_per_domain for rank in ranks}))


@dataclass(frozen=True, slots=True)
class Option:
    """One way: either possible, with its predicted seconds, SMs held and how that was found, or not, with the reason.

    n_sms is None where nobody knows how many channels NCCL takes on the machine. `error` is the share of the time by which the
    prediction may be off. `caution` says where the group is unlike those that its time was measured on, empty elsewhere.
    """

    way: Way
    seconds: float | None
    n_sms: int | None
    reason: str
    error: float = MODEL_ERROR
    caution: str = ""

    @property
    def possible(self) -> bool:
        """Whether the operation can go this way."""
        return self.seconds is not None


# Put with signal: first in 2.29.2 (not in 2.28); collectives on copy engines in 2.28.3, kernels on symmetric windows in 2.27.3.
_PUT_SINCE: Final = Version((2, 29, 2))
_COPY_ENGINE_SINCE: Final = Version((2, 28, 3))
_SYMMETRIC_SINCE: Final = Version((2, 27, 3))
_BY_COPY_ENGINE: Final = (Collective.ALL_GATHER, Collective.ALL_TO_ALL)
_BY_SYMMETRIC: Final = (Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
# symmetric.cc, ncclSymImplemented: sums of floats of up to 32 bits.
_SUMS: Final = ("f32", "f16", "bf16", "f8e4m3fn", "f8e5m2")
# NVSHMEM 3.5.1: a reduction runs on 1 block, on 16 with NVLS from 256 KiB; one shot up to 2048 elements, else two.
_NVLS_BYTES: Final = 256 * 2**10
_NVLS_BLOCKS: Final = 16
_ONE_SHOT_ELEMENTS: Final = 2048


def options(operation: Operation, setting: Setting) -> list[Option]:
    """Every way that does this kind of operation, in the order of Way, whether possible or not."""
    ways: list[tuple[Way, Callable[[Operation, Setting], Option]]] = [(Way.NCCL, _nccl)]
    if operation.op is Collective.PERMUTE:
        ways += [(Way.NCCL_PUT, _nccl_put), (Way.NVSHMEM_PUT, _nvshmem_put)]
    if operation.op in _BY_COPY_ENGINE:
        ways.append((Way.NCCL_COPY_ENGINE, _copy_engine))
    if operation.op in _BY_SYMMETRIC:
        ways.append((Way.NCCL_SYMMETRIC, _symmetric))
    if operation.op is Collective.ALL_REDUCE:
        ways.append((Way.NVSHMEM_REDUCE, _nvshmem_reduce))
    found = []
    for way, price in ways:
        try:
            found.append(price(operation, setting))
        except InputError as error:  # a table that the calibration lacks
            found.append(Option(way, None, 0, f"{error}"))
    return found


def _nccl(operation: Operation, setting: Setting) -> Option:
    group = setting.group(operation)
    if operation.op is not Collective.PERMUTE:
        asked = (operation.op, operation.n_bytes, group, setting.machine, setting.calibration)
        seconds, how = collective_s(*asked)
        caution = _caution(operation.op, group, setting.calibration) if how.startswith("measured") else ""
        n_sms = collective_sms(*asked, shipped_channels(setting.machine.name))
        return Option(Way.NCCL, seconds, n_sms, how + (f"; caution: {caution}" if caution else ""), caution=caution)
    n_ranks = _communicator(operation, setting)
    ranks = n_ranks if n_ranks is not None else group.n_ranks
    wide = Group(ranks, max(group.n_domains, -(-ranks // setting.machine.gpus_per_domain)))
    law = channel_law(setting.machine, setting.calibration)
    if law is None:
        raise InputError(f"the calibration of {setting.calibration.machine} has no [p2p] table")
    path = Path.NVLINK if group.n_domains == 1 else Path.NIC
    one = wide.n_domains == 1
    seconds = float(law.send_recv_s(operation.n_bytes, ranks, one, path, operation.traffic))
    channels = int(law.channels(operation.n_bytes, ranks, one, path))
    how = f"send/recv on {channels} channel{'s' if channels > 1 else ''} of a communicator of {ranks}"
    if n_ranks is not None and n_ranks > group.n_ranks:
        how += ": all devices of the program, as XLA before JAX 0.10.0 has it"
    return Option(Way.NCCL, seconds, channels, how)


def _caution(op: Collective, group: Group, calibration: Calibration) -> str:
    """What sets the group apart from all that the calibration has curves of; empty where one is of as many ranks in as many
    domains at least.
    """
    measured = [(curve.n_domains, curve.n_ranks) for curve in calibration.curves if curve.op is op]
    most_domains, most_ranks = (max(counts) for counts in zip(*measured, strict=True))
    these = f"{op} over {group.n_ranks:,} ranks in {format_count(group.n_domains, 'NVLink domain')}"
    if group.n_domains > 1 and most_domains == 1:
        return f"{these} was never measured: all that was is inside one domain, up to {most_ranks} ranks"
    if group.n_ranks > most_ranks or group.n_domains > most_domains:
        return f"{these} was never measured: the most is {most_ranks} ranks in {format_count(most_domains, 'domain')}"
    return ""


def _puts(setting: Setting) -> PutLaw:
    law = put_law(setting.machine, setting.calibration)
    if law is None:
        raise InputError(f"the calibration of {setting.calibration.machine} has no [put] table")
    return law


def _nccl_put(operation: Operation, setting: Setting) -> Option:
    version = setting.libraries.nccl
    if version < _PUT_SINCE:
        return Option(Way.NCCL_PUT, None, 0, f"NCCL {version} has no put; it came with {_PUT_SINCE}")
    if reason := _unreached(operation, setting):
        return Option(Way.NCCL_PUT, None, 0, reason)
    if setting.rules is not None and not setting.rules.modes:
        return Option(Way.NCCL_PUT, None, 0, f"{setting.rules.name} has no mode of permutes that puts; it came with xla-0.10.1")
    law = _puts(setting)
    return Option(Way.NCCL_PUT, float(law.put_s(operation.n_bytes)), 0, "copy engine, buffers in symmetric windows")


def _nvshmem_put(operation: Operation, setting: Setting) -> Option:
    if reason := _no_nvshmem(operation, setting):
        return Option(Way.NVSHMEM_PUT, None, 0, reason)
    if operation.dtype not in PUT_DTYPES:
        return Option(Way.NVSHMEM_PUT, None, 0, f"no put of {operation.dtype}; there are {', '.join(PUT_DTYPES)}")
    near = operation.stays_within(setting.machine.gpus_per_domain)
    law = _puts(setting)
    seconds, how = float(law.put_s(operation.n_bytes, Path.NVLINK if near else Path.NIC)), "copy engine" if near else "RDMA write"
    if setting.rules is not None:
        team = min(operation.n_devices, setting.machine.gpus_per_domain)
        seconds += law.barrier_s(team)
        how += f", then XLA's barrier over {team} ranks"
    return Option(Way.NVSHMEM_PUT, seconds, 0, how + _as_read(setting))


def _copy_engine(operation: Operation, setting: Setting) -> Option:
    """A rank copies its part to each peer, one after the other."""
    version = setting.libraries.nccl
    if version < _COPY_ENGINE_SINCE:
        return Option(Way.NCCL_COPY_ENGINE, None, 0, f"NCCL {version} has none; they came with {_COPY_ENGINE_SINCE}")
    if reason := _unreached(operation, setting):
        return Option(Way.NCCL_COPY_ENGINE, None, 0, reason)
    law = _puts(setting)
    n = setting.group(operation).n_ranks
    seconds = law.start_s() + operation.n_bytes * (n - 1) / n / law.rate_Bps()
    return Option(Way.NCCL_COPY_ENGINE, seconds, 0, "NCCL_CTA_POLICY_ZERO, symmetric windows; derived", DERIVED_ERROR)


def _symmetric(operation: Operation, setting: Setting) -> Option:
    version = setting.libraries.nccl
    if version < _SYMMETRIC_SINCE:
        return Option(Way.NCCL_SYMMETRIC, None, 0, f"NCCL {version} has none; they came with {_SYMMETRIC_SINCE}")
    if reason := _unreached(operation, setting):
        return Option(Way.NCCL_SYMMETRIC, None, 0, reason)
    if operation.op is not Collective.ALL_GATHER and operation.dtype not in _SUMS:
        return Option(Way.NCCL_SYMMETRIC, None, 0, f"no sum of {operation.dtype}; there are {', '.join(_SUMS)}")
    kernel = symmetric_kernel(operation.op, operation.n_bytes, setting.group(operation).n_ranks, setting.machine)
    how = f"kernel {kernel.name}, symmetric windows; NCCL's own estimate"
    return Option(Way.NCCL_SYMMETRIC, kernel.seconds, kernel.n_blocks, how, DERIVED_ERROR)


def _nvshmem_reduce(operation: Operation, setting: Setting) -> Option:
    if reason := _no_nvshmem(operation, setting):
        return Option(Way.NVSHMEM_REDUCE, None, 0, reason)
    if not operation.stays_within(setting.machine.gpus_per_domain):
        return Option(Way.NVSHMEM_REDUCE, None, 0, "its ranks are in several NVLink domains: one block by proxy, not modelled")
    law = _puts(setting)
    n, size = setting.group(operation).n_ranks, operation.n_bytes
    one_shot = size <= _ONE_SHOT_ELEMENTS * DTYPE_BYTES[operation.dtype]
    blocks = _NVLS_BLOCKS if size >= _NVLS_BYTES else 1
    # Each block moves what one block of NCCL's own kernels does; the barriers are on both ends of each shot.
    moved = size * (n - 1) if one_shot else 2 * size * (n - 1) / n
    block_Bps = symmetric_kernel(Collective.ALL_REDUCE, size, n, setting.machine).block_Bps
    seconds = setting.calibration.launch_s + (2 if one_shot else 3) * law.barrier_s(n) + moved / (blocks * block_Bps)
    shots = "one shot" if one_shot else "two shots"
    held = "1 block" if blocks == 1 else f"{blocks} blocks"
    return Option(Way.NVSHMEM_REDUCE, seconds, blocks, f"{shots} on {held}; derived{_as_read(setting)}", DERIVED_ERROR)


def _as_read(setting: Setting) -> str:
    """A note where the job has another NVSHMEM than the one whose source the model follows."""
    found = setting.libraries.nvshmem
    return "" if found == NEWEST.nvshmem else f"; as of NVSHMEM {NEWEST.nvshmem}, {found} may differ"


def _communicator(operation: Operation, setting: Setting) -> int | None:
    """Ranks of the communicator that a permute runs in under XLA: all of the program, until its groups got their own."""
    if setting.rules is None:
        return None
    return operation.n_devices if setting.rules.release < Version((0, 10, 0)) else None


def _unreached(operation: Operation, setting: Setting) -> str:
    if operation.stays_within(setting.machine.gpus_per_domain):
        return ""
    return f"its ranks are in several NVLink domains of {setting.machine.gpus_per_domain} GPUs; it works inside one"


def _no_nvshmem(operation: Operation, setting: Setting) -> str:
    """Why XLA can't run the operation on NVSHMEM, or would run it wrongly; empty where it can, and without XLA."""
    if setting.rules is None:
        return ""
    if not setting.rules.nvshmem:
        return f"{setting.rules.name} has no NVSHMEM collectives; they were in xla-0.6.2 to xla-0.10.1"
    return next(iter(hazards(operation, setting.machine.gpus_per_domain)), "")
