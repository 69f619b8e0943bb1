"""The kernel against SimGrid on random flows, where SimGrid (Debian: libsimgrid-dev) and g++ are installed."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from flow_oracle import graph_of

from shardroute.planner.simulator import TaskGraph, simulate

TOOL = Path(__file__).parents[1] / "tools" / "bench_engine.py"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_engine", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where a dataclass looks its module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def driver(bench: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = bench.build_driver(tmp_path_factory.mktemp("sg_flows"))
    if isinstance(program, str):
        pytest.skip(program)
    assert isinstance(program, Path)
    return program


def random_flows(seed: int) -> TaskGraph:
    """Up to 60 flows over up to 10 links, with starts, delays, caps and dependencies each in some of the cases."""
    rng = np.random.default_rng(seed)
    n, n_links = int(rng.integers(2, 60)), int(rng.integers(2, 10))
    has_starts, has_caps, has_deps, has_ties = rng.random(4) < 0.5
    routes = [rng.choice(n_links, rng.integers(1, min(5, n_links + 1)), replace=False).tolist() for _ in range(n)]
    amount = rng.integers(1, 4, n) * 1e6 if has_ties else np.floor(rng.uniform(1e5, 1e7, n))
    return graph_of(
        capacity=(rng.integers(1, 4, n_links) * 1e9 if has_ties else rng.uniform(1e9, 9e9, n_links)).tolist(),
        routes=routes,
        amount=amount.tolist(),
        start_s=(rng.uniform(0, 0.01, n) if has_starts else np.zeros(n)).tolist(),
        delay_s=rng.uniform(0, 1e-5, n).tolist(),
        cap=np.where(has_caps & (rng.random(n) < 0.5), rng.uniform(1e8, 2e9, n), np.inf).tolist(),
        deps=[sorted(set(rng.integers(0, i, 2).tolist())) if has_deps and i and rng.random() < 0.5 else [] for i in range(n)],
    )


@pytest.mark.parametrize("seed", range(24))
def test_random_flows_finish_when_simgrid_says(bench: ModuleType, driver: Path, tmp_path: Path, seed: int) -> None:
    graph = random_flows(seed)

    reference = bench.run_simgrid(driver, graph, tmp_path)

    np.testing.assert_allclose(simulate(graph).finish_s, reference.finish_s, rtol=1e-6)
