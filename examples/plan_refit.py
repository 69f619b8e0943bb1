"""Plan a refit by each of three strategies, prove each plan, and print what it is predicted to take beside the best possible.

    python examples/plan_refit.py

Qwen3-30B-A3B from Megatron-Core's layout on 16 GPUs to two vLLM replicas on 16 others, on DGX H100.
"""

from shardroute.planner import check, load_model, make_plan, parse_spec, predict, refit_problem, report
from shardroute.topologies import build_topology, default_calibration, format_seconds, load_machine

MACHINE = "dgx-h100"
STRATEGIES = ("direct", "domain-relay", "gather-broadcast")


def main() -> None:
    """Plan, prove, predict."""
    problem, _ = refit_problem(load_model("qwen3-30b-a3b"), parse_spec("EP8 x PP2"), parse_spec("TP8 x DP2"))
    topology = build_topology(load_machine(MACHINE), min_gpus=problem.n_ranks)
    calibration = default_calibration(MACHINE)
    print(f"{len(problem.tensors)} tensors, {problem.n_bytes / 1e9:.1f} GB, {problem.n_ranks} GPUs")
    for strategy in STRATEGIES:
        plan = make_plan(problem, topology, strategy)
        check(plan)  # raises PlanError unless each needed element arrives once, from a rank that holds it
        found = report(plan, predict(plan, calibration), calibration)
        took = format_seconds(found.predicted_s)
        print(f"{strategy:18} {took:>8}  {found.ratio_to_bound:.2f} x bound  {found.n_steps:,} steps")


if __name__ == "__main__":
    main()
