"""NCCL's topology dump (NCCL_TOPO_DUMP_FILE): hosts, GPUs, NVLinks and NICs from its XML.

Rule: the file is a stranger's. Declarations of types and entities are refused, so that none can be expanded, and size, depth and
count of elements are limited. NCCL fuses the files of one NVLink clique only (ncclTopoGetSystem, src/graph/topo.cc), so the
hosts of one dump are one domain.
"""

import xml.parsers.expat as expat
from dataclasses import dataclass, field
from typing import Final

from shardroute.topologies.errors import InputError
from shardroute.topologies.importers.hosts import Gpu, Host, Nic

MAX_DUMP_BYTES: Final = 2**24  # the dump of a rack of 72 GPUs has some 200 kB
_MAX_DEPTH: Final = 64
_MAX_ELEMENTS: Final = 10**5
_NVSWITCH: Final = "0x068000"  # PCI class of an NVSwitch, NCCL's `tclass`
_GPU_CLASS: Final = "0x0302"  # PCI class 3D controller; NCCL's `tclass` of a GPU at the other end of an NVLink
_INFINIBAND: Final = "0x0207"  # PCI class of an InfiniBand controller; an Ethernet one has 0x0200
_SPEED_UNIT: Final = 1e6  # bit/s: `speed` of <net> is in Mb/s


@dataclass(slots=True)
class _Element:
    tag: str
    line: int
    given: dict[str, str]
    up: "_Element | None"
    inside: "list[_Element]" = field(default_factory=list)

    def within(self, tag: str) -> "list[_Element]":
        """Elements of that tag below this one, in the file's order."""
        found: list[_Element] = []
        for child in self.inside:
            found += [child] if child.tag == tag else []
            found += child.within(tag)
        return found

    def path(self) -> "list[_Element]":
        """This element and those around it, the outermost first."""
        return [*(self.up.path() if self.up is not None else []), self]


def parse_nccl_dump(data: bytes, where: str) -> tuple[Host, ...]:
    """The hosts of a dump in the file's order, GPUs by their number.

    Near a GPU are the NICs that share the deepest PCIe switch, else those of its NUMA node. Raises InputError, led by `where`
    and the line, for XML that can't be read, isn't NCCL's, or declares types or entities.
    """
    root = _read(data, where)
    if root.tag != "system":
        raise InputError(f"{where}: line {root.line}: expected NCCL's <system>, found <{root.tag}>; see NCCL_TOPO_DUMP_FILE")
    by_host: dict[str, list[_Element]] = {}
    for cpu in root.within("cpu"):
        by_host.setdefault(cpu.given.get("host_hash", ""), []).append(cpu)
    several = len([cpus for cpus in by_host.values() if any(cpu.within("gpu") for cpu in cpus)]) > 1
    hosts = []
    for name, cpus in by_host.items():
        gpus = [gpu for cpu in cpus for gpu in cpu.within("gpu")]
        if gpus:
            hosts.append(_host(name or where, where, cpus, gpus, several))
    if not hosts:
        raise InputError(f"{where}: no <gpu>; NCCL dumps the GPUs of the job, so dump from one that uses all of the host's")
    return tuple(hosts)


def _host(name: str, where: str, cpus: list[_Element], gpus: list[_Element], several: bool) -> Host:
    nets = [net for cpu in cpus for net in cpu.within("net")]
    joined = _joined(gpus, where)
    found = [
        Gpu(
            index=_number(gpu, "dev", where),
            n_nvlinks=sum(_number(link, "count", where) for link in gpu.within("nvlink")),
            near=tuple(_text(net, "name", where) for net in _nearest(gpu, nets)),
            domain=f"{where}" if several else f"{where} {name} {joined[id(gpu)]}",
            sm=_number(gpu, "sm", where),
            model=gpu.up.given.get("device", "") if gpu.up is not None else "",
        )
        for gpu in gpus
    ]
    return Host(name, where, tuple(sorted(found, key=lambda gpu: gpu.index)), tuple(_nic(net, where) for net in nets), several)


def _nic(net: _Element, where: str) -> Nic:
    pci = next((element for element in reversed(net.path()) if element.tag == "pci"), None)
    kind = pci.given.get("class", "") if pci is not None else ""
    rate = _number(net, "speed", where) * _SPEED_UNIT / 8
    guid = net.given.get("guid", "")
    name = _text(net, "name", where)
    return Nic(name, not kind.startswith(_INFINIBAND), rate if rate > 0 else None, _guid(guid))


def _guid(text: str) -> str | None:
    """The GUID as the fabric writes it. NCCL prints its bytes, which are in network order, as a little-endian number."""
    try:
        value = int(text, 16)
    except ValueError:
        return None
    return value.to_bytes(8, "little").hex() if 0 < value < 2**64 else None


def _joined(gpus: list[_Element], where: str) -> dict[int, str]:
    """For each GPU, by id, the name of what its NVLinks join it to: the switches, or the first GPU that they lead to."""
    by_bus = {_text(gpu.up, "busid", where): gpu for gpu in gpus if gpu.up is not None and gpu.up.tag == "pci"}
    leader = {id(gpu): id(gpu) for gpu in gpus}

    def top(key: int) -> int:
        while leader[key] != key:
            key = leader[key]
        return key

    switched: int | None = None
    for gpu in gpus:
        for link in gpu.within("nvlink"):
            if link.given.get("tclass", "") == _NVSWITCH:
                switched = id(gpu) if switched is None else switched
                leader[top(id(gpu))] = top(switched)
            elif link.given.get("tclass", "").startswith(_GPU_CLASS) and link.given.get("target", "") in by_bus:
                leader[top(id(gpu))] = top(id(by_bus[link.given["target"]]))
    names = {key: str(i) for i, key in enumerate(dict.fromkeys(top(id(gpu)) for gpu in gpus))}
    return {id(gpu): names[top(id(gpu))] for gpu in gpus}


def _nearest(gpu: _Element, nets: list[_Element]) -> list[_Element]:
    around = [id(element) for element in gpu.path()]
    shared = [len([element for element in net.path() if id(element) in around]) for net in nets]
    # One shared element is the whole file; two are a file and a CPU.
    most = max([2, *shared])
    return [net for net, n in zip(nets, shared, strict=True) if n == most]


def _text(element: _Element | None, key: str, where: str) -> str:
    if element is None or key not in element.given:
        line, tag = (element.line, element.tag) if element is not None else (0, "?")
        raise InputError(f"{where}: line {line}: <{tag}> has no {key}; NCCL writes it, so the file was cut or changed")
    return element.given[key]


def _number(element: _Element, key: str, where: str) -> int:
    text = _text(element, key, where)
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise InputError(f"{where}: line {element.line}: <{element.tag} {key}={text!r}>: expected a whole number")
    return int(text)


def _read(data: bytes, where: str) -> _Element:
    parser = expat.ParserCreate()
    root: list[_Element] = []
    open_: list[_Element] = []
    n_elements = 0

    def start(tag: str, given: dict[str, str]) -> None:
        nonlocal n_elements
        n_elements += 1
        if n_elements > _MAX_ELEMENTS or len(open_) >= _MAX_DEPTH:
            raise InputError(
                f"{where}: line {parser.CurrentLineNumber}: more than {_MAX_ELEMENTS} elements, or {_MAX_DEPTH} in each other"
            )
        element = _Element(tag, parser.CurrentLineNumber, given, open_[-1] if open_ else None)
        (open_[-1].inside if open_ else root).append(element)
        open_.append(element)

    def end(_tag: str) -> None:
        open_.pop()

    def refuse(*_given: object) -> None:
        raise InputError(
            f"{where}: line {parser.CurrentLineNumber}: a DOCTYPE or an entity is declared, which NCCL never writes and which "
            "could expand without end; remove the declaration"
        )

    parser.StartElementHandler, parser.EndElementHandler = start, end
    parser.StartDoctypeDeclHandler = refuse
    parser.EntityDeclHandler = refuse
    try:
        parser.Parse(data, True)
    except expat.ExpatError as error:
        raise InputError(f"{where}: expected XML ({error})") from None
    except (LookupError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{where}: expected XML ({error})") from None
    return root[0]
