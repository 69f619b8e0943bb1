"""What must be said aloud, on stderr, of a prediction that a command prints."""

from shardroute.planner.cli.output import say
from shardroute.planner.reports import calibration_warning
from shardroute.topologies.calibrations import Calibration
from shardroute.topologies.machines import Machine


def say_costs(machine: Machine, calibration: Calibration) -> bool:
    """Whether the costs are the machine's own; else print that they are nominal, or another machine's."""
    warning = calibration_warning(machine, calibration)
    if warning is not None:
        say(warning, style="bold red")
    return warning is None
