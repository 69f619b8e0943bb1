"""Every way to lay a training step over GPUs that a model and a machine allow, predicted and ranked."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from shardroute.planner.backends.rates import StepRates
from shardroute.planner.shares import Told, parts
from shardroute.planner.steps.memories import step_memory
from shardroute.planner.steps.models import DenseModel
from shardroute.planner.steps.predictions import StepPrediction, computed_s, predict_work
from shardroute.planner.steps.settings import Carrier, Scheme, StepLayout, check_layout
from shardroute.planner.steps.transfers import Network, carriers, uncalibrated
from shardroute.planner.steps.works import step_work
from shardroute.topologies.errors import InputError

# Least difference between step times that the model is trusted to tell: its rates meet published steps to 4 % at best.
_SAME_STEP = 0.01
# Layouts that don't fit are predicted only to say what more memory would bring.
_N_UNFIT = 4
# What bounding all layouts takes beside simulating those that fit: microseconds each, not milliseconds.
_BOUNDED = 0.05


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a search is free to choose: None is free, anything else is fixed."""

    cp: int | None = None
    tp: int | None = None
    fsdp: int | None = None
    scheme: Scheme | None = None
    ulysses: int | None = None
    head_stride: int | None = None
    carrier: Carrier | None = None


def search(
    model: DenseModel,
    asked: StepLayout,
    wanted: Wanted,
    rates: StepRates,
    net: Network,
    n_best: int = 24,
    progress: Told | None = None,
) -> list[StepPrediction]:
    """The n_best layouts of `net.n_gpus` GPUs: those that fit first, fastest first. `asked` gives what isn't searched.

    Layouts are simulated in order of the time that they compute, which no step can beat; the search ends when that exceeds
    the n_best-th found. Of those that don't fit only a few follow. Raises InputError when there is none, with the reason that
    ruled out the last.
    """
    bounding, fitting, others = parts(progress, (_BOUNDED, 1.0, 1.0))
    bounded = []
    for i, layout in enumerate(layouts_of(model, asked, wanted, net)):
        fits = step_memory(model, layout, net.machine).fits
        work = step_work(model, layout, rates, net)
        bounded.append(((not fits, computed_s(work, model.n_layers), i), layout, work))
    bounded.sort(key=lambda item: item[0])
    bounding(1.0)
    n_fit = sum(not bound[0] for bound, _, _ in bounded)
    found: list[StepPrediction] = []
    for done, chosen, n in ((fitting, bounded[:n_fit], n_best), (others, bounded[n_fit:], _N_UNFIT if n_fit else n_best)):
        times: list[float] = []
        for i, ((_, least_s, _), layout, work) in enumerate(chosen):
            if len(times) >= n and sorted(times)[n - 1] <= least_s:
                break
            found.append(predict_work(work, model, layout, net))
            times.append(found[-1].step_s)
            done((i + 1) / len(chosen))
        done(1.0)
    return sorted(found, key=_rank)


def batch_that_fits(model: DenseModel, asked: StepLayout, wanted: Wanted, net: Network) -> float | None:
    """The most sequences a GPU, of the asked ones halved again and again, with which some layout fits; None where none does."""
    batch = asked.batch
    while batch * net.n_gpus >= 1:
        try:
            layouts = [*layouts_of(model, replace(asked, batch=batch), wanted, net)]
        except InputError:
            return None
        if any(step_memory(model, layout, net.machine).fits for layout in layouts):
            return batch
        batch /= 2
    return None


def layouts_of(model: DenseModel, asked: StepLayout, wanted: Wanted, net: Network) -> Iterator[StepLayout]:
    """The layouts that a search predicts. Raises InputError when there is none."""
    reason: InputError | None = None
    any_found = False
    for cp, tp in _degrees(model, wanted, net):
        fsdp = net.n_gpus // (cp * tp)
        for scheme, ulysses, stride in _schemes(cp, model.n_kv_heads // tp, wanted):
            layout = replace(
                asked, cp=cp, tp=tp, fsdp=fsdp, scheme=scheme, ulysses=ulysses, head_stride=stride, carrier=Carrier.NCCL
            )
            try:
                check_layout(model, layout)
            except InputError as error:
                reason = error
                continue
            found = _carriers(net, layout, wanted)
            if not found:
                reason = uncalibrated(net, "p2p") if layout.ring > 1 else _carries_nothing(wanted, scheme)
            for carrier in found:
                any_found = True
                yield replace(layout, carrier=carrier)
    if not any_found:
        raise reason or InputError(
            f"no layout of {net.n_gpus} GPUs: cp x tp x fsdp must be {net.n_gpus}; asked for "
            f"cp {wanted.cp or 'any'}, tp {wanted.tp or 'any'}, fsdp {wanted.fsdp or 'any'}" + _of_attention(wanted)
        )


def _of_attention(wanted: Wanted) -> str:
    """What else was asked for, where it can rule a layout out."""
    parts = [f"{name} {value}" for name, value in _asked(wanted) if value is not None]
    if not parts:
        return ""
    degrees = "a cp above 1"
    if wanted.ulysses is not None:
        degrees = "ulysses 1 for ring, all-gather and pass-q, cp for ulysses, between for hybrid"
    elif wanted.head_stride is not None:
        degrees = "strategy all-gather, and a cp above 1"
    return f"; and {', '.join(parts)}, which needs {degrees}"


def _asked(wanted: Wanted) -> tuple[tuple[str, Scheme | int | None], ...]:
    return ("strategy", wanted.scheme), ("ulysses", wanted.ulysses), ("head stride", wanted.head_stride)


def _carries_nothing(wanted: Wanted, scheme: Scheme) -> InputError:
    return InputError(f"carrier {wanted.carrier} carries the hops of a ring; strategy {scheme} has none: leave --backend out")


def why(best: StepPrediction, others: list[StepPrediction]) -> str:
    """One sentence: what sets the best apart from the fastest that is laid out otherwise, and from what would be faster."""
    layout = best.layout
    faster = min((p for p in others if not p.memory.fits), key=lambda p: p.step_s, default=None)
    rival = next((p for p in others if p.memory.fits and _shape(p.layout) != _shape(layout)), None)
    parts = []
    if rival is not None:
        more = rival.step_s / best.step_s - 1
        close = " (less than the model can tell apart)" if more < _SAME_STEP else ""
        parts.append(
            f"{more:.1%} faster{close} than cp {rival.layout.cp} x tp {rival.layout.tp} x fsdp {rival.layout.fsdp} "
            f"{rival.layout.scheme_text}: exposed communication {best.exposed_s:.3g} s against {rival.exposed_s:.3g} s, "
            f"computing {best.compute_s:.3g} s against {rival.compute_s:.3g} s"
        )
    if best.memory.fits and faster is not None and faster.step_s < best.step_s:
        parts.append(
            f"cp {faster.layout.cp} x tp {faster.layout.tp} x fsdp {faster.layout.fsdp} {faster.layout.scheme_text} would take "
            f"{faster.step_s:.3g} s but needs {faster.memory.total / 1e9:.0f} GB a GPU"
        )
    same = [p for p in others if _shape(p.layout) == _shape(layout) and p.layout.carrier is not layout.carrier]
    if same:
        spread = max(p.step_s for p in same) / best.step_s - 1
        note = ", less than the model can tell apart" if spread < _SAME_STEP else ""
        parts.append(f"its carrier matters by up to {spread:.1%}{note}")
    return "; ".join(parts)


def _rank(prediction: StepPrediction) -> tuple[bool, float, int, int, int, int, str]:
    layout = prediction.layout
    stride = 0 if layout.head_stride is None else layout.head_stride
    return (not prediction.memory.fits, prediction.step_s, layout.cp, layout.tp, layout.ulysses, stride, layout.carrier)


def _shape(layout: StepLayout) -> tuple[int, int, int, Scheme, int, int | None]:
    return layout.cp, layout.tp, layout.fsdp, layout.scheme, layout.ulysses, layout.head_stride


def _degrees(model: DenseModel, wanted: Wanted, net: Network) -> Iterator[tuple[int, int]]:
    """(cp, tp) whose product divides the GPUs. Tensor ranks stay in one NVLink domain, where their collectives are fast."""
    for tp in _divisors(net.n_gpus) if wanted.tp is None else [wanted.tp]:
        if wanted.tp is None and (tp > net.machine.gpus_per_domain or model.n_kv_heads % tp):
            continue
        if tp < 1 or net.n_gpus % tp:
            continue
        left = net.n_gpus // tp
        for cp in _divisors(left) if wanted.cp is None else [wanted.cp]:
            if cp >= 1 and left % cp == 0 and (wanted.fsdp is None or left // cp == wanted.fsdp):
                yield cp, tp


def _schemes(cp: int, n_kv_heads: int, wanted: Wanted) -> Iterator[tuple[Scheme, int, int | None]]:
    """Scheme, Ulysses degree and head stride; all heads at once is no stride, unless it was asked for."""
    if cp == 1:
        if wanted.scheme in (None, Scheme.RING) and wanted.ulysses in (None, 1) and wanted.head_stride is None:
            yield Scheme.RING, 1, None
        return
    strides: list[int | None] = [wanted.head_stride]
    if wanted.head_stride is None:
        strides += [stride for stride in _divisors(n_kv_heads) if stride < n_kv_heads]
    every: list[tuple[Scheme, int, int | None]] = [(Scheme.RING, 1, None), (Scheme.PASS_Q, 1, None), (Scheme.ULYSSES, cp, None)]
    every += [(Scheme.ALL_GATHER, 1, stride) for stride in strides]
    every += [(Scheme.HYBRID, u, None) for u in _divisors(cp) if 1 < u < cp]
    for scheme, ulysses, stride in every:
        strided = wanted.head_stride is None or scheme is Scheme.ALL_GATHER
        if wanted.scheme in (None, scheme) and wanted.ulysses in (None, ulysses) and strided:
            yield scheme, ulysses, stride


def _carriers(net: Network, layout: StepLayout, wanted: Wanted) -> list[Carrier]:
    if layout.ring == 1:
        return [Carrier.NCCL] if wanted.carrier in (None, Carrier.NCCL) or layout.cp == 1 else []
    if wanted.carrier is not None:
        return [wanted.carrier]
    return carriers(net, layout)


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
