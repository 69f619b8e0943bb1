"""Which NICs of a host carry its GPUs' traffic, at what rate, on which rail.

Rule: what hangs on the fabric counts; without a file of it, InfiniBand NICs near a GPU. Ethernet ports (storage, management) are
left out unless the user says that the fabric is Ethernet.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardroute.topologies.errors import InputError
from shardroute.topologies.importers.fabrics import Fabric, FabricPort
from shardroute.topologies.importers.hosts import Host, Nic


@dataclass(frozen=True, slots=True)
class NicChoice:
    """What is known of NICs: `ibstat`'s, the fabric, names to take (none: by rule), and whether Ethernet counts."""

    listed: tuple[Nic, ...] = ()
    fabric: Fabric | None = None
    names: tuple[str, ...] = ()
    ethernet: bool = False


@dataclass(frozen=True, slots=True)
class Rail:
    """A NIC of a host with the GPUs that it is nearest to and the leaf switch that its cable leads to."""

    host: str
    nic: str
    gpus: tuple[int, ...]
    rail: str


def chosen_nics(host: Host, called: Sequence[str], choice: NicChoice) -> tuple[tuple[Nic, ...], list[Rail], list[str]]:
    """The host's NICs that count, the rails of those on every host of that kind, and notes for the user.

    called: names of the hosts that are like it, itself first. Raises InputError when no NIC is left, or one named isn't there.
    """
    listed = {nic.name: nic for nic in choice.listed}
    nics = [_merged(nic, listed[nic.name]) if nic.name in listed else nic for nic in host.nics]
    nics += [nic for name, nic in listed.items() if name not in {nic.name for nic in nics}] if not host.nics else []
    notes: list[str] = []
    if listed and (down := [nic.name for nic in nics if nic.name not in listed]):
        notes.append(f"{', '.join(down)}: left out, ibstat shows no active port")
        nics = [nic for nic in nics if nic.name in listed]
    rails: list[Rail] = []
    if choice.fabric is not None:
        nics, rails, said = _on_fabric(host, nics, called, choice.fabric)
        notes += said
    if choice.names:
        known = {nic.name for nic in nics}
        if missing := [name for name in choice.names if name not in known]:
            raise InputError(f"--nics: {host.source} has no {missing[0]}; it has {', '.join(sorted(known)) or 'none'}")
        nics = [nic for nic in nics if nic.name in choice.names]
    elif not choice.ethernet:
        nics, said = _without_ethernet(host, nics)
        notes += said
    if not choice.names and choice.fabric is None:
        nics, said = _near_gpus(host, nics)
        notes += said
    if not nics:
        raise InputError(f"{host.source}: no NIC is left; name those of the fabric with --nics, such as --nics mlx5_0,mlx5_1")
    if unknown := [nic.name for nic in nics if nic.ethernet is None and not choice.names]:
        notes.append(f"{', '.join(unknown)}: taken, but {host.source} doesn't say whether they are Ethernet; --ibstat FILE does")
    kept = {nic.name for nic in nics}
    return tuple(nics), [rail for rail in rails if rail.nic in kept], notes


def _merged(nic: Nic, said: Nic) -> Nic:
    return replace(said, guid=nic.guid or said.guid)


def _without_ethernet(host: Host, nics: list[Nic]) -> tuple[list[Nic], list[str]]:
    left = [nic for nic in nics if nic.ethernet is not True]
    gone = [nic.name for nic in nics if nic.ethernet is True]
    if gone and not left:
        raise InputError(
            f"{host.source}: every NIC is Ethernet ({', '.join(gone)}); if GPUs talk over them (RoCE, EFA), say --ethernet, "
            "with --nics NAMES for some of them"
        )
    notes = [f"{', '.join(gone)}: left out, Ethernet"] if gone else []
    return left, notes


def _near_gpus(host: Host, nics: list[Nic]) -> tuple[list[Nic], list[str]]:
    """NICs that are nearest to some GPU, if every GPU has one; else all: where GPUs hang on CPUs, none is nearer than another."""
    names = {nic.name for nic in nics}
    if not all(names & set(gpu.near) for gpu in host.gpus):
        return nics, []
    near = {name for gpu in host.gpus for name in gpu.near}
    far = [nic.name for nic in nics if nic.name not in near]
    notes = [f"{', '.join(far)}: left out, nearest to no GPU (--nics takes them)"] if far else []
    return [nic for nic in nics if nic.name in near], notes


def _on_fabric(host: Host, nics: list[Nic], called: Sequence[str], fabric: Fabric) -> tuple[list[Nic], list[Rail], list[str]]:
    by_guid: dict[str, list[FabricPort]] = {}
    for port in fabric.ports:
        if port.guid is not None:
            by_guid.setdefault(port.guid, []).append(port)
    by_name = {(port.host, port.nic): port for port in fabric.ports}
    found: list[Nic] = []
    rails: list[Rail] = []
    lacking: list[str] = []
    for nic in nics:
        nearest = tuple(gpu.index for gpu in host.gpus if nic.name in gpu.near)
        at_guid = by_guid.get(nic.guid or "", [])
        own = next((port for port in at_guid if port.nic == nic.name), at_guid[0] if len(at_guid) == 1 else None)
        ports = [by_name.get((name, nic.name)) for name in called]
        if own is not None and own.host in called:
            ports[called.index(own.host)] = own
        elif own is not None and ports[0] is None:  # the fabric calls the file's host by another name
            ports[0] = own
        rails += [Rail(name, nic.name, nearest, port.rail) for name, port in zip(called, ports, strict=True) if port is not None]
        if not any(ports):
            lacking.append(nic.name)
            continue
        first = next(port for port in ports if port is not None)
        rate_Bps = first.bandwidth_Bps if first.bandwidth_Bps is not None else nic.bandwidth_Bps
        found.append(replace(nic, bandwidth_Bps=rate_Bps, ethernet=False))
        lacking += [f"{nic.name} of {name}" for name, port in zip(called, ports, strict=True) if port is None]
    if not found:
        known = list(dict.fromkeys(port.host for port in fabric.ports))
        raise InputError(
            f"{host.source}: no NIC of {called[0]} is on the fabric, by GUID or by name; the fabric's file has the hosts "
            f"{', '.join(known[:6])}{', ...' if len(known) > 6 else ''}: give the host's name there with --hosts"
        )
    more = f" and {len(lacking) - 8} more" if len(lacking) > 8 else ""
    return found, rails, [f"not on the fabric: {', '.join(lacking[:8])}{more}"] if lacking else []


def swapped_cables(rails: Sequence[Rail]) -> list[str]:
    """A note for each host whose NICs hang on the leaves of an earlier host, but in another order."""
    of_host: dict[str, dict[str, str]] = {}
    for rail in rails:
        of_host.setdefault(rail.host, {})[rail.nic] = rail.rail
    first: dict[tuple[str, ...], str] = {}
    notes = []
    for host, rail_of in of_host.items():
        like = first.setdefault(tuple(sorted(rail_of.values())), host)
        other = next((nic for nic, rail in rail_of.items() if of_host[like].get(nic, rail) != rail), None)
        if other is not None:
            notes.append(f"{host}: {other} hangs on {rail_of[other]}, on {like} it hangs on {of_host[like][other]}")
    return notes
