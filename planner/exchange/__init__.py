"""Layouts from and to frameworks and files. No framework is ever imported: objects are read by their public attributes."""

from shardroute.planner.exchange.checkpoint_metadata import read_checkpoint_metadata
from shardroute.planner.exchange.distributed_checkpoints import (
    StoredChunk,
    StoredTensor,
    describe_checkpoint,
    inventory_of_checkpoint,
)
from shardroute.planner.exchange.dtensors import (
    TorchSharding,
    from_device_mesh,
    from_dtensor,
    from_dtensor_spec,
    from_torch_placements,
    to_torch,
)
from shardroute.planner.exchange.inventories import Inventory, inventory_of, problem_between
from shardroute.planner.exchange.jax_shardings import from_named_sharding, from_partition_spec
from shardroute.planner.exchange.layout_files import layout_schema, load_layout, parse_layout, save_layout
from shardroute.planner.exchange.read import read_inventory
from shardroute.planner.exchange.safetensors import load_safetensors, read_safetensors_header
from shardroute.planner.exchange.shardings import Sharding

__all__ = [
    "Inventory",
    "Sharding",
    "StoredChunk",
    "StoredTensor",
    "TorchSharding",
    "describe_checkpoint",
    "from_device_mesh",
    "from_dtensor",
    "from_dtensor_spec",
    "from_named_sharding",
    "from_partition_spec",
    "from_torch_placements",
    "inventory_of",
    "inventory_of_checkpoint",
    "layout_schema",
    "load_layout",
    "load_safetensors",
    "parse_layout",
    "problem_between",
    "read_checkpoint_metadata",
    "read_inventory",
    "read_safetensors_header",
    "save_layout",
    "to_torch",
]
