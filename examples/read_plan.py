"""Read a plan file with NumPy alone, without shardroute: how many bytes each rank sends and takes in.

    shardroute plan --shape 4096,1024 --from-mesh tp=4 --from-placements S0 --to-mesh tp=2 --to-placements S1 \
        --machine dgx-h100 -o q.plan
    python examples/read_plan.py q.plan
"""

import json
import re
import sys
import zipfile

import numpy as np

COPY = 0


def itemsize(dtype):
    """Bytes of an element: `bf16` has 16 bits, `f8_e4m3` has 8."""
    return 1 if dtype == "bool" else int(re.match(r"[a-z]+(\d+)", dtype)[1]) // 8


def piece_bytes(header, columns):
    """Bytes of each bundle entry's piece. Tensors alike in dtype and layouts are one class, numbered as they first occur."""
    classes = list(dict.fromkeys((t["dtype"], t["source"], t["target"]) for t in header["tensors"]))
    of_tensor = np.array([classes.index((t["dtype"], t["source"], t["target"])) for t in header["tensors"]])
    n_boxes, at, sizes = columns["boxes.n"], 0, []
    for (dtype, source, _), n in zip(classes, n_boxes.tolist(), strict=True):
        n_dims = len(header["fragment_shapes"][source])
        lo, hi = (columns[f"boxes.{side}"][at : at + n * n_dims].reshape(n, n_dims) for side in ("lo", "hi"))
        sizes.append((hi - lo).prod(axis=1) * itemsize(dtype))
        at += n * n_dims
    first = np.cumsum(n_boxes) - n_boxes
    return np.concatenate(sizes)[first[of_tensor[columns["bundles.tensor"]]] + columns["bundles.piece"]]


def main(path) -> None:
    """Print what the copies of the plan at `path` carry."""
    try:
        with zipfile.ZipFile(path) as archive:
            header = json.loads(archive.read("header.json"))
    except (OSError, zipfile.BadZipFile, KeyError) as error:
        sys.exit(f"{path}: expected a plan file, as `shardroute plan ... -o q.plan` writes one ({error})")
    if (header["format"], header["schema"]) != ("shardroute-plan", 1):
        sys.exit(f"{path}: expected a shardroute plan of schema 1, found {header['format']} {header['schema']}")
    columns = np.load(path)
    ptr = columns["bundles.ptr"]
    before = np.concatenate([[0], np.cumsum(piece_bytes(header, columns))])
    bundle_bytes = before[ptr[1:]] - before[ptr[:-1]]
    copies = columns["steps.op"] == COPY
    src, dst = columns["steps.src"][copies], columns["steps.dst"][copies]
    n_bytes = np.where(src == dst, 0, bundle_bytes[columns["steps.bundle"][copies]])
    sent, taken_in = (np.bincount(rank, weights=n_bytes, minlength=header["n_ranks"]) for rank in (src, dst))
    print(f"{header['strategy']}, {len(copies)} steps, {int(n_bytes.sum())} bytes between ranks")
    for rank in range(header["n_ranks"]):
        print(f"rank {rank}: sends {int(sent[rank])}, takes in {int(taken_in[rank])}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: read_plan.py FILE")
    main(sys.argv[1])
