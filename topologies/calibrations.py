"""Calibrations: what a library was measured to reach on a machine, apart from the machine's nominal rates.

A prediction names the calibration that it used; there is no silent default.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shardroute.topologies.calibration_files import (
    QUANTITIES,
    CalibrationDocument,
    read_calibration_file,
    write_calibration_file,
)
from shardroute.topologies.collectives import CollectiveCurve
from shardroute.topologies.costs import (
    COST_TABLES,
    CollectiveCost,
    ControlCost,
    Cost,
    MemoryCost,
    P2pCost,
    PathCost,
    PutCost,
    SumCost,
    TileCost,
    cost_from_values,
    cost_values,
)
from shardroute.topologies.documents import plain, unknown_name
from shardroute.topologies.errors import InputError
from shardroute.topologies.figures import Figure, Quantity, check_figures, write_figure
from shardroute.topologies.files import check_writable
from shardroute.topologies.machines import Machine, MachineKind

__all__ = [
    "Calibration",
    "PathCost",
    "calibration_figure",
    "calibration_from_figures",
    "calibration_names",
    "calibration_to_dict",
    "check_calibration",
    "check_calibration_path",
    "default_calibration",
    "least_start_s",
    "load_calibration",
    "nominal_calibration",
    "save_calibration",
]

_FOLDER: Final = Path(__file__).parent / "calibrations"


@dataclass(frozen=True, slots=True)
class Calibration:
    """Measured costs of one library on one machine.

    launch_s is the time that the issuing rank spends to start one step, or one NCCL group of them; a path's latency comes after
    it, and message_s for each further pair of messages of the group, one sent and one received. piece_s is the time to gather
    or scatter one box of a step (CPU time for kind CPU). cores is how many cores copy at once and copy_Bps the bytes per
    second that one of them copies, strided boxes included. start_s is the CPU time that a thread which computes takes longer for
    its first step, check_s that which a step takes to see that another rank's, which it waits for, is done, wait_s that to sleep
    and be woken where it isn't, run_s that of each contiguous run of memory that a strided box lies in, compute_s what a COMPUTE
    takes beside its arithmetic, such as operands that lie in no cache (all for kind CPU; on GPUs launch and piece are part of
    latency and bandwidth).
    p2p, put and memory say more about a GPU machine's copies, collectives and curves about its collectives; where they
    are None or empty, copies are latency and bandwidth and collectives are reckoned from links. attend_*, grad_* and sums
    are what attention takes on CPUs, by dtype; GPUs' rates of computation are in shardroute.planner.backends.rates.
    A calibration holds nvlink and nic, or cores and copy_Bps, or all four; anything else, and a figure that
    disagrees with its number, raises InputError.
    """

    machine: str
    library: str
    measured: str
    versions: str
    nvlink: PathCost | None
    nic: PathCost | None
    launch_s: float
    piece_s: float
    cores: float | None
    copy_Bps: float | None
    figures: tuple[Figure, ...] = ()
    message_s: float = 0.0
    start_s: float = 0.0
    check_s: float = 0.0
    wait_s: float = 0.0
    run_s: float = 0.0
    compute_s: float = 0.0
    p2p: P2pCost | None = None
    put: PutCost | None = None
    memory: MemoryCost | None = None
    collectives: CollectiveCost | None = None
    control: ControlCost | None = None
    attend_f32: TileCost | None = None
    grad_f32: TileCost | None = None
    attend_f64: TileCost | None = None
    grad_f64: TileCost | None = None
    sums: SumCost | None = None
    curves: tuple[CollectiveCurve, ...] = ()

    def __post_init__(self) -> None:
        try:
            _check_pair("nvlink", self.nvlink, "nic", self.nic)
            _check_pair("cpu.cores", self.cores, "cpu.copy_bandwidth", self.copy_Bps)
            if self.nvlink is None and self.cores is None:
                raise InputError(
                    "expected the tables nvlink and nic (GPUs) or cpu (processes), found neither"
                )
            for key, value in _values(self).items():
                least_open = QUANTITIES[key] in (Quantity.CORES, Quantity.BANDWIDTH)
                if not math.isfinite(value) or value < 0 or (least_open and value == 0):
                    raise InputError(
                        f"{key}: expected a number {'above' if least_open else 'from'} 0, found {value!r}"
                    )
            check_figures(self.figures, QUANTITIES, _values(self))
        except InputError as error:
            raise InputError(f"calibration of {self.machine}: {error}") from None


def calibration_names() -> tuple[str, ...]:
    """Return the names of the calibrations that ship with shardroute, sorted; each is its machine's name."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))


def load_calibration(name_or_path: str) -> Calibration:
    """Return the shipped calibration of that name, or the one in the file if the text ends in .toml.

    Raises InputError for an unknown name (with the names that exist) and a file that doesn't fit (with the
    key).
    """
    if name_or_path.endswith(".toml"):
        return _calibration_from_file(Path(name_or_path).expanduser())
    names = calibration_names()
    if name_or_path not in names:
        raise unknown_name("calibration", name_or_path, names)
    return _calibration_from_file(_FOLDER / f"{name_or_path}.toml")


def default_calibration(machine_name: str) -> Calibration:
    """Return the calibration that ships for the machine; InputError says what to do if there is none."""
    if machine_name not in calibration_names():
        raise InputError(
            f"no calibration ships for machine {machine_name!r}, and predicting needs one; give --calibration FILE with "
            "measured costs, --calibration nominal for nominal rates alone, or that of a machine like it "
            f"({', '.join(calibration_names())})"
        )
    return load_calibration(machine_name)


def nominal_calibration(machine: Machine) -> Calibration:
    """Return costs that assume the nominal rates: efficiency 1, no latency, no launch; for kind GPU only.

    Raises InputError for kind CPU: shared memory has no nominal rate.
    """
    if machine.kind is MachineKind.CPU:
        raise InputError(
            f"machine {machine.name} has no nominal rates (processes copy through shared memory); give "
            "--calibration FILE with measured cores and copy bandwidth"
        )
    source = "assumption: nominal rates, nothing measured"
    nominal = {"nvlink.latency": 0.0, "nvlink.efficiency": 1.0, "nic.latency": 0.0, "nic.efficiency": 1.0}
    figures = [
        calibration_figure(key, v, source)
        for key, v in {**nominal, "step.launch": 0.0, "step.piece": 0.0}.items()
    ]
    return calibration_from_figures(machine.name, "none (nominal rates)", "not measured", "none", figures)


def calibration_figure(key: str, value: float, source: str) -> Figure:
    """Return the figure for a measured number, in SI; key is for example "nic.latency" or "cpu.cores".

    Raises InputError for an unknown key or an impossible value.
    """
    if key not in QUANTITIES:
        raise InputError(f"{key}: unknown figure; expected one of {', '.join(QUANTITIES)}")
    return write_figure(key, QUANTITIES[key], value, source)


def calibration_from_figures(
    machine: str,
    library: str,
    measured: str,
    versions: str,
    figures: Iterable[Figure],
    curves: Iterable[CollectiveCurve] = (),
) -> Calibration:
    """Return the calibration that the figures and curves state; how a measuring program makes one.

    Raises InputError for an unknown or missing figure.
    """
    figures = tuple(figures)
    value = {figure.key: figure.value for figure in figures}
    for key in ("step.launch", "step.piece"):
        if key not in value:
            raise InputError(f"calibration of {machine}: {key}: missing")
    try:
        costs = {table: cost_from_values(table, value) for table in COST_TABLES}
    except InputError as error:
        raise InputError(f"calibration of {machine}: {error}") from None
    return Calibration(
        machine=machine,
        library=library,
        measured=measured,
        versions=versions,
        **costs,  # type: ignore[arg-type]  # each table's own class, by COST_TABLES
        launch_s=value["step.launch"],
        piece_s=value["step.piece"],
        message_s=value.get("step.message", 0.0),
        start_s=value.get("step.start", 0.0),
        check_s=value.get("step.check", 0.0),
        wait_s=value.get("step.wait", 0.0),
        run_s=value.get("step.run", 0.0),
        compute_s=value.get("step.compute", 0.0),
        cores=value.get("cpu.cores"),
        copy_Bps=value.get("cpu.copy_bandwidth"),
        figures=figures,
        curves=tuple(curves),
    )


def check_calibration(calibration: Calibration, machine: Machine) -> None:
    """Raise InputError unless the calibration has the costs that the machine's kind needs."""
    needs_gpu = machine.kind is MachineKind.GPU
    if (calibration.nvlink if needs_gpu else calibration.cores) is None:
        needed = "nvlink and nic" if needs_gpu else "cpu (cores and copy_bandwidth)"
        raise InputError(
            f"calibration of {calibration.machine} ({calibration.library}) has no {needed} costs, which "
            f"machine {machine.name} of kind '{machine.kind}' needs"
        )


def least_start_s(calibration: Calibration, *, between_domains: bool) -> float:
    """The least time before anything between two GPUs flows, by whatever library; 0 without costs of GPUs."""
    path = calibration.nic if between_domains else calibration.nvlink
    if path is None:
        return 0.0
    starts = [calibration.launch_s + path.latency_s]
    if calibration.p2p is not None and not between_domains:
        starts += [calibration.p2p.start_s, calibration.p2p.small_start_s]
    if calibration.put is not None:
        starts.append(calibration.put.far_start_s if between_domains else calibration.put.start_s)
    if calibration.collectives is not None:
        # NCCL's tuning model reckons with less for a small collective than for a send and receive, but never with less than this.
        starts.append(calibration.launch_s)
    return min(starts)


def save_calibration(calibration: Calibration, path: Path | str) -> None:
    """Write the calibration as a TOML file that load_calibration reads back as an equal value.

    Raises InputError if a number has no figure (a file holds no number without a source) or if path can't be
    written.
    """
    check_calibration_path(path)
    by_key = {figure.key: figure for figure in calibration.figures}
    if missing := [key for key in _values(calibration) if key not in by_key]:
        raise InputError(
            f"{path}: no source for {', '.join(missing)}; add a figure for each (calibration_figure)"
        )
    document = CalibrationDocument(
        calibration.machine,
        calibration.library,
        calibration.measured,
        calibration.versions,
        calibration.figures,
        calibration.curves,
    )
    write_calibration_file(document, path)


def check_calibration_path(path: Path | str) -> None:
    """Raise InputError for a path that save_calibration couldn't write to; so that it is known before anything is measured."""
    if not str(path).endswith(".toml"):
        raise InputError(f"{path}: expected a name that ends in .toml")
    check_writable(path, "the calibration")


def calibration_to_dict(calibration: Calibration) -> dict[str, object]:
    """Return the calibration as plain values for JSON."""
    return plain(calibration)


def _calibration_from_file(path: Path) -> Calibration:
    file = read_calibration_file(path)
    try:
        return calibration_from_figures(file.machine, file.library, file.measured, file.versions, file.figures, file.curves)
    except InputError as error:
        raise InputError(f"{path.name}: {error}") from None


def _costs(calibration: Calibration) -> dict[str, Cost]:
    """The cost tables that the calibration holds, by name."""
    found = {table: getattr(calibration, table) for table in COST_TABLES}
    return {table: cost for table, cost in found.items() if cost is not None}


def _check_pair(name: str, value: object, other_name: str, other: object) -> None:
    if (value is None) != (other is None):
        missing, given = (name, other_name) if value is None else (other_name, name)
        raise InputError(f"{missing}: missing, though {given} is given; both are needed")


def _values(calibration: Calibration) -> dict[str, float]:
    values = {"step.launch": calibration.launch_s, "step.piece": calibration.piece_s}
    given = {figure.key for figure in calibration.figures}
    optional = {
        "step.message": calibration.message_s, "step.start": calibration.start_s, "step.check": calibration.check_s,
        "step.wait": calibration.wait_s, "step.run": calibration.run_s, "step.compute": calibration.compute_s,
    }  # fmt: skip
    values |= {key: value for key, value in optional.items() if value != 0 or key in given}
    for table, cost in _costs(calibration).items():
        values |= cost_values(table, cost)
    if calibration.cores is not None and calibration.copy_Bps is not None:
        values |= {"cpu.cores": calibration.cores, "cpu.copy_bandwidth": calibration.copy_Bps}
    return values
