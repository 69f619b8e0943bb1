"""What `choose` is asked for: a collective out of its options, what it rests on, and choices with what must be said of them."""

import re
from collections.abc import Sequence

from shardroute.planner.choice import (
    NEWEST,
    Choice,
    Libraries,
    Operation,
    RuleSet,
    Setting,
    Version,
    choose,
    operation,
    permute,
)
from shardroute.planner.choice.operations import DTYPE_BYTES
from shardroute.planner.cli.cautions import say_costs
from shardroute.planner.cli.options import about, bytes_of, check_known
from shardroute.planner.cli.output import progress, say
from shardroute.planner.cli.plan import calibrated_alike
from shardroute.topologies.calibrations import calibration_names
from shardroute.topologies.collectives import Collective
from shardroute.topologies.errors import InputError
from shardroute.topologies.topologies import MAX_GPUS

_LIBRARIES = ("nccl", "nvshmem")


def choices_for(
    asked: Sequence[Operation], setting: Setting, sets: Sequence[RuleSet], calibration: str | None
) -> list[Choice]:
    """The choice for each operation, after saying what costs they rest on, and which were never measured on such groups, and
    showing progress on a terminal; `calibration` is what --calibration says. Raises InputError, with what to give, where NCCL
    can't be priced.
    """
    found: list[Choice] = []
    try:
        with progress("choosing") as done:
            for each in asked:
                found.append(choose(each, setting, tuple(sets)))
                done(len(found) / len(asked))
    except InputError as error:
        raise InputError(f"{error}; {_costs_with_tables(setting, calibration)}") from None
    say_costs(setting.machine, setting.calibration)
    for caution in dict.fromkeys(option.caution for choice in found for option in choice.options if option.caution):
        say(f"caution: {caution}")
    return found


def _costs_with_tables(setting: Setting, calibration: str | None) -> str:
    """What to give instead of a calibration that lacks what NCCL is priced by."""
    machine = setting.machine
    if machine.name in calibration_names() and calibration not in (None, machine.name):
        return f"leave --calibration out, which takes the measured costs of {machine.name}"
    alike = calibrated_alike(machine)
    instead = f"give --calibration {alike}, a machine with the same GPUs, or" if alike else "give"
    return f"{instead} --calibration FILE that has it; `shardroute calibrate` makes one of logs of nccl-tests"


def asked_for(
    op: Collective | None,
    n_bytes: str | None,
    ranks: int | None,
    pairs: str | None,
    dtype: str,
    devices: int | None,
    devices_per_process: int,
) -> Operation:
    """The collective that the options of these names say. Raises InputError where they say none, or contradict each other."""
    if pairs is not None and op not in (None, Collective.PERMUTE):
        raise InputError(f"--pairs and --op {op} don't go together: pairs are those of a {Collective.PERMUTE}")
    if n_bytes is None or (pairs is None and (op is None or ranks is None)):
        raise InputError("choose what for? give --op, --bytes and --ranks, or --pairs and --bytes, or --hlo FILE, or --plan FILE")
    check_known("--dtype", dtype, DTYPE_BYTES)
    for option, count in (("--ranks", ranks), ("--devices", devices)):
        if count is not None and count > MAX_GPUS:
            raise InputError(f"{option} {count}: expected at most {MAX_GPUS}")
    found = () if pairs is None else _pairs(pairs)
    least = max(max((1 + max(pair) for pair in found), default=0), ranks or 0)
    n_devices = least if devices is None else devices
    if least > n_devices:
        what = f"--ranks {ranks}" if pairs is None else f"--pairs {pairs}"
        raise InputError(f"{what}: the whole program has --devices {devices}; give --devices {least} or more, or leave it out")
    if devices_per_process > n_devices:
        whole = f"the whole program has {n_devices}; say with --devices how many there are"
        raise InputError(f"--devices-per-process {devices_per_process}: {whole}")
    if pairs is not None:
        return permute(_whole_bytes(n_bytes), found, dtype=dtype, n_devices=n_devices, devices_per_process=devices_per_process)
    assert op is not None
    assert ranks is not None
    return operation(op, _whole_bytes(n_bytes), ranks, dtype=dtype, n_devices=n_devices, devices_per_process=devices_per_process)


def _pairs(text: str) -> tuple[tuple[int, int], ...]:
    matches = [re.fullmatch(r"\s*(\d{1,6})\s*>\s*(\d{1,6})\s*", item) for item in text.split(",")]
    found = tuple((int(match[1]), int(match[2])) for match in matches if match is not None)
    if len(found) < len(matches) or len({s for s, _ in found}) < len(found) or len({t for _, t in found}) < len(found):
        raise InputError(f"--pairs {text!r}: expected pairs such as 0>1,1>0, with each device a source once and a target once")
    if all(source == target for source, target in found):
        raise InputError(f"--pairs {text!r}: nothing goes from one device to another; expected pairs such as 0>1,1>0")
    return found


def _whole_bytes(text: str) -> int:
    n_bytes = bytes_of("--bytes", text)
    if n_bytes < 1:
        raise InputError(f"--bytes {text}: expected a size above 0, such as 32MiB")
    return n_bytes


def libraries_of(given: Sequence[str]) -> Libraries:
    """The versions that --library-version says, else the newest that are known."""
    versions = {"nccl": NEWEST.nccl, "nvshmem": NEWEST.nvshmem}
    said: dict[str, str] = {}
    for text in given:
        name, _, version = text.partition("=")
        if name not in _LIBRARIES or not version:
            raise InputError(f"--library-version {text!r}: expected nccl=VERSION or nvshmem=VERSION, such as nccl=2.29.7")
        if name in said:
            raise InputError(f"--library-version gives {name} twice: {said[name]} and {version}")
        said[name] = version
        with about("--library-version"):
            versions[name] = Version.of(version)
    return Libraries(**versions)
