"""What a backend is chosen for: one collective of a program, the program's devices, and the libraries at hand."""

import re
from dataclasses import dataclass
from typing import Final

from shardroute.planner.backends.channels import Traffic
from shardroute.topologies.collectives import Collective
from shardroute.topologies.errors import InputError
from shardroute.topologies.topologies import MAX_GPUS

# Bytes an element, by XLA's names of dtypes.
DTYPE_BYTES: Final = {
    "pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "s32": 4, "u32": 4, "s64": 8, "u64": 8, "f16": 2, "bf16": 2, "f32": 4,
    "f64": 8, "c64": 8, "c128": 16, "f8e4m3": 1, "f8e4m3fn": 1, "f8e5m2": 1, "f8e4m3fnuz": 1, "f8e5m2fnuz": 1,
    "f8e4m3b11fnuz": 1, "f8e3m4": 1, "f8e8m0fnu": 1,
}  # fmt: skip

# Characters of a list that a message shows.
_SHOWN: Final = 80


@dataclass(frozen=True, slots=True, order=True)
class Version:
    """A library's version, compared number by number."""

    numbers: tuple[int, ...]

    @classmethod
    def of(cls, text: str) -> "Version":
        """Read "2.29.7". Raises InputError for anything but numbers with dots."""
        if not re.fullmatch(r"\d{1,6}(\.\d{1,6}){0,3}", text.strip()):
            raise InputError(f"version {text!r}: expected numbers with dots, such as 2.29.7")
        return cls(tuple(int(n) for n in text.strip().split(".")))

    def __str__(self) -> str:
        return ".".join(map(str, self.numbers))


@dataclass(frozen=True, slots=True)
class Libraries:
    """Versions that a job runs with."""

    nccl: Version
    nvshmem: Version


# The newest of each that this was read for (2026-11).
NEWEST = Libraries(Version((2, 30, 7)), Version((3, 5, 1)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One collective of a program of n_devices devices, device d on GPU d.

    n_bytes    as shardroute.topologies.collectives.Collective counts them
    groups     the ranks of each instance; of a permute, those joined by its pairs
    pairs      (source, target) of a permute, else empty
    xla_bytes  what XLA's rules compare with their threshold: the bytes of the output
    devices_per_process    GPUs that one process drives
    """

    op: Collective
    n_bytes: int
    dtype: str
    groups: tuple[tuple[int, ...], ...]
    n_devices: int
    pairs: tuple[tuple[int, int], ...] = ()
    xla_bytes: int | None = None
    devices_per_process: int = 1
    name: str = ""

    def __post_init__(self) -> None:
        what = self.name or self.op
        if self.dtype not in DTYPE_BYTES:
            raise InputError(f"{what}: dtype {self.dtype!r} is unknown; expected one of {', '.join(DTYPE_BYTES)}")
        if self.n_bytes >= 2**63:
            raise InputError(f"{what}: {self.n_bytes} bytes: expected less than 2^63")
        if self.n_bytes < 1 or self.devices_per_process < 1:
            found = f"{self.n_bytes}, {self.devices_per_process}"
            raise InputError(f"{what}: expected bytes and devices a process from 1, found {found}")
        if self.n_devices > MAX_GPUS:
            raise InputError(f"{what}: expected at most {MAX_GPUS} devices, found {self.n_devices}")
        if self.devices_per_process > self.n_devices:
            raise InputError(
                f"{what}: {self.devices_per_process} devices a process, but the program has {self.n_devices}; "
                "say how many there are in all"
            )
        ranks = [rank for group in self.groups for rank in group]
        if not ranks or len(set(ranks)) != len(ranks) or not all(0 <= rank < self.n_devices for rank in ranks):
            found = str(self.groups)
            raise InputError(
                f"{what}: expected groups of different devices from 0 to {self.n_devices - 1}, found "
                f"{found if len(found) <= _SHOWN else found[:_SHOWN] + ' ...'}"
            )
        if (self.op is Collective.PERMUTE) != bool(self.pairs):
            raise InputError(f"{what}: source and target pairs belong to a {Collective.PERMUTE}, and it needs some")
        if any(len({pair[end] for pair in self.pairs}) < len(self.pairs) for end in (0, 1)):
            raise InputError(f"{what}: expected each device once as a source and once as a target of the pairs")

    @property
    def output_bytes(self) -> int:
        """Bytes that XLA compares with its threshold."""
        return self.n_bytes if self.xla_bytes is None else self.xla_bytes

    @property
    def largest(self) -> tuple[int, ...]:
        """The group with the most ranks, the first of those."""
        return max(self.groups, key=len)

    @property
    def is_world(self) -> bool:
        """Whether one group holds all devices."""
        return len(self.largest) == self.n_devices

    @property
    def is_partial(self) -> bool:
        """Whether some device of the program has no source in a permute, or no target."""
        return 0 < len(self.pairs) < self.n_devices  # each device is a source once at most, and a target once

    @property
    def traffic(self) -> Traffic:
        """What one rank of a permute does at once."""
        targets = dict(self.pairs)
        if all(targets.get(target) == source for source, target in self.pairs):
            return Traffic.PAIRS
        if not set(targets) & set(targets.values()):
            return Traffic.ONE_WAY
        return Traffic.RING

    def stays_within(self, width: int) -> bool:
        """Whether each group lies in one block of `width` neighbouring devices: a process, or an NVLink domain."""
        return all(len({rank // width for rank in group}) == 1 for group in self.groups)


def operation(
    op: Collective, n_bytes: int, n_ranks: int, *, dtype: str = "bf16", n_devices: int | None = None, devices_per_process: int = 1
) -> Operation:
    """A collective over the first n_ranks devices of a program; a permute is a ring of them."""
    if n_ranks < 2:
        raise InputError(f"{op}: expected at least 2 ranks, found {n_ranks}")
    if n_ranks > MAX_GPUS:
        raise InputError(f"{op}: expected at most {MAX_GPUS} ranks, found {n_ranks}")
    ranks = tuple(range(n_ranks))
    n_devices = n_ranks if n_devices is None else n_devices
    if op is Collective.PERMUTE:
        ring = tuple((rank, (rank + 1) % n_ranks) for rank in ranks)
        return permute(n_bytes, ring, dtype=dtype, n_devices=n_devices, devices_per_process=devices_per_process)
    return Operation(
        op=op, n_bytes=n_bytes, dtype=dtype, groups=(ranks,), devices_per_process=devices_per_process, n_devices=n_devices,
        xla_bytes=n_bytes // n_ranks if op is Collective.REDUCE_SCATTER else n_bytes,
    )  # fmt: skip


def permute(
    n_bytes: int, pairs: tuple[tuple[int, int], ...], *, dtype: str = "bf16", n_devices: int, devices_per_process: int = 1
) -> Operation:
    """A permute of these (source, target) pairs; one pair alone is a copy from one device to another."""
    return Operation(
        op=Collective.PERMUTE, n_bytes=n_bytes, dtype=dtype, groups=joined(pairs), pairs=pairs, n_devices=n_devices,
        devices_per_process=devices_per_process,
    )  # fmt: skip


def joined(pairs: tuple[tuple[int, int], ...]) -> tuple[tuple[int, ...], ...]:
    """The sets of ranks that pairs join, each sorted, in order of their first rank."""
    leader: dict[int, int] = {}

    def find(rank: int) -> int:
        while leader.setdefault(rank, rank) != rank:
            leader[rank] = rank = leader[leader[rank]]
        return rank

    for source, target in pairs:
        a, b = find(source), find(target)
        leader[max(a, b)] = min(a, b)
    groups: dict[int, list[int]] = {}
    for rank in sorted(leader):
        groups.setdefault(find(rank), []).append(rank)
    return tuple(tuple(group) for group in groups.values())
