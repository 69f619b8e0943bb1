"""Which ranks that one launcher has started on this host have come: for libraries whose start waits for all and names none.

Rule: nothing is left behind. A rank is there while it holds a socket of an abstract name, which Linux frees with the process;
other systems have none, and there nobody is known to be missing.
"""

import hashlib
import socket
import sys
from contextlib import suppress

from shardroute.executors.launching.launches import file_of_host
from shardroute.executors.transports.seam import Place


def come(place: Place) -> socket.socket | None:
    """Be there, for as long as what is returned is open; None where ranks can't see each other: all must be on this host."""
    if sys.platform != "linux" or place.rendezvous != file_of_host():
        return None
    here = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        here.bind(_name(place, place.rank))
    except OSError:  # somebody of that number is there
        here.close()
        return None
    return here


def missing_ranks(place: Place) -> list[int]:
    """The ranks of the run that aren't there, for a rank that could `come`."""
    return [rank for rank in range(place.size) if not _is_there(place, rank)]


def _is_there(place: Place, rank: int) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as asking, suppress(OSError):
        asking.connect(_name(place, rank))
        return True
    return False


def _name(place: Place, rank: int) -> str:
    return f"\0shardroute-{hashlib.sha256(place.rendezvous.encode()).hexdigest()[:32]}-{rank}"
