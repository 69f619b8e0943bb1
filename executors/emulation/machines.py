"""The machine that an emulated cluster is: chosen rates, written as a machine file like any other.

Rule: nothing here is measured. What the links reach is (`ping_pong`), and goes into the calibration.
"""

from collections.abc import Mapping
from typing import Final

from shardroute.topologies.errors import InputError
from shardroute.topologies.files import check_writable, write_file
from shardroute.topologies.machines import Machine, MachineKind
from shardroute.topologies.topologies import Topology
from shardroute.topologies.units import format_bandwidth

NAME: Final = "emulated"
# Ten to one, as NVLink to NICs on DGX H100 (450 to 50 GB/s) nearly is, and so slow that 16 ranks on two cores keep to them: a
# chunk of 2 kB takes a NIC 2 ms, and a process some 60 us to send and to receive (measured on a 2-core Xeon).
NIC_BPS: Final = 1e6
NVLINK_BPS: Final = 1e7
# Buffers of `gather-broadcast` are 2 % of it: 2 MB, which take a NIC 2 s.
MEMORY_BYTES: Final = 100 * 10**6
# More than a core copies, so that the share that is reached can be stated (`memory.efficiency` of the calibration).
MEMORY_BPS: Final = 1e11


def emulated_machine(
    gpus_per_domain: int = 4, nvlink_Bps: float = NVLINK_BPS, nic_Bps: float = NIC_BPS, name: str = NAME
) -> Machine:
    """A unit of the emulated cluster: one NVLink domain, one NIC a GPU. Raises InputError for impossible numbers."""
    if gpus_per_domain < 1:
        raise InputError(f"an NVLink domain has 1 GPU or more, found {gpus_per_domain}")
    title = f"Emulated: {gpus_per_domain} GPUs, NVLink {format_bandwidth(nvlink_Bps)}, NICs {format_bandwidth(nic_Bps)}"
    return Machine(
        name, title, MachineKind.GPU, "emulated", gpus_per_domain, 1, nvlink_Bps, 1, nic_Bps, MEMORY_BPS, MEMORY_BYTES, 1.0
    )  # fmt: skip


def save_machine(machine: Machine, path: str) -> None:
    """Write the emulated machine as a TOML file that `--machine` reads. Raises InputError for a path that can't be written."""
    check_machine_path(path)
    write_file(path, _text(machine).encode(), "the machine")


def check_machine_path(path: str) -> None:
    """Raise InputError for a path that save_machine couldn't write to."""
    if not path.endswith(".toml"):
        raise InputError(f"{path}: expected a name that ends in .toml")
    check_writable(path, "the machine")


def _text(machine: Machine) -> str:
    source = "chosen for the emulation"
    tables: Mapping[str, Mapping[str, str]] = {
        "gpu": {
            "per_host": f"{machine.gpus_per_host}",
            "memory": f'"{machine.memory_bytes} B"',
            "memory_bandwidth": f'"{machine.hbm_Bps:.15g} B/s"',
        },
        "nvlink": {"hosts_per_domain": "1", "bandwidth": f'"{machine.nvlink_Bps:.15g} B/s"'},
        "nic": {"per_gpu": "1", "bandwidth": f'"{machine.nic_Bps:.15g} B/s"'},
        "fabric": {"oversubscription": "1.0"},
    }
    lines = [f'title = "{machine.title}"', 'kind = "gpu"']
    for table, figures in tables.items():
        lines += ["", f"[{table}]", *(['model = "emulated"'] if table == "gpu" else [])]
        lines += [f'{key} = {{ value = {value}, source = "{source}" }}' for key, value in figures.items()]
    return "\n".join(lines) + "\n"


def check_emulated(topology: Topology) -> None:
    """Raise InputError for a topology whose links can't be emulated."""
    if topology.machine.kind is not MachineKind.GPU:
        raise InputError(
            f"{topology.title} has no links to emulate; plan for a machine with NVLink and NICs, see `shardroute emulate --help`"
        )
    if topology.machine.oversubscription != 1:
        raise InputError(f"{topology.title}: an oversubscribed fabric is not emulated; expected oversubscription 1")
    if (topology.nic_Bps <= 0).any():
        raise InputError(f"{topology.title}: a NIC that is down is not emulated")
