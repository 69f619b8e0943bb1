"""The fabric between hosts: which switch each NIC's port hangs on, by ibnetdiscover or by a table of rails.

Rule: a rail is the leaf switch that a cable leads to. A NIC's number says nothing: mlx5_3 may be a storage port, and cables get
swapped.
"""

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from shardroute.topologies.errors import InputError
from shardroute.topologies.units import parse_bandwidth

# Gb/s a lane as ibnetdiscover abbreviates it; InfiniBand Architecture Specification vol. 2, by the roadmap at
# https://www.infinibandta.org/infiniband-roadmap/ . SDR to QDR are signalling rates less their 8b/10b code.
_LANE_Gbps: Final = {
    "SDR": 2.0, "DDR": 4.0, "QDR": 8.0, "FDR10": 10.0, "FDR": 14.0, "EDR": 25.0, "HDR": 50.0, "NDR": 100.0, "XDR": 200.0,
}  # fmt: skip
_SPEED: Final = re.compile(r"(\d{1,2})x([A-Z]+\d*)")
_SWITCH: Final = re.compile(r'Switch\s+\d+\s+"(S-[0-9a-fA-F]+)"\s*#\s*"([^"]*)".*')
_ADAPTER: Final = re.compile(r'Ca\s+\d+\s+"(H-[0-9a-fA-F]+)"\s*#\s*"([^"]*)".*')
_SYSTEM: Final = re.compile(r"sysimgguid=0x([0-9a-fA-F]+)\s*")
_PORT: Final = re.compile(r'\[(\d+)\](?:\([0-9a-fA-F]+\))?\s+"([SH]-[0-9a-fA-F]+)"\[\d+\](?:\([0-9a-fA-F]+\))?\s*#(.*)')


@dataclass(frozen=True, slots=True)
class FabricPort:
    """A NIC's port on the fabric: where it sits, as far as the file says, the rail that it hangs on, and its rate one way."""

    host: str
    nic: str
    rail: str
    guid: str | None = None
    bandwidth_Bps: float | None = None


@dataclass(frozen=True, slots=True)
class Fabric:
    """Ports, and what leaves carry to their hosts over what they carry on (1.0: full bisection), where the file says."""

    ports: tuple[FabricPort, ...]
    oversubscription: float | None = None


def parse_ibnetdiscover(text: str, where: str) -> Fabric:
    """The fabric that `ibnetdiscover` prints.

    A port's host and NIC are the words of its description ("node001 mlx5_0"). The oversubscription is the worst leaf's: rate of
    its links to adapters over that of its links to switches. Raises InputError, led by `where` and the line, for other text.
    """
    switches: dict[str, str] = {}
    adapters: dict[str, tuple[str, str | None]] = {}
    links: list[tuple[int, str, str, float]] = []  # line, switch, what hangs there, bytes per second
    at_switch, system = "", None
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if match := _SYSTEM.fullmatch(line):
            system = match[1].lower().zfill(16)
        elif match := _SWITCH.fullmatch(line):
            at_switch = match[1]
            switches[at_switch] = match[2].strip()
            system = None
        elif match := _ADAPTER.fullmatch(line):
            at_switch = ""
            adapters[match[1]] = match[2].strip(), system
            system = None
        elif at_switch and (match := _PORT.fullmatch(line)):
            links.append((number, at_switch, match[2], _rate_Bps(match[3], f"{where}: line {number}")))
        elif line.startswith("[") and _PORT.fullmatch(line) is None:
            raise InputError(f"{where}: line {number}: can't read the port {line[:60]!r}; expected ibnetdiscover's output")
    if not switches or not adapters:
        raise InputError(f"{where}: no switch or no adapter; expected the output of `ibnetdiscover`")
    ports: list[FabricPort] = []
    down: dict[str, float] = dict.fromkeys(switches, 0.0)
    onward: dict[str, float] = dict.fromkeys(switches, 0.0)
    for number, switch, other, rate_Bps in links:
        if other in switches:
            onward[switch] += rate_Bps
            continue
        if other not in adapters:
            raise InputError(f"{where}: line {number}: {other} hangs on {switches[switch]!r} but isn't described; give it all")
        described, guid = adapters[other]
        if "aggregation node" in described.lower():  # SHARP's own adapter in a switch; no host's
            continue
        host, _, nic = described.partition(" ")
        down[switch] += rate_Bps
        ports.append(FabricPort(host, nic.strip(), switches[switch] or switch, guid, rate_Bps))
    ratios = [down[leaf] / onward[leaf] for leaf in switches if down[leaf] and onward[leaf]]
    one_switch = len([leaf for leaf in switches if down[leaf]]) == 1
    return Fabric(tuple(ports), max(1.0, *ratios) if ratios else 1.0 if one_switch else None)


def _rate_Bps(after: str, where: str) -> float:
    found = _SPEED.findall(after)
    if not found or found[-1][1] not in _LANE_Gbps:
        raise InputError(f"{where}: no rate such as 4xNDR; known are {', '.join(_LANE_Gbps)}")
    return float(found[-1][0]) * _LANE_Gbps[found[-1][1]] * 1e9 / 8


def parse_rail_table(text: str, where: str) -> Fabric:
    """The fabric that a CSV table says: columns host, nic, rail, and, if known, rate ("400 Gb/s"), in any order.

    Raises InputError, led by `where` and the line, for a column that lacks or isn't known, and for a NIC that stands twice.
    """
    try:
        rows = list(csv.reader(io.StringIO(text), strict=True))
    except csv.Error as error:
        raise InputError(f"{where}: expected a table with commas ({error})") from None
    head = [name.strip().lower() for name in rows[0]] if rows else []
    if sorted(set(head) - {"rate"}) != ["host", "nic", "rail"] or len(set(head)) < len(head):
        raise InputError(f"{where}: line 1: expected the columns host,nic,rail and perhaps rate, found {','.join(head)!r}")
    ports: dict[tuple[str, str], FabricPort] = {}
    for number, row in enumerate(rows[1:], 2):
        if not any(cell.strip() for cell in row):
            continue
        port = _table_port(head, row, f"{where}: line {number}")
        if (port.host, port.nic) in ports:
            raise InputError(f"{where}: line {number}: {port.nic} of {port.host} stands twice")
        ports[port.host, port.nic] = port
    if not ports:
        raise InputError(f"{where}: no row below the columns; write one a NIC, such as node001,mlx5_0,leaf-1")
    return Fabric(tuple(ports.values()))


# Tables have a few rates, on hundreds of thousands of rows; parsing one takes 10 us.
_bandwidth_Bps = lru_cache(maxsize=64)(parse_bandwidth)


def _table_port(head: Sequence[str], row: Sequence[str], where: str) -> FabricPort:
    cells = {name: cell.strip() for name, cell in zip(head, row, strict=False)}
    if len(row) != len(head) or not all(cells[name] for name in ("host", "nic", "rail")):
        raise InputError(f"{where}: expected {','.join(head)}, found {','.join(row)!r}")
    try:
        rate_Bps = _bandwidth_Bps(cells["rate"]) if cells.get("rate") else None
    except InputError as error:
        raise InputError(f"{where}: rate: {error}") from None
    return FabricPort(cells["host"], cells["nic"], cells["rail"], None, rate_Bps)
