"""Finding the ranks that a resharder works with: a caller's group, torch's, or those that a launcher started."""

from shardroute.executors.launching.launches import find_place
from shardroute.executors.transports.libraries import load_library
from shardroute.executors.transports.seam import Deadline, World
from shardroute.topologies.errors import InputError


def open_world(transport: str | World, group: object, deadline: Deadline) -> World:
    """The world of a transport. All ranks call it. Raises InputError where nothing says which ranks are meant."""
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
    return library.connect(place, deadline)
