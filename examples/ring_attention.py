"""Ring attention, planned twice: predicted on 16 GPUs of a GB200 NVL72 rack, and run small on this machine's processes.

    python examples/ring_attention.py

The small run computes real attention, forward and backward, and is compared with attention on one device.
"""

from shardroute.executors import run_plan
from shardroute.planner import check, predict
from shardroute.planner.ring import Attention, Pass, ring_plan
from shardroute.topologies import build_topology, default_calibration, format_seconds, load_machine


def main() -> None:
    """Predict three strategies on a rack, then run one small."""
    call = Attention((131072,), n_ranks=16, n_heads=32, n_kv_heads=8, head_dim=128)
    rack = build_topology(load_machine("gb200-nvl72"), min_gpus=16)
    for strategy in ("ring", "all-gather", "ulysses"):
        plan = ring_plan(call, rack, strategy, Pass.RECOMPUTE)
        check(plan)
        print(f"{strategy:10} {format_seconds(predict(plan, default_calibration('gb200-nvl72')).predicted_s)} on 16 GB200")

    small = Attention((256,), n_ranks=4, n_heads=4, n_kv_heads=2, head_dim=32, dtype="f64", grad_dtype="f64")
    here = build_topology(load_machine("cpu-processes"), min_gpus=4)
    result = run_plan(ring_plan(small, here, "ring", Pass.RECOMPUTE))
    print(f"run on 4 processes in {format_seconds(result.measured_s)}: {result.verified.against}")
    assert not result.mismatches


if __name__ == "__main__":
    main()
