"""`hybrid`: refit as NeMo RL does it with `nccl_reshard`: feed-forward weights by `m2n-pack`, then all else by broadcast.

Experts count as feed-forward weights. Which way a weight goes is told by its Hugging Face name, as in NeMo RL. The second half
begins when all ranks have finished the first.
"""

import re
from collections.abc import Sequence
from typing import Final

import numpy as np

from shardroute.planner.layouts.fragments import Ints
from shardroute.planner.layouts.overlaps import Pieces
from shardroute.planner.plans import Backend, Plan
from shardroute.planner.problems import Problem
from shardroute.planner.routing import gather_broadcast, m2n_pack
from shardroute.planner.routing.drafts import Draft
from shardroute.planner.routing.options import Options
from shardroute.planner.routing.sizes import split_all
from shardroute.topologies.topologies import Topology

# nemo_rl/weight_sync/nccl_reshard_utils.py: gate, up and down projections of feed-forward layers, and all of the experts.
_BULK: Final = re.compile(r"(^|\.)experts\.|(^|\.)((gate|up|down|gate_up)_proj|w[123])\.weight$")
# Broadcast all the same: shared experts, scales of quantised weights, layers that predict further tokens.
_REST: Final = re.compile(r"shared_expert|scale|^mtp\.")
# In DeepSeek-V3 and GLM the layer that predicts further tokens has a number; only such a layer has this projection.
_MTP_LAYER: Final = re.compile(r"^(.*\.layers\.\d+\.)eh_proj\.")

# Shares of planning that are over when feed-forward weights are written, and when the rest is: roughly, as it is with
# DeepSeek-V3 from 256 to 256 GPUs. For those who wait.
_BULK_WRITTEN: Final = 0.8
_WRITTEN: Final = 0.9


def plan(problem: Problem, pieces: Sequence[Pieces], topology: Topology, backend: Backend, options: Options) -> Plan:
    """The plan; a problem without feed-forward weights is broadcast as a whole. Of the options, none applies but `told`."""
    bulk = in_bulk([tensor.name for tensor in problem.tensors])
    rest = np.setdiff1d(np.arange(len(problem.tensors), dtype=np.int64), bulk)
    buffer_bytes = gather_broadcast.buffer_bytes_for(problem, topology)
    is_rest = [not np.isin(cls.members, bulk).any() for cls in problem.classes]
    cut = [c if apart else p for p, c, apart in zip(pieces, split_all(problem, pieces, buffer_bytes), is_rest, strict=True)]
    draft = Draft()
    before = m2n_pack.write(draft, problem, cut, topology, bulk, options.part(0.0, _BULK_WRITTEN))
    if len(before) and len(rest):
        everyone = np.union1d(problem.source.ranks, problem.target.ranks).astype(np.int32)
        before = np.array([draft.barrier(draft.group(everyone), before)])
    joining = gather_broadcast.broadcasters(problem, topology)
    gather_broadcast.write(draft, problem, cut, rest, buffer_bytes, before, joining, options.part(_BULK_WRITTEN, _WRITTEN).told)
    return draft.plan("hybrid", problem, cut, topology, backend)


def in_bulk(names: Sequence[str]) -> Ints:
    """Indices of the names that are feed-forward weights, ascending."""
    mtp = tuple(found[1] for found in map(_MTP_LAYER.match, names) if found)
    wanted = [bool(_BULK.search(n)) and not _REST.search(n) and not (mtp and n.startswith(mtp)) for n in names]
    return np.flatnonzero(wanted).astype(np.int64)
