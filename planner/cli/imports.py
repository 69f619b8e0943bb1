"""`shardroute machines import`: a machine file from what a cluster already writes."""

import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Final, TypeVar

import typer

from shardroute.planner.cli.catalogues import machines
from shardroute.planner.cli.import_hints import NO_OPTION, hinted
from shardroute.planner.cli.options import about, machine_of
from shardroute.planner.cli.output import JsonFlag, print_facts, print_json, print_table, progress, say
from shardroute.planner.shares import untold
from shardroute.topologies.errors import InputError
from shardroute.topologies.files import read_file, read_text, write_file
from shardroute.topologies.importers import (
    Fabric,
    Host,
    Imported,
    Inputs,
    NicChoice,
    expand_hosts,
    import_machines,
    machine_to_toml,
    parse_ibnetdiscover,
    parse_ibstat,
    parse_nccl_dump,
    parse_nvidia_smi,
    parse_rail_table,
)
from shardroute.topologies.importers.nccl_dumps import MAX_DUMP_BYTES
from shardroute.topologies.machines import load_machine, machine_names, machine_to_dict
from shardroute.topologies.units import format_bandwidth, format_count

# ibnetdiscover of 10,000 adapters and their switches is some 10 MB; nvidia-smi -q of 8 GPUs some 100 kB.
_MAX_TEXT_BYTES: Final = 2**26
# A byte of 20 MB of ibnetdiscover, 0.05, to one of a table of 480,000 NICs.
_BYTE_US: Final = 0.1
_Read = TypeVar("_Read")


@machines.command("import")
def import_command(
    dumps: Annotated[list[str] | None, typer.Argument(help="XML that NCCL wrote (NCCL_TOPO_DUMP_FILE), one or several.")] = None,
    nvidia_smi: Annotated[
        list[str] | None,
        typer.Option(
            "--nvidia-smi",
            metavar="FILE",
            help="Output of `nvidia-smi topo -m`; those of `nvidia-smi -L` and `nvidia-smi -q` may follow in it. Repeatable.",
        ),
    ] = None,
    hosts: Annotated[
        str | None,
        typer.Option("--hosts", help='The hosts as Slurm lists them, "node[001-032]": all like the one shown, or one a file.'),
    ] = None,
    domain_hosts: Annotated[
        int | None, typer.Option("--domain-hosts", help="Hosts of an NVLink domain, where one host stands for all: 18 for NVL72.")
    ] = None,
    like: Annotated[
        str | None,
        typer.Option(
            "--like",
            help="Machine to take memory from, which no such file says. Default: the shipped one with the same GPU.",
            autocompletion=machine_names,
        ),
    ] = None,
    ibstat: Annotated[str | None, typer.Option("--ibstat", help="Output of `ibstat` on a host: what each NIC is.")] = None,
    ibnetdiscover: Annotated[
        str | None, typer.Option("--ibnetdiscover", help="Output of `ibnetdiscover`: rails and oversubscription.")
    ] = None,
    rails: Annotated[str | None, typer.Option("--rails", help="The same as a table: CSV of host,nic,rail[,rate].")] = None,
    nics: Annotated[str | None, typer.Option("--nics", help="Take these NICs, mlx5_0,mlx5_1, and no others.")] = None,
    ethernet: Annotated[bool, typer.Option("--ethernet", help="The fabric is Ethernet (RoCE, EFA): keep its NICs.")] = False,
    output: Annotated[
        str | None, typer.Option("--output", "-o", help="The machine file, pod.toml; further kinds of domain: pod-2.toml.")
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Make a machine file of what a cluster already writes. Without -o it goes to standard output.

    shardroute machines import topo.xml -o pod.toml

    shardroute machines import --nvidia-smi topo.txt --hosts "node[001-032]" -o pod.toml
    """
    if output is not None and not output.endswith(".toml"):
        raise InputError(f"--output {output}: a machine file ends in .toml, so that --machine takes it")
    chosen = NicChoice(
        listed=() if ibstat is None else _read(ibstat, "--ibstat", parse_ibstat),
        fabric=_fabric(ibnetdiscover, rails),
        names=() if nics is None else tuple(name.strip() for name in nics.split(",")),
        ethernet=ethernet,
    )
    inputs = Inputs(
        hosts=_hosts(dumps or [], nvidia_smi or []),
        names=() if hosts is None else _host_names(hosts),
        hosts_per_domain=domain_hosts,
        like=None if like is None else machine_of(like, "--like")[0],
        nics=chosen,
    )
    imported = import_machines(inputs, "imported" if output is None else Path(output).stem)
    for note in imported.notes:
        say(f"note: {note}")
    if output is None and not json and len(imported.machines) > 1:
        raise InputError(f"the hosts make {len(imported.machines)} kinds of NVLink domains, one machine file each; give -o FILE")
    if output is not None:
        for made in imported.machines:
            write_file(Path(output).with_name(f"{made.machine.name}.toml"), machine_to_toml(made.machine).encode(), "the machine")
    if json:
        print_json(_json(imported, output))
    elif output is None:
        sys.stdout.write(machine_to_toml(imported.machines[0].machine))
    else:
        _show(imported, output)


def _host_names(text: str) -> tuple[str, ...]:
    with about("--hosts"):
        return expand_hosts(text)


def _hosts(dumps: list[str], texts: list[str]) -> tuple[Host, ...]:
    found: list[Host] = []
    with progress("reading dumps") if dumps else nullcontext(untold) as done:
        for number, path in enumerate(dumps):
            done(number / len(dumps))
            with hinted(path, NO_OPTION):
                found += parse_nccl_dump(read_file(path, MAX_DUMP_BYTES), path)
    return (*found, *(_read(path, "--nvidia-smi", parse_nvidia_smi) for path in texts))


def _fabric(ibnetdiscover: str | None, rails: str | None) -> Fabric | None:
    if ibnetdiscover is not None and rails is not None:
        raise InputError("--ibnetdiscover and --rails don't go together: both say where NICs hang")
    if ibnetdiscover is not None:
        return _read(ibnetdiscover, "--ibnetdiscover", parse_ibnetdiscover)
    return None if rails is None else _read(rails, "--rails", parse_rail_table)


def _read(path: str, option: str, parse: Callable[[str, str], _Read]) -> _Read:
    with about(option), hinted(path, option), progress(f"reading {path}", _reading_us(path)):
        return parse(read_text(path, _MAX_TEXT_BYTES), path)


def _reading_us(path: str) -> float | None:
    """About the microseconds that reading a text takes; None where there is none."""
    try:
        return _BYTE_US * os.path.getsize(path)
    except (OSError, ValueError):
        return None


def _path(output: str | None, name: str) -> str:
    path = f"{name}.toml" if output is None else str(Path(output).with_name(f"{name}.toml"))
    return path if "/" in path else f"./{path}"


def _machine_text(imported: Imported, output: str | None) -> str:
    """What --machine takes: "./pod.toml x 4"."""
    return " + ".join(f"{_path(output, made.machine.name)} x {made.n_units}" for made in imported.machines)


def _json(imported: Imported, output: str | None) -> dict[str, object]:
    return {
        "machine": _machine_text(imported, output),
        "machines": [
            {**machine_to_dict(made.machine), "n_units": made.n_units, "hosts": list(made.hosts)} for made in imported.machines
        ],
        "rails": imported.rails,
        "notes": imported.notes,
    }


def _show(imported: Imported, output: str) -> None:
    for made in imported.machines:
        machine, found = made.machine, format_count(made.n_units, "NVLink domain")
        print_facts(
            f"{_path(output, machine.name)}: {machine.title}",
            [
                ("found", f"{found} of {machine.hosts_per_domain} x {machine.gpus_per_host} GPUs"),
                ("NVLink a GPU", format_bandwidth(machine.nvlink_Bps)),
                ("NICs a GPU", f"{machine.nics_per_gpu} x {format_bandwidth(machine.nic_Bps)}"),
                ("oversubscription", f"{machine.oversubscription:g}"),
            ],
        )
    if imported.rails:
        first = imported.rails[0].host
        print_table(
            ["NIC", "nearest to", "rail"],
            [[r.nic, ", ".join(f"GPU {i}" for i in r.gpus) or "-", r.rail] for r in imported.rails if r.host == first],
            title=f"\nRails of {first}, by the fabric; planning doesn't use them",
        )
    print_facts("\nplan on it", [("", f'--machine "{_machine_text(imported, output)}"'), ("", _calibration_text(imported))])


def _calibration_text(imported: Imported) -> str:
    """The costs to plan with until there are measured ones: those of a shipped machine with the same GPUs, else nominal ones."""
    gpus = {made.machine.gpu for made in imported.machines}
    alike = [name for name in machine_names() if {load_machine(name).gpu} == gpus]
    return f"--calibration {alike[0] if alike else 'nominal'} (until `shardroute calibrate` has made yours)"
