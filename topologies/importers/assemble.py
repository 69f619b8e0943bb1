"""Imported hosts to machines: hosts into NVLink domains, like domains into one machine, each figure with its file.

Rule: what the files don't say (memory, its bandwidth, and a fabric's spine) is a known machine's, and its source says so.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Final

from shardroute.topologies.documents import toml_value
from shardroute.topologies.errors import InputError
from shardroute.topologies.figures import Figure, Quantity, figure_value, read_figure, write_figure
from shardroute.topologies.importers.hosts import Host
from shardroute.topologies.importers.nics import NicChoice, Rail, chosen_nics, swapped_cables
from shardroute.topologies.machines import QUANTITIES, Machine, MachineKind, load_machine, machine_names
from shardroute.topologies.topologies import MAX_GPUS

# GPUs of the shipped machines as files name them: device ids of https://pci-ids.ucw.cz/v2.2/pci.ids, vendor 10de; product names
# as `nvidia-smi -L` prints them.
_KNOWN: Final[Mapping[str, str]] = {
    "0x2330": "dgx-h100", "NVIDIA H100 80GB HBM3": "dgx-h100",
    "0x2335": "hgx-h200", "NVIDIA H200": "hgx-h200",
    "0x2901": "dgx-b200", "NVIDIA B200": "dgx-b200",
    "0x2941": "gb200-nvl72", "NVIDIA GB200": "gb200-nvl72",
}  # fmt: skip
# Compute capability of the shipped machines' GPUs, and bytes per second of one NVLink one way: 18 links make the 450 and 900 GB/s
# that the machines' own files give with their sources; A100's 12 make 300 GB/s (half of 600, NVIDIA A100 data sheet).
_SM: Final[Mapping[str, int]] = {"dgx-h100": 90, "hgx-h200": 90, "dgx-b200": 100, "gb200-nvl72": 100}
_LINK_Bps: Final[Mapping[int, float]] = {80: 25e9, 90: 25e9, 100: 50e9}


@dataclass(frozen=True, slots=True)
class Inputs:
    """What is imported.

    hosts            from dumps and nvidia-smi's text, in the order of files
    names            the cluster's hosts; `hosts` has one for each, or one that stands for all, or those of one domain that does
    hosts_per_domain hosts of one NVLink domain, where one host stands for all
    like             machine for what files don't say; None: the shipped one with the same GPU
    nics             which NICs count
    """

    hosts: tuple[Host, ...]
    names: tuple[str, ...] = ()
    hosts_per_domain: int | None = None
    like: Machine | None = None
    nics: NicChoice = field(default_factory=NicChoice)


@dataclass(frozen=True, slots=True)
class ImportedMachine:
    """A machine, how many NVLink domains of it there are, and their hosts in the order in which GPUs are numbered."""

    machine: Machine
    n_units: int
    hosts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Imported:
    """One machine for each kind of domain, the rails of NICs if a fabric was given, and notes for the user."""

    machines: tuple[ImportedMachine, ...]
    rails: tuple[Rail, ...]
    notes: tuple[str, ...]


def import_machines(inputs: Inputs, name: str) -> Imported:
    """The machines of these hosts, called `name`, `name-2`, ...: domains of like hosts are one machine, first come first.

    Raises InputError when hosts of a domain are unlike, a host's GPUs aren't one domain, or something needed isn't said.
    """
    found: dict[Machine, tuple[Machine, list[str]]] = {}
    rails: list[Rail] = []
    notes: list[str] = []
    for hosts, called in _domains(inputs):
        host = hosts[0]
        nics, on_rails, said = chosen_nics(host, called if len(hosts) == 1 else called[:1], inputs.nics)
        for other, other_name in zip(hosts[1:], called[1:], strict=False):
            others, other_rails, also = chosen_nics(other, [other_name], inputs.nics)
            if (len(other.gpus), len(others)) != (len(host.gpus), len(nics)):
                raise InputError(
                    f"{other.source}: {other_name} has {len(other.gpus)} GPUs and {len(others)} NICs, {called[0]} of its NVLink "
                    f"domain {len(host.gpus)} and {len(nics)}; a machine's hosts are alike, so use all GPUs of each for the dump"
                )
            on_rails += other_rails
            said += also
        rates = {nic.name: nic.bandwidth_Bps for nic in nics}
        machine, also = _machine(host, len(called) if len(hosts) > 1 else _per_domain(inputs, host), rates, inputs, name)
        rails += on_rails
        troubles = [trouble for each in hosts for trouble in each.troubles]
        notes += [note for note in dict.fromkeys([*said, *also, *troubles]) if note not in notes]
        # Hosts of one kind come from files of their own, so titles and sources are no part of the kind.
        found.setdefault(replace(machine, title="", figures=()), (machine, []))[1].extend(called)
    notes += swapped_cables(rails)
    machines = []
    for i, (machine, called) in enumerate(found.values(), 1):
        named = machine if i == 1 else replace(machine, name=f"{name}-{i}")
        machines.append(ImportedMachine(named, len(called) // machine.hosts_per_domain, tuple(called)))
    order = [host for made in machines for host in made.hosts]
    if inputs.names and order != list(inputs.names):
        notes.append("hosts are numbered domain by domain, not in the order of --hosts; see `hosts` of --json")
    return Imported(tuple(machines), tuple(rails), tuple(notes))


def machine_to_toml(machine: Machine) -> str:
    """The machine as a file that load_machine reads; it must have all its figures."""
    figures = {figure.key: figure for figure in machine.figures}
    lines = [f"title = {toml_value(machine.title)}", f'kind = "{machine.kind.value}"']
    table = ""
    for key, quantity in QUANTITIES.items():
        head, _, field = key.partition(".")
        if head != table:
            lines += ["", f"[{head}]", *([f"model = {toml_value(machine.gpu)}"] if head == "gpu" else [])]
            table = head
        value = toml_value(figure_value(figures[key], quantity))
        lines.append(f"{field} = {{ value = {value}, source = {toml_value(figures[key].source)} }}")
    return "\n".join(lines) + "\n"


def _domains(inputs: Inputs) -> list[tuple[list[Host], list[str]]]:
    """For each domain its hosts as files show them, and their names; where one host stands for all, it alone and all names."""
    hosts, names = inputs.hosts, inputs.names
    if not hosts:
        raise InputError("nothing to import: give a dump of NCCL, or nvidia-smi's text with --nvidia-smi")
    for host in hosts:
        if len(domains := {gpu.domain for gpu in host.gpus}) > 1:
            raise InputError(
                f"{host.source}: {host.name}: its {len(host.gpus)} GPUs are {len(domains)} NVLink domains, or none; a machine's "
                "domain has whole hosts (docs/machines.md)"
            )
    if len(hosts) == 1:
        per_domain, called = _per_domain(inputs, hosts[0]), list(names) or [hosts[0].name]
        if names and len(called) % per_domain:
            raise InputError(f"--hosts: {len(called)} hosts aren't whole NVLink domains of {per_domain}; list whole ones")
        unnamed = [] if names else [f"{called[0]}#{i}" for i in range(1, per_domain)]
        return [([hosts[0]], called + unnamed)]
    if names and len(names) != len(hosts):
        if len({host.gpus[0].domain for host in hosts}) > 1 or len(names) % len(hosts):
            raise InputError(
                f"--hosts names {len(names)} hosts, the files show {len(hosts)}; one host, or those of one domain, stand for all "
                "of them, or each has its own"
            )
        # A GUID is one host's own: those of other domains are found by name.
        others = [replace(host, nics=tuple(replace(nic, guid=None) for nic in host.nics)) for host in hosts]
        firsts = range(0, len(names), len(hosts))
        return [(others if first else list(hosts), list(names[first : first + len(hosts)])) for first in firsts]
    if inputs.hosts_per_domain is not None:
        raise InputError(f"--domain-hosts goes with one host that stands for all; the files show {len(hosts)} and their domains")
    grouped: dict[str, tuple[list[Host], list[str]]] = {}
    for host, name in zip(hosts, names or _apart(hosts), strict=True):
        in_domain, called = grouped.setdefault(host.gpus[0].domain, ([], []))
        in_domain.append(host)
        called.append(name)
    return list(grouped.values())


def _apart(hosts: Sequence[Host]) -> tuple[str, ...]:
    names = [host.name for host in hosts]
    if len(set(names)) < len(names):
        raise InputError(f"{names[0]}: two files show the same host; give each once")
    return tuple(names)


def _per_domain(inputs: Inputs, host: Host) -> int:
    if inputs.hosts_per_domain is not None:
        if inputs.hosts_per_domain < 1:
            raise InputError(f"--domain-hosts: expected 1 or more, found {inputs.hosts_per_domain}")
        if inputs.hosts_per_domain > MAX_GPUS:
            raise InputError(f"--domain-hosts: expected at most {MAX_GPUS}, found {inputs.hosts_per_domain}")
        return inputs.hosts_per_domain
    if host.spans and len(inputs.hosts) == 1:
        raise InputError(
            f"{host.source}: the NVLink domain goes beyond this host ({host.gpus[0].domain}), and one file doesn't say how far; "
            "give one file a host, or --domain-hosts 18"
        )
    return 1


def _machine(
    host: Host, n_hosts: int, rates: Mapping[str, float | None], inputs: Inputs, name: str
) -> tuple[Machine, list[str]]:
    n_gpus = len(host.gpus)
    like, notes = _like(host, inputs.like)
    from_like = {figure.key: figure for figure in like.figures}
    rate_Bps, rate_source = _nic_rate(host, rates, like)
    if n_gpus > len(rates) or len(rates) % n_gpus:
        per_gpu, shared = 1, f", {len(rates)} of them shared evenly by {n_gpus} GPUs"
        rate_Bps = rate_Bps * len(rates) / n_gpus
    else:
        per_gpu, shared = len(rates) // n_gpus, ""
    fabric = inputs.nics.fabric
    spine = fabric.oversubscription if fabric is not None else None
    written = [
        write_figure("gpu.per_host", Quantity.COUNT, n_gpus, f"{host.source}: GPUs of a host"),
        _borrowed(from_like, like, "gpu.memory", like.memory_bytes),
        _borrowed(from_like, like, "gpu.memory_bandwidth", like.hbm_Bps),
        write_figure("nvlink.hosts_per_domain", Quantity.COUNT, n_hosts, _domain_source(host, n_hosts, inputs)),
        _nvlink(host, like, from_like),
        write_figure("nic.per_gpu", Quantity.COUNT, per_gpu, f"{host.source}: {', '.join(rates)} for {n_gpus} GPUs"),
        _bandwidth("nic.bandwidth", rate_Bps, rate_source + shared),
        _borrowed(from_like, like, "fabric.oversubscription", like.oversubscription)
        if spine is None
        else write_figure("fabric.oversubscription", Quantity.RATIO, spine, "ibnetdiscover: worst leaf's rate, down over up"),
    ]
    values = {figure.key: figure.value for figure in written}
    machine = Machine(
        name=name,
        title=f"{like.gpu}, {n_gpus} a host, {n_hosts} {'host' if n_hosts == 1 else 'hosts'} an NVLink domain; imported",
        kind=MachineKind.GPU,
        gpu=like.gpu,
        gpus_per_host=n_gpus,
        hosts_per_domain=n_hosts,
        nvlink_Bps=values["nvlink.bandwidth"],
        nics_per_gpu=per_gpu,
        nic_Bps=values["nic.bandwidth"],
        hbm_Bps=like.hbm_Bps,
        memory_bytes=like.memory_bytes,
        oversubscription=values["fabric.oversubscription"],
        figures=tuple(written),
    )
    return machine, notes


# Thousands of hosts are like one of a few machines; reading one takes half a millisecond.
_shipped = cache(load_machine)


def _like(host: Host, given: Machine | None) -> tuple[Machine, list[str]]:
    models = sorted({gpu.model for gpu in host.gpus})
    known = {_KNOWN[model] for model in models if model in _KNOWN}
    same = _shipped(next(iter(known))) if len(known) == 1 and len(models) == 1 else None
    if given is not None:
        if given.kind is not MachineKind.GPU:
            raise InputError(f"--like {given.name}: its ranks are processes; name a machine with GPUs")
        if same is not None and same.gpu != given.gpu and given.name in machine_names():
            return given, [f"{host.source} shows {same.gpu}, --like {given.name} has {given.gpu}: memory is the latter's"]
        return given, []
    if same is None:
        shown = f"GPUs {', '.join(models)}" if any(models) else "no model of its GPUs (`nvidia-smi -L` does)"
        raise InputError(
            f"{host.source}: {shown}, and memory stands in no such file; name a machine with the same GPU by --like, one of "
            f"{', '.join(n for n in machine_names() if load_machine(n).kind is MachineKind.GPU)}, or a .toml file"
        )
    return same, []


def _borrowed(figures: Mapping[str, Figure], like: Machine, key: str, value: float) -> Figure:
    if key not in figures:
        return write_figure(key, QUANTITIES[key], value, f"--like {like.name}, whose file gives no source")
    figure = figures[key]
    return replace(figure, source=f"as {like.name}: {figure.source}")


def _domain_source(host: Host, n_hosts: int, inputs: Inputs) -> str:
    if inputs.hosts_per_domain is not None:
        return "--domain-hosts"
    if host.spans:
        return f"{n_hosts} hosts in the files are of {host.gpus[0].domain}"
    return f"{host.source}: NVLinks end at the host"


def _nvlink(host: Host, like: Machine, from_like: Mapping[str, Figure]) -> Figure:
    links = sorted({gpu.n_nvlinks for gpu in host.gpus})
    sms = {gpu.sm for gpu in host.gpus if gpu.sm}
    sm = sms.pop() if len(sms) == 1 else _SM.get(like.name, 0)
    if len(links) > 1:
        raise InputError(
            f"{host.source}: GPUs have {links[0]} to {links[-1]} NVLinks; a machine's are alike, so mend the host or leave it out"
        )
    if sm not in _LINK_Bps or not links[0]:
        return _borrowed(from_like, like, "nvlink.bandwidth", like.nvlink_Bps)
    each = f"{_LINK_Bps[sm] / 1e9:g} GB/s one way"
    source = f"{host.source}: {links[0]} NVLinks a GPU, each {each} at compute capability {sm / 10:g}"
    return _bandwidth("nvlink.bandwidth", links[0] * _LINK_Bps[sm], source)


def _nic_rate(host: Host, rates: Mapping[str, float | None], like: Machine) -> tuple[float, str]:
    said = {rate for rate in rates.values() if rate is not None}
    if len(said) > 1:
        shown = ", ".join(f"{nic} {rate * 8 / 1e9:g} Gb/s" for nic, rate in rates.items() if rate is not None)
        raise InputError(f"{host.source}: NICs have unlike rates ({shown}); name those of the fabric with --nics")
    if not said or None in rates.values():
        return like.nic_Bps, f"as {like.name}: {host.source} says no rate; `ibstat` does"
    return said.pop(), f"{host.source}: rate of {', '.join(rates)}"


def _bandwidth(key: str, bandwidth_Bps: float, source: str) -> Figure:
    text = f"{bandwidth_Bps * 8 / 1e9!r} Gb/s" if key.startswith("nic") else f"{bandwidth_Bps / 1e9!r} GB/s"
    return read_figure(key, Quantity.BANDWIDTH, text.replace(".0 G", " G"), source)
