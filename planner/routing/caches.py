"""Plans kept in a folder, so that a training loop plans once: the second call with the same problem, machine and options loads
a file.

A plan's key is a digest over all that planning reads. Files are plan files, nothing else; one that can't be read is planned anew.
"""

import hashlib
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import msgspec

from shardroute.planner.layouts.fragments import Fragments
from shardroute.planner.plan_files import load_plan, save_plan
from shardroute.planner.plans import Plan
from shardroute.planner.problems import Problem
from shardroute.planner.routing.options import Options
from shardroute.planner.routing.strategies import make_plan
from shardroute.topologies.calibrations import Calibration, calibration_to_dict
from shardroute.topologies.errors import PlanError
from shardroute.topologies.files import cannot_write
from shardroute.topologies.topologies import Topology, topology_to_dict

# Part of every key: raise it when a strategy or the meaning of a plan changes, so that older files are not taken.
VERSION = 3


def plan_key(
    problem: Problem, topology: Topology, strategy: str, options: Options, calibration: Calibration | None = None
) -> str:
    """The digest (hex) of what a plan follows from; the calibration is part of it where the strategy reads one."""
    sha = hashlib.sha256()
    if calibration is not None:
        sha.update(msgspec.json.encode(calibration_to_dict(calibration)))
    asked = asdict(replace(options, told=None))
    about = {"version": VERSION, "strategy": strategy, "options": asked, "topology": topology_to_dict(topology)}
    sha.update(msgspec.json.encode(about))
    sha.update(msgspec.json.encode([problem.n_ranks, [(t.name, t.shape, t.dtype) for t in problem.tensors], problem.summed]))
    for layout in (problem.source, problem.target):
        seen: dict[Fragments, int] = {}
        for fragments, names in zip(layout.fragments, layout.buffers, strict=True):
            if fragments not in seen:
                seen[fragments] = len(seen)
                for column in (
                    fragments.rank, fragments.lo, fragments.hi, fragments.buffer, fragments.offset, fragments.strides,
                    fragments.buffer_size,
                ):  # fmt: skip
                    sha.update(f"\n{column.dtype.str}{column.shape}".encode())
                    sha.update(column.tobytes())
            sha.update(msgspec.json.encode([seen[fragments], names]))
    return sha.hexdigest()


def cached_plan(
    problem: Problem,
    topology: Topology,
    strategy: str,
    folder: str | Path,
    options: Options | None = None,
    *,
    calibration: Calibration | None = None,
    make: Callable[[], Plan] | None = None,
) -> tuple[Plan, bool]:
    """The plan of `strategy`, from the folder if it is there, else planned and put there; and whether it was there.

    `make` plans in place of make_plan; give the calibration too if it reads one. The options' `told` hears the share of
    planning, or of reading. Raises as planning does, and InputError where the folder can't be made or written to.
    """
    options = Options() if options is None else options
    path = Path(folder) / f"{plan_key(problem, topology, strategy, options, calibration)}.plan"
    if os.path.isfile(path):  # False, too, for names that no file can have
        try:
            return load_plan(path, options.told), True
        except PlanError:
            pass  # planned anew below, which replaces the file
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise cannot_write(folder, "plans", error) from None
    plan = make_plan(problem, topology, strategy, options=options) if make is None else make()
    save_plan(plan, path)  # whole or not there, whoever else reads or writes
    return plan, False
