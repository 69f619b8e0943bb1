"""Finding the ranks that a resharder works with: a caller's group, torch's, or those that a launcher started."""

from shardroute.executors.launching.launches import find_place
from shardroute.executors.transports.libraries import load_library
from shardroute.executors.transports.seam import Changing, Deadline, World
from shardroute.topologies.errors import InputError


def open_world(transport: str | World, group: object, deadline: Deadline, before: World | None = None) -> World:
    """The world of a transport, which may keep some of the one that this rank was in before. All ranks call it. Raises InputError
    where nothing says which ranks are meant.
    """
    if not isinstance(transport, str):
        return transport
    library = load_library(transport)
    found = library.join(group)
    if found is not None:
        return found
    place = find_place()
    if place is None:
        raise InputError(
            f"transport {transport} has no ranks to work with: initialise its library first, give a group, or start this with "
            "torchrun, srun or mpirun"
        )
    if before is not None and isinstance(before, Changing):
        return before.again(place, deadline)
    return library.connect(place, deadline)
