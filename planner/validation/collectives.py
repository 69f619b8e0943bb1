"""Collectives and permutes: published against predicted, each row also by a calibration that hasn't seen it."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from shardroute.planner.backends.channels import ChannelLaw, Path, channel_law
from shardroute.planner.backends.collectives import collective_s, steady_points
from shardroute.planner.backends.tuning import Group, collective_cost
from shardroute.planner.measurements.channel_fits import SendRecvRows, fit_channel_law
from shardroute.planner.validation.published import (
    PublishedCollective,
    PublishedPermute,
    permute_source,
    published_collectives,
    published_permutes,
)
from shardroute.planner.validation.rows import ValidationRow
from shardroute.planner.validation.systems import System, system
from shardroute.topologies.collectives import Collective, CollectiveCurve
from shardroute.topologies.units import format_bytes

# Machines whose calibration holds XLA's table as curves of its own; hgx-h200's are those of dgx-h100.
_CURVE_MACHINES: Final = ("dgx-h100", "dgx-b200", "gb200-nvl72")
# Up to here XLA's times on H100 and B200 go up and down with bytes: for 37 and 40 % of neighbours twice the bytes took over 10 %
# less; on GB200 for 2 %, and from 2 MiB on for 1 % everywhere (docs/predictions.md).
_SCATTERED_BYTES: Final = 2**19
# Rows that are off by less than this share need no reason.
_OFF: Final = 0.25
# Rows of GB200 that took 2 to 6 times as long as those of half and of twice the bytes.
_AWRY_BYTES: Final = frozenset({288, 1024, 2304, 4096})
# How the note of a row begins that took longer than its neighbours let expect.
DISTURBED: Final = "it took"
_AWRY: Final = f"{DISTURBED} 2 to 6 times as long as half and as twice its bytes"
_PEAK: Final = "size not stated: the peak, taken at 8 GiB"
_SAME_TIME: Final = 1e-3  # curves are written with 4 digits


def most_collective_rows() -> int:
    """As many rows as `collective_rows` has at most: points that a publication and a curve both have are counted twice."""
    curves = [curve for machine in _CURVE_MACHINES for curve in system(machine).calibration.curves]
    return len(published_collectives()) + sum(len(curve.n_bytes) for curve in curves) + len(published_permutes())


def collective_rows() -> Iterator[ValidationRow]:
    """Every published collective, then every point of the shipped curves, then every permute."""
    in_curves: set[tuple[str, CollectiveCurve, int]] = set()
    for published in published_collectives():
        yield _published_row(published, in_curves)
    for machine in _CURVE_MACHINES:
        place = system(machine)
        for curve in place.calibration.curves:
            for at in range(len(curve.n_bytes)):
                if (place.machine.name, curve, at) not in in_curves and not curve.source.startswith("assumption"):
                    yield _curve_row(place, curve, at)
    yield from permute_rows()


def _published_row(published: PublishedCollective, in_curves: set[tuple[str, CollectiveCurve, int]]) -> ValidationRow:
    place, group = published.system, published.group
    predicted_s, how = _collective_s(published, place)
    held, left_out_s = "", None
    point = _point_of(published)
    if point is not None:
        curve, at = point
        in_curves.add((place.machine.name, curve, at))
        left_out_s, held = _collective_s(published, _without(place, curve, at))[0], "row"
    series = f"{published.source.title}: {published.op} of {group.n_ranks} on {place.name}"
    if published.algorithm is not None:
        series += f" by {published.algorithm}"
    note = (place.note or _against(published, predicted_s)) if published.size_stated else _PEAK
    return ValidationRow(
        "collective",
        series,
        f"{published.op} {_size(published.n_bytes)}",
        published.time_s,
        predicted_s,
        published.fitted or point is not None,
        left_out_s,
        held,
        how,
        published.source.url,
        note,
    )


def _against(published: PublishedCollective, predicted_s: float) -> str:
    """What others of its series say against a row, see _contradiction."""
    key = (published.source, published.system.name, published.op, published.group, published.algorithm)
    same = [
        row
        for row in published_collectives()
        if row.size_stated and (row.source, row.system.name, row.op, row.group, row.algorithm) == key
    ]
    same.sort(key=lambda row: row.n_bytes)
    at = [row.name for row in same].index(published.name)
    return _contradiction([row.n_bytes for row in same], [row.time_s for row in same], at, predicted_s)


def _collective_s(published: PublishedCollective, place: System) -> tuple[float, str]:
    time_s, how = collective_s(
        published.op, published.n_bytes, published.group, place.machine, place.calibration, published.algorithm
    )
    call_s = collective_cost(place.calibration).call_s if published.one_at_a_time else 0.0
    return time_s + call_s, how


def _point_of(published: PublishedCollective) -> tuple[CollectiveCurve, int] | None:
    """The curve of the system's calibration that holds this very measurement, and where."""
    for curve in published.system.calibration.curves:
        if (curve.op, curve.n_ranks, curve.n_domains) != (published.op, published.group.n_ranks, published.group.n_domains):
            continue
        for at, (n_bytes, time_s) in enumerate(zip(curve.n_bytes, curve.time_s, strict=True)):
            if n_bytes == published.n_bytes and abs(time_s / published.time_s - 1) < _SAME_TIME:
                return curve, at
    return None


def _without(place: System, curve: CollectiveCurve, at: int) -> System:
    """The system, with a calibration whose curve lacks the point."""
    keep = [i for i in range(len(curve.n_bytes)) if i != at]
    less = replace(curve, n_bytes=tuple(curve.n_bytes[i] for i in keep), time_s=tuple(curve.time_s[i] for i in keep))
    # Only curves of the operation are read, so that the others needn't be carried.
    curves = tuple(less if c is curve else c for c in place.calibration.curves if c.op is curve.op)
    return replace(place, calibration=replace(place.calibration, curves=curves, figures=()))


def _curve_row(place: System, curve: CollectiveCurve, at: int) -> ValidationRow:
    group, n_bytes = Group(curve.n_ranks, curve.n_domains), curve.n_bytes[at]
    predicted_s, how = collective_s(curve.op, n_bytes, group, place.machine, place.calibration)
    less = _without(place, curve, at)
    left_out_s, _ = collective_s(curve.op, n_bytes, group, less.machine, less.calibration)
    source = permute_source()
    series = f"{source.title}: {curve.op} of {curve.n_ranks} on {place.name}"
    name = f"{curve.op} {_size(n_bytes)}"
    note = _contradiction(curve.n_bytes, curve.time_s, at, left_out_s)
    if not steady_points(curve)[at]:
        other = min(range(at + 1, len(curve.n_bytes)), key=lambda i: curve.time_s[i])
        longer = curve.time_s[at] / curve.time_s[other]
        note = f"{DISTURBED} {longer:.3g} times as long as {_size(curve.n_bytes[other])}: not used"
    elif not note and n_bytes <= _SCATTERED_BYTES and place.name != "gb200-nvl72":
        note = "small messages of this table scatter"
    return ValidationRow(
        "collective", series, name, curve.time_s[at], predicted_s, True, left_out_s, "row", how, source.url, note
    )


def _contradiction(n_bytes: Sequence[int], time_s: Sequence[float], at: int, predicted_s: float) -> str:
    """What the point's own table says against it where the prediction is off: a smaller message that took longer, the slowest of
    them, where the point is faster than predicted; else a larger one that took less, the fastest. "" where there is none.
    """
    if abs(predicted_s / time_s[at] - 1) < _OFF:
        return ""
    fast = predicted_s > time_s[at]
    against = [
        i
        for i in range(len(n_bytes))
        if (n_bytes[i] < n_bytes[at] and time_s[i] > time_s[at] if fast else n_bytes[i] > n_bytes[at] and time_s[i] < time_s[at])
    ]
    if not against:
        return ""
    other = max(against, key=lambda i: time_s[i]) if fast else min(against, key=lambda i: time_s[i])
    return f"in its own table {_size(n_bytes[other])} took {time_s[other] / time_s[at]:.3g} times as long"


def left_out_groups() -> Iterator[ValidationRow]:
    """Every point of the shipped curves of GB200, predicted without any curve of its operation and group."""
    place = system("gb200-nvl72")
    for curve in place.calibration.curves:
        rest = tuple(c for c in place.calibration.curves if c.op is curve.op and c.n_ranks != curve.n_ranks)
        # step.message is the slope over the groups of all-to-all, this one among them.
        message_s = 0.0 if curve.op is Collective.ALL_TO_ALL else place.calibration.message_s
        less = replace(place.calibration, curves=rest, message_s=message_s, figures=())
        group = Group(curve.n_ranks, curve.n_domains)
        for n_bytes, time_s in zip(curve.n_bytes, curve.time_s, strict=True):
            found_s, how = collective_s(curve.op, n_bytes, group, place.machine, less)
            series = f"{curve.op} of {curve.n_ranks} left out"
            name = f"{curve.op} {_size(n_bytes)}"
            yield ValidationRow("group", series, name, time_s, found_s, True, found_s, "group", how, permute_source().url)


def permute_rows() -> Iterator[ValidationRow]:
    """Every permute, by the calibration's law and by a law fitted without the row's series."""
    source = permute_source()
    published = published_permutes()
    for machine in dict.fromkeys(row.machine for row in published):
        place = system(machine)
        law = channel_law(place.machine, place.calibration)
        assert law is not None
        rows = [row for row in published if row.machine == machine]
        for traffic, n_ranks in dict.fromkeys((row.traffic, row.n_ranks) for row in rows):
            own = [row for row in rows if (row.traffic, row.n_ranks) == (traffic, n_ranks)]
            rest = [row for row in rows if row not in own]
            without = replace(law, cost=fit_channel_law(send_recv_rows(rest)))
            for row in own:
                yield ValidationRow(
                    "permute",
                    f"{source.title}: permute ({traffic}) of {n_ranks} on {machine}",
                    f"permute {_size(row.n_bytes)}",
                    row.time_s,
                    _permute_s(law, row),
                    True,
                    _permute_s(without, row),
                    "series",
                    "model: NCCL send/recv, channels",
                    source.url,
                    _AWRY if machine == "gb200-nvl72" and row.n_bytes in _AWRY_BYTES else "",
                )


def send_recv_rows(permutes: list[PublishedPermute]) -> list[SendRecvRows]:
    """Permutes as rows to fit a channel law to, by traffic and ranks."""
    found = []
    for traffic, n_ranks in dict.fromkeys((row.traffic, row.n_ranks) for row in permutes):
        own = [row for row in permutes if (row.traffic, row.n_ranks) == (traffic, n_ranks)]
        found.append(
            SendRecvRows(n_ranks, traffic, np.array([r.n_bytes for r in own], float), np.array([r.time_s for r in own]))
        )
    return found


def _permute_s(law: ChannelLaw, row: PublishedPermute) -> float:
    return float(law.send_recv_s(row.n_bytes, row.n_ranks, True, Path.NVLINK, row.traffic))


def _size(n_bytes: int) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if n_bytes >= unit and n_bytes % unit == 0:
            return f"{n_bytes // unit} {name}"
    return format_bytes(n_bytes)
