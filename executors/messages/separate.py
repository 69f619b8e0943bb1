"""A plan as ranks run it whose memory is their own: its programs, one driver a rank, and the messages between them.

Rule: what such ranks run may be another plan than what was given, with the same outputs; `of_step` leads back.
"""

from dataclasses import dataclass

import numpy as np

from shardroute.executors.interpreting.interpret import Programs, compile_plan
from shardroute.executors.interpreting.memories import Buffers
from shardroute.executors.interpreting.reductions import without_reductions
from shardroute.executors.messages.messages import Messages, lay_messages
from shardroute.planner.layouts.fragments import Ints
from shardroute.planner.plans import Plan


@dataclass(frozen=True, slots=True, eq=False)
class Separate:
    """The plan that is run, and for each of its steps the step of the given plan that it is a part of, -1 for none."""

    plan: Plan
    of_step: Ints
    programs: Programs
    buffers: Buffers
    messages: Messages

    def cells_of(self, n_steps: int) -> tuple[Ints, Ints]:
        """Cells ordered by the step of the given plan, of `n_steps`, and where each step's begin; cells of none are left out."""
        ptr = self.programs.cells.ptr
        step = np.repeat(self.of_step, np.diff(ptr))
        cells = np.argsort(step, kind="stable")
        cells = cells[step[cells] >= 0]
        return cells, np.searchsorted(step[cells], np.arange(n_steps + 1))


def compile_separate(plan: Plan, *, library_sums: bool = False) -> Separate:
    """Compile a plan for ranks that share no memory, and whose library adds up partial tensors or doesn't. Raises as compile_plan
    and lay_messages do.
    """
    run, of_step = without_reductions(plan)
    programs, buffers = compile_plan(run, apart=False)
    return Separate(run, of_step, programs, buffers, lay_messages(run, programs, buffers, library_sums=library_sums))
