"""Every reader of shardroute with the samples that its inputs are made of.

A reader takes the bytes of one input and does with them what a command would: read, check, use. It returns, or raises one of
shardroute's errors; anything else is a crash.
"""

import io
import itertools
import json
import re
import shlex
import sys
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from fuzzing import samples
from shardroute.executors.commands import main as run_program
from shardroute.executors.interpreting.interpret import compile_plan
from shardroute.executors.launching.launches import find_place, first_host
from shardroute.planner.arguments import parse_nics, parse_ranks, tensor_problem
from shardroute.planner.backends.rates import load_rates
from shardroute.planner.changes import changed_topology, with_new_ranks, without_ranks
from shardroute.planner.check import check
from shardroute.planner.choice import parse_hlo
from shardroute.planner.exchange import problem_between, read_inventory
from shardroute.planner.importers import layout_of_command, read_settings, refit_of_settings
from shardroute.planner.importers.pipeline_layouts import parse_pipeline_layout
from shardroute.planner.layouts import load_model, parse_spec
from shardroute.planner.layouts.notation import MAX_RANKS
from shardroute.planner.measurements.bandwidth_logs import read_bandwidth_log
from shardroute.planner.measurements.calibrate import calibrate_from_logs
from shardroute.planner.measurements.nccl_logs import read_nccl_log
from shardroute.planner.measurements.put_logs import read_put_log
from shardroute.planner.parts import load_part
from shardroute.planner.plan_files import load_plan
from shardroute.planner.simulator.refit import predict
from shardroute.planner.timelines import load_timeline
from shardroute.planner.validation.attention_calls import read_calls
from shardroute.topologies.calibrations import default_calibration, load_calibration
from shardroute.topologies.importers import (
    Inputs,
    NicChoice,
    expand_hosts,
    import_machines,
    parse_ibnetdiscover,
    parse_ibstat,
    parse_nccl_dump,
    parse_nvidia_smi,
    parse_rail_table,
)
from shardroute.topologies.machines import load_machine, parse_machine
from shardroute.topologies.topologies import build_topology
from shardroute.topologies.units import parse_bandwidth, parse_bytes, parse_operations, parse_seconds

_ROOT: Final = Path(__file__).resolve().parents[2]
_DATA: Final = _ROOT / "tests" / "data"
_MODELS: Final = _ROOT / "planner" / "layouts" / "models" / "configs"
_RATES: Final = _ROOT / "planner" / "backends" / "rates"
_TABLES: Final = _ROOT / "planner" / "validation" / "tables"
_MACHINES: Final = _ROOT / "topologies" / "machines"
_CALIBRATIONS: Final = _ROOT / "topologies" / "calibrations"

# What writes where it is told, runs processes, or changes the user's shell.
_LEFT_OUT: Final = frozenset(
    {"run", "demo", "emulate", "report", "study", "validate", "--here", "--install-completion", "--show-completion"}
)
_SIZES: Final = frozenset(
    (
        "--from-mesh", "--to-mesh", "--from", "--to", "--machine", "--cp", "--gpus", "--tp", "--fsdp", "--ranks", "--from-ranks",
        "--to-ranks", "--batch", "--heads", "--kv-heads",
    )
)  # fmt: skip
_MOST_GPUS: Final = 64
_WRITES: Final = ("-o", "--output", "--trace", "--cache", "--csv")


@dataclass(frozen=True, slots=True)
class Reader:
    """A reader by name; `read` raises what the package raises. `weight` is its share of the time, as against the others' 1."""

    name: str
    samples: Sequence[bytes]
    read: Callable[[bytes], None]
    weight: float = 1.0


def make_samples(folder: Path) -> None:
    """Write into the folder what the samples don't have as files: plans, a timeline, a layout, headers of checkpoints."""
    for name, command in samples.PLANS.items():
        _program([*shlex.split(command), "-o", str(folder / f"{name}.plan")])
    _program(["simulate", str(folder / "relay.plan"), "-o", str(folder / "relay.json")])
    for name, tensor in (("one", "a"), ("two", "b")):
        header = json.dumps({tensor: {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
        (folder / f"{name}.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    (folder / "dump.xml").write_bytes((_DATA / "clusters" / "dgx-h100.xml").read_bytes())
    (folder / "nccl.txt").write_bytes((_DATA / "logs" / "sendrecv_perf.txt").read_bytes())


def readers(folder: Path) -> list[Reader]:
    """All readers; their inputs are written into the folder, which `make_samples` has filled."""
    plans = [folder / f"{name}.plan" for name in samples.PLANS]
    return [
        Reader("plan", [plan.read_bytes() for plan in plans], _of_file(folder / "x.plan", _use_plan)),
        Reader("plan, a member", _member_samples(plans), partial(_read_member, plans, folder / "m.plan")),
        Reader("part of a plan", _member_samples(plans[:3]), partial(_read_member_part, plans[:3], folder / "p.plan")),
        Reader("machine", _files(_MACHINES), _of_file(folder / "machine.toml", _use_machine)),
        Reader("machine text", samples.MACHINE_TEXTS, _of_text(parse_machine)),
        Reader("calibration", _files(_CALIBRATIONS), _of_file(folder / "c.toml", lambda p: load_calibration(str(p)))),
        Reader("rates", _files(_RATES), _of_file(folder / "r.toml", lambda p: load_rates(str(p)))),
        Reader("model config", _files(_MODELS, "*/config.json"),
               _of_file(folder / "config.json", lambda p: load_model(str(p)))),
        Reader("layout file", samples.LAYOUTS, _of_file(folder / "layout.json", _use_inventory)),
        Reader("safetensors", samples.SAFETENSORS, _of_file(folder / "x.safetensors", _use_inventory)),
        Reader("safetensors index", samples.INDEXES, _of_file(folder / "x.safetensors.index.json", read_inventory)),
        Reader("checkpoint metadata", _files(_DATA / "checkpoints"), _of_file(folder / ".metadata", _use_inventory)),
        Reader("notation", samples.NOTATIONS, _of_text(parse_spec)),
        Reader("tensor and meshes", samples.TENSORS, _read_tensor),
        Reader("units", samples.UNITS, _read_units),
        Reader("launch command", samples.LAUNCHES, _of_text(_use_command)),
        Reader("pipeline layout", samples.PIPELINES, _of_text(partial(parse_pipeline_layout, pp=4))),
        Reader("recipe (YAML)", _files(_DATA / "recipes"), _of_file(folder / "recipe.yaml", _use_recipe)),
        Reader("NCCL's XML", _files(_DATA / "clusters", "*.xml"), _read_dump),
        Reader("nvidia-smi topo", [*_files(_DATA / "clusters", "*topo.txt"), *_files(_DATA / "clusters", "gb*.txt")], _read_smi),
        Reader("ibstat", _files(_DATA / "clusters", "ibstat.txt"), _of_text(lambda t: parse_ibstat(t, "x"))),
        Reader("ibnetdiscover", _files(_DATA / "clusters", "ibnet*.txt"), _read_fabric),
        Reader("table of rails", samples.RAILS, _of_text(lambda t: parse_rail_table(t, "x"))),
        Reader("Slurm's hosts", samples.HOSTS, _read_hosts),
        Reader("launcher's environment", samples.PLACES, _read_place),
        Reader("nccl-tests log", [*_files(_DATA / "logs", "collectives.txt"), *_files(_DATA / "logs", "send*.txt")],
               _of_file(folder / "all_reduce_perf.txt", partial(_use_log, read_nccl_log))),
        Reader("nvbandwidth log", _files(_DATA / "logs", "nvband*.txt"),
               _of_file(folder / "log.txt", partial(_use_log, read_bandwidth_log))),
        Reader("perftest log", _files(_DATA / "logs", "perf*.txt"),
               _of_file(folder / "log.txt", partial(_use_log, read_put_log))),
        Reader("HLO dump", _files(_DATA / "hlo"), _of_text(lambda t: parse_hlo(t, "x"))),
        Reader("published table", [(_TABLES / "ring_attention.csv").read_bytes()[:6000]],
               _of_file(folder / "t.csv", lambda p: list(read_calls(p)))),
        Reader("timeline", [(folder / "relay.json").read_bytes()], _of_file(folder / "t.json", load_timeline)),
        Reader("change for replan", samples.CHANGES, partial(_read_change, folder / "relay.plan")),
        Reader("command line", ["\n".join(shlex.split(c)).encode() for c in samples.COMMANDS],
               partial(_read_arguments, folder), weight=6.0),
    ]  # fmt: skip


def _files(folder: Path, pattern: str = "*") -> list[bytes]:
    return [path.read_bytes() for path in sorted(folder.glob(pattern)) if path.is_file()]


def _of_file(path: Path, use: Callable[[Path], object]) -> Callable[[bytes], None]:
    def read(data: bytes) -> None:
        path.write_bytes(data)
        use(path)

    return read


def _of_text(use: Callable[[str], object]) -> Callable[[bytes], None]:
    def read(data: bytes) -> None:
        use(_text(data))

    return read


def _text(data: bytes) -> str:
    """As Python gives arguments of the command line: what isn't UTF-8 is kept as half surrogates; none can hold a NUL."""
    return data.replace(b"\0", b"").decode(errors="surrogateescape")


def _use_plan(path: Path) -> None:
    plan = load_plan(path)
    check(plan)
    compile_plan(plan)
    if plan.attention is None and plan.topology.n_gpus >= plan.problem.n_ranks:
        predict(plan, default_calibration(plan.topology.machine.name))


def _member_samples(plans: Sequence[Path]) -> list[bytes]:
    """Each member of each plan, led by the numbers of the plan and of the member: what is changed is one member's content."""
    found = []
    for k, path in enumerate(plans):
        with zipfile.ZipFile(path) as archive:
            found += [bytes([k, i]) + archive.read(name) for i, name in enumerate(archive.namelist())]
    return found


def _with_member(plans: Sequence[Path], data: bytes) -> bytes:
    number, member, content = (*data[:2], data[2:]) if len(data) > 1 else (0, 0, data)
    made = io.BytesIO()
    with zipfile.ZipFile(plans[number % len(plans)]) as archive, zipfile.ZipFile(made, "w") as changed:
        names = archive.namelist()
        for i, name in enumerate(names):
            changed.writestr(name, content if i == member % len(names) else archive.read(name))
    return made.getvalue()


def _read_member(plans: Sequence[Path], path: Path, data: bytes) -> None:
    path.write_bytes(_with_member(plans, data))
    _use_plan(path)


def _read_member_part(plans: Sequence[Path], path: Path, data: bytes) -> None:
    path.write_bytes(_with_member(plans, data))
    part = load_part(path, 1)
    compile_plan(part.plan)


def _use_machine(path: Path) -> None:
    build_topology(load_machine(str(path)), 2)


def _use_inventory(path: Path) -> None:
    inventory = read_inventory(path)
    problem_between(inventory, inventory)


def _read_tensor(data: bytes) -> None:
    shape, dtype, *rest = (_text(data).split("\n") + [""] * 8)[:8]
    tensor_problem(shape, dtype, *rest[:4], from_ranks=rest[4] or None, to_ranks=rest[5] or None)


def _read_units(data: bytes) -> None:
    kind, _, text = _text(data).partition(" ")
    {"B": parse_bytes, "s": parse_seconds, "F": parse_operations}.get(kind, parse_bandwidth)(text)


def _use_command(text: str) -> None:
    parse_spec(str(layout_of_command(text, 64).spec))


def _use_recipe(path: Path) -> None:
    (path.parent / "base.yaml").write_bytes((_DATA / "recipes" / "base.yaml").read_bytes())
    refit_of_settings(read_settings([path], ["cluster.num_nodes=32"]))


def _read_dump(data: bytes) -> None:
    import_machines(Inputs(parse_nccl_dump(data, "x"), like=load_machine("dgx-h100")), "x")


def _read_smi(data: bytes) -> None:
    host = parse_nvidia_smi(_text(data), "x")
    import_machines(Inputs((host,), hosts_per_domain=18 if host.spans else None, like=load_machine("dgx-h100")), "x")


def _read_fabric(data: bytes) -> None:
    fabric = parse_ibnetdiscover(_text(data), "x")
    hosts = parse_nccl_dump((_DATA / "clusters" / "dgx-h100.xml").read_bytes(), "y")
    import_machines(Inputs(hosts, like=load_machine("dgx-h100"), nics=NicChoice(fabric=fabric)), "x")


def _read_hosts(data: bytes) -> None:
    text = _text(data)
    first_host(text)
    expand_hosts(text)


def _read_place(data: bytes) -> None:
    pairs = (line.split("=", 1) for line in _text(data).split("\n") if "=" in line)
    environment = dict(pairs)
    find_place(rendezvous=environment.pop("--rendezvous", ""), environment=environment)


def _use_log(read: Callable[[str, str], object], path: Path) -> None:
    read(path.read_text(errors="replace"), path.name)
    calibrate_from_logs([str(path)], load_machine("dgx-h100"), default_calibration("dgx-h100"))


def _read_change(path: Path, data: bytes) -> None:
    gone, new, like, nics = (_text(data).split("\n") + [""] * 4)[:4]
    plan = load_plan(path)
    problem = with_new_ranks(plan.problem, parse_ranks("--new", new), parse_ranks("--new", like))
    problem = without_ranks(problem, parse_ranks("--gone", gone))
    changed_topology(plan.topology, parse_nics("--nic", nics.split(";")), problem.n_ranks)


def _read_arguments(folder: Path, data: bytes) -> None:
    """The program with these arguments, one a line, in the folder; those that could touch anything else are left alone."""
    arguments = _text(data).split("\n")
    told = [i for i, argument in enumerate(arguments) if argument.startswith(_WRITES)]
    if any(arguments[i] not in _WRITES or re.fullmatch(r"[\w.]{1,40}", "".join(arguments[i + 1 : i + 2])) is None for i in told):
        return
    if set(arguments) & _LEFT_OUT or _is_large(arguments) or max(map(len, arguments)) > 100_000:
        return
    _program(arguments)


def _is_large(arguments: Sequence[str]) -> bool:
    """Whether it takes long because much is asked for: more GPUs than samples have, and no more than there may be."""
    sizes = [value for option, value in itertools.pairwise(arguments) if option in _SIZES]
    return any(_MOST_GPUS < int(digits) <= MAX_RANKS for text in sizes for digits in re.findall(r"[0-9]{1,9}", text))


def _program(arguments: Sequence[str]) -> None:
    """The program; an exit code that isn't one of its own is an error."""
    before, sys.argv = sys.argv, ["shardroute", *arguments]
    try:
        run_program()
    except SystemExit as end:
        if end.code not in (None, 0, 1, 2):
            raise RuntimeError(f"the program ended with {end.code!r}") from None
    finally:
        sys.argv = before
