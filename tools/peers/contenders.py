"""All contenders on a layout: our strategies, the M2N library, and the re-stated rules, in the same figures.

Every contender's routes become a plan of ours and are predicted by the one simulator under the one calibration: what differs is
where the bytes go, not what carries them. (`m2n-pack` and `hybrid` are ours too: there M2N and NeMo RL are modelled as they run.)
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np

from peers.layouts import TENSORS, problem_of
from peers.m2n_wheel import M2n, side_of
from peers.rounds import alpa_rounds, megatron_rounds
from peers.rules import RULES, m2n_limits
from peers.ways import Loads, Refused, Way, loads, loads_of_ways
from shardroute.planner.layouts.fragments import Ranks
from shardroute.planner.layouts.overlaps import Pieces
from shardroute.planner.plans import Op, Plan
from shardroute.planner.problems import Problem
from shardroute.planner.reports import traffic
from shardroute.planner.routing.bounds import cuts, demand
from shardroute.planner.routing.loads import busiest_s
from shardroute.planner.routing.options import Options
from shardroute.planner.routing.patterns import entries_of, patterns_of
from shardroute.planner.routing.sizes import bytes_into_busiest_rank, message_bytes_for, split_all
from shardroute.planner.routing.strategies import STRATEGIES, backend_for, make_plan, pieces_of
from shardroute.planner.routing.trees import Tree, plan_by_trees
from shardroute.planner.simulator.refit import predict
from shardroute.topologies.calibrations import Calibration, default_calibration, nominal_calibration
from shardroute.topologies.errors import ShardrouteError
from shardroute.topologies.machines import load_machine
from shardroute.topologies.topologies import Topology, build_topology

# Steps above which a plan is not simulated here, and hops above which a peer's routes are not made a plan: minutes on 2 cores.
MOST_SIMULATED = 700_000
MOST_HOPS = 100_000
# Messages above which rounds are not counted: they are dealt one by one.
MOST_MESSAGES = 300_000
WHEEL_MODES = ("uniform", "node", "split")


class Row(msgspec.Struct, frozen=True):
    """One contender on one layout; None where a figure isn't defined or wasn't worked out, which `note` explains.

    senders      max over mean of what source ranks send: over NICs, or at all where none of theirs sends
    idle         source ranks that send nothing, of n_sources
    sent_max, received_max   bytes of the busiest source rank, and into the NIC of the busiest rank
    crossed, least           bytes into other domains, and the least that any plan can do
    depth        hops that the last byte makes
    link         busiest link over the bound, at nominal rates
    predicted_s, ratio       one cost model for all; over the bound
    plan_s       seconds to plan; of a peer's rule as re-stated here
    """

    layout: str
    machine: str
    contender: str
    ours: bool
    senders: float | None = None
    idle: int | None = None
    n_sources: int | None = None
    sent_max: float | None = None
    received_max: float | None = None
    crossed: float | None = None
    least: int | None = None
    depth: int | None = None
    link: float | None = None
    predicted_s: float | None = None
    ratio: float | None = None
    plan_s: float | None = None
    note: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Arena:
    """A layout on a machine, ready for contenders."""

    layout: str
    machine: str
    problem: Problem
    whole: tuple[Pieces, ...]
    topology: Topology
    calibration: Calibration
    patterns: tuple[tuple[Ranks, Ranks], ...]
    n_bytes: tuple[float, ...]
    bound_s: float
    least: int

    def row(self, contender: str, found: Loads | None = None, figures: Mapping[str, object] | None = None) -> Row:
        """A row of this layout with these figures and those that follow from loads."""
        known: dict[str, object] = {
            "layout": self.layout, "machine": self.machine, "contender": contender, "ours": contender in STRATEGIES,
        }  # fmt: skip
        if found is not None:
            sources = self.problem.source.ranks
            sent = found.nic_out[sources]
            sent = sent if sent.any() else found.sent[sources]
            known |= {
                "senders": float(sent.max() / sent.mean()) if sent.any() else None,
                "idle": int((found.sent[sources] == 0).sum()), "n_sources": len(sources), "sent_max": float(sent.max()),
                "received_max": float(found.nic_in.max()), "crossed": found.crossed, "least": self.least,
            }  # fmt: skip
        return msgspec.convert(known | dict(figures or {}), Row)

    def predicted(self, plan: Plan) -> dict[str, object]:
        """The figures of a plan's prediction and busiest link."""
        copies = bool((plan.steps.op == Op.COPY).all())
        figures: dict[str, object] = {"link": busiest_s(plan) / self.bound_s if copies else None}
        if len(plan.steps) > MOST_SIMULATED:
            return figures | {"note": f"{len(plan.steps):,} steps: not simulated"}
        seconds = predict(plan, self.calibration).predicted_s
        return figures | {"predicted_s": seconds, "ratio": seconds / self.bound_s}


def arena(layout: str, machine: str) -> Arena:
    """The layout on as many units of the machine as it needs."""
    problem = problem_of(layout)
    topology = build_topology(load_machine(machine), None, problem.n_ranks)
    whole = pieces_of(problem)
    needs = demand(problem, whole, topology)
    entries, holders, needers = entries_of(problem, whole)
    n_bytes = np.bincount(entries.pattern, weights=entries.n_bytes, minlength=len(holders))
    bound_s = cuts(needs, topology, nominal_calibration(topology.machine))[0].seconds
    return Arena(
        layout, machine, problem, whole, topology, default_calibration(machine), tuple(zip(holders, needers, strict=True)),
        tuple(n_bytes.tolist()), bound_s, needs.n_bytes_cross_domain,
    )  # fmt: skip


def contender_names() -> list[str]:
    """The names of all contenders, in the order of `contenders`."""
    return [*STRATEGIES, *(f"M2N wheel, {mode}" for mode in WHEEL_MODES), *RULES, "Megatron rounds*"]


def contenders(place: Arena, wheel: M2n | str) -> Iterator[tuple[str, Callable[[], Row]]]:
    """Name and run of every contender; `wheel` is the M2N library, or why it is absent."""
    runs = (
        *(partial(_ours, place, strategy) for strategy in STRATEGIES),
        *(partial(_wheel, place, wheel, mode) for mode in WHEEL_MODES),
        *(partial(_rule, place, name) for name in RULES),
        partial(_megatron, place),
    )
    return zip(contender_names(), runs, strict=True)


def _ours(place: Arena, strategy: str) -> Row:
    began = time.perf_counter()
    try:
        plan = make_plan(place.problem, place.topology, strategy)
    except ShardrouteError as error:
        return place.row(strategy, figures={"note": f"refused: {error}"})
    plan_s = time.perf_counter() - began
    steps = plan.steps
    copies = (steps.op == Op.COPY) & (steps.src != steps.dst)
    figures = {"plan_s": plan_s} | place.predicted(plan)
    if not (steps.op == Op.COPY).all():  # of collectives only what crosses is defined
        crossed = float(traffic(plan).n_bytes_cross_domain)
        return place.row(strategy, figures=figures | {"crossed": crossed, "least": place.least})
    src, dst = (column[copies].astype(np.int64) for column in (steps.src, steps.dst))
    found = loads(place.problem.n_ranks, src, dst, plan.step_bytes[copies].astype(np.float64), place.topology.domain)
    return place.row(strategy, found, figures | {"depth": _depth(plan)})


def _depth(plan: Plan) -> int:
    """Hops that the last byte of a plan of copies makes between ranks."""
    steps = plan.steps
    brought: dict[tuple[int, int], int] = {}
    for bundle, src, dst in zip(steps.bundle.tolist(), steps.src.tolist(), steps.dst.tolist(), strict=True):
        if src != dst:
            brought[bundle, dst] = 1 + brought.get((bundle, src), 0)
    return max(brought.values(), default=0)


def _wheel(place: Arena, wheel: M2n | str, mode: str) -> Row:
    name = f"M2N wheel, {mode}"
    if isinstance(wheel, str):
        return place.row(name, figures={"note": f"absent: {wheel}"})
    if place.layout not in TENSORS:
        return place.row(name, figures={"note": "takes one tensor between two meshes; a model is a call for each"})
    shape, *meshes = TENSORS[place.layout]
    began = time.perf_counter()
    try:
        source, target = side_of(shape, "bf16", *meshes[:2]), side_of(shape, "bf16", *meshes[2:])
        per_domain = place.topology.machine.gpus_per_domain
        ways = wheel.ways(source, target, place.patterns, place.n_bytes, place.topology.domain, per_domain, mode)
    except Refused as error:
        return place.row(name, figures={"note": f"refused: {error}"})
    return _routed(place, name, ways, time.perf_counter() - began)


def _rule(place: Arena, name: str) -> Row:
    began = time.perf_counter()
    note = ""
    of_tensors = [list(zip(pieces.holders, pieces.needers, strict=True)) for pieces in place.whole]
    if name.startswith("M2N"):
        try:
            for patterns in of_tensors:
                m2n_limits(patterns, direct="direct" in name)
        except Refused as error:
            note = f"M2N refuses: {error}"
    if name.startswith("Alpa") and len(of_tensors) == 1:
        note = f"{alpa_rounds(place.patterns)[1]:,} rounds"
    # Peers plan tensor by tensor; tensors that are alike go alike.
    ways: dict[tuple[bytes, bytes], Way] = {}
    for patterns in of_tensors:
        for (who, to), way in zip(patterns, RULES[name](patterns, place.topology.domain), strict=True):
            ways.setdefault((who.tobytes(), to.tobytes()), way)
    ordered = [ways[who.tobytes(), to.tobytes()] for who, to in place.patterns]
    return _routed(place, name, ordered, time.perf_counter() - began, note)


def _megatron(place: Arena) -> Row:
    """Megatron's scheduler over direct copies, simulated with one copy at a time from or to a rank in place of its rounds."""
    name = "Megatron rounds*"
    ways = RULES["Awex*"](place.patterns, place.topology.domain)
    pairs = [(a, b) for way in ways for a, b, _ in way.hops]
    if len(pairs) > MOST_MESSAGES:
        return place.row(name, figures={"note": f"{len(pairs):,} messages: rounds not counted"})
    began = time.perf_counter()
    n_rounds = megatron_rounds(pairs)
    whole = Options(message_bytes=int(max(place.n_bytes)), max_ops_in_flight=1)  # its messages aren't cut
    return _routed(place, name, ways, time.perf_counter() - began, f"{n_rounds:,} rounds", whole)


def _routed(
    place: Arena, name: str, ways: Sequence[Way], plan_s: float, note: str = "", options: Options | None = None
) -> Row:
    """The row of a contender that goes these ways."""
    found = loads_of_ways(ways, place.n_bytes, place.problem.n_ranks, place.topology.domain)
    figures: dict[str, object] = {"depth": max(way.depth for way in ways), "plan_s": plan_s}
    n_hops = sum(len(tree) for way in ways for tree in way.trees or ())
    if any(way.trees is None for way in ways) or n_hops > MOST_HOPS:
        return place.row(name, found, figures | {"note": "; ".join(filter(None, [note, "too many hops to simulate"]))})
    figures |= place.predicted(_plan(place, name, ways, Options() if options is None else options))
    return place.row(name, found, figures | {"note": "; ".join(filter(None, [note, str(figures.get("note", ""))]))})


def _plan(place: Arena, name: str, ways: Sequence[Way], options: Options) -> Plan:
    """The plan of these ways, in messages as our fixed rules have them."""
    trees = {(who.tobytes(), to.tobytes()): way.trees or () for (who, to), way in zip(place.patterns, ways, strict=True)}

    def rule(holders: Ranks, needers: Ranks, _topology: Topology) -> Sequence[Tree]:
        return trees[holders.tobytes(), needers.tobytes()]

    limit = options.message_bytes
    if limit is None:
        patterns = patterns_of(*entries_of(place.problem, place.whole), place.topology)
        limit = message_bytes_for(bytes_into_busiest_rank(patterns, place.problem.n_ranks))
    if len(place.problem.tensors) == 1:  # each tree has a share
        limit = min([limit, *(int(size / max(1, len(way.trees or ()))) for size, way in zip(place.n_bytes, ways, strict=True))])
    pieces = split_all(place.problem, place.whole, max(limit, 1))
    backend = backend_for(place.problem, place.topology)
    return plan_by_trees(name, place.problem, pieces, place.topology, backend, rule, max(limit, 1), options)
