"""The loop of refit_loop.py with trainers and servers as two groups of Ray actors, as NeMo RL and verl run them.

    pip install ray 'shardroute[torch]'
    python examples/refit_ray.py

Ray starts the processes and tells them what to do when; the weights don't pass through it. All actors are ranks of one gloo
group, in which a Resharder moves them from shard to shard.
"""

import socket
import sys

import ray
import torch
import torch.distributed as dist
from refit_loop import N_RANKS, N_STEPS, SERVERS, SERVING, TRAINERS, TRAINING, forward, train, weights
from torch.distributed.device_mesh import DeviceMesh

from shardroute.executors import Resharder


class Rank:
    """An actor that is one rank: it joins the group of all ranks, makes its weights, and plans the refit with the others."""

    def __init__(self, rank, rendezvous):
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=N_RANKS)
        meshes = DeviceMesh("cpu", TRAINERS, mesh_dim_names=("dp", "tp")), DeviceMesh("cpu", SERVERS)
        groups = [dist.new_group(ranks) for ranks in (*TRAINERS, SERVERS)]
        self.trains = rank not in SERVERS
        self.group = groups[rank // 2]
        self.held = weights(meshes[0], TRAINING, 2) if self.trains else weights(meshes[1], SERVING, 2)
        self.held["scale"].to_local().fill_(1.0)
        held = self.held if self.trains else None
        needed = None if self.trains else self.held
        self.resharder = Resharder(held, needed)

    def ready(self):
        """How many steps the plan has."""
        return len(self.resharder.plan.steps)

    def train(self, step):
        """One optimiser step."""
        train(self.held, step)

    def refit(self):
        """Send, or receive, the new weights."""
        self.resharder.run(self.held if self.trains else None, None if self.trains else self.held).wait()

    def output(self):
        """What the model makes of one batch."""
        return forward(self.held, self.group, "inner" if self.trains else "hidden").numpy()


def main():
    """Drive both groups of actors through the loop."""
    ray.init(num_cpus=N_RANKS, include_dashboard=False, log_to_driver=False)
    with socket.create_server(("127.0.0.1", 0)) as free:
        rendezvous = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    actor = ray.remote(num_cpus=1)(Rank)
    ranks = [actor.remote(rank, rendezvous) for rank in range(N_RANKS)]
    trainers, servers = ranks[: len(ranks) - len(SERVERS)], ranks[len(ranks) - len(SERVERS) :]
    print(f"planned: {ray.get([rank.ready.remote() for rank in ranks])[0]} steps", flush=True)
    for step in range(N_STEPS):
        ray.get([trainer.train.remote(step) for trainer in trainers])
        ray.get([rank.refit.remote() for rank in ranks])
        outputs = ray.get([rank.output.remote() for rank in [*trainers, *servers]])
        apart = max(float(abs(output - outputs[0]).max()) for output in outputs)
        assert apart < 1e-4, f"step {step}: outputs differ by {apart}"
        who = f"{len(trainers)} trainers and {len(servers)} servers"
        print(f"step {step}: {who} agree (largest difference {apart:.1e})", flush=True)
    ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
