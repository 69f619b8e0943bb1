"""The report's pictures of the machine: its domains and GPUs with what each is for, and how busy each link is."""

from typing import Final

import numpy as np

from shardroute.planner.plans import Plan
from shardroute.planner.reporting.charts import COLOURS, WIDTH, Chart, heat_map
from shardroute.planner.reporting.sections import Cell, Section, count, rate, seconds, share, size, table
from shardroute.planner.simulator.refit import Prediction
from shardroute.topologies.machines import MachineKind
from shardroute.topologies.units import format_count

# Domains that the machine's picture draws; beyond these a picture is no longer read.
_MOST_DOMAINS: Final = 40
# GPUs above which the heat map has a cell a domain, its busiest link of each kind, in place of one a GPU.
_MOST_GPUS: Final = 1024
_MOST_LINKS: Final = 20
_PICTURE_HEIGHT: Final = 480  # pixels, beyond which domains are drawn smaller
_KINDS: Final = ("NVLink out", "NVLink in", "NIC out", "NIC in")


def machine_section(plan: Plan) -> Section:
    """The domains with their GPUs: source, destination, both or neither."""
    topology, problem = plan.topology, plan.problem
    gpus = np.arange(topology.n_gpus)
    source, target = np.isin(gpus, problem.source.ranks), np.isin(gpus, problem.target.ranks)
    role = np.where(source & target, "both", np.where(source, "source", np.where(target, "destination", "neither")))
    first = np.searchsorted(topology.domain, np.arange(topology.n_domains + 1))
    cells: list[dict[str, str | int]] = [
        {"domain": d, "column": g - int(first[d]), "role": str(role[g])}
        for d in range(min(topology.n_domains, _MOST_DOMAINS))
        for g in range(int(first[d]), int(first[d + 1]))
    ]
    rows = []
    for d in range(topology.n_domains):
        inside = slice(int(first[d]), int(first[d + 1]))
        hosts = np.unique(topology.host[inside])
        roles = [count(int((role[inside] == word).sum())) for word in ("source", "destination", "both", "neither")]
        rates = [rate(float(topology.nvlink_Bps[inside].sum())), rate(float(topology.nic_Bps[inside].sum()))]
        numbers = Cell(f"{first[d]} to {first[d + 1] - 1}")
        rows.append([Cell(f"domain {d}", d), numbers, count(len(hosts)), *roles, *rates])
    cpu = topology.machine.kind is MachineKind.CPU
    words = [f"{topology.title}: {topology.machine.title}."]
    if cpu:
        words.append("Every rank is a process of one host; they share its memory.")
    else:
        words.append(
            "A row is an NVLink domain: the line above its GPUs is the switch that joins them. Below each stands its NIC. "
            f"All NICs meet in one fabric, whose oversubscription is {topology.machine.oversubscription:g}. Planning takes any "
            "NIC to reach any other at its own rate, so rails bind nothing."
        )
    if topology.n_domains > _MOST_DOMAINS:
        words.append(f"The first {_MOST_DOMAINS} of {topology.n_domains} domains are drawn; the table has all.")
    domains = format_count(topology.n_domains, "domain")
    about = f"{domains} of GPUs, each GPU coloured by whether it is source, destination, both or neither"
    columns = ("domain", "GPUs", "hosts", "source", "destination", "both", "neither", "NVLink one way", "NICs one way")
    return Section("machine", "The machine", tuple(words), _machine_chart(cells, cpu), about, table(columns, rows))


def _machine_chart(cells: list[dict[str, str | int]], cpu: bool) -> Chart:
    n_columns = 1 + max(int(cell["column"]) for cell in cells)
    n_rows = 1 + max(int(cell["domain"]) for cell in cells)
    side = min(30.0, (WIDTH - 140) / n_columns, max(_PICTURE_HEIGHT / n_rows, 14.0))
    columns: list[int | str] = [*range(n_columns), *([] if cpu else [" ", "  ", "fabric"])]
    title, axis = "process" if cpu else "GPU of the domain", {"labelOverlap": True, "labelAngle": 0}
    x = {"field": "column", "type": "ordinal", "title": title, "axis": axis, "scale": {"domain": columns}}
    y = {"field": "domain", "type": "ordinal", "title": "domain", "axis": {"grid": False}}
    words = ["source", "destination", "both", "neither"]
    fill = {
        "field": "role", "type": "nominal", "legend": {"orient": "top", "title": None},
        "scale": {"domain": words, "range": [COLOURS[0], COLOURS[1], COLOURS[2], "var(--line)"]},
    }  # fmt: skip
    mark = {"type": "square", "size": (0.6 * side) ** 2, "opacity": 1, "aria": False}
    gpus: Chart = {"mark": mark, "encoding": {"x": x, "y": y, "color": fill}}
    size = {"width": side * len(columns), "height": max(side, 14) * 1.3 * n_rows}
    if cpu:
        return {**size, "data": {"values": cells}, "layer": [gpus]}
    ends: list[object] = [
        {"aggregate": [{"op": "max", "field": "column", "as": "last"}], "groupby": ["domain"]},
        {"calculate": "0", "as": "begin"},
        {"calculate": "'fabric'", "as": "fabric"},
    ]
    line = {"type": "rule", "color": "var(--line)", "size": 2, "aria": False}
    first = {"field": "begin", "type": "ordinal"}
    nic = {"type": "point", "shape": "triangle-down", "filled": True, "size": max(side, 6), "yOffset": 0.45 * side}
    layers: list[Chart] = [
        {
            "transform": ends,
            "mark": {**line, "yOffset": -0.42 * side},
            "encoding": {"x": first, "x2": {"field": "last"}, "y": y},
        },
        {
            "transform": ends,
            "mark": {**line, "size": 1, "yOffset": 0.52 * side},
            "encoding": {"x": first, "x2": {"field": "fabric"}, "y": y},
        },
        {
            "transform": ends,
            "mark": {"type": "rect", "color": "var(--line)", "width": {"band": 0.4}, "aria": False},
            "encoding": {"x": {"field": "fabric", "type": "ordinal"}, "y": y},
        },
        gpus,
        {"mark": {**nic, "color": "var(--ink)", "opacity": 1, "aria": False}, "encoding": {"x": x, "y": y}},
    ]
    return {**size, "data": {"values": cells}, "layer": layers}


def load_section(plan: Plan, prediction: Prediction) -> Section:
    """How much of the predicted time each link is busy: a cell a GPU and kind of link, or a domain's busiest."""
    topology, total_s = plan.topology, prediction.predicted_s
    names = [resource.name for resource in prediction.resources]
    rows = [
        [Cell(r.name), size(r.n_bytes), seconds(r.busy_s), share(r.busy_s / total_s if total_s else None)]
        for r in prediction.resources[:_MOST_LINKS]
    ]
    n = topology.n_gpus
    chart, words = None, [f"Links that carry bytes: {len(names):,}. Busy is what a link's bytes take at its full rate."]
    if topology.machine.kind is MachineKind.GPU and total_s:
        busy = prediction.result.link_busy_s[: len(_KINDS) * n].reshape(len(_KINDS), n) / total_s
        first = np.searchsorted(topology.domain, np.arange(topology.n_domains + 1))
        cells: list[dict[str, str | int | float]] = []
        if n <= _MOST_GPUS:
            for kind, of_kind in zip(_KINDS, busy, strict=True):
                for g, value in enumerate(np.minimum(of_kind, 1.0).tolist()):
                    d = int(topology.domain[g])
                    cells.append({"kind": kind, "row": d, "column": g - int(first[d]), "share": round(value, 4)})
            chart = heat_map(cells, "column", "row", "kind", "GPU of the domain", "domain", "busy")
            words.append("A cell is one link of one GPU.")
        else:
            per_row = int(np.ceil(np.sqrt(topology.n_domains)))
            for kind, of_kind in zip(_KINDS, busy, strict=True):
                worst = np.minimum(np.maximum.reduceat(of_kind, first[:-1]), 1.0)
                cells += [
                    {"kind": kind, "row": d // per_row * per_row, "column": d % per_row, "share": round(v, 4)}
                    for d, v in enumerate(worst.tolist())
                ]
            chart = heat_map(cells, "column", "row", "kind", "domain, plus that of the row", "first domain of the row", "busy")
            words.append(f"A cell is a domain: its busiest link, as {n:,} GPUs are too many to draw.")
        for kind, of_kind in zip(_KINDS, busy, strict=True):
            g = int(np.argmax(of_kind))
            summary = f"most GPU {g}, median {np.median(of_kind):.0%}, idle on {int((of_kind == 0).sum()):,} of {n:,}"
            rows.append([Cell(f"{kind}: {summary}"), Cell(""), seconds(float(of_kind[g]) * total_s), share(float(of_kind[g]))])
    if len(names) > _MOST_LINKS:
        words.append(f"The table has the {_MOST_LINKS} busiest, then each kind of link.")
    about = "share of the predicted time that each link is busy, for NVLink out and in and NICs out and in of each GPU"
    columns = ("link", "bytes", "busy", "of the time")
    return Section("load", "Load on every link", tuple(words), chart, about, table(columns, rows))
