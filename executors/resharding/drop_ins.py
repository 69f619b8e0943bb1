"""Calls as other libraries have them, over shardroute's plans: NCCL M2N's `reshard`, NeMo RL's `xferdtensor`.

    from shardroute.executors import reshard            instead of    from nccl.m2n import reshard
    from shardroute.executors import xferdtensor        instead of    from nemo_rl.weight_sync.xferdtensor import xferdtensor

Rule: meshes, placements and tensors are read by their public attributes, so those of nccl.m2n, of NeMo RL and of torch all do. A
call is planned once for its group, meshes, placements and shape; every further one runs that plan.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shardroute.executors.resharding.resharders import DEFAULT_TIMEOUT_S, Resharder
from shardroute.executors.resharding.worlds import open_world
from shardroute.executors.transports.seam import Deadline, World
from shardroute.planner.exchange import Sharding, inventory_of
from shardroute.planner.layouts.meshes import Mesh
from shardroute.planner.layouts.placements import Placement, Replicate, Shard, parse_placement
from shardroute.planner.layouts.tensors import Tensor
from shardroute.topologies.errors import InputError

# Plans kept: one a tensor of a large model's layer kinds, layouts and groups; each is small, its tensors being of one shape.
_MOST_KEPT: Final = 1024
_NAME: Final = "tensor"
_kept: OrderedDict[tuple[object, ...], Resharder] = OrderedDict()
_worlds: dict[int, tuple[object, World]] = {}  # by the id of the group, which is kept so that no other can come to have it


def reshard(
    src: object,
    dst: object,
    comm: object = None,
    stream: object = None,
    *,
    src_mesh: object,
    src_placements: Sequence[object],
    src_local_shape: Sequence[int] | None = None,
    src_dtype: object = None,
    dst_mesh: object,
    dst_placements: Sequence[object],
    dst_local_shape: Sequence[int] | None = None,
    dst_dtype: object = None,
    handle: object = None,
) -> None:
    """Move a tensor from `src`'s layout to `dst`'s; arguments as nccl.m2n.reshard has them (nccl-extensions 0.1.0).

    Every rank of `comm` calls it in the same order; `src` or `dst` is None on ranks that hold no part of that side. Meshes are
    nested lists of ranks, DeviceMeshes, or have `dims` and `start_rank`; they may overlap, and have any number of axes, all of
    which may shard. `comm` is a torch process group whose backend moves CPU tensors, or None for all ranks. It returns when the
    tensor has been moved; `stream` and `handle` are taken and not needed. Raises InputError for shapes that the meshes don't
    divide evenly (one part doesn't tell the whole shape then: use `Resharder`), and what Resharder raises.
    """
    sides = [
        _side(mesh, placements, given, shape)
        for mesh, placements, given, shape in (
            (src_mesh, src_placements, src, src_local_shape),
            (dst_mesh, dst_placements, dst, dst_local_shape),
        )
    ]
    shapes = {shape for _, shape in sides if shape is not None}
    if len(shapes) != 1:
        found = ", ".join(map(str, sorted(shapes))) or "no tensor and no local shape"
        raise InputError(f"reshard: the whole tensor's shape follows from either side's part of it; found {found}")
    known = (src_dtype, dst_dtype, getattr(src, "dtype", None), getattr(dst, "dtype", None))
    dtype = next((d for d in known if d is not None), None)
    if dtype is None:
        raise InputError("reshard: no dtype is known on this rank; give src_dtype or dst_dtype")
    _move(Tensor(_NAME, shapes.pop(), str(dtype)), sides[0][0], sides[1][0], src, dst, comm)


def xferdtensor(
    src_tensor: object,
    src_mesh: object,
    src_placement: Sequence[object],
    dst_tensor: object,
    dst_mesh: object,
    dst_placement: Sequence[object],
    process_group: object = None,
) -> None:
    """Move a tensor between meshes; arguments as NeMo RL's xferdtensor has them.

    Tensors have the whole tensor's `shape`, a `dtype` and their part in `_local_tensor` (DTensorRef, DTensor); the one of a side
    that the rank has no part in is None. Every rank of the group calls it in the same order. Shards may be uneven. Raises what
    Resharder raises.
    """
    given = src_tensor if src_tensor is not None else dst_tensor
    shape, dtype = getattr(given, "shape", None), getattr(given, "dtype", None)
    if shape is None or dtype is None:
        raise InputError("xferdtensor: give src_tensor or dst_tensor, with the whole tensor's shape and its dtype")
    tensor = Tensor(_NAME, tuple(int(n) for n in shape), str(dtype))
    source, target = (
        Sharding(read_mesh(mesh), tuple(read_placement(p) for p in placements))
        for mesh, placements in ((src_mesh, src_placement), (dst_mesh, dst_placement))
    )
    _move(tensor, source, target, src_tensor, dst_tensor, process_group)


def _move(tensor: Tensor, source: Sharding, target: Sharding, src: object, dst: object, group: object) -> None:
    if id(group) not in _worlds:
        _worlds[id(group)] = group, open_world("gloo", group, Deadline.after(DEFAULT_TIMEOUT_S))
    world = _worlds[id(group)][1]
    key = (id(group), tensor, source, target)
    if key not in _kept:
        if len(_kept) >= _MOST_KEPT:
            _kept.popitem(last=False)
        # In place, as those libraries do: of the many that are kept, none has memory of its own for weights to arrive in.
        src_side, dst_side = (inventory_of([(tensor, side)]) for side in (source, target))
        _kept[key] = Resharder(src_side, dst_side, transport=world, spare_bytes=0)
    _kept.move_to_end(key)
    parts_in, parts_out = ({} if part is None else {_NAME: part} for part in (src, dst))
    _kept[key].run(parts_in, parts_out).wait()


def _side(
    mesh: object, placements: Sequence[object], given: object, local_shape: Sequence[int] | None
) -> tuple[Sharding, tuple[int, ...] | None]:
    """The sharding of a side, and the whole tensor's shape if this rank has a part of it or knows a part's shape."""
    sharding = Sharding(read_mesh(mesh), tuple(read_placement(placement) for placement in placements))
    shape = getattr(given, "shape", None) if local_shape is None else local_shape
    if shape is None:
        return sharding, None
    whole = [int(n) for n in shape]
    for size, placement in zip(sharding.mesh.sizes, sharding.placements, strict=False):
        if isinstance(placement, Shard) and placement.dim < len(whole):
            whole[placement.dim] *= size
    return sharding, tuple(whole)


def read_mesh(mesh: object) -> Mesh:
    """The mesh that nested lists of ranks, a DeviceMesh, or dims with a start rank say. Raises InputError for anything else."""
    dims, start = getattr(mesh, "dims", None), getattr(mesh, "start_rank", None)
    if dims is not None and start is not None:
        sizes = tuple(int(n) for n in dims)
        return _mesh(np.arange(int(start), int(start) + math.prod(sizes)).reshape(sizes))
    ranks = getattr(mesh, "mesh", mesh)
    nested = ranks.tolist() if hasattr(ranks, "tolist") else ranks
    try:
        return _mesh(np.array(nested, dtype=np.int64))
    except (TypeError, ValueError) as error:
        found = type(mesh).__name__
        raise InputError(f"expected a mesh as nested lists of ranks, or a DeviceMesh, found {found} ({error})") from error


def _mesh(ranks: NDArray[np.int64]) -> Mesh:
    return Mesh(tuple(f"dim{i}" for i in range(ranks.ndim)), ranks.shape, tuple(ranks.ravel().tolist()))


def read_placement(placement: object) -> Placement:
    """The placement that an object says: its `dim` if it is called a Shard, its text otherwise. Raises InputError."""
    match type(placement).__name__:
        case "Replicate":
            return Replicate()
        case "Shard":
            return Shard(int(getattr(placement, "dim", -1)))
        case _:
            return parse_placement(str(placement))
