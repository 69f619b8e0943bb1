"""Times expanding and proving a refit's layouts: python tools/bench_layouts.py [case ...].

Proving is overlap of every class: it raises when a needed element has no holder, and its pieces tile what is needed, which
the sizes confirm. Prints seconds, peak memory of the process, fragments and pieces. One process a case, so that memory is
that case's own.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from shardroute.planner.layouts import Model, load_model, overlap, parse_spec
from shardroute.planner.layouts.models.precisions import with_scales
from shardroute.planner.refits import refit_problem

# Kimi K2's shape with deeper and more experts: 2.8 trillion parameters, which is nobody's model.
LARGE = {"num_hidden_layers": 96, "n_routed_experts": 672, "first_k_dense_replace": 1, "num_attention_heads": 128}

# Model, from, to, and the bound of seconds and of GB that issue 3 sets for the case.
CASES = {
    "deepseek-v3": ("deepseek-v3", "PP16 x EP16", "TP32 x DP8", 10.0, None),
    "deepseek-v3-fsdp": ("deepseek-v3", "FSDP256", "EP32 x DP8", None, None),
    "moe-2.8t": ("large", "TP8 x PP16 x EP16 x DP16", "TP32 x DP64", 90.0, 4.0),
    "moe-2.8t-fsdp": ("large", "HSDP2x512 x TP2", "TP8 x EP32 x DP64", None, None),
    "moe-2.8t-fp8": ("large-fp8", "PP16 x EP16 x DP128", "EP32 x DP64", None, None),
}


def large_model() -> Model:
    """The model of LARGE."""
    shipped = Path(__file__).parent.parent / "planner/layouts/models/configs/kimi-k2/config.json"
    config = {**json.loads(shipped.read_text(encoding="utf-8")), **LARGE, "num_key_value_heads": LARGE["num_attention_heads"]}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config), encoding="utf-8")
        return load_model(str(path))


def run(name: str) -> None:
    """Expand and prove one case in this process, and print its figures."""
    model_name, source, target, bound_s, bound_gb = CASES[name]
    match model_name:
        case "large":
            model = large_model()
        case "large-fp8":
            model = with_scales(large_model(), "fp8-block")
        case _:
            model = load_model(model_name)
    start = time.perf_counter()
    problem, summary = refit_problem(model, parse_spec(source), parse_spec(target))
    expanded = time.perf_counter()
    n_fragments = n_pieces = 0
    for c in problem.classes:
        pieces = overlap(c.source, c.target)
        n_pieces += len(pieces)
        n_fragments += len(c.source) + len(c.target)
        copies = sum(int(n) * len(pieces.needers[p]) for n, p in zip(pieces.n_elements, pieces.pattern, strict=True))
        assert copies == int(c.target.n_elements.sum()), f"{name}: pieces don't tile what is needed"
    proved = time.perf_counter()
    memory_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9  # Linux counts it in KiB
    bounds = f"bound {bound_s:g} s" + (f", {bound_gb:g} GB" if bound_gb else "") if bound_s else "no bound"
    print(
        f"{name:17} {model.n_parameters / 1e9:6.0f} B  {summary.n_src_gpus:5} -> {summary.n_dst_gpus:5} GPUs  "
        f"expand {expanded - start:5.2f} s  prove {proved - expanded:6.2f} s  peak {memory_gb:4.2f} GB  "
        f"{len(problem.classes):5} classes  {n_fragments:8} fragments  {n_pieces:8} pieces  ({bounds})",
        flush=True,
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        run(sys.argv[2])
    else:
        for case in sys.argv[1:] or CASES:
            subprocess.run([sys.executable, __file__, "--one", case], check=True)
