"""One side of a transfer from whatever file says it: a layout of one's own, a safetensors or a PyTorch distributed checkpoint."""

import os
from pathlib import Path

from shardroute.planner.exchange.checkpoint_metadata import read_checkpoint_metadata
from shardroute.planner.exchange.distributed_checkpoints import inventory_of_checkpoint
from shardroute.planner.exchange.inventories import Inventory
from shardroute.planner.exchange.layout_files import load_layout
from shardroute.planner.exchange.safetensors import load_safetensors


def read_inventory(path: str | Path) -> Inventory:
    """The inventory in a layout file, or of a checkpoint: a folder, a `.safetensors` file, a `.safetensors.index.json`.

    Of a safetensors checkpoint, rank i holds file i whole. A folder with a `.metadata`, or that file, is a checkpoint of
    torch.distributed.checkpoint: each chunk is on the rank that wrote it. Raises InputError as `load_layout`, `load_safetensors`
    and `read_checkpoint_metadata` do.
    """
    path = Path(path)
    if path.name == ".metadata" or os.path.exists(path / ".metadata"):
        return inventory_of_checkpoint(read_checkpoint_metadata(path))
    if os.path.isdir(path) or path.name.endswith((".safetensors", ".safetensors.index.json")):
        return load_safetensors(path)
    return load_layout(path)
