"""Reads what nvbandwidth prints: a matrix of GB/s for each test that it ran."""

import re
import statistics
from dataclasses import dataclass
from typing import Final

from shardroute.planner.measurements.log_lines import lines_of
from shardroute.planner.shares import Told, untold
from shardroute.topologies.errors import InputError


@dataclass(frozen=True, slots=True)
class BandwidthTest:
    """One test of nvbandwidth: its name, and the bytes per second of every entry that is not N/A."""

    name: str
    bandwidths_Bps: tuple[float, ...]
    file: str

    @property
    def median_Bps(self) -> float:
        """The middle of the entries."""
        return statistics.median(self.bandwidths_Bps)


_BEGIN: Final = re.compile(r"^\s*Running (?P<name>\w+)\.?\s*$")
_SUM: Final = re.compile(r"^\s*SUM (?P<name>\w+)\b")
_MATRIX_ROW: Final = re.compile(r"^\s*\d+\s+(?P<values>(?:N/A|\d+\.\d+)(?:\s+(?:N/A|\d+\.\d+))*)\s*$")


def looks_like_bandwidth_log(text: str) -> bool:
    """Whether nvbandwidth printed the text."""
    return "nvbandwidth" in text or "bandwidth (GB/s)" in text


def read_bandwidth_log(text: str, file: str, progress: Told = untold) -> tuple[BandwidthTest, ...]:
    """The tests in a log of nvbandwidth; progress is told the share of the lines that was read.

    InputError, led by the file's name, when it holds no matrix.
    """
    found: list[BandwidthTest] = []
    name = ""
    values: list[float] = []
    for line in lines_of(text, progress):
        if begin := _BEGIN.match(line):
            name, values = begin["name"], []
        elif row := _MATRIX_ROW.match(line):
            # nvbandwidth counts 10^9 bytes a GB.
            values += [float(value) * 1e9 for value in row["values"].split() if value != "N/A"]
        elif total := _SUM.match(line):
            if values and min(values) <= 0:
                raise InputError(f"{file}: {name or total['name']}: found {min(values):g} GB/s, expected bandwidths above 0")
            if values:
                found.append(BandwidthTest(name or total["name"], tuple(values), file))
            name, values = "", []
    if not found:
        raise InputError(f"{file}: found no matrix of nvbandwidth; expected 'Running TEST.', rows of GB/s and 'SUM TEST ...'")
    return tuple(found)
