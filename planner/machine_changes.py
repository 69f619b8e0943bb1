"""Machines as they might be: another NIC, another size of NVLink domain, all else as it is. Nobody has measured these."""

import math
from dataclasses import replace

from shardroute.topologies.errors import InputError
from shardroute.topologies.machines import Machine


def with_nics(machine: Machine, gpu_nic_Bps: float) -> Machine:
    """The machine with NICs that carry this much for one GPU, one way, all of its NICs together."""
    return replace(machine, nic_Bps=gpu_nic_Bps / machine.nics_per_gpu, figures=())


def with_domains(machine: Machine, n_gpus: int) -> Machine:
    """The machine with NVLink domains of `n_gpus` GPUs: whole hosts where the size allows, else hosts of fewer GPUs."""
    if n_gpus < 1:
        raise InputError(f"NVLink domain of {n_gpus} GPUs: expected 1 or more, such as 8, 36 or 72")
    per_host = math.gcd(machine.gpus_per_host, n_gpus)
    return replace(machine, gpus_per_host=per_host, hosts_per_domain=n_gpus // per_host, figures=())
