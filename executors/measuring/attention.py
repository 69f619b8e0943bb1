"""What attention takes on this machine's cores: the tables attend_*, grad_* and sums of a calibration.

The kernels that ranks run are run here on every kind of tile: large and small, wide and narrow heads, masked and not. Five costs,
none negative, are fitted to the CPU time that each took, weighted as shares, so that small tiles count as much as large ones.

CPU time, not time, so that whatever else the machine does is left out; and in a process of its own, whose linear algebra has one
thread as that of ranks has.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Final

import numpy as np

from shardroute.executors.attention.contents import DTYPES_OF
from shardroute.executors.attention.floats import HOST_DTYPES
from shardroute.executors.attention.jobs import load_arithmetic
from shardroute.executors.attention.kernels import Floats, add, attend, grad, merge
from shardroute.executors.attention.seam import Arithmetic, Block
from shardroute.executors.launching.processes import ONE_THREAD
from shardroute.planner.ring.chunks import chunks_of
from shardroute.planner.ring.tiles import Work, work
from shardroute.planner.ring.workloads import Attention, SequenceLayout
from shardroute.planner.shares import Told, heard, parts
from shardroute.topologies.costs import COST_TABLES, TileCost
from shardroute.topologies.errors import RunError

# Tokens, heads, KV heads and width: tiles of 512 x 512 down to 64 x 64, also of several heads on one KV head; each some 10 ms.
_CASES: Final = (
    (2048, 1, 1, 64), (1024, 1, 1, 16), (1024, 1, 1, 128), (512, 4, 4, 128), (256, 8, 8, 64), (128, 16, 16, 32), (64, 32, 32, 64),
    (256, 16, 4, 64), (128, 32, 8, 32), (512, 8, 2, 32),
)  # fmt: skip
# The median is taken, as of runs: what interrupts and caches that others use cost is part of a step, too.
# All take 3 s of CPU time.
_REPEATS: Final = 5
# Seconds of a case (2-core Xeon, 2026-12-01).
_CASE_S: Final[Mapping[str, float]] = {"f32": 0.075, "f64": 0.144}
# Of a partial output or gradient that is added up: between the caches and what a large call has.
_SUM_SHAPE: Final = (1, 4096, 8, 64)
_BOOT: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from shardroute.executors.measuring.attention import main; main()"
)


@dataclass(frozen=True, slots=True)
class _Sample:
    """A case's work, by the parts that `TileCost` has costs of, in its order; and its CPU seconds."""

    parts: tuple[float, ...]
    seconds: float


def attention_figures(timeout_s: float, progress: Told | None = None) -> dict[str, float]:
    """The figures of the tables, by key (attend_f32.score), in SI; `progress` is told the share that is done. Raises RunError
    when measuring fails or takes too long.
    """
    told, figures, is_late = heard(progress), dict[str, float](), threading.Event()
    with tempfile.TemporaryFile("w+") as errors, subprocess.Popen(
        [sys.executable, "-c", _BOOT, json.dumps(sys.path)],
        env=os.environ | ONE_THREAD, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True,
    ) as measuring:  # fmt: skip
        assert measuring.stdout is not None

        def end() -> None:
            is_late.set()
            measuring.kill()

        limit = threading.Timer(timeout_s, end)
        limit.start()
        try:
            for line in measuring.stdout:
                said: float | dict[str, float] = json.loads(line)
                if isinstance(said, dict):
                    figures = said
                else:
                    told(said)
        except BaseException:
            measuring.kill()
            raise
        finally:
            limit.cancel()
        if is_late.is_set():
            raise RunError(f"measuring attention took over {timeout_s:g} s; is the machine busy? Measure when it is idle")
        if measuring.wait() != 0:
            errors.seek(0)
            raise RunError(f"measuring attention failed: {errors.read().strip().splitlines()[-1:]}")
    return figures


def kernel_figures(progress: Told | None = None) -> dict[str, float]:
    """The same, measured in this process, in which memory is kept as ranks keep it."""
    load_arithmetic(Arithmetic.NUMPY)
    figures: dict[str, float] = {}
    dtypes, cases = DTYPES_OF[Arithmetic.NUMPY], list(product(_CASES, (False, True)))
    told = iter(parts(progress, [_CASE_S[dtype] for dtype in dtypes for _ in cases]))
    for dtype in dtypes:
        samples = []
        for (n, heads, kv_heads, width), causal in cases:
            layout = SequenceLayout.CONTIGUOUS
            samples.append(_measured(Attention((n,), 1, heads, kv_heads, width, causal=causal, layout=layout, dtype=dtype)))
            next(told)(1.0)
        for table, found in zip((f"attend_{dtype}", f"grad_{dtype}"), zip(*samples, strict=True), strict=True):
            figures |= {f"{table}.{key}": cost for key, cost in zip(COST_TABLES[table][1], _fitted(found), strict=True)}
    return figures | _sums()


def main() -> None:
    """Print shares as they are done, then the figures: one JSON value a line."""
    print(json.dumps(kernel_figures(lambda share: print(json.dumps(share), flush=True))))


def _measured(call: Attention) -> tuple[_Sample, _Sample]:
    """Attention of a whole call to itself, forward and backward."""
    chunks, random = chunks_of(call), np.random.default_rng(0)
    dtype = HOST_DTYPES[call.dtype]
    names = ("q", "k", "v", "o", "do", "dq", "dk", "dv")
    shapes = {name: (1, call.n_tokens, call.heads_of(name), call.head_dim) for name in names}
    arrays: dict[str, Floats] = {name: random.random(shape).astype(dtype) - 0.5 for name, shape in shapes.items()}
    arrays["lse"] = np.zeros(shapes["q"][:3], dtype)
    queries = [Block(chunks.rows, 0, call.n_heads, {name: arrays[name] for name in ("q", "o", "lse", "do", "dq")})]
    keys = [Block(chunks.rows, 0, call.n_kv_heads, {name: arrays[name] for name in ("k", "v", "dk", "dv")})]
    served = call.n_heads // call.n_kv_heads
    parts = _parts(work(call, chunks.rows, 0, chunks.rows, 0, served).times(call.n_kv_heads), call.head_dim)
    forward_s = _typical(lambda: attend(call, queries, keys, fresh=True))
    backward_s = _typical(lambda: grad(call, queries, keys, fresh_dq=True, fresh_dkv=True))
    return _Sample(parts, forward_s), _Sample(parts, backward_s)


def _parts(found: Work, width: int) -> tuple[float, ...]:
    return tuple(map(float, (found.n_scores, found.n_scores * width, found.n_masked, found.n_edges * width, found.n_tiles)))


def _fitted(samples: tuple[_Sample, ...]) -> tuple[float, ...]:
    """Costs of the parts by least squares of shares: costs that come out negative are set to 0, and the others fitted again."""
    shares = np.array([sample.parts for sample in samples]) / np.array([[sample.seconds] for sample in samples])
    used = list(range(shares.shape[1]))
    while True:
        costs = np.linalg.lstsq(shares[:, used], np.ones(len(samples)), rcond=None)[0]
        if (costs >= 0).all():
            break
        used = [part for part, cost in zip(used, costs, strict=True) if cost >= 0]
    found = np.zeros(shares.shape[1])
    found[used] = costs
    fitted = TileCost(*found.tolist())
    return tuple(getattr(fitted, name) for name in TileCost.__slots__)


def _sums() -> dict[str, float]:
    """Rates of adding and merging, in bytes of what is added."""
    out, other = (np.ones(_SUM_SHAPE, np.float32) for _ in range(2))
    lse, found = (np.zeros(_SUM_SHAPE[:3], np.float32) for _ in range(2))
    return {
        "sums.add_bandwidth": out.nbytes / _typical(lambda: add(out, [other], fresh=False)),
        "sums.merge_bandwidth": out.nbytes / _typical(lambda: merge(out, lse, [(other, found)], fresh=False)),
    }


def _typical(run: Callable[[], None]) -> float:
    times: list[float] = []
    for _ in range(_REPEATS):
        began_s = time.thread_time()
        run()
        times.append(time.thread_time() - began_s)
    return statistics.median(times)
