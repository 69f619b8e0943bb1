"""NCCL M2N's own planner, from the published nccl-extensions 0.1.0 wheel, asked by ctypes on a CPU.

The wheel is not a dependency: `pip download --no-deps nccl-extensions==0.1.0` and name the file, or have it installed. The
library wants libnccl and libcuda only to run; where these are absent, empty libraries of their names stand in, for which a C
compiler is needed. Of its structs only what is read is known here, by offset (x86-64, version 0.1.0); every answer is checked to
bring each needing rank each of its bytes once, so a library that is laid out otherwise is found out.
"""

import contextlib
import ctypes
import importlib.metadata
import math
import os
import platform
import shutil
import struct
import subprocess
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from peers.ways import Domains, Pattern, Refused, Way, by_trees, hop
from shardroute.planner.arguments import parse_axes, parse_placements, parse_shape
from shardroute.planner.layouts.placements import Replicate, Shard
from shardroute.planner.layouts.tensors import DTYPES
from shardroute.planner.routing.trees import Hop

VERSION = "0.1.0"
# Its planner takes 15 to 29 ms a rank and tensor at 4,112 ranks (it grows with the square of replicas): minutes for all of them.
MOST_RANKS = 1100
_LIBRARY = "nccl/m2n/lib/cu13/libnccl_m2n.so"
_PREPARE = "_Z20prepareReshardParamsiPK17ncclDistTensor_v2PKmS1_S3_P17ncclWindow_vidmemmijiiS3_P17ncclReshardParamsbbii"
_VALIDATE = "_Z25validateReshardPlanLimitsiPK17ncclDistTensor_v2PKmS1_S3_m16ReshardAlgorithmi"
_MODES = {"uniform": 0, "node": 1}
_RING = 0  # its hierarchical algorithm
# Where a rank's plan says what, in bytes from its start; a target's fields from the target's.
_N_TARGETS, _TARGETS, _TARGET_BYTES = 18616, 3256, 240
_TO_RANK, _TOTAL = 4, 224
_FOLLOWERS, _N_FOLLOWERS, _NEXT = 18620, 19132, 19136
_PLAN_BYTES = 32768  # more than its 20,000 or so


class Absent(Exception):
    """The wheel's planner can't be asked here; the text says why."""


class _Mesh(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("version", ctypes.c_uint),
        ("n_dims", ctypes.c_int),
        ("dims", ctypes.POINTER(ctypes.c_int)),
        ("first_rank", ctypes.c_int),
    )


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("version", ctypes.c_uint),
        ("data", ctypes.c_void_p),
        ("local_shape", ctypes.POINTER(ctypes.c_size_t)),
        ("n_dims", ctypes.c_int),
        ("dtype", ctypes.c_int),
        ("mesh", ctypes.POINTER(_Mesh)),
        ("placements", ctypes.POINTER(ctypes.c_int)),
    )


@dataclass(frozen=True, slots=True)
class Side:
    """One side as M2N takes it: a mesh of two dims, the tensor dim that each shards (-1: none), and a rank's shape in bytes."""

    dims: tuple[int, int]
    placements: tuple[int, int]
    local_bytes: tuple[int, ...]

    @property
    def n_ranks(self) -> int:
        """Ranks of the mesh."""
        return math.prod(self.dims)


def side_of(shape: str, dtype: str, mesh: str, placements: str) -> Side:
    """The side of a bare tensor's layout. Raises Refused for what M2N can't say: it has one shard axis, and even shards."""
    sizes = list(parse_axes("mesh", mesh).values())
    dims = []
    for placement in parse_placements("placements", placements):
        match placement:
            case Replicate():
                dims.append(-1)
            case Shard(dim):
                dims.append(dim)
            case _:
                raise Refused(f"no strided or partial placement ({placements})")
    if len(sizes) > 2 or sum(d >= 0 for d in dims) > 1:
        raise Refused(f"one shard axis in a mesh of two dims at most ({mesh}, {placements})")
    if len(sizes) == 1:
        sizes, dims = [1, *sizes], [-1, *dims]
    if all(d < 0 for d in dims):
        sizes, dims = [sizes[0] * sizes[1], 1], [-1, 0]
    local = list(parse_shape(shape))
    local[-1] *= DTYPES[dtype]
    for n, d in zip(sizes, dims, strict=True):
        if d >= 0:
            if local[d] % n:
                raise Refused(f"{local[d]} along dim {d} don't divide by {n}")
            local[d] //= n
    return Side((sizes[0], sizes[1]), (dims[0], dims[1]), tuple(local))


class M2n:
    """The library, loaded."""

    def __init__(self, wheel: str | None) -> None:
        """From a wheel file, a folder that one was unpacked in, or (None) the installed package. Raises Absent, saying why."""
        if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
            raise Absent(f"its library is for Linux on x86-64, this is {platform.system()} on {platform.machine()}")
        with tempfile.TemporaryDirectory(prefix="m2n-") as folder:  # what is loaded outlives its file
            path = _library(wheel, Path(folder))
            self._stand_ins = [_stand_in(name, Path(folder)) for name in ("libnccl.so.2", "libcuda.so.1")]
            self._load(path)

    def _load(self, path: Path) -> None:
        try:
            self._lib = ctypes.CDLL(str(path), mode=os.RTLD_LAZY)
            self._prepare, self._validate = self._lib[_PREPARE], self._lib[_VALIDATE]
            self._last_error = self._lib["ncclM2nGetLastError"]
            self._mode = ctypes.c_int.in_dll(self._lib, "gReshardLbMode")
            self._mode_set = ctypes.c_ubyte.in_dll(self._lib, "gReshardLbModeSet")
        except (OSError, AttributeError, ValueError) as error:
            raise Absent(f"its library can't be used ({error})") from None
        self._last_error.restype = ctypes.c_char_p

    def ways(
        self, source: Side, target: Side, patterns: Sequence[Pattern], n_bytes: Sequence[float], domain: Domains, per_domain: int,
        mode: str,
    ) -> list[Way]:  # fmt: skip
        """The way of each pattern (n_bytes each) by `mode`: uniform, node, or split: node-aware over split communicators.

        Raises Refused with the library's own words, and for more ranks than MOST_RANKS; RuntimeError where its answer doesn't
        bring every byte once.
        """
        n_ranks = source.n_ranks + target.n_ranks
        if n_ranks > MOST_RANKS:
            raise Refused(f"not asked: {n_ranks} ranks of some 20 ms each")
        split = _split(source, target, per_domain) if mode == "split" else None
        self._mode.value, self._mode_set.value = _MODES["uniform" if mode == "uniform" else "node"], 1
        held, needed = _described(source, 0), _described(target, source.n_ranks)
        shapes = [(ctypes.c_size_t * 3)(*side.local_bytes) for side in (source, target)]
        offsets = (ctypes.c_size_t * n_ranks)()
        plans = []
        for rank in range(n_ranks):
            common = (ctypes.c_int(rank), ctypes.byref(held), shapes[0], ctypes.byref(needed), shapes[1])
            buffer = ctypes.create_string_buffer(_PLAN_BYTES)
            with _quiet():
                code = self._validate(*common, ctypes.c_size_t(1), ctypes.c_int(_RING), ctypes.c_int(per_domain))
                if not code:
                    strided, anchored = ctypes.c_bool(split is not None), ctypes.c_bool(split is not None)
                    n_injected, per_replica = split or (-1, 1)
                    code = self._prepare(
                        *common, None, ctypes.c_size_t(1), ctypes.c_int(8), ctypes.c_uint(0), ctypes.c_int(per_domain),
                        ctypes.c_int(per_domain), offsets, buffer, strided, anchored, ctypes.c_int(n_injected),
                        ctypes.c_int(per_replica),
                    )  # fmt: skip
            if code:
                said = (self._last_error() or b"").decode(errors="replace")
                raise Refused(said.partition(": ")[2].partition(". Fix")[0] or f"error {code}")
            plans.append(buffer.raw)
        return _ways(plans, source.n_ranks, patterns, n_bytes, domain)


def _library(wheel: str | None, folder: Path) -> Path:
    if wheel is None:
        try:
            found = importlib.metadata.distribution("nccl-extensions")
        except importlib.metadata.PackageNotFoundError:
            raise Absent(
                f"nccl-extensions {VERSION} isn't installed; `pip download --no-deps nccl-extensions=={VERSION}`, --wheel FILE"
            ) from None
        if found.version != VERSION:
            raise Absent(f"nccl-extensions {found.version} is installed, {VERSION} is what is known here")
        path = Path(str(found.locate_file(_LIBRARY)))
    elif wheel.endswith(".whl"):
        if f"-{VERSION}-" not in Path(wheel).name:
            raise Absent(f"{wheel}: version {VERSION} is what is known here")
        try:
            with zipfile.ZipFile(wheel) as archive:
                path = Path(archive.extract(_LIBRARY, folder))
        except (OSError, KeyError, zipfile.BadZipFile) as error:
            raise Absent(f"{wheel}: {error}") from None
    else:
        path = Path(wheel) / _LIBRARY
    if not path.is_file():
        raise Absent(f"there is no {path}")
    return path


def _stand_in(name: str, folder: Path) -> ctypes.CDLL:
    """The library of this name, or an empty one that answers to it."""
    with contextlib.suppress(OSError):
        return ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise Absent(f"{name} is absent, and there is no C compiler to make an empty one")
    path = folder / name
    subprocess.run([compiler, "-shared", f"-Wl,-soname,{name}", "-o", path, "-x", "c", os.devnull], check=True)
    return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def _described(side: Side, first_rank: int) -> _Tensor:
    mesh = _Mesh(ctypes.sizeof(_Mesh), 2, 2, (ctypes.c_int * 2)(*side.dims), first_rank)
    shape = (ctypes.c_size_t * 3)(*side.local_bytes)
    n_dims = len(side.local_bytes)
    placements = (ctypes.c_int * 2)(*side.placements)
    return _Tensor(ctypes.sizeof(_Tensor), 2, None, shape, n_dims, 1, ctypes.pointer(mesh), placements)


def _split(source: Side, target: Side, per_domain: int) -> tuple[int, int]:
    """Domains that are injected, and domains a destination replica spans, as the library chooses them for split communicators."""
    n_domains, n_replicas = target.n_ranks // per_domain, _replicas(target)
    if target.n_ranks % per_domain or not n_domains or (n_domains % n_replicas and n_replicas % n_domains):
        raise Refused(f"no split communicators for {n_replicas} replicas over {target.n_ranks / per_domain:g} domains")
    per_replica = max(1, n_domains // n_replicas)
    most = min(_replicas(source), n_replicas)
    if source.n_ranks + target.n_ranks > 200:  # "large": one injection a domain, or four
        most = min(most, 1 if per_replica > 1 else 4)
    return most * per_replica, per_replica


def _replicas(side: Side) -> int:
    return math.prod(n for n, d in zip(side.dims, side.placements, strict=True) if d < 0)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep what the library prints to itself; its words are in its last error."""
    kept = [os.dup(fd) for fd in (1, 2)]
    with open(os.devnull, "wb") as nowhere:
        try:
            for fd in (1, 2):
                os.dup2(nowhere.fileno(), fd)
            yield
        finally:
            for fd, was in zip((1, 2), kept, strict=True):
                os.dup2(was, fd)
                os.close(was)


def _ways(
    plans: Sequence[bytes], n_sources: int, patterns: Sequence[Pattern], n_bytes: Sequence[float], domain: Domains
) -> list[Way]:
    """The ways that the ranks' plans say: a source's targets are leaders; a leader feeds its followers and the next leader."""
    targets: dict[int, list[tuple[int, int]]] = {}
    for rank in range(n_sources):
        n = _number(plans[rank], _N_TARGETS)
        at = [_TARGETS + _TARGET_BYTES * i for i in range(n)]
        targets[rank] = [(_number(plans[rank], a + _TO_RANK), struct.unpack_from("<Q", plans[rank], a + _TOTAL)[0]) for a in at]
    ways = []
    for (who, to), size in zip(patterns, n_bytes, strict=True):
        needers = set(to.tolist())
        hops: list[Hop] = []
        for sender in who.tolist():
            for leader, total in targets.get(sender, ()):
                if leader not in needers:
                    continue
                if total != size:
                    raise RuntimeError(f"M2N sends {total} bytes from rank {sender} to {leader}, the piece has {size:.0f}")
                from_, parent = sender, None
                while leader >= 0:
                    hops.append(hop(from_, leader, parent, domain))
                    from_, parent = leader, len(hops) - 1
                    plan = plans[leader]
                    followers = [_number(plan, _FOLLOWERS + 4 * i) for i in range(_number(plan, _N_FOLLOWERS))]
                    hops += [hop(leader, other, parent, domain) for other in followers]
                    leader = _number(plan, _NEXT)
        if sorted(h.dst for h in hops) != sorted(needers):
            raise RuntimeError(f"M2N brings a piece to {sorted(h.dst for h in hops)[:8]}, it is needed by {sorted(needers)[:8]}")
        ways.append(by_trees([tuple(hops)]))
    return ways


def _number(plan: bytes, at: int) -> int:
    return int(struct.unpack_from("<i", plan, at)[0])
