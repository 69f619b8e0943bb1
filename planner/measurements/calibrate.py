"""A calibration from logs: what they say replaces what a base calibration says, with the data and the residual as its source."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shardroute.planner.backends.channels import Traffic
from shardroute.planner.measurements.bandwidth_logs import BandwidthTest, looks_like_bandwidth_log, read_bandwidth_log
from shardroute.planner.measurements.channel_fits import ONE_WAY_SHARE, SendRecvRows, fit_channel_law, fit_line, fitted_errors
from shardroute.planner.measurements.nccl_logs import NcclRun, Test, looks_like_nccl_log, merged, read_nccl_log
from shardroute.planner.measurements.put_fits import put_figures
from shardroute.planner.measurements.put_logs import PutRun, looks_like_put_log, read_put_log
from shardroute.planner.shares import Told, parts
from shardroute.topologies.calibrations import Calibration, calibration_figure, calibration_from_figures
from shardroute.topologies.collectives import Collective, CollectiveCurve
from shardroute.topologies.costs import COST_TABLES, cost_values
from shardroute.topologies.errors import InputError
from shardroute.topologies.figures import Figure
from shardroute.topologies.files import read_file
from shardroute.topologies.machines import Machine

Floats = NDArray[np.float64]

_MAX_LOG_BYTES: Final = 256 * 2**20  # a day's NCCL_DEBUG log of a large job
_KEPT: Final = "kept, as nothing measured here says otherwise: "
_DEFAULT: Final = "NCCL's default (src/init.cc), which the law of send and receive is fitted with"
_ONE_WAY_KEY: Final = "p2p.one_way_channel_bandwidth"
_ONE_WAY: Final = f"assumption: {ONE_WAY_SHARE} x channel_bandwidth, as in XLA's tables of 8 H100 and 8 B200; rings don't tell"
_COLLECTIVES: Final = {
    Test.ALL_GATHER: Collective.ALL_GATHER,
    Test.ALL_REDUCE: Collective.ALL_REDUCE,
    Test.ALL_TO_ALL: Collective.ALL_TO_ALL,
    Test.BROADCAST: Collective.BROADCAST,
    Test.REDUCE_SCATTER: Collective.REDUCE_SCATTER,
}
# Messages from here on are taken as large: bandwidth, not start, is what they took.
_LARGE_BYTES: Final = 2**28
# An all-reduce whose busbw is so much over a ring's was done by NVLS: rings can't.
_NVLS_GAIN: Final = 1.1


@dataclass(frozen=True, slots=True)
class Fitted:
    """A calibration, the keys of its figures that the logs gave, and what of the logs was of no use, for people."""

    calibration: Calibration
    fitted: tuple[str, ...]
    unused: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Found:
    """Figures and curves from one kind of log."""

    figures: tuple[Figure, ...] = ()
    curves: tuple[CollectiveCurve, ...] = ()
    unused: tuple[str, ...] = ()


def calibrate_from_logs(
    paths: Sequence[str], machine: Machine, base: Calibration, progress: Told | None = None
) -> Fitted:
    """The base calibration with what logs of nccl-tests, nvbandwidth and NVSHMEM's perftest on the machine say instead.

    sendrecv_perf in one domain gives [p2p] and nvlink.latency, across domains nic.latency and nic.efficiency; alltoall_perf
    across domains nic.efficiency; collectives become curves, and their large messages [collectives]; nvbandwidth gives
    put.bandwidth and memory.efficiency, perftest [put] and nic.efficiency. Of what several say, nccl-tests' nic.efficiency and
    nvbandwidth's put.bandwidth count. progress is told the share of the logs that was read.

    Raises InputError for a file that can't be read or is no such log, and for logs of which nothing can be used.
    """
    runs: list[NcclRun] = []
    tests: list[BandwidthTest] = []
    puts: list[PutRun] = []
    others: list[str] = []
    sizes = [Path(path).stat().st_size if Path(path).is_file() else 0 for path in paths]
    for path, done in zip(paths, parts(progress, sizes), strict=True):
        text = read_file(Path(path), _MAX_LOG_BYTES).decode(errors="replace")
        if looks_like_nccl_log(text) and not looks_like_put_log(text):  # perftest's collectives have these columns too
            runs += read_nccl_log(text, path, done)
        elif looks_like_bandwidth_log(text):
            tests += read_bandwidth_log(text, path, done)
        elif looks_like_put_log(text):
            log = read_put_log(text, path, done)
            puts += log.runs
            others += log.unused
        else:
            raise InputError(
                f"{path}: expected the text output of nccl-tests (size, ..., algbw, busbw), of nvbandwidth, or of NVSHMEM's "
                "perftest; of nvidia-smi, ibstat and the like `shardroute machines import` makes a machine"
            )
    by_puts = put_figures(puts, machine, base)
    found = [
        _Found(by_puts.figures, (), (*others, *by_puts.unused)),
        _send_recv(runs, machine, base),
        _collectives(runs, machine, base),
        _bandwidths(tests, machine),
    ]
    figures = {figure.key: figure for part in found for figure in part.figures}
    curves = [curve for part in found for curve in part.curves]
    unused = tuple(note for part in found for note in part.unused)
    if not figures and not curves:
        raise InputError(f"nothing in {', '.join(paths)} can be used: {'; '.join(unused)}")
    return Fitted(_over(base, machine, figures, curves, [*runs, *puts]), (*figures, *map(_curve_name, curves)), unused)


def _over(
    base: Calibration,
    machine: Machine,
    figures: Mapping[str, Figure],
    curves: Sequence[CollectiveCurve],
    runs: Sequence[NcclRun | PutRun],
) -> Calibration:
    """The base with these figures and curves in place of its own."""
    kept = [figure for figure in kept_figures(base) if figure.key not in figures]
    merged_figures = [*kept, *figures.values()]
    order = [f"{table}." for table in COST_TABLES] + ["step.", "cpu."]
    merged_figures.sort(key=lambda figure: next(i for i, prefix in enumerate(order) if figure.key.startswith(prefix)))
    groups = {(curve.op, curve.n_ranks, curve.n_domains) for curve in curves}
    kept_curves = [curve for curve in base.curves if (curve.op, curve.n_ranks, curve.n_domains) not in groups]
    said = {f"NCCL {run.version}" for run in runs if isinstance(run, NcclRun) and run.version}
    versions = ", ".join(sorted(said)) or "not stated in the logs"
    devices = ", ".join(sorted({run.device for run in runs if run.device}))
    return calibration_from_figures(
        machine.name,
        "NCCL send/recv",
        "from logs" + (f" of {devices}" if devices else "") + "; what they don't say is kept from " + base.machine,
        versions,
        merged_figures,
        [*curves, *kept_curves],
    )


def kept_figures(base: Calibration) -> list[Figure]:
    """The figures of a base calibration, each saying that it was kept; InputError when the base has numbers without a source."""
    if not base.figures:
        raise InputError(f"calibration of {base.machine} ({base.library}) has no figures with sources to keep")
    return [
        replace(figure, source=figure.source if figure.source.startswith(_KEPT) else _KEPT + figure.source)
        for figure in base.figures
    ]


def _send_recv(runs: Sequence[NcclRun], machine: Machine, base: Calibration) -> _Found:
    own = _by_group([run for run in runs if run.test is Test.SEND_RECV], machine)
    near = [run for (_, _, domains), run in own.items() if domains == 1]
    far = [run for (_, _, domains), run in own.items() if domains > 1]
    figures: list[Figure] = []
    unused: list[str] = []
    if near:
        rows = [_rows(run) for run in near]
        try:
            cost = fit_channel_law(rows)
        except InputError as error:
            unused.append(f"{_where(near)}: {error}")
        else:
            source = f"fit of the channel law to {_where(near)}: {_residual(fitted_errors(rows, cost))}"
            one_way = source if any(row.traffic is not Traffic.RING for row in rows) else _ONE_WAY
            other = {"p2p.channels": _DEFAULT, "p2p.near_chunk": _DEFAULT, "p2p.far_chunk": _DEFAULT, _ONE_WAY_KEY: one_way}
            figures += [calibration_figure(key, value, other.get(key, source)) for key, value in cost_values("p2p", cost).items()]
            latency_s = max(cost.start_s - base.launch_s, 0.0)
            figures.append(calibration_figure("nvlink.latency", latency_s, f"start of [p2p] less step.launch; {source}"))
    if far:
        start_s, bandwidth_Bps, errors = _line([(run.n_bytes, run.time_us) for run in far])
        source = f"line through {_where(far)}: {_residual(errors)}"
        share = bandwidth_Bps / machine.gpu_nic_Bps
        figures.append(calibration_figure("nic.latency", max(start_s - base.launch_s, 0.0), f"start less step.launch; {source}"))
        figures.append(calibration_figure("nic.efficiency", min(share, 1.0), f"{bandwidth_Bps / 1e9:.1f} GB/s; {source}"))
    return _Found(tuple(figures), (), tuple(unused))


def _collectives(runs: Sequence[NcclRun], machine: Machine, base: Calibration) -> _Found:
    own = _by_group([run for run in runs if run.test in _COLLECTIVES], machine)
    curves = [
        CollectiveCurve(_COLLECTIVES[test], n_ranks, domains, run.n_bytes, tuple(us / 1e6 for us in run.time_us), _where([run]))
        for (test, n_ranks, domains), run in own.items()
    ]
    figures: dict[str, Figure] = {}
    if base.collectives is None:
        return _Found((), tuple(curves), () if not curves else ("large messages: the base has no [collectives] to change",))
    for (test, n_ranks, domains), run in own.items():
        if run.n_bytes[-1] < _LARGE_BYTES:
            continue
        alg_Bps = run.n_bytes[-1] / run.time_us[-1] * 1e6
        source = f"largest message of {_where([run])}"
        gathers = test in (Test.ALL_GATHER, Test.REDUCE_SCATTER)
        if domains == 1 and gathers:
            figures["collectives.ring_bandwidth"] = calibration_figure(
                "collectives.ring_bandwidth", alg_Bps * (n_ranks - 1) / n_ranks, f"busbw, {source}"
            )
            share = min(figures["collectives.ring_bandwidth"].value / machine.nvlink_Bps, 1.0)
            figures["nvlink.efficiency"] = calibration_figure("nvlink.efficiency", share, f"busbw over nominal, {source}")
        elif domains > 1 and gathers:
            nics_Bps = n_ranks / domains * machine.gpu_nic_Bps
            share = min(alg_Bps * (n_ranks - 1) / n_ranks / nics_Bps, 1.0)
            figures["collectives.nic_efficiency"] = calibration_figure("collectives.nic_efficiency", share, f"busbw, {source}")
        elif domains > 1 and test is Test.ALL_TO_ALL:
            left_Bps = alg_Bps * (n_ranks - n_ranks / domains) / n_ranks
            share = min(left_Bps / machine.gpu_nic_Bps, 1.0)
            figures["nic.efficiency"] = calibration_figure("nic.efficiency", share, f"what leaves the domain, {source}")
        elif domains == 1 and test is Test.ALL_REDUCE and _bus(alg_Bps, n_ranks) > _NVLS_GAIN * base.collectives.ring_Bps:
            key = "collectives.nvls_bandwidth"
            figures[key] = calibration_figure(key, alg_Bps, f"algbw, {source}")
    return _Found(tuple(figures.values()), tuple(curves))


def _bus(alg_Bps: float, n_ranks: int) -> float:
    """nccl-tests' busbw of an all-reduce."""
    return alg_Bps * 2 * (n_ranks - 1) / n_ranks


def _bandwidths(tests: Sequence[BandwidthTest], machine: Machine) -> _Found:
    figures: list[Figure] = []
    unused: list[str] = []
    for test in tests:
        what = f"median of {len(test.bandwidths_Bps)} entries of {test.name} ({test.file})"
        if test.name in ("device_to_device_memcpy_write_ce", "device_to_device_memcpy_read_ce"):
            figures = [figure for figure in figures if figure.key != "put.bandwidth"]
            spread = (max(test.bandwidths_Bps) - min(test.bandwidths_Bps)) / test.median_Bps
            figures.append(calibration_figure("put.bandwidth", test.median_Bps, f"{what}; spread {spread:.1%}"))
        elif test.name == "device_local_copy":
            # nvbandwidth counts a byte copied once; it is read and written.
            share = min(2 * test.median_Bps / machine.hbm_Bps, 1.0)
            figures.append(calibration_figure("memory.efficiency", share, f"{what}, read and written each"))
        else:
            unused.append(f"{test.file}: {test.name} says nothing that a prediction needs")
    return _Found(tuple(figures), (), tuple(unused))


def _by_group(runs: Iterable[NcclRun], machine: Machine) -> dict[tuple[Test, int, int], NcclRun]:
    """Runs by test, ranks and NVLink domains, those of one group merged."""
    found: dict[tuple[Test, int, int], list[NcclRun]] = {}
    for run in runs:
        domains = -(-run.n_hosts // machine.hosts_per_domain)
        found.setdefault((run.test, run.n_ranks, domains), []).append(run)
    return {group: merged(tuple(same)) for group, same in found.items()}


def _rows(run: NcclRun) -> SendRecvRows:
    """sendrecv_perf shifts round a ring; two ranks exchange."""
    traffic = Traffic.PAIRS if run.n_ranks == 2 else Traffic.RING
    return SendRecvRows(run.n_ranks, traffic, np.array(run.n_bytes, float), np.array(run.time_us) / 1e6)


def _line(series: Sequence[tuple[tuple[int, ...], tuple[float, ...]]]) -> tuple[float, float, Floats]:
    """Start, bandwidth and relative errors of time = start + bytes / bandwidth."""
    size = np.concatenate([np.array(n_bytes, float) for n_bytes, _ in series])
    time_s = np.concatenate([np.array(us) / 1e6 for _, us in series])
    start_s, rate_Bps = fit_line(size, time_s, "of send/recv between domains")
    return start_s, rate_Bps, (start_s + size / rate_Bps) / time_s - 1


def _residual(errors: Floats) -> str:
    return f"median error {np.median(np.abs(errors)):.1%}, worst {np.abs(errors).max():.0%} of {len(errors)} sizes"


def _where(runs: Sequence[NcclRun]) -> str:
    """The runs for people: `sendrecv_perf, 8 ranks on 1 host (sr.txt)`."""
    return "; ".join(
        f"{run.test}_perf, {run.n_ranks} ranks on {run.n_hosts} host{'s' if run.n_hosts > 1 else ''}"
        + (f", {run.device}" if run.device else "")
        + f" ({run.file})"
        for run in runs
    )


def _curve_name(curve: CollectiveCurve) -> str:
    return f"{curve.op} of {curve.n_ranks}" + (f" in {curve.n_domains} domains" if curve.n_domains > 1 else "")
