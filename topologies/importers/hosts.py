"""Hosts as importers read them: GPUs with their NVLinks and nearest NICs, NICs with what they are, and lists of host names."""

import itertools
import re
from collections import Counter
from dataclasses import dataclass
from typing import Final

from shardroute.topologies.errors import InputError

# Above any list that a scheduler gives; a slip such as n[1-99999999] must not fill memory.
MAX_HOSTS: Final = 2**18

_PART: Final = re.compile(r"([^\[\],]*)(?:\[([^\[\]]*)\])?")


@dataclass(frozen=True, slots=True)
class Nic:
    """A NIC's port. None where the file doesn't say: its link layer, its rate one way, its GUID (16 hex digits)."""

    name: str
    ethernet: bool | None = None
    bandwidth_Bps: float | None = None
    guid: str | None = None


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU of a host.

    index     its number on the host
    n_nvlinks NVLinks that lead out of it
    near      names of the NICs that are nearest to it by PCIe
    domain    what joins it to others by NVLink: GPUs of equal text are in one domain, whatever their hosts
    sm        compute capability (90 for Hopper), 0 if not said
    model     device id ("0x2330") or product name, empty if not said
    """

    index: int
    n_nvlinks: int
    near: tuple[str, ...]
    domain: str
    sm: int = 0
    model: str = ""


@dataclass(frozen=True, slots=True)
class Host:
    """A host as a file shows it, GPUs by number.

    spans     whether its NVLink domain goes beyond it, as far as the file says
    troubles  what the file says of its NVLinks that planning doesn't reckon with
    """

    name: str
    source: str
    gpus: tuple[Gpu, ...]
    nics: tuple[Nic, ...]
    spans: bool = False
    troubles: tuple[str, ...] = ()


def expand_hosts(text: str) -> tuple[str, ...]:
    """Host names of a Slurm list: "node[001-003,7],login1" gives node001, node002, node003, node7, login1.

    Raises InputError for brackets that don't close, ranges that fall, names given twice, and more than MAX_HOSTS.
    """
    found: list[str] = []
    for item in _items(text):
        parts = []
        for prefix, numbers in _PART.findall(item):
            parts += [[prefix]] if prefix else []
            parts += [_numbers(text, numbers)] if numbers else []
        size = 1
        for part in parts:
            size *= len(part)
        if len(found) + size > MAX_HOSTS:
            raise InputError(f"hosts {text!r}: more than {MAX_HOSTS} names")
        found += ["".join(name) for name in itertools.product(*parts)]
    for name, count in Counter(found).items():
        if count > 1:
            raise InputError(f"hosts {text!r}: {name} is listed twice")
    return tuple(found)


def _items(text: str) -> list[str]:
    """The list cut at commas that stand outside of brackets."""
    items, depth, start = [], 0, 0
    for at, char in enumerate(text):
        depth += (char == "[") - (char == "]")
        if depth not in (0, 1):
            break
        if char == "," and depth == 0:
            items.append(text[start:at].strip())
            start = at + 1
    items.append(text[start:].strip())
    if depth or not all(items):
        raise InputError(f"hosts {text!r}: expected names and ranges as Slurm writes them, such as node[001-032],login1")
    return items


def _numbers(text: str, listed: str) -> list[str]:
    """"001-003,7" -> 001, 002, 003, 7: as wide as the first number of a range is."""
    found: list[str] = []
    for item in listed.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})(?:-(\d{1,9}))?\s*", item)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if match is None or last < first:
            raise InputError(f"hosts {text!r}: [{listed}]: {item!r} is no number or rising range; write for example [001-032]")
        if len(found) + last - first >= MAX_HOSTS:
            raise InputError(f"hosts {text[:60]!r}: more than {MAX_HOSTS} names")
        found += [f"{n:0{len(match[1])}d}" for n in range(first, last + 1)]
    return found
