"""The plan: steps that move bundles of pieces between ranks, in one global order, as columns.

Rules of meaning, on which simulating, checking and running all rest:

- A *bundle* is an ordered list of pieces (of any tensors) that travel together. A *step* carries one bundle.
- COPY is driven by its source rank, which puts the bundle into the destination's memory (one-sided); src == dst is a local copy.
  BROADCAST and ALL_GATHER are driven by all ranks of their group together. A BROADCAST goes from `src` to every other rank of the
  group. In an ALL_GATHER every rank of the group ends with all of the bundle, its own part included; each piece comes from the
  first rank of the group that holds it in its source weights.
- A BARRIER carries an empty bundle. Each rank of its group comes to it when the steps of its `after` list that the rank drives or
  receives are complete; it is complete when all ranks of the group have come. So whoever waits for a barrier waits for its whole
  `after` list.
- A plan of an attention call (`Plan.attention`) computes, too. A COMPUTE is driven by the one rank of its group and carries an
  empty bundle; its row of `Computes` says what it does to which *operands*, each a bundle at a place. In a REDUCE_SCATTER every
  rank of the group brings all of the bundle, in one slot; the sum of each piece lands at TARGET on the rank of the group whose
  destination weights contain it.
- A plan of partial tensors (`Problem.summed`) adds up, too. Every rank of the group of an ALL_REDUCE or REDUCE_SCATTER brings all
  of the bundle from its source weights, which hold addends. The sum of each piece lands at TARGET: of an ALL_REDUCE on every rank
  of the group that needs the piece, of a REDUCE_SCATTER on one of them (`ownership.reduced_to`). An ALL_GATHER reads TARGET and
  brings what a REDUCE_SCATTER of the same bundle and group has added up to the others that need it.
  Ranks that add up themselves do so in ascending order of ranks, each addition rounded to the tensor's dtype; a library that has
  reductions of its own orders sums as it likes.
- A step reads from and writes to a *place*: SOURCE (the source weights), TARGET (the destination weights) or a staging slot
  (its number). At TARGET a piece lands in every fragment of that rank that contains it. In a slot it lies dense, row-major,
  at the bundle's `offset` for it.
- A rank runs the steps that it drives queue by queue: within one queue of a lane in plan order, one at a time. Queues and lanes
  run beside each other.
- A step starts when its rank reaches it and all steps in its `after` list are complete. `after` names earlier steps only, so one
  global order rules out cyclic waits; a rank waits only on steps that it drives or that deliver to it. What comes to a rank it
  reads, and what nobody has read it overwrites, after a step that it waits for itself: that another rank says so isn't enough. A
  collective that carries nothing tells nobody of what it waited for.
- Nothing else: no pointers, handles, times or predictions.
"""

from shardroute.planner.plans.columns import Boxes, Bundles, Computes, Steps, places, ranges
from shardroute.planner.plans.plan import WINDOW_BYTES, Plan, classes_of
from shardroute.planner.plans.words import SOURCE, TARGET, Backend, Kind, Lane, Mode, Op, lane_of, queue_of, queued

__all__ = [
    "SOURCE",
    "TARGET",
    "WINDOW_BYTES",
    "Backend",
    "Boxes",
    "Bundles",
    "Computes",
    "Kind",
    "Lane",
    "Mode",
    "Op",
    "Plan",
    "Steps",
    "classes_of",
    "lane_of",
    "places",
    "queue_of",
    "queued",
    "ranges",
]
