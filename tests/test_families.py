"""Every family under every convention, element by element and in order, against what the frameworks' own code would store."""

import numpy as np
import pytest
from family_oracles import TINY, fsdp_family, megatron_family, serving_family, tiny
from framework_oracles import Job, flat, layout_buffers, whole_tensors

from shardroute.planner.layouts import Mesh, Model, Shard, Side, StridedShard, lay_out, overlap, parse_spec, place
from shardroute.planner.refits import refit_problem
from shardroute.topologies.errors import InputError


def side_of(convention: str, model: Model, spec: str, first_rank: int = 0) -> Side:
    return lay_out(convention, model, parse_spec(spec), first_rank)


def models() -> list[Model]:
    """Every small family, with and without the layers that predict further tokens."""
    found = [tiny(name) for name in TINY]
    return found + [tiny(name, mtp=True) for name, config in TINY.items() if "num_nextn_predict_layers" in config]


ALL = pytest.mark.parametrize("model", models(), ids=lambda m: m.name + ("+mtp" if m.has_mtp else ""))


def even_stages(model: Model, n: int) -> tuple[int, ...]:
    return tuple(len(part) for part in np.array_split(np.arange(model.n_layers), n))


@ALL
@pytest.mark.parametrize(
    ("stages", "tp", "cp", "dp", "ep", "etp"), [(1, 1, 1, 1, 1, 1), (1, 2, 1, 2, 2, 2), (2, 2, 1, 2, 4, 1), (2, 4, 2, 1, 2, 2)]
)
def test_megatron_stores_every_family_so(model: Model, stages: int, tp: int, cp: int, dp: int, ep: int, etp: int) -> None:
    if not model.n_experts:
        ep = etp = 1
    job = Job(even_stages(model, stages), tp=tp, cp=cp, dp=dp, ep=ep, etp=etp)

    side = side_of("megatron", model, job.spec)

    assert side.n_ranks == job.n_ranks
    assert flat(layout_buffers(model, side.layout)) == flat(megatron_family(model, job))


@ALL
@pytest.mark.parametrize("server", ["vllm", "sglang"])
@pytest.mark.parametrize(
    ("stages", "tp", "dp", "ep"), [(1, 1, 1, 1), (1, 2, 2, 1), (2, 4, 1, 1), (1, 4, 1, 4), (1, 1, 2, 4), (2, 2, 1, 4)]
)
def test_serving_frameworks_store_every_family_so(model: Model, server: str, stages: int, tp: int, dp: int, ep: int) -> None:
    ep = ep if model.n_experts else 1
    job = Job(even_stages(model, stages), tp=tp, dp=dp, ep=ep)

    side = side_of(server, model, job.spec, 3)

    assert side.n_ranks == dp * stages * max(tp, ep)
    assert flat(layout_buffers(model, side.layout)) == flat(serving_family(model, job, server, 3))


@ALL
def test_sglang_cuts_each_expert_over_the_ranks_that_tp_has_beyond_ep(model: Model) -> None:
    if not model.n_experts:
        return
    job = Job((model.n_layers,), tp=4, ep=2, dp=2)

    side = side_of("sglang", model, job.spec)

    assert flat(layout_buffers(model, side.layout)) == flat(serving_family(model, job, "sglang"))


@ALL
@pytest.mark.parametrize(
    ("spec", "replicas", "shards", "tp"), [("FSDP3", 1, 3, 1), ("HSDP2x4", 2, 4, 1), ("HSDP2x3 x TP2", 2, 3, 2)]
)
def test_fsdp_stores_every_family_so(model: Model, spec: str, replicas: int, shards: int, tp: int) -> None:
    if tp > 1 and model.family in ("gpt_oss", "nemotron_h"):
        with pytest.raises(InputError, match="fsdp has no tensor-parallel plan"):
            side_of("fsdp", model, spec)
        return

    side = side_of("fsdp", model, spec)

    assert side.n_ranks == replicas * shards * tp
    assert flat(layout_buffers(model, side.layout)) == flat(fsdp_family(model, replicas, shards, tp))


@pytest.mark.parametrize(("shards", "tp"), [(2, 2), (4, 2), (2, 1)])
def test_fsdp_over_tp_is_what_dtensor_calls_a_strided_shard(shards: int, tp: int) -> None:
    model = tiny("llama")
    mesh = Mesh.of({"dp": shards, "tp": tp})

    side = side_of("fsdp", model, f"FSDP{shards} x TP{tp}")

    strided, plain = [StridedShard(0, split_factor=tp), Shard(0)], [Shard(0), Shard(1)]
    for name, placements in (("mlp.up_proj", strided), ("mlp.down_proj", plain)):
        i = [t.name for t in model.tensors].index(f"model.layers.0.{name}.weight")
        expected, found = place(model.tensors[i].shape, mesh, placements), side.layout.fragments[i]
        assert sorted(zip(found.rank.tolist(), found.lo.tolist(), found.hi.tolist(), strict=True)) == sorted(
            zip(expected.rank.tolist(), expected.lo.tolist(), expected.hi.tolist(), strict=True)
        )


@ALL
def test_a_checkpoint_holds_every_parameter_whole_and_every_expert_apart(model: Model) -> None:
    w = whole_tensors(model)

    side = side_of("huggingface", model, "PP2 x DP2")

    held = layout_buffers(model, side.layout)
    expected = {}
    for name, whole in w.items():
        for i, part in enumerate(whole) if "*" in name else [(0, whole)]:
            expected[name.replace("*", str(i))] = part.ravel().tolist()
    for reader in (range(0, 2), range(2, 4)):
        found = {name: content.tolist() for (rank, name), content in held.items() if rank in reader}
        assert found == expected


@ALL
@pytest.mark.parametrize("source", ["FSDP4", "TP2 x PP2[{}] x DP2"])
@pytest.mark.parametrize(("target", "server"), [("TP4", "vllm"), ("TP2 x DP2", "sglang")])
def test_every_need_of_a_server_is_covered_once_by_what_trainers_hold(
    model: Model, source: str, target: str, server: str
) -> None:
    stages = ",".join(str(n) for n in even_stages(model, 2))

    problem, summary = refit_problem(model, parse_spec(source.format(stages)), parse_spec(target), to_convention=server)

    assert summary.source["convention"] == ("fsdp" if source.startswith("FSDP") else "megatron")
    for c in problem.classes:
        pieces = overlap(c.source, c.target)
        copies = sum(int(n) * len(pieces.needers[p]) for n, p in zip(pieces.n_elements, pieces.pattern, strict=True))
        assert copies == int(c.target.n_elements.sum())
