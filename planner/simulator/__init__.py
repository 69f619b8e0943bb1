"""The event kernel: tasks, dependencies, links, flows, time. No word of GPUs or plans."""

from shardroute.planner.simulator.engine import SimulationResult, simulate
from shardroute.planner.simulator.tasks import TaskGraph, in_order, merge_dependencies

__all__ = ["SimulationResult", "TaskGraph", "in_order", "merge_dependencies", "simulate"]
