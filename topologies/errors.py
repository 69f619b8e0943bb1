"""The tree of errors that shardroute raises; every other package imports it from here.

    ShardrouteError
    ├── InputError        what a user gave is wrong (also a ValueError): names the thing, what was expected, the fix
    ├── InfeasibleError   the request is well formed, but no plan can satisfy it: names the constraint
    ├── PlanError         a plan or its file is wrong, truncated, foreign or does not deliver its problem
    └── RunError          a run failed: names the rank and the step

The command line turns InputError, InfeasibleError and PlanError into exit code 2, RunError into 1, without a traceback.
"""


class ShardrouteError(Exception):
    """Root of every error that shardroute raises on purpose."""


class InputError(ShardrouteError, ValueError):
    """What the user gave can't be used; the message says what was found, what was expected, and of which thing."""


class InfeasibleError(ShardrouteError):
    """No plan can satisfy the request; the message names the constraint."""


class PlanError(ShardrouteError):
    """A plan, or the file that holds it, is wrong; the message names the step, tensor or column."""


class RunError(ShardrouteError):
    """A run of a plan failed; the message names the rank and the step."""
