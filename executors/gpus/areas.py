"""Memory of a rank on its device that transports share."""

from enum import Enum, auto

from shardroute.executors.gpus.devices import Device


class Area(Enum):
    """What memory is for."""

    ARENA = auto()
    OUT = auto()  # to pack in
    IN = auto()  # to unpack from


class Areas:
    """A rank's memory on a device for its arena, to pack in and to unpack from: shared by transports of which one runs at a time,
    as large as the largest of them needs.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._pointers = dict.fromkeys(Area, 0)
        self._sizes = dict.fromkeys(Area, 0)

    def at_least(self, area: Area, n_bytes: int) -> int:
        """A pointer to so many bytes, which holds until more are asked for."""
        if self._sizes[area] < n_bytes or not self._sizes[area]:
            if self._sizes[area]:
                self._device.free(self._pointers[area])
                self._sizes[area] = 0
            self._pointers[area] = self._device.allocate(n_bytes)
            self._sizes[area] = max(n_bytes, 1)
        return self._pointers[area]
