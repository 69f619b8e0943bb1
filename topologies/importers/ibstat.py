"""`ibstat`: the link layer, rate and GUID of each NIC's port."""

import re
from typing import Final

from shardroute.topologies.errors import InputError
from shardroute.topologies.importers.hosts import Nic

_CA: Final = re.compile(r"\s*CA '([^']+)'\s*")
_VALUE: Final = re.compile(r"\s*(State|Rate|Link layer|System image GUID):\s*(\S+).*")


def parse_ibstat(text: str, where: str) -> tuple[Nic, ...]:
    """The NICs with an active port, by name; of one with two ports the first active one. Raises InputError for other text."""
    found: dict[str, dict[str, str]] = {}
    name, live = "", False
    for line in text.splitlines():
        if match := _CA.fullmatch(line):
            name, live = match[1], False
            found[name] = {}
        elif name and re.fullmatch(r"\s*Port \d+:\s*", line):
            live = found[name].get("State") == "Active"
        elif name and not live and (match := _VALUE.fullmatch(line)) is not None:
            found[name][match[1]] = match[2]
    if not found:
        raise InputError(f"{where}: no line like CA 'mlx5_0'; expected the output of `ibstat`")
    return tuple(_nic(nic, given, where) for nic, given in found.items() if given.get("State") == "Active")


def _nic(name: str, given: dict[str, str], where: str) -> Nic:
    layer, rate = given.get("Link layer"), given.get("Rate", "")
    if layer not in ("InfiniBand", "Ethernet"):
        raise InputError(f"{where}: CA {name!r}: Link layer: expected InfiniBand or Ethernet, found {layer!r}")
    if re.fullmatch(r"\d{1,5}(\.\d)?", rate) is None:
        raise InputError(f"{where}: CA {name!r}: Rate: expected Gb/s such as 400, found {rate!r}")
    guid = given.get("System image GUID", "").removeprefix("0x")
    return Nic(name, layer == "Ethernet", float(rate) * 1e9 / 8, guid.lower().zfill(16) if guid else None)
