"""Texts that inputs are made of, where the repository has no file of the kind: small, right, and of every form."""

from typing import Final


def _lines(*parts: str) -> bytes:
    return "\n".join(parts).encode()


def _safetensors(header: str) -> bytes:
    return len(header).to_bytes(8, "little") + header.encode() + bytes(64)


# Small plans of every kind: relays, staging and barriers, collectives, sums, attention.
PLANS: Final[dict[str, str]] = {
    "relay": "plan --shape 12,10 --dtype f32 --from-mesh x=3 --from-placements S0 --to-mesh dp=2,tp=2 --to-placements R,S1 "
    "--machine dgx-h100 --strategy domain-relay",
    "packed": "plan --shape 8,8 --dtype f32 --from-mesh x=2 --from-placements S0 --to-mesh x=2 --to-placements R "
    "--machine dgx-h100 --strategy m2n-pack",
    "gathered": "plan --shape 8,8 --dtype f32 --from-mesh x=2 --from-placements S0 --to-mesh x=3 --to-placements R "
    "--machine dgx-h100 --strategy gather-broadcast",
    "summed": "plan --shape 8,6 --dtype f32 --from-mesh x=4 --from-placements P --to-mesh x=4 --to-placements R "
    "--machine cpu-processes --strategy two-shot",
    "ring": "plan-ring --cp 4 --heads 4 --head-dim 8 --seq 64 --dtype f32 --machine cpu-processes",
}  # fmt: skip
COMMANDS: Final = (
    "plan --shape 64,64 --from-mesh x=2 --from-placements S0 --to-mesh dp=2,tp=2 --to-placements R,S1 --machine dgx-h100 "
    "--strategy greedy --dtype f32 --message-size 1MiB --max-staging 512MiB --nic 3=25GB/s --json",
    "plan --model qwen3-0.6b --from TP2 --to TP1 --machine dgx-h100 --strategy direct --scale 64 --json",
    "bound --shape 64,64 --from-mesh x=2 --from-placements S0 --to-mesh x=4 --to-placements S1 --machine dgx-h100",
    "choose --machine dgx-h100 --op all-gather --bytes 32MiB --ranks 8 --dtype bf16 --library-version nccl=2.29.7",
    "plan-ring --cp 4 --heads 4 --kv-heads 2 --head-dim 8 --seq 64 --batch 2 --machine dgx-h100 --strategy ulysses",
    "ring --model llama-3-8b --seq 8192 --machine dgx-h100 --gpus 8 --cp 4 --tp 2 --fsdp 1 --batch 0.5",
    "layout --model qwen3-0.6b --spec TP2 --convention vllm --rank 1",
    "show relay.plan --rank 1", "check relay.plan", "simulate gathered.plan --json", "explain relay.plan",
    "steps summed.plan -o s.csv", "diff relay.plan relay.plan",
    "trace relay.plan relay.json -o t.json", "compare relay.json relay.json",
    "replan relay.plan --gone 6 --new 7=4 --nic 1=25GB/s --slow-domain 0=0.5",
    "import --train 'torchrun --nproc-per-node 8 p.py --tensor-model-parallel-size 4' --serve 'vllm serve m -tp 8' --gpus 8",
    "machines import --hosts node[001-002] dump.xml", "machines show dgx-h100", "models show qwen3-0.6b --json", "schema plan",
    "strategies --shape 8,8 --from-mesh x=2 --from-placements S0 --to-mesh x=2 --to-placements R --machine dgx-h100",
    "calibrate nccl.txt --machine dgx-h100",
)  # fmt: skip
MACHINE_TEXTS: Final = [b"dgx-h100", b"dgx-h100 x 32", b"gb200-nvl72 x 2"]
NOTATIONS: Final = [
    b"TP4 x PP8 x EP16", b"TP8 x DP16", b"TP4 x PP8[11,12,12,12,12,12,12,11] x DP4", b"PP2[0,31,30,0] x VPP2", b"HSDP3x8 x TP2",
    b"TP4 x PP8 x CP2 order=tp-cp-ep-pp-dp", b"FSDP16", b"TP8 x EP4 x ETP1 x DP2",
]  # fmt: skip
TENSORS: Final = [
    _lines("256,2048,7168", "bf16", "ep=16", "S0", "dp=8,tp=32", "R,S1"),
    _lines("8,6", "f32", "x=2,y=2", "S0,SS0:2", "x=4", "S1", "0-3", "4-7"),
    _lines("4096,1024", "f32", "dp=2,tp=2", "P,S1", "dp=2,tp=2", "R,_S(0,4)"),
]
UNITS: Final = [b"b 400 Gb/s", b"b 12 GiB/s", b"B 80 GB", b"B 64MiB", b"s 18 us", b"s 1.5 ms", b"F 1400 TFLOP/s"]
LAUNCHES: Final = [
    b"torchrun --nnodes 16 --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 4 --pipeline-model-parallel-size 8 "
    b"--num-layers 94 --decoder-first-pipeline-num-layers 11 --decoder-last-pipeline-num-layers 11",
    b"t --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'E|t*31|t*30|L' --num-layers 61",
    b"torchrun --nproc_per_node=8 train.py --parallelism.data_parallel_shard_degree=-1 --parallelism.tensor_parallel_degree 2",
    b"accelerate launch --use_fsdp --fsdp_sharding_strategy HYBRID_SHARD --num_machines 2 --num_processes 16 t.py",
    b"VLLM_PP_LAYER_PARTITION=10,12 python -m vllm.entrypoints.api_server --model m -pp 2",
    b"vllm serve m -tp 8 -dp 4 --enable_expert_parallel",
    b"python -m sglang.launch_server --model-path m --tp 8 --ep-size 4 --dp 2",
]
PIPELINES: Final = [b"Et*3|t*4,|(t*5|)*5t*2L", b"Et|(t|)*6tL", b"E|t*31|t*30|L"]
RAILS: Final = [b"host,nic,rail,rate\nh1,mlx5_0,0,400Gb/s\nh1,mlx5_1,1,400Gb/s\n", b"host,nic,rail\na,b,c\n"]
HOSTS: Final = [b"node[001-003,7],login1", b"n[1-4]", b"a,b,c", b"r[1-2]n[01-18]"]
PLACES: Final = [
    _lines("RANK=3", "WORLD_SIZE=8", "LOCAL_RANK=3", "MASTER_ADDR=10.0.0.1", "MASTER_PORT=29500", "TORCHELASTIC_RUN_ID=none"),
    _lines("SLURM_PROCID=2", "SLURM_NTASKS=4", "SLURM_STEP_NODELIST=node[07-09,12],other3", "SLURM_JOB_ID=123456"),
    _lines("OMPI_COMM_WORLD_RANK=1", "OMPI_COMM_WORLD_SIZE=2", "OMPI_COMM_WORLD_LOCAL_SIZE=2", "--rendezvous=tcp://[::1]:29500"),
]
CHANGES: Final = [_lines("6", "7-8", "3,4", "1=25GB/s;2=0"), _lines("0-1", "7", "3", "0-3=200Gb/s")]
LAYOUTS: Final = [
    b'{"format": "shardroute-layout", "version": 1, "layouts": [{"name": "rows", "mesh": {"axes": ["fsdp"], "sizes": [4]}, '
    b'"placements": ["S0"]}], "tensors": [{"name": "q", "shape": [32, 16], "dtype": "bf16", "layout": "rows"}]}',
    b'{"format": "shardroute-layout", "version": 1, "tensors": [{"name": "q", "shape": [32, 16], "dtype": "bf16", "buffers": '
    b'["qk"], "layout": {"fragments": [{"rank": 4, "lo": [0, 0], "hi": [16, 16], "offset": 4, "strides": [16, 1], "buffer_size": '
    b'320}, {"rank": 5, "lo": [16, 0], "hi": [32, 16], "buffer_size": 320}]}}], "aliases": [{"buffer": "qk", "memory": "m"}]}',
]
SAFETENSORS: Final = [
    _safetensors('{"a": {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]}, "b": {"dtype": "BF16", "shape": [16], '
                 '"data_offsets": [32, 64]}, "__metadata__": {"format": "pt"}}'),
]  # fmt: skip
INDEXES: Final = [b'{"metadata": {"total_size": 32}, "weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}']
