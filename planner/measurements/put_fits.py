"""What runs of NVSHMEM's perftest say of puts: figures of a calibration, each with its data and residual."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from shardroute.planner.measurements.channel_fits import fit_line
from shardroute.planner.measurements.put_logs import PutRun, PutTest
from shardroute.topologies.calibrations import Calibration, calibration_figure
from shardroute.topologies.errors import InputError
from shardroute.topologies.figures import Figure
from shardroute.topologies.machines import Machine

# Of two programs that say the same the later one here is believed: the ping-pong's put has a signal, as a plan's have, and host
# puts go as a plan's go, by copy engines and from a stream.
_ORDER: Final = (
    PutTest.DEVICE_BANDWIDTH, PutTest.LATENCY, PutTest.BANDWIDTH, PutTest.SIGNAL, PutTest.BARRIER,
)  # fmt: skip
_NO_SIGNAL: Final = "puts without a signal, back to back: a put with one takes no less"


@dataclass(frozen=True, slots=True)
class PutFigures:
    """Figures, and what of the runs was of no use, in words."""

    figures: tuple[Figure, ...]
    unused: tuple[str, ...]


def put_figures(runs: Sequence[PutRun], machine: Machine, base: Calibration) -> PutFigures:
    """put.start, put.bandwidth, put.far_start, put.barrier and nic.efficiency, as far as the runs say them.

    A put takes start + bytes / rate; inside one NVLink domain that is the copy engines', across domains the NIC's. What threads
    of a kernel store over NVLink (the device's programs) says nothing of copy engines.
    """
    found: dict[str, Figure] = {}
    unused: list[str] = []
    if base.put is None:
        return PutFigures((), tuple(f"{_where(run)}: the base has no [put] to change" for run in runs))
    for run in sorted(runs, key=lambda run: _ORDER.index(run.test)):
        if run.n_pes < 2 or run.n_hosts < 1:
            unused.append(f"{_where(run)}: no lines 'mype: 0 mype_node: 0 ...' say how many PEs ran, and on how many hosts")
            continue
        try:
            figures = _figures(run, machine)
        except InputError as error:
            unused.append(f"{_where(run)}: {error}")
            continue
        if not figures:
            unused.append(f"{_where(run)}: threads stored these bytes over NVLink; a plan's puts go by copy engines")
        found |= {figure.key: figure for figure in figures}
    return PutFigures(tuple(found.values()), tuple(unused))


def _figures(run: PutRun, machine: Machine) -> list[Figure]:
    near = -(-run.n_hosts // machine.hosts_per_domain) == 1
    if run.test is PutTest.BARRIER:
        rounds = math.ceil(math.log2(run.n_pes))
        return [calibration_figure("put.barrier", run.time_s[0] / rounds, f"{rounds} rounds of {_where(run)}")]
    if near and run.test in (PutTest.DEVICE_BANDWIDTH, PutTest.SIGNAL):
        return []
    size, time_s = np.array(run.n_bytes, float), np.array(run.time_s)
    start_s, rate_Bps = fit_line(size, time_s, f"of {run.test}")
    error = np.abs((start_s + size / rate_Bps) / time_s - 1)
    source = f"line through {_where(run)}: median error {np.median(error):.1%}, worst {error.max():.0%} of {len(size)} sizes"
    figures = []
    if run.test in (PutTest.LATENCY, PutTest.SIGNAL):
        signal = "half of the way there and back" if run.test is PutTest.SIGNAL else _NO_SIGNAL
        figures.append(calibration_figure("put.start" if near else "put.far_start", start_s, f"{signal}; {source}"))
    if near:
        figures.append(calibration_figure("put.bandwidth", rate_Bps, source))
    elif run.test in (PutTest.BANDWIDTH, PutTest.DEVICE_BANDWIDTH):
        share = min(rate_Bps / machine.gpu_nic_Bps, 1.0)
        figures.append(calibration_figure("nic.efficiency", share, f"{rate_Bps / 1e9:.1f} GB/s; {source}"))
    return figures


def _where(run: PutRun) -> str:
    """The run for people: `host/pt-to-pt/bw, 2 PEs on 1 host (bw.txt)`."""
    hosts = f" on {run.n_hosts} host{'' if run.n_hosts == 1 else 's'}" if run.n_hosts else ""
    return f"{run.test}, {run.n_pes} PEs{hosts}" + (f", {run.device}" if run.device else "") + f" ({run.file})"
