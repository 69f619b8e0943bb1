"""Ports of a rank: what limits the bytes that its channels send or receive together, in turn, to a rate.

An outgoing port is a wire: a chunk leaves when its last byte would have. If the rank is late, which on a busy machine it often
is by a part of a millisecond, the next chunks follow at once until the wire has caught up. An incoming port is a token bucket:
chunks are taken as they come, but not more of them than the rate allows.

Rule: time is given to a port, never read by it.
"""

from collections import deque
from typing import Final, Protocol

# A wire that was held up for longer than this starts anew: whatever stopped the rank then was more than a late wake-up.
_CATCH_UP_S: Final = 0.1


class Flow(Protocol):
    """One channel as a port sees it."""

    queued: bool  # whether it stands in the port's line

    def chunk(self, most: int) -> int:
        """Bytes that it would move next, 0 for none now."""

    def move(self, most: int) -> int:
        """Move up to so many bytes; how many were, 0 if the other end has no room or nothing has come."""


class Port:
    """Flows served in turn, `quantum` bytes at a time, at a rate in bytes per second (inf: as fast as they come)."""

    def __init__(self, rate_Bps: float, quantum: int, *, outgoing: bool) -> None:
        self.rate_Bps, self.quantum, self._outgoing = rate_Bps, quantum, outgoing
        self._line: deque[Flow] = deque()
        self._at_s = 0.0  # when the wire is free, or the bucket has a token again
        self._busy = False
        self._slack_s = quantum / rate_Bps

    def add(self, flow: Flow) -> None:
        """Put a flow that can move something into the line, unless it stands there."""
        if not flow.queued:
            flow.queued = True
            self._line.append(flow)

    def serve(self, now_s: float) -> float | None:
        """Move what may move by now; when to be called again, None if not before another flow is added."""
        return self._send(now_s) if self._outgoing else self._take(now_s)

    def _send(self, now_s: float) -> float | None:
        line = self._line
        while line:
            n = line[0].chunk(self.quantum)
            if n:
                if not self._busy:
                    self._at_s, self._busy = now_s + n / self.rate_Bps, True
                if self._at_s > now_s:
                    return self._at_s
            flow = line.popleft()
            flow.queued = False
            moved = flow.move(self.quantum) if n else 0
            if not moved:
                continue
            if flow.chunk(self.quantum):
                self.add(flow)
            if line:
                start_s = max(self._at_s - (n - moved) / self.rate_Bps, now_s - _CATCH_UP_S)
                self._at_s = start_s + line[0].chunk(self.quantum) / self.rate_Bps
        self._busy = False
        return None

    def _take(self, now_s: float) -> float | None:
        line = self._line
        while line:
            if self._at_s > now_s:
                return self._at_s
            flow = line.popleft()
            flow.queued = False
            n = flow.move(self.quantum) if flow.chunk(self.quantum) else 0
            if n:
                self._at_s = max(self._at_s, now_s - self._slack_s) + n / self.rate_Bps
                if flow.chunk(self.quantum):
                    self.add(flow)
        return None
