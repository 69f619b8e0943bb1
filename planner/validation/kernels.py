"""Published rates of attention kernels on one GPU, and what they are between and beyond the lengths that were measured."""

from dataclasses import dataclass
from functools import cache

import numpy as np

from shardroute.planner.validation.shipped import table_rows


@dataclass(frozen=True, slots=True, order=True)
class Kernel:
    """A kernel on a GPU, for a mask ("full", "causal") and a direction ("fwd", "bwd")."""

    gpu: str
    name: str
    mask: str
    direction: str


@dataclass(frozen=True, slots=True)
class KernelCurve:
    """Operations a second by sequence length, which rises; causal ones are counted over half of the square."""

    seq: tuple[int, ...]
    rate_Fps: tuple[float, ...]

    def at(self, seq: float) -> float:
        """The rate at a length: between points in log(length); beyond the last as a time of a s^2 + b s through the last two."""
        if seq <= self.seq[-1] or len(self.seq) < 2:
            return float(np.interp(np.log(seq), np.log(self.seq), self.rate_Fps))
        (near, far), (slow, fast) = self.seq[-2:], self.rate_Fps[-2:]
        # 1 / rate = a + b / length
        b = (1 / slow - 1 / fast) / (1 / near - 1 / far)
        return 1 / (1 / fast + b * (1 / seq - 1 / far))

    def without(self, seq: int) -> "KernelCurve":
        """The curve less the point at that length."""
        keep = [i for i, length in enumerate(self.seq) if length != seq]
        return KernelCurve(tuple(self.seq[i] for i in keep), tuple(self.rate_Fps[i] for i in keep))


@cache
def kernel_curves() -> dict[Kernel, KernelCurve]:
    """Every published curve."""
    points: dict[Kernel, list[tuple[int, float]]] = {}
    for row in table_rows("ring_kernels.csv"):
        kernel = Kernel(row["gpu"], row["kernel"], row["mask"], row["direction"])
        points.setdefault(kernel, []).append((int(row["seq"]), float(row["tflops"]) * 1e12))
    return {
        kernel: KernelCurve(tuple(seq for seq, _ in sorted(found)), tuple(rate for _, rate in sorted(found)))
        for kernel, found in sorted(points.items())
    }
