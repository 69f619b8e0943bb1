"""What must be said aloud, on stderr, of a prediction that a command prints."""

from shardroute.planner.cli.output import say
from shardroute.planner.reports import calibration_warning
from shardroute.planner.simulator.refit import Prediction
from shardroute.topologies.calibrations import Calibration
from shardroute.topologies.machines import Machine
from shardroute.topologies.units import format_seconds


def say_costs(machine: Machine, calibration: Calibration) -> bool:
    """Whether the costs are the machine's own; else print that they are nominal, or another machine's."""
    warning = calibration_warning(machine, calibration)
    if warning is not None:
        say(warning, style="bold red")
    return warning is None


def say_tolerance(prediction: Prediction) -> Prediction:
    """The prediction, after saying that it went on with a tolerance by itself, where it did."""
    result = prediction.result
    if result.foreseen_s:
        say(
            f"predicted with a tolerance of {result.tolerance:.0%}: exactly it was foreseen to take more than "
            f"{format_seconds(result.foreseen_s)}; `shardroute simulate PLAN --tolerance 0` takes that time"
        )
    return prediction
