"""torch's own DTensors against our placements, in one process with torch's fake process group. Skipped where torch is absent."""

import inspect
import itertools
import pickle

import numpy as np
import pytest

from shardroute.planner.exchange import (
    describe_checkpoint,
    from_device_mesh,
    from_dtensor,
    inventory_of_checkpoint,
    to_torch,
)
from shardroute.planner.layouts.meshes import Mesh

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
fake_pg = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
tensor_api = pytest.importorskip("torch.distributed.tensor")
placement_types = pytest.importorskip("torch.distributed.tensor.placement_types")

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own
KINDS = {
    "R": placement_types.Replicate,
    "S": placement_types.Shard,
    "P": placement_types.Partial,
    "_S": lambda dim, factor: placement_types._StridedShard(dim, split_factor=factor),
}
SIZES = (2, 3, 2)
CUTS_LOCALLY = "src_data_rank" in inspect.signature(tensor_api.distribute_tensor).parameters
RANKS = torch.randperm(12, generator=torch.Generator().manual_seed(1)).reshape(SIZES)


@pytest.fixture
def as_rank():
    """A function that makes this process the given one of 12 ranks."""

    def become(rank):
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=rank, world_size=12)
        return dist.device_mesh.DeviceMesh("cpu", RANKS, mesh_dim_names=("a", "b", "c"))

    yield become
    if dist.is_initialized():
        dist.destroy_process_group()


def distributed(full, mesh, placements):
    """A DTensor of which this rank cuts its part out of the whole. torch 2.6 only knows to send parts, so there we cut."""
    if CUTS_LOCALLY:
        return tensor_api.distribute_tensor(full, mesh, placements, src_data_rank=None)
    local = full
    for axis, placement in enumerate(placements):
        if placement.is_shard():
            parts, _ = placement._split_tensor(local, mesh.size(axis), with_padding=False)
            local = parts[mesh.get_coordinate()[axis]]
    return tensor_api.DTensor.from_local(local, mesh, placements, shape=full.shape, stride=full.stride())


def kinds_for(n_dims):
    return [("R",), *(("S", dim) for dim in range(n_dims)), *(("_S", dim, factor) for dim in range(n_dims) for factor in (2, 3))]


def cases():
    rng = np.random.default_rng(7)
    every = list(itertools.product(kinds_for(2), repeat=3))
    chosen = [(tuple(int(n) for n in rng.integers(1, 14, 2)), every[i]) for i in rng.choice(len(every), 25, replace=False)]
    # torch 2.6 shards with strides only what every split divides
    return (
        chosen
        if CUTS_LOCALLY
        else [((72, 72) if any(kind[0] == "_S" for kind in kinds) else shape, kinds) for shape, kinds in chosen]
    )


def test_every_rank_of_a_dtensor_holds_what_our_fragments_say(as_rank) -> None:
    full = {shape: torch.arange(shape[0] * shape[1]).reshape(shape) for shape, _ in cases()}
    found: dict[tuple[int, int], list[int]] = {}
    shardings = {}
    for rank in range(12):
        mesh = as_rank(rank)
        for i, (shape, kinds) in enumerate(cases()):
            placements = [KINDS[kind](*arguments) for kind, *arguments in kinds]
            dtensor = distributed(full[shape], mesh, placements)
            found[i, rank] = dtensor.to_local().flatten().tolist()
            shardings[i] = from_dtensor("w", dtensor)

    for i, (shape, kinds) in enumerate(cases()):
        tensor, sharding = shardings[i]
        assert (tensor.shape, tensor.dtype) == (shape, "i64")
        assert to_torch(sharding).placements == kinds
        fragments = sharding.fragments(shape)
        for rank in range(12):
            local = np.full(len(found[i, rank]), -1)
            for row in np.flatnonzero(fragments.rank == rank):
                index = np.indices(fragments.extent[row]).reshape(2, -1)
                at = fragments.offset[row] + (index * fragments.strides[row][:, None]).sum(axis=0)
                local[at] = np.ravel_multi_index(tuple(index + fragments.lo[row][:, None]), shape)
            assert local.tolist() == found[i, rank], (shape, kinds, rank)


def test_a_device_mesh_goes_there_and_back(as_rank) -> None:
    mesh = from_device_mesh(as_rank(0))

    assert mesh == Mesh(("a", "b", "c"), SIZES, tuple(RANKS.flatten().tolist()))


def test_a_sharding_is_pickled_and_rebuilt_in_torch(as_rank) -> None:
    mesh = as_rank(0)
    placements = [KINDS["_S"](0, 2), KINDS["R"](), KINDS["S"](0)]
    dtensor = distributed(torch.zeros(8, 4), mesh, placements)

    described = pickle.loads(pickle.dumps(to_torch(from_dtensor("w", dtensor)[1])))
    rebuilt = dist.device_mesh.DeviceMesh("cpu", torch.tensor(described.mesh), mesh_dim_names=described.mesh_dim_names)

    assert torch.equal(rebuilt.mesh, mesh.mesh)
    assert tuple(KINDS[kind](*arguments) for kind, *arguments in described.placements) == dtensor.placements
    assert b"torch." not in pickle.dumps(described)


def test_a_saved_checkpoint_is_described_without_its_data(tmp_path) -> None:
    checkpoint = pytest.importorskip("torch.distributed.checkpoint")
    checkpoint.save({"w": torch.zeros(4, 3, dtype=torch.bfloat16), "note": "text"}, checkpoint_id=tmp_path)

    stored = describe_checkpoint(checkpoint.FileSystemReader(tmp_path).read_metadata())
    found = inventory_of_checkpoint(stored)

    assert [(t.name, t.shape, t.dtype) for t in found.tensors] == [("w", (4, 3), "bf16")]
    assert found.layout.fragments[0].rank.tolist() == [0]
