"""One side of a transfer from whatever file says it: a layout of one's own, or a safetensors checkpoint."""

import os
from pathlib import Path

from shardroute.planner.exchange.inventories import Inventory
from shardroute.planner.exchange.layout_files import load_layout
from shardroute.planner.exchange.safetensors import load_safetensors


def read_inventory(path: str | Path) -> Inventory:
    """The inventory in a layout file, or of a checkpoint: a folder, a `.safetensors` file, a `.safetensors.index.json`.

    Of a checkpoint, rank i holds file i whole. Raises InputError as `load_layout` and `load_safetensors` do.
    """
    path = Path(path)
    if os.path.isdir(path) or path.name.endswith((".safetensors", ".safetensors.index.json")):
        return load_safetensors(path)
    return load_layout(path)
