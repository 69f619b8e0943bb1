"""nvidia-smi's text: the matrix of `topo -m`, and, where the file has them too, the lists of `-L` and the fabric of `-q`.

Rule: a GPU's NVLink domain is its (ClusterUUID, CliqueId) where `-q` says them: two cliques of one rack share the UUID, and one
clique spans hosts. A UUID of zeros is a fabric that ends at the host. A GPU that can't use its NVLinks is refused, and what else
`-q` says of their health is told.
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
# What -q prints where a GPU has no fabric, or its driver doesn't say.
_UNSAID: Final = ("", "n/a", "not supported", "unknown")
# Rows of `Health` and the values of a sound fabric: the conditions of NVML's NVML_GPU_FABRIC_HEALTH_MASK, and in newer drivers
# their summary, which is Healthy, Unhealthy or Limited Capacity.
_SOUND: Final = {
    "Health": "healthy", "Summary": "healthy", "Bandwidth": "full", "Route Recovery in progress": "false",
    "Route Unhealthy": "false", "Access Timeout Recovery": "false", "Incorrect Configuration": "none",
}  # fmt: skip
# Rows that say that the fabric doesn't carry this GPU's traffic, with the value that does.
_FATAL: Final = {"Health": "unhealthy", "Summary": "unhealthy", "Route Unhealthy": "true"}
# From the nearest on. PXB is behind switches of one root; beyond that every NIC is as near as any other.
_NEAR: Final = ("PIX", "PXB")


@dataclass(slots=True)
class _Queried:
    line: int
    name: str = ""
    fabric: dict[str, str] = field(default_factory=dict)
    health: dict[str, str] = field(default_factory=dict)


def parse_nvidia_smi(text: str, where: str) -> Host:
    """The host that the text describes; it is called `where`.

    The text may hold the outputs of `nvidia-smi topo -m`, `nvidia-smi -L` and `nvidia-smi -q` in any order; the first is needed.
    Raises InputError, led by `where` and the line, for a matrix that can't be read and for GPUs that haven't joined their fabric,
    or that it doesn't carry.
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
    for gpu in queried:
        _check_fabric(gpu, where)
    cliques = [_clique(gpu) for gpu in queried]
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
    ports = tuple(Nic(name, True if "bond" in name else None) for name in named)
    return Host(where, where, gpus, ports, any(cliques), _troubles(queried, where))


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
    section: dict[str, str] | None = None
    for at, line in enumerate(lines):
        if _QUERIED.fullmatch(line):
            found.append(_Queried(at + 1))
            section = None
        elif found and line.strip() == "Fabric":
            section = found[-1].fabric
        elif found and line.strip() == "Health" and section is found[-1].fabric:
            section = found[-1].health
        elif found and line[:1].isspace() and ":" in line:
            name, value = (part.strip() for part in line.split(":", 1))
            if name == "Product Name":
                found[-1].name = value
            elif section is found[-1].fabric and name == "Health":  # drivers that have no rows of it say it in one
                found[-1].health.setdefault(name, value.strip("[]"))
            elif section is not None:
                section.setdefault(name, value.strip("[]"))
        else:
            section = None
    return found


def _check_fabric(gpu: _Queried, where: str) -> None:
    """Raise InputError for a GPU that hasn't joined its fabric, or that the fabric doesn't carry."""
    state, status = gpu.fabric.get("State", ""), gpu.fabric.get("Status", "Success")
    if state.casefold() in _UNSAID:
        return
    if state != "Completed" or status != "Success":
        raise InputError(
            f"{where}: line {gpu.line}: the fabric of this GPU is {state}, {status}; expected Completed, Success: restart its "
            "fabric manager or IMEX, or leave the host out"
        )
    if any(gpu.health.get(row, "").casefold() == value for row, value in _FATAL.items()):
        raise InputError(
            f"{where}: line {gpu.line}: the fabric of this GPU is not healthy ({', '.join(_unsound(gpu))}); have it mended, or "
            "leave the host out"
        )


def _unsound(gpu: _Queried) -> list[str]:
    """The rows of a GPU's fabric health that aren't as they should be, "Bandwidth: Degraded"."""
    found = {row: gpu.health.get(row, "") for row in _SOUND}
    return [f"{row}: {value}" for row, value in found.items() if value.casefold() not in (*_UNSAID, _SOUND[row])]


def _troubles(queried: Sequence[_Queried], where: str) -> tuple[str, ...]:
    """A sentence for each kind of trouble with a fabric that carries, with the GPUs that have it."""
    troubled: dict[str, list[int]] = {}
    for i, gpu in enumerate(queried):
        if found := _unsound(gpu):
            troubled.setdefault(", ".join(found), []).append(i)
    return tuple(
        f"{where}: NVLink fabric of {', '.join(f'GPU {i}' for i in gpus)}: {what}; it is planned as if it were whole, so "
        "predictions are too fast there until it is mended"
        for what, gpus in troubled.items()
    )


def _clique(gpu: _Queried) -> str:
    """The text of a GPU's clique, empty where its fabric ends at the host."""
    uuid, clique = gpu.fabric.get("ClusterUUID", ""), gpu.fabric.get("CliqueId", "")
    if gpu.fabric.get("State", "").casefold() in _UNSAID or not uuid.strip("0-") or uuid.casefold() in _UNSAID:
        return ""
    return f"fabric {uuid} clique {clique}"
