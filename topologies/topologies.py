"""Topologies: units of one machine, or of several, as one column per property with one entry per GPU.

GPUs are numbered unit by unit and host by host. Columns, not formulas, are what planners read, so unlike GPUs need no code of
their own.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from shardroute.topologies.documents import convert
from shardroute.topologies.errors import InputError
from shardroute.topologies.machines import Machine, MachineKind, machine_from_dict, machine_to_dict

# Far above any cluster built (some 10^5 GPUs), and low enough that predicting for all of them takes seconds.
MAX_GPUS: Final = 2**20


@dataclass(frozen=True, slots=True)
class Topology:
    """The GPUs of whole units of a machine; equal and hashed by what is given, columns are read-only.

    host and domain (int32) number hosts and NVLink domains from 0; nvlink_Bps and nic_Bps (float64) are bytes
    per second one way of the GPU's NVLink ports and of its NICs together, hbm_Bps those of its memory. For kind CPU every
    process is on host 0 and in domain 0, and all bandwidths are 0: the calibration says what shared memory gives.

    more lists machines of another kind on the same fabric, as (machine, GPUs); theirs follow those of `machine`, and n_gpus
    counts them too. Raises InputError where kind or oversubscription differ: one fabric has one spine.

    own_nic_Bps lists GPUs whose NICs are not the machine's, as (GPU, bytes per second), ascending: a slower rail, or 0 for
    a NIC that is down. Raises InputError where it names a GPU twice or one that isn't there.
    """

    machine: Machine
    n_gpus: int
    own_nic_Bps: tuple[tuple[int, float], ...] = ()
    more: tuple[tuple[Machine, int], ...] = ()
    host: npt.NDArray[np.int32] = field(init=False, repr=False, compare=False)
    domain: npt.NDArray[np.int32] = field(init=False, repr=False, compare=False)
    nvlink_Bps: npt.NDArray[np.float64] = field(init=False, repr=False, compare=False)
    nic_Bps: npt.NDArray[np.float64] = field(init=False, repr=False, compare=False)
    hbm_Bps: npt.NDArray[np.float64] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        machine, n_gpus = self.machine, self.n_gpus
        for part, count in self.parts:
            if not 1 <= count <= n_gpus <= MAX_GPUS or count % part.gpus_per_unit:
                raise InputError(
                    f"topology of {part.name}: expected 1 to {MAX_GPUS} GPUs in whole units of "
                    f"{part.gpus_per_unit}, found {count}"
                )
            if part.kind is not machine.kind or part.oversubscription != machine.oversubscription:
                raise InputError(
                    f"{machine.name} ({machine.kind}, oversubscription {machine.oversubscription:g}) and {part.name} "
                    f"({part.kind}, {part.oversubscription:g}) don't go together: one fabric has one kind and one spine"
                )
        object.__setattr__(self, "more", _joined(self.parts)[1:])
        if self.more and machine.kind is MachineKind.CPU:
            raise InputError(f"{machine.name} and {self.more[0][0].name}: processes share one machine, and no fabric joins two")
        object.__setattr__(self, "own_nic_Bps", _own_nics(machine, n_gpus, self.own_nic_Bps))
        shared = machine.kind is MachineKind.CPU
        columns = {
            "host": np.zeros(n_gpus, np.int32) if shared else _numbered([(m.gpus_per_host, n) for m, n in self.parts]),
            "domain": np.zeros(n_gpus, np.int32) if shared else _numbered([(m.gpus_per_domain, n) for m, n in self.parts]),
            "nvlink_Bps": np.concatenate([np.full(n, m.nvlink_Bps) for m, n in self.parts]),
            "nic_Bps": np.concatenate([np.full(n, m.gpu_nic_Bps) for m, n in self.parts]),
            "hbm_Bps": np.concatenate([np.full(n, m.hbm_Bps) for m, n in self.parts]),
        }
        for at, nic_Bps in self.own_nic_Bps:
            columns["nic_Bps"][at] = nic_Bps
        for name, column in columns.items():
            column.flags.writeable = False
            object.__setattr__(self, name, column)

    def __reduce__(self) -> tuple[type["Topology"], tuple[object, ...]]:
        # Pickled arrays come back writable and make the pickle large; the columns follow from these.
        return Topology, (self.machine, self.n_gpus, self.own_nic_Bps, self.more)

    @property
    def parts(self) -> tuple[tuple[Machine, int], ...]:
        """Every machine with how many GPUs it has here, in the order in which these are numbered."""
        return (self.machine, self.n_gpus - sum(n for _, n in self.more)), *self.more

    @property
    def n_units(self) -> int:
        """Units of the first machine: what stands after the x in "dgx-h100 x 32"."""
        return self.parts[0][1] // self.machine.gpus_per_unit

    @property
    def title(self) -> str:
        """What it is built of, `dgx-h100 x 4 + gb200-nvl72 x 1`."""
        return " + ".join(f"{machine.name} x {n // machine.gpus_per_unit}" for machine, n in self.parts)

    @property
    def n_hosts(self) -> int:
        """Hosts, counted from the column."""
        return int(self.host[-1]) + 1

    @property
    def n_domains(self) -> int:
        """NVLink domains, counted from the column."""
        return int(self.domain[-1]) + 1


def _joined(parts: Sequence[tuple[Machine, int]]) -> tuple[tuple[Machine, int], ...]:
    """The parts with neighbours of one machine as one."""
    found: list[tuple[Machine, int]] = []
    for machine, n in parts:
        if found and found[-1][0] == machine:
            found[-1] = machine, found[-1][1] + n
        else:
            found.append((machine, n))
    return tuple(found)


def _numbered(parts: list[tuple[int, int]]) -> npt.NDArray[np.int32]:
    """For runs of GPUs (members of a group, GPUs), the group of each GPU; each run begins a new group."""
    columns, first = [], 0
    for size, count in parts:
        columns.append(first + np.arange(count, dtype=np.int32) // np.int32(size))
        first = int(columns[-1][-1]) + 1
    return np.concatenate(columns)


def _own_nics(
    machine: Machine, n_gpus: int, given: tuple[tuple[int, float], ...]
) -> tuple[tuple[int, float], ...]:
    nics = tuple(sorted((int(gpu), float(nic_Bps)) for gpu, nic_Bps in given))
    gpus = [gpu for gpu, _ in nics]
    if machine.kind is MachineKind.CPU and nics:
        raise InputError(f"topology of {machine.name}: processes have no NICs, but some are given for GPU {gpus[0]}")
    if len(set(gpus)) < len(gpus) or any(not 0 <= gpu < n_gpus for gpu in gpus):
        raise InputError(
            f"topology of {machine.name}: own NICs are given for GPUs {gpus}; expected each of 0 to {n_gpus - 1} at most once"
        )
    for gpu, nic_Bps in nics:
        if not (math.isfinite(nic_Bps) and nic_Bps >= 0):
            raise InputError(f"topology of {machine.name}: NICs of GPU {gpu}: expected 0 bytes/s or more, found {nic_Bps}")
    return nics


class _TopologyRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    machine: dict[str, object]
    n_units: int
    own_nic_Bps: list[tuple[int, float]] = []
    more: list[tuple[dict[str, object], int]] = []


def build_topology(machine: Machine, n_units: int | None = None, min_gpus: int = 1) -> Topology:
    """Return n_units of the machine, or, for None, as few as hold min_gpus.

    "dgx-h100" with min_gpus=20 gives 3 units, 24 GPUs. Raises InputError if n_units is below 1 or holds fewer
    than min_gpus.
    """
    per_unit = machine.gpus_per_unit
    n_fitting = max(1, -(-min_gpus // per_unit))
    if n_units is None:
        n_units = n_fitting
    if n_units < 1:
        raise InputError(f"machine {machine.name}: expected a count from 1, found {n_units}")
    if n_units < n_fitting:
        what = "processes" if machine.kind is MachineKind.CPU else "GPUs"
        raise InputError(
            f"{machine.name} x {n_units} has {n_units * per_unit} {what}, but {min_gpus} are needed; "
            f"use '{machine.name} x {n_fitting}'"
        )
    return Topology(machine, n_units * per_unit)


def join_topologies(parts: Sequence[Topology]) -> Topology:
    """The GPUs of all of these on one fabric, numbered in this order. Raises InputError where they don't go together."""
    first, n_before = parts[0], 0
    own: list[tuple[int, float]] = []
    more: list[tuple[Machine, int]] = []
    for part in parts:
        own += [(gpu + n_before, nic_Bps) for gpu, nic_Bps in part.own_nic_Bps]
        more += part.parts
        n_before += part.n_gpus
    return Topology(first.machine, n_before, tuple(own), tuple(more[1:]))


def topology_to_dict(topology: Topology) -> dict[str, object]:
    """Return the topology as plain values for JSON; topology_from_dict gives an equal topology back."""
    data: dict[str, object] = {"machine": machine_to_dict(topology.machine), "n_units": topology.n_units}
    if topology.own_nic_Bps:
        data["own_nic_Bps"] = [list(pair) for pair in topology.own_nic_Bps]
    if topology.more:
        data["more"] = [[machine_to_dict(machine), n // machine.gpus_per_unit] for machine, n in topology.more]
    return data


def topology_from_dict(data: Mapping[str, object]) -> Topology:
    """Return the topology that topology_to_dict wrote; InputError, with the key, if it doesn't fit."""
    record = convert(dict(data), _TopologyRecord, "topology")
    built = join_topologies(
        [build_topology(machine_from_dict(machine), n) for machine, n in [(record.machine, record.n_units), *record.more]]
    )
    return replace(built, own_nic_Bps=tuple(record.own_nic_Bps))
