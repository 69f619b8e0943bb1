"""One side of a transfer from whatever file says it: a layout of one's own, a safetensors or a PyTorch distributed checkpoint."""

import os
from pathlib import Path
from typing import Final

from shardroute.planner.exchange.checkpoint_metadata import read_checkpoint_metadata
from shardroute.planner.exchange.distributed_checkpoints import inventory_of_checkpoint
from shardroute.planner.exchange.inventories import Inventory
from shardroute.planner.exchange.layout_files import load_layout
from shardroute.planner.exchange.safetensors import load_safetensors
from shardroute.planner.shares import Told, parts

# The share of the metadata's pickle in reading a checkpoint.
_READ: Final = 0.7
# A byte of layout files of some 20 MB: 0.07, and up to 0.3 where keys are looked at, too.
_READING_US: Final = 0.15


def read_inventory(path: str | Path, progress: Told | None = None) -> Inventory:
    """The inventory in a layout file, or of a checkpoint: a folder, a `.safetensors` file, a `.safetensors.index.json`.

    Of a safetensors checkpoint, rank i holds file i whole. A folder with a `.metadata`, or that file, is a checkpoint of
    torch.distributed.checkpoint: each chunk is on the rank that wrote it. progress is told the share that is done.
    Raises InputError as `load_layout`, `load_safetensors` and `read_checkpoint_metadata` do.
    """
    path = Path(path)
    if path.name == ".metadata" or os.path.exists(path / ".metadata"):
        read, laid = parts(progress, (_READ, 1.0 - _READ))
        stored = read_checkpoint_metadata(path, read)
        found = inventory_of_checkpoint(stored)
        laid(1.0)
        return found
    if os.path.isdir(path) or path.name.endswith((".safetensors", ".safetensors.index.json")):
        return load_safetensors(path, progress=progress)
    return load_layout(path, progress)


def reading_us(path: str | Path) -> float | None:
    """About the microseconds that `read_inventory` takes; None where a file's size doesn't tell."""
    try:
        return None if os.path.isdir(path) or str(path).endswith(".safetensors") else _READING_US * os.path.getsize(path)
    except (OSError, ValueError):
        return None
