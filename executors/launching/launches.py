"""Who started this process as which rank: read from what torchrun, srun and mpirun leave in the environment.

Rule: explicit flags win; nothing here opens a connection.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shardroute.executors.transports.seam import Place
from shardroute.topologies.errors import InputError


@dataclass(frozen=True, slots=True)
class _Launcher:
    """The variables by which a launcher tells a process who it is."""

    name: str
    rank: str
    size: str
    local_rank: str


# In the order in which they are believed: torchrun may itself have been started by srun or mpirun, once a host.
_LAUNCHERS: Final = (
    _Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK"),  # docs.pytorch.org, torchrun, "Environment Variables"
    _Launcher("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),  # Open MPI
    _Launcher("mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),  # MPICH's Hydra, Intel MPI
    _Launcher("srun", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),  # slurm.schedmd.com/srun.html
)
# Ports for jobs that name none, by their number: 20000 to 29999, below where Linux hands out ports of its own (32768).
_FIRST_PORT, _N_PORTS = 20_000, 10_000
_MOST_PORT: Final = 2**16 - 1  # TCP's ports are 16 bits


def find_place(
    rank: int | None = None, size: int | None = None, rendezvous: str = "", environment: Mapping[str, str] = os.environ
) -> Place | None:
    """This process's place in a run, from the flags and else from the launcher; None if nothing says that it is a rank.

    Raises InputError when only part of it is known, what a launcher says makes no sense, or nobody could meet there.
    """
    found = next((at for at in _LAUNCHERS if at.rank in environment and at.size in environment), None)
    if found is None and rank is None and size is None:
        if rendezvous:
            raise InputError("--rendezvous was given, but no --rank and --world-size, and no launcher has set them")
        return None
    known = found if found is not None else _LAUNCHERS[0]
    rank = _number(environment, known.rank, "--rank") if rank is None else rank
    size = _number(environment, known.size, "--world-size") if size is None else size
    local = environment.get(known.local_rank, "") if found is not None else ""
    if not 0 <= rank < size:
        raise InputError(f"rank {rank} of {size}: expected a rank from 0 to {size - 1}")
    rendezvous = rendezvous or _rendezvous(found, environment)
    _check_rendezvous(rendezvous)
    return Place(rank, size, rendezvous, int(local) if re.fullmatch(r"[0-9]{1,9}", local) else 0)


def _number(environment: Mapping[str, str], name: str, flag: str) -> int:
    text = environment.get(name)
    if text is None:
        raise InputError(f"{flag} is missing: give both --rank and --world-size, or start ranks with torchrun, srun or mpirun")
    if re.fullmatch(r"[0-9]{1,9}", text) is None:  # Python reads no number of thousands of digits
        raise InputError(f"the environment says {name}={text[:40]!r}; expected a number, or {flag}")
    return int(text)


def _rendezvous(launcher: _Launcher | None, environment: Mapping[str, str]) -> str:
    """Where the ranks meet if the user doesn't say: "" for MASTER_ADDR and MASTER_PORT, else what the launcher implies."""
    if "MASTER_ADDR" in environment and "MASTER_PORT" in environment:
        return ""  # which means them
    if launcher is None:
        raise InputError("nowhere to meet: give --rendezvous tcp://HOST:PORT or file:///PATH, or set MASTER_ADDR and MASTER_PORT")
    if launcher.name == "srun":
        nodes = environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_JOB_NODELIST", "localhost"))
        job = environment.get("SLURM_JOB_ID", "0")
        port = _FIRST_PORT + (int(job) if re.fullmatch(r"[0-9]{1,18}", job) else 0) % _N_PORTS
        return f"tcp://{first_host(nodes)}:{port}"
    return file_of_host() if _on_one_host(environment) else ""


def _check_rendezvous(where: str) -> None:
    """Raise InputError for a place where nobody can meet: some libraries would try it for minutes, whatever the deadline."""
    if where.startswith("file://"):
        folder = Path(where.removeprefix("file://")).parent
        if not folder.is_dir() or not os.access(folder, os.W_OK):
            raise InputError(f"rendezvous {where!r}: expected a file in a folder that can be written to, {folder} is none")
    elif where:
        host_and_port(where)


def host_and_port(where: str) -> tuple[str, int]:
    """What tcp://HOST:PORT names. Raises InputError for anything else."""
    host, _, port = where.removeprefix("tcp://").rpartition(":")
    if not where.startswith("tcp://") or not host or re.fullmatch(r"[0-9]{1,5}", port) is None or int(port) > _MOST_PORT:
        raise InputError(f"rendezvous {where!r}: expected tcp://HOST:PORT or file:///PATH")
    return host.strip("[]"), int(port)


def first_host(nodes: str) -> str:
    """The first host of a list as Slurm writes it: `node[07-09,12],other3` is node07."""
    found = re.match(r"([^,\[]+)(?:\[(\d+))?", nodes)
    if found is None:
        raise InputError(f"Slurm's list of nodes {nodes!r} names no host; give --rendezvous tcp://HOST:PORT")
    return found[1] + (found[2] or "")


def _on_one_host(environment: Mapping[str, str]) -> bool:
    pairs = (("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE"), ("MPI_LOCALNRANKS", "PMI_SIZE"))
    return any(here in environment and environment[here] == environment.get(everywhere) for here, everywhere in pairs)


def file_of_host() -> str:
    """A file for ranks that one process of this host has started; that process's start time tells it from earlier ones of its
    number.
    """
    parent = _launching_process()
    try:
        started = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        started = "0"
    folder = os.environ.get("XDG_RUNTIME_DIR") or os.environ.get("TMPDIR") or "/tmp"
    return f"file://{folder}/shardroute-{os.getuid()}-{parent}-{started}"


def _launching_process() -> int:
    """The process that has started the ranks of this host: the nearest above this one that isn't a script which mpirun has
    started as this rank.
    """
    process, mine = os.getppid(), _told(os.environ.items())
    try:
        while mine and mine == _told(_environment_of(process)):
            process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:  # another user's, or a system without /proc
        pass
    return process


def _told(environment: Iterable[tuple[str, str]]) -> dict[str, str]:
    """What mpirun tells a process of its place."""
    return {name: value for name, value in environment if name.startswith(("PMI_", "PMIX_", "OMPI_"))}


def _environment_of(process: int) -> Iterator[tuple[str, str]]:
    for line in Path(f"/proc/{process}/environ").read_bytes().decode(errors="surrogateescape").split("\0"):
        name, _, value = line.partition("=")
        yield name, value
