"""Plans and timelines that commands read and write, while they show progress: of millions of steps that takes seconds."""

from shardroute.planner.cli.output import progress
from shardroute.planner.plan_files import load_plan, save_plan
from shardroute.planner.plans import Plan
from shardroute.planner.timelines import Timeline, load_timeline, save_timeline


def read_plan(path: str) -> Plan:
    """The plan in the file. Raises as `load_plan` does."""
    with progress(f"reading {path}") as done:
        return load_plan(path, done)


def write_plan(plan: Plan, path: str) -> None:
    """Write the plan. Raises as `save_plan` does."""
    with progress(f"writing {path}") as done:
        save_plan(plan, path, done)


def read_timeline(path: str) -> Timeline:
    """The timeline in the file. Raises as `load_timeline` does."""
    with progress(f"reading {path}") as done:
        return load_timeline(path, done)


def write_timeline(timeline: Timeline, path: str) -> None:
    """Write the timeline. Raises as `save_timeline` does."""
    with progress(f"writing {path}") as done:
        save_timeline(timeline, path, done)
