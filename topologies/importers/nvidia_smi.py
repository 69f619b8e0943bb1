"""nvidia-smi's text: the matrix of `topo -m`, and, where the file has them too, the lists of `-L` and the fabric of `-q`.

Rule: a GPU's NVLink domain is its (ClusterUUID, CliqueId) where `-q` says them: two cliques of one rack share the UUID, and one
clique spans hosts. A UUID of zeros is a fabric that ends at the host.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from shardroute.topologies.errors import InputError
from shardroute.topologies.importers.hosts import Gpu, Host, Nic

_ESCAPES: Final = re.compile(r"\x1b\[[0-9;]*m")  # the matrix's header is underlined, even in a file
_DEVICE: Final = re.compile(r"(GPU|NIC)(\d{1,4})|((?:mlx|bnxt|irdma|rdma|roce|efa)\w*)")  # older drivers head columns by name
_CELL: Final = re.compile(r"X|SYS|NODE|PHB|PXB|PIX|NV(\d{1,3})")
_LEGEND: Final = re.compile(r"\s*(NIC\d{1,4}):\s*(\S+)\s*")
_LISTED: Final = re.compile(r"GPU (\d{1,4}): (.+?) \(UUID: \S+\)\s*")
_QUERIED: Final = re.compile(r"GPU [0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.\d\s*")
_VALUE: Final = re.compile(r"\s+(Product Name|State|Status|CliqueId|ClusterUUID)\s+:\s*(.*?)\s*")
# From the nearest on. PXB is behind switches of one root; beyond that every NIC is as near as any other.
_NEAR: Final = ("PIX", "PXB")


@dataclass(slots=True)
class _Queried:
    line: int
    name: str = ""
    fabric: dict[str, str] = field(default_factory=dict)


def parse_nvidia_smi(text: str, where: str) -> Host:
    """The host that the text describes; it is called `where`.

    The text may hold the outputs of `nvidia-smi topo -m`, `nvidia-smi -L` and `nvidia-smi -q` in any order; the first is needed.
    Raises InputError, led by `where` and the line, for a matrix that can't be read and for GPUs that haven't joined their fabric.
    """
    lines = [_ESCAPES.sub("", line) for line in text.splitlines()]
    header = next((i for i, line in enumerate(lines) if re.match(r"\s*GPU0\b(?!\s*:)", line) and " X " not in f" {line} "), None)
    if header is None:
        raise InputError(f"{where}: no matrix with a header of GPU0, GPU1, ...; add the output of `nvidia-smi topo -m`")
    columns = _columns(lines[header])
    rows = _rows(lines, header, columns, where)
    legend = {match[1]: match[2] for line in lines if (match := _LEGEND.fullmatch(line))}
    n_gpus = len([name for name in columns if name.startswith("GPU")])
    models = {int(match[1]): match[2] for line in lines if (match := _LISTED.fullmatch(line))}
    queried = _queried(lines)
    if queried and len(queried) != n_gpus:
        raise InputError(f"{where}: the matrix has {n_gpus} GPUs, `nvidia-smi -q` {len(queried)}; take both on one host")
    nics = [name for name in columns if not name.startswith("GPU")]
    cliques = [_clique(gpu, where) for gpu in queried]
    groups = _groups(rows, n_gpus)
    gpus = tuple(
        Gpu(
            index=i,
            n_nvlinks=max((_n_nvlinks(rows[f"GPU{i}"][f"GPU{j}"]) for j in range(n_gpus) if j != i), default=0),
            near=tuple(legend.get(name, name) for name in _nearest(rows[f"GPU{i}"], nics)),
            domain=cliques[i] if cliques and cliques[i] else f"{where} {groups[i]}",
            model=models.get(i, queried[i].name if queried else ""),
        )
        for i in range(n_gpus)
    )
    named = (legend.get(name, name) for name in nics)
    # A bond is an interface of the Ethernet driver; nothing else in this text says what a NIC is.
    return Host(where, where, gpus, tuple(Nic(name, True if "bond" in name else None) for name in named), any(cliques))


def _columns(header: str) -> tuple[str, ...]:
    names = []
    for word in header.split():
        if _DEVICE.fullmatch(word) is None:
            break
        names.append(word)
    return tuple(names)


def _rows(lines: Sequence[str], header: int, columns: Sequence[str], where: str) -> dict[str, dict[str, str]]:
    rows: dict[str, dict[str, str]] = {}
    for at in range(header + 1, len(lines)):
        words = lines[at].split()
        if not words or words[0] not in columns:
            if len(rows) == len(columns):
                break
            continue
        cells = words[1 : 1 + len(columns)]
        for cell in cells:
            if _CELL.fullmatch(cell) is None:
                raise InputError(f"{where}: line {at + 1}: row {words[0]}: {cell!r} is none of X, SYS, NODE, PHB, PXB, PIX, NV18")
        if len(cells) < len(columns) or words[0] in rows or cells[list(columns).index(words[0])] != "X":
            raise InputError(
                f"{where}: line {at + 1}: row {words[0]}: expected one cell for each of {len(columns)} columns, X for itself; "
                "paste the output of `nvidia-smi topo -m` whole"
            )
        rows[words[0]] = dict(zip(columns, cells, strict=True))
    if missing := [name for name in columns if name not in rows]:
        raise InputError(f"{where}: the matrix has no row {missing[0]}; paste the output of `nvidia-smi topo -m` whole")
    n_gpus = len([name for name in columns if name.startswith("GPU")])
    if any(f"GPU{i}" not in rows for i in range(n_gpus)):
        raise InputError(f"{where}: line {header + 1}: expected the columns GPU0 to GPU{n_gpus - 1}")
    return rows


def _n_nvlinks(cell: str) -> int:
    match = _CELL.fullmatch(cell)
    return int(match[1]) if match is not None and match[1] is not None else 0


def _groups(rows: Mapping[str, Mapping[str, str]], n_gpus: int) -> list[int]:
    """For each GPU the first one that it reaches over NVLinks."""
    first = list(range(n_gpus))
    for i in range(n_gpus):
        for j in range(i):
            if _n_nvlinks(rows[f"GPU{i}"][f"GPU{j}"]):
                low, high = sorted((first[i], first[j]))
                first = [low if group == high else group for group in first]
    return first


def _nearest(row: Mapping[str, str], nics: Sequence[str]) -> list[str]:
    for distance in _NEAR:
        if found := [name for name in nics if row[name] == distance]:
            return found
    return []


def _queried(lines: Sequence[str]) -> list[_Queried]:
    """What `nvidia-smi -q` says of each GPU, in its order, which is that of the numbers."""
    found: list[_Queried] = []
    in_fabric = False
    for at, line in enumerate(lines):
        if _QUERIED.fullmatch(line):
            found.append(_Queried(at + 1))
            in_fabric = False
        elif found and line.strip() == "Fabric":
            in_fabric = True
        elif found and (match := _VALUE.fullmatch(line)) is not None:
            if match[1] == "Product Name":
                found[-1].name = match[2]
            elif in_fabric:
                found[-1].fabric[match[1]] = match[2]
        elif line.strip() in ("Health", "Capabilities"):
            in_fabric = False
    return found


def _clique(gpu: _Queried, where: str) -> str:
    """The text of a GPU's clique, empty where its fabric ends at the host."""
    uuid, clique = gpu.fabric.get("ClusterUUID", "N/A"), gpu.fabric.get("CliqueId", "N/A")
    state = gpu.fabric.get("State", "N/A")
    if not gpu.fabric or state == "N/A" or not uuid.strip("0-") or uuid == "N/A":
        return ""
    if state != "Completed" or gpu.fabric.get("Status", "Success") != "Success":
        raise InputError(
            f"{where}: line {gpu.line}: the fabric of this GPU is {state}, {gpu.fabric.get('Status')}; expected Completed, "
            "Success: restart its fabric manager or IMEX, or leave the host out"
        )
    return f"fabric {uuid} clique {clique}"
