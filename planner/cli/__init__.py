"""The planning half of the command line: everything that needs no run.

`app` is the whole program's Typer app; shardroute.executors.cli adds the commands that run plans.
"""

from shardroute.planner.cli import (
    bound,
    catalogues,
    choose,
    diff,
    explain,
    import_layouts,
    imports,
    inspect,
    layout,
    plan,
    plan_ring,
    predict,
    refits,
    replan,
    report,
    ring,
    schemas,
    steps,
    study,
    study_sizes,
    study_steps,
    validate,
)
from shardroute.planner.cli.program import app

__all__ = [
    "app",
    "bound",
    "catalogues",
    "choose",
    "diff",
    "explain",
    "import_layouts",
    "imports",
    "inspect",
    "layout",
    "plan",
    "plan_ring",
    "predict",
    "refits",
    "replan",
    "report",
    "ring",
    "schemas",
    "steps",
    "study",
    "study_sizes",
    "study_steps",
    "validate",
]
