"""How the ranks of torch.distributed find each other, and what a rank that fails leaves for the others: both by torch's store,
which rank 0 keeps, or torchrun.

Rule: who is missing has a name. Rank 0 counts who has come and tells the others, sooner than they give up themselves. Looking for
last words is short, though torch's own calls have no deadline where rank 0 is stopped.
"""

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Final, Protocol, TypeVar

from shardroute.executors.launching.launches import host_and_port
from shardroute.executors.reasons import first_line
from shardroute.executors.transports.seam import Deadline, Place
from shardroute.topologies.errors import InputError, RunError

_Found = TypeVar("_Found")

_PREFIX: Final = "shardroute"
_TOLD: Final = "told"  # the ranks that rank 0 misses, separated by commas: none, if all have come
_LOOK_AGAIN_S: Final = 0.02
# How much sooner than the deadline rank 0 says who is missing, and how long it then stays so that others hear it.
_SOONER_S: Final = 0.5
_STAYS_S: Final = 0.5
_MOST_LOOK_S: Final = 1.0  # for last words; a store that answers does so in less than a millisecond
_MOST_WORDS: Final = 1024


_WORLDS: Final[dict[str, int]] = {}  # made in this process of each group


class Store(Protocol):
    """What is used of a store of torch.distributed, which torch's types leave out."""

    def set(self, key: str, value: str) -> None:
        """Keep a value."""

    def get(self, key: str) -> bytes:
        """A value; waits until it is there."""

    def check(self, keys: list[str]) -> bool:
        """Whether all of the keys have values."""


def open_store(place: Place, deadline: Deadline) -> Store:
    """The store of the run. Raises RunError where rank 0, or torchrun, can't be reached; InputError for nowhere to meet."""
    import torch.distributed as dist

    where, first = place.rendezvous, place.rank == 0
    timeout = timedelta(seconds=deadline.limit_s)
    try:
        if where.startswith("file://"):
            kept: Store = vars(dist)["FileStore"](where.removeprefix("file://"), place.size)
            return kept
        more: dict[str, object] = {"is_master": first, "multi_tenant": True}
        if where.startswith("fd://"):
            host, port_text, fd = where.removeprefix("fd://").split(":")
            port, more = int(port_text), {"is_master": first, "master_listen_fd": int(fd) if first else None}
        elif where:
            host, port = host_and_port(where)
        else:
            host, port = _told_address()
            if _is_agents():
                more = {"is_master": False}
        if not more["is_master"] and "master_listen_fd" not in more:
            _await_listener(host, port, place, deadline)
        make: Callable[..., Store] = vars(dist)["TCPStore"]
        more |= {"timeout": timeout, "wait_for_workers": False}
        try:
            return make(host, port, place.size, **more)
        except RuntimeError as error:
            if "libuv" not in str(error):
                raise
            # torch 2.6's newer server takes no socket that listens already; its older one does.
            return make(host, port, place.size, **more, use_libuv=False)
    except (RuntimeError, ValueError) as error:  # torch raises both for what it can't reach or parse
        who = f"rank 0 can't keep their store at {where or 'MASTER_ADDR'}" if first else f"rank 0 can't be reached{_at(where)}"
        raise couldnt_join(place, f"{who} (torch says: {first_line(error)})") from error


def _await_listener(host: str, port: int, place: Place, deadline: Deadline) -> None:
    """Return when somebody listens there: torch would wait for that, too, but up to twice as long as it is told."""
    while True:
        try:
            with socket.create_connection((host, port), timeout=max(deadline.left_s, _LOOK_AGAIN_S)):
                return
        except OSError as error:
            if deadline.left_s <= 0:
                allowed = f"the {deadline.allowed_s:g} s that --timeout allows"
                why = f"rank 0 can't be reached{_at(place.rendezvous)} within {allowed} ({error.strerror or error})"
                raise couldnt_join(place, why) from error
        time.sleep(_LOOK_AGAIN_S)


def check_in(store: Store, place: Place, deadline: Deadline) -> None:
    """Return when all ranks have come to the store. Raises RunError on each that has come, naming those that haven't."""
    import torch.distributed as dist

    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    run: Store = vars(dist)["PrefixStore"](f"{_PREFIX}/{attempt}", store)
    try:
        run.set(_key(place.rank), "")
        missing = _count(run, place.size, deadline) if place.rank == 0 else _hear(run, place.size, deadline)
    except (RuntimeError, ValueError) as error:
        raise couldnt_join(place, f"rank 0, which counts the others, is lost (torch says: {first_line(error)})") from error
    if missing:
        allowed = f"the {deadline.allowed_s:g} s that --timeout allows"
        raise couldnt_join(place, f"rank {', '.join(map(str, missing))} didn't come within {allowed}")


def couldnt_join(place: Place, why: str) -> RunError:
    """The error of a rank that found the others too late, or not at all."""
    return RunError(f"rank {place.rank} couldn't join the {place.size} ranks of the run: {why}")


def _count(run: Store, size: int, deadline: Deadline) -> list[int]:
    """Who hasn't come, as rank 0 finds it, and tells the others."""
    missing = list(range(1, size))
    until_s = deadline.at_s - min(_SOONER_S, deadline.left_s / 2)
    while True:
        missing = [rank for rank in missing if not run.check([_key(rank)])]
        if not missing or time.monotonic() > until_s:
            break
        time.sleep(_LOOK_AGAIN_S)
    run.set(_TOLD, ",".join(map(str, missing)))
    if missing:
        time.sleep(_STAYS_S)
    return missing


def _hear(run: Store, size: int, deadline: Deadline) -> list[int]:
    """Who hasn't come, as rank 0 tells it; where that says nothing, as this rank finds it."""
    while not run.check([_TOLD]):
        if not deadline.left_s:
            return [rank for rank in range(size) if not run.check([_key(rank)])] or [0]
        time.sleep(_LOOK_AGAIN_S)
    told: str = run.get(_TOLD).decode()
    return [int(rank) for rank in told.split(",") if rank]


def words_of_run(store: Store, place: Place) -> "LastWords":
    """The last words of the ranks that came to this store."""
    where = place.rendezvous
    by_rank = not where.startswith("file://") if where else not _is_agents()
    return LastWords(store, "run", 0 if by_rank else None)


def words_of(group: object) -> "LastWords":
    """The last words of a new world of a process group, in the store by which its ranks found each other; in none, where this
    torch doesn't say which that is. All ranks of the group make their worlds of it in one order.
    """
    import torch.distributed as dist

    find = vars(dist.distributed_c10d).get("_get_default_store")  # for which torch has no public name
    name = str(getattr(group, "group_name", "world"))
    _WORLDS[name] = _WORLDS.get(name, 0) + 1
    store: Store | None = None
    with suppress(RuntimeError, ValueError):
        store = find() if find is not None else None
    return LastWords(store, f"{name}/{_WORLDS[name]}")


class LastWords:
    """What ranks of one world that fail leave for those that then lose them. `name` tells worlds of one store apart; `keeper` is
    the rank in whose process the store lies, None where it is another.
    """

    def __init__(self, store: Store | None, name: str, keeper: int | None = None) -> None:
        self._store, self._name, self._keeper = store, f"{_PREFIX}/words/{name}", keeper

    def leave(self, rank: int, words: str) -> None:
        """Say why this rank fails, if the store can be reached."""
        store, key = self._store, f"{self._name}/{rank}"
        if store is None:
            return

        def tell() -> None:
            store.set(key, words[:_MOST_WORDS])
            store.check([key])  # an answer: it is there before the connections of this rank close

        _shortly(tell)

    def of(self, rank: int) -> str:
        """What a rank has left; nothing if it left nothing. Where the store can't be reached, that its keeper is lost."""
        store, key = self._store, f"{self._name}/{rank}"
        if store is None:
            return ""

        def look() -> str:
            return store.get(key).decode(errors="replace") if store.check([key]) else ""

        found = _shortly(look)
        if found is None and self._keeper not in (None, rank):
            return f"rank {self._keeper} is lost, and rank {rank}: neither it nor the store that it keeps for all can be reached"
        return found or ""


def _shortly(do: Callable[[], _Found]) -> _Found | None:
    """What a call to the store gives, None where it fails or takes long, as it does when rank 0 is stopped."""
    found: list[_Found] = []

    def run() -> None:
        with suppress(RuntimeError, ValueError):
            found.append(do())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(_MOST_LOOK_S)
    return found[0] if found else None


def _key(rank: int) -> str:
    return f"here/{rank}"


def _is_agents() -> bool:
    """Whether torchrun's agent keeps the store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _told_address() -> tuple[str, int]:
    told = os.environ
    if "MASTER_ADDR" not in told or "MASTER_PORT" not in told:
        raise InputError("nowhere to meet: MASTER_ADDR and MASTER_PORT are not set; give --rendezvous tcp://HOST:PORT")
    return host_and_port(f"tcp://{told['MASTER_ADDR']}:{told['MASTER_PORT']}")


def _at(where: str) -> str:
    place = where or f"tcp://{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    return "" if where.startswith("fd://") else f" at {place}"
