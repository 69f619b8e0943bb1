"""Machines from what clusters already write: NCCL's dump, nvidia-smi, ibstat, ibnetdiscover, tables of rails, lists of hosts."""

from shardroute.topologies.importers.assemble import Imported, ImportedMachine, Inputs, import_machines, machine_to_toml
from shardroute.topologies.importers.fabrics import Fabric, FabricPort, parse_ibnetdiscover, parse_rail_table
from shardroute.topologies.importers.hosts import Gpu, Host, Nic, expand_hosts
from shardroute.topologies.importers.ibstat import parse_ibstat
from shardroute.topologies.importers.nccl_dumps import parse_nccl_dump
from shardroute.topologies.importers.nics import NicChoice, Rail
from shardroute.topologies.importers.nvidia_smi import parse_nvidia_smi

__all__ = [
    "Fabric",
    "FabricPort",
    "Gpu",
    "Host",
    "Imported",
    "ImportedMachine",
    "Inputs",
    "Nic",
    "NicChoice",
    "Rail",
    "expand_hosts",
    "import_machines",
    "machine_to_toml",
    "parse_ibnetdiscover",
    "parse_ibstat",
    "parse_nccl_dump",
    "parse_nvidia_smi",
    "parse_rail_table",
]
