"""A training loop whose weights cross over to inference ranks after every step, on the CPU.

    python examples/refit_loop.py                                  starts its six ranks itself
    torchrun --nproc-per-node 6 examples/refit_loop.py             or let torchrun do so

Ranks 0 to 3 train, as two replicas of two tensor-parallel ranks; ranks 4 and 5 serve, two tensor-parallel ranks that cut the
same matrices the other way. After each step the new weights move straight from shard to shard. Both sides then put one batch
through the model and compare what comes out.
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardroute.executors import Resharder

TRAINERS, SERVERS = [[0, 1], [2, 3]], [4, 5]  # replica x tensor-parallel rank; tensor-parallel rank
N_RANKS = 6
N_STEPS = 3
HIDDEN, INNER, BATCH = 64, 256, 8

# How each side cuts the weights: Megatron style while training, and along the other dim while serving.
TRAINING = {"up": [Replicate(), Shard(0)], "down": [Replicate(), Shard(1)], "scale": [Replicate(), Replicate()]}
SERVING = {"up": [Shard(1)], "down": [Shard(0)], "scale": [Replicate()]}
SHAPES = {"up": (INNER, HIDDEN), "down": (HIDDEN, INNER), "scale": (HIDDEN,)}


def weights(mesh, placements, tp):
    """Zeroed weights of this rank; `tp` ranks share each cut dim."""
    held = {}
    for name, shape in SHAPES.items():
        local = [n // tp if Shard(dim) in placements[name] else n for dim, n in enumerate(shape)]
        held[name] = DTensor.from_local(torch.zeros(local), mesh, placements[name], run_check=False)
    return held


def train(held, step):
    """Stand-in for an optimiser step: every element changes, and what several ranks hold stays alike."""
    for number, weight in enumerate(held.values()):
        part = weight.device_mesh.get_local_rank("tp") if weight.placements[1].is_shard() else 0
        noise = torch.Generator().manual_seed(1000 * step + 10 * number + part)
        weight.to_local().add_(torch.randn(weight.to_local().shape, generator=noise) / 10)


def forward(held, group, cut):
    """One batch through the model, over the tensor-parallel ranks of a group; all of them get the result."""
    up, down, scale = (held[name].to_local() for name in SHAPES)
    x = torch.linspace(-1, 1, BATCH * HIDDEN).reshape(BATCH, HIDDEN) * scale
    mine = dist.get_group_rank(group, dist.get_rank())
    if cut == "inner":  # each rank has rows of `up` and the columns of `down` that go with them
        y = torch.relu(x @ up.T) @ down.T
        dist.all_reduce(y, group=group)
        return y
    inner = x[:, mine * up.shape[1] : (mine + 1) * up.shape[1]] @ up.T  # columns of `up`, rows of `down`
    dist.all_reduce(inner, group=group)
    parts = [torch.empty(BATCH, down.shape[0]) for _ in SERVERS]
    dist.all_gather(parts, torch.relu(inner) @ down.T, group=group)
    return torch.cat(parts, dim=1)


def run():
    """What every rank does, inside an initialised torch.distributed."""
    rank = dist.get_rank()
    trains = rank not in SERVERS
    train_mesh, serve_mesh = DeviceMesh("cpu", TRAINERS, mesh_dim_names=("dp", "tp")), DeviceMesh("cpu", SERVERS)
    replicas = [dist.new_group(ranks) for ranks in (*TRAINERS, SERVERS)]
    group = replicas[2] if not trains else replicas[rank // 2]
    held = weights(train_mesh, TRAINING, 2) if trains else weights(serve_mesh, SERVING, 2)
    held["scale"].to_local().fill_(1.0)

    # --8<-- [start:loop]
    # Planned once, on all ranks together: each says what it knows, trainers the source and servers the destination.
    resharder = Resharder(held if trains else None, None if trains else held)
    if rank == 0:
        print(f"planned: {len(resharder.plan.steps)} steps, strategy {resharder.plan.strategy}", flush=True)
    for step in range(N_STEPS):
        if trains:
            train(held, step)
        transfer = resharder.run(held if trains else None, None if trains else held)
        # ... the next batch could be made ready here; only the weights must not change yet ...
        transfer.wait()  # raises what went wrong, with rank, step and peer
        # --8<-- [end:loop]
        y = forward(held, group, "inner" if trains else "hidden")
        everyone = [torch.empty_like(y) for _ in range(N_RANKS)]
        dist.all_gather(everyone, y)
        apart = max(float((other - y).abs().max()) for other in everyone)
        assert apart < 1e-4, f"step {step}: outputs differ by {apart}"
        if rank == 0:
            print(f"step {step}: all {N_RANKS} ranks agree (largest difference {apart:.1e})", flush=True)
    resharder.close()


def main():
    """Be a rank that torchrun has started, or fork all ranks."""
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        run()
        dist.destroy_process_group()
        return 0
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        children = [fork_rank(rank, f"file://{folder}/rendezvous") for rank in range(N_RANKS)]
        return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0 for child in children)


def fork_rank(rank, rendezvous):
    """Start a rank in a copy of this process; its process id."""
    child = os.fork()
    if child:
        return child
    try:
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=N_RANKS)
        run()
        dist.destroy_process_group()
        os._exit(0)
    finally:
        sys.excepthook(*sys.exc_info())
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
