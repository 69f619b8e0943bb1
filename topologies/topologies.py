"""Topologies: n units of a machine, as one column per property with one entry per GPU.

GPUs are numbered unit by unit and host by host. Columns, not formulas, are what planners read, so that a
topology of unlike GPUs can come later without changing them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from shardroute.topologies.documents import convert
from shardroute.topologies.errors import InputError
from shardroute.topologies.machines import Machine, MachineKind, machine_from_dict, machine_to_dict

# Far above any cluster built (some 10^5 GPUs), and low enough that predicting for all of them takes seconds.
_MAX_GPUS: Final = 2**20


@dataclass(frozen=True, slots=True)
class Topology:
    """The GPUs of n whole units of a machine; equal and hashed by what is given, columns are read-only.

    host and domain (int32) number hosts and NVLink domains from 0; nvlink_Bps and nic_Bps (float64) are bytes
    per second one way of the GPU's NVLink ports and of its NICs together. For kind CPU every process is on
    host 0 and in domain 0, and both bandwidths are 0: the calibration says what shared memory gives.

    own_nic_Bps lists GPUs whose NICs are not the machine's, as (GPU, bytes per second), ascending: a slower rail, or 0 for
    a NIC that is down. Raises InputError where it names a GPU twice or one that isn't there.
    """

    machine: Machine
    n_gpus: int
    own_nic_Bps: tuple[tuple[int, float], ...] = ()
    host: npt.NDArray[np.int32] = field(init=False, repr=False, compare=False)
    domain: npt.NDArray[np.int32] = field(init=False, repr=False, compare=False)
    nvlink_Bps: npt.NDArray[np.float64] = field(init=False, repr=False, compare=False)
    nic_Bps: npt.NDArray[np.float64] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        machine, n_gpus = self.machine, self.n_gpus
        if not 1 <= n_gpus <= _MAX_GPUS or n_gpus % machine.gpus_per_unit:
            raise InputError(
                f"topology of {machine.name}: expected 1 to {_MAX_GPUS} GPUs in whole units of "
                f"{machine.gpus_per_unit}, found {n_gpus}"
            )
        object.__setattr__(self, "own_nic_Bps", _own_nics(machine, n_gpus, self.own_nic_Bps))
        gpu = np.arange(n_gpus, dtype=np.int32)
        shared = machine.kind is MachineKind.CPU
        columns = {
            "host": np.zeros_like(gpu) if shared else gpu // np.int32(machine.gpus_per_host),
            "domain": np.zeros_like(gpu) if shared else gpu // np.int32(machine.gpus_per_domain),
            "nvlink_Bps": np.full(n_gpus, machine.nvlink_Bps),
            "nic_Bps": np.full(n_gpus, machine.gpu_nic_Bps),
        }
        for at, nic_Bps in self.own_nic_Bps:
            columns["nic_Bps"][at] = nic_Bps
        for name, column in columns.items():
            column.flags.writeable = False
            object.__setattr__(self, name, column)

    def __reduce__(self) -> tuple[type["Topology"], tuple[Machine, int, tuple[tuple[int, float], ...]]]:
        # Pickled arrays come back writable and make the pickle large; the columns follow from these three.
        return Topology, (self.machine, self.n_gpus, self.own_nic_Bps)

    @property
    def n_units(self) -> int:
        """Units of the machine: what stands after the x in "dgx-h100 x 32"."""
        return self.n_gpus // self.machine.gpus_per_unit

    @property
    def n_hosts(self) -> int:
        """Hosts, counted from the column."""
        return int(self.host[-1]) + 1

    @property
    def n_domains(self) -> int:
        """NVLink domains, counted from the column."""
        return int(self.domain[-1]) + 1


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


def topology_to_dict(topology: Topology) -> dict[str, object]:
    """Return the topology as plain values for JSON; topology_from_dict gives an equal topology back."""
    data: dict[str, object] = {"machine": machine_to_dict(topology.machine), "n_units": topology.n_units}
    if topology.own_nic_Bps:
        data["own_nic_Bps"] = [list(pair) for pair in topology.own_nic_Bps]
    return data


def topology_from_dict(data: Mapping[str, object]) -> Topology:
    """Return the topology that topology_to_dict wrote; InputError, with the key, if it doesn't fit."""
    record = convert(dict(data), _TopologyRecord, "topology")
    built = build_topology(machine_from_dict(record.machine), record.n_units)
    return replace(built, own_nic_Bps=tuple(record.own_nic_Bps))
