"""The `.metadata` file of a torch.distributed.checkpoint, without torch and without unpickling.

Rule: the file is a pickle, and a pickle can run anything. Here its instructions are read one by one and only build plain data:
no class is looked up, no name is imported, nothing is called. What torch's classes would hold is read off their names.
"""

import io
import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from shardroute.planner.exchange.distributed_checkpoints import StoredTensor, describe_checkpoint
from shardroute.planner.shares import Told, parts
from shardroute.topologies.errors import InputError
from shardroute.topologies.files import read_file

# Some 100 bytes a chunk: a million chunks have 100 MB.
_MAX_BYTES: Final = 2**28
_MARK: Final = object()
# Instructions between two shares that are told: some milliseconds. And the share of running them in reading.
_INSTRUCTIONS: Final = 1000
_RUN: Final = 0.7


@dataclass(frozen=True, slots=True)
class _Name:
    """A class or function that the pickle names, "torch.Size"."""

    text: str


@dataclass(slots=True, eq=False)
class _Built:
    """What the pickle would make: of which class or call, from which arguments, with which state."""

    kind: str
    arguments: object
    state: object = None
    items: dict[object, object] = field(default_factory=dict)
    listed: list[object] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Properties:
    dtype: str


@dataclass(frozen=True, slots=True)
class _Chunk:
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Tensor:
    size: tuple[int, ...]
    properties: _Properties
    chunks: tuple[_Chunk, ...]


@dataclass(frozen=True, slots=True)
class _Index:
    fqn: str
    offset: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Info:
    relative_path: str


@dataclass(frozen=True, slots=True)
class _Metadata:
    state_dict_metadata: Mapping[str, object]
    storage_data: object


def read_checkpoint_metadata(path: str | Path, progress: Told | None = None) -> tuple[StoredTensor, ...]:
    """The tensors of a checkpoint, by its folder or its `.metadata` file, as describe_checkpoint gives them; progress is told the
    share that is read.

    Raises InputError, led by the path, for a file that isn't such a pickle.
    """
    path = Path(path)
    if path.is_dir():
        path = path / ".metadata"
    data = read_file(path, _MAX_BYTES)
    try:
        running, building = parts(progress, (_RUN, 1.0 - _RUN))
        root = _run(data, running)
        running(1.0)
        metadata = _metadata(root)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError, MemoryError) as error:
        raise InputError(f"{path}: expected a checkpoint's metadata, found no such pickle ({error})") from None
    found = describe_checkpoint(metadata)
    building(1.0)
    return found


def _metadata(root: object) -> _Metadata:
    state = _state(root, "Metadata")
    tensors = state.get("state_dict_metadata")
    if not isinstance(tensors, dict):
        raise InputError("expected a checkpoint's metadata, found no state_dict_metadata")
    places = state.get("storage_data")
    return _Metadata(
        {_word(name): _tensor(entry) for name, entry in tensors.items()},
        {_index(index): _info(info) for index, info in places.items()} if isinstance(places, dict) else None,
    )


def _tensor(entry: object) -> object:
    if not isinstance(entry, _Built) or entry.kind.rpartition(".")[2] != "TensorStorageMetadata":
        return None
    state = _state(entry, "TensorStorageMetadata")
    properties = state["properties"]
    inner = properties.state if isinstance(properties, _Built) else None
    dtype = inner[0] if isinstance(inner, tuple) and inner else inner.get("dtype") if isinstance(inner, dict) else None
    chunks = state["chunks"]
    if not isinstance(chunks, list):
        raise InputError("expected a list of chunks")
    return _Tensor(_sizes(state["size"]), _Properties(_word(dtype)), tuple(_chunk(chunk) for chunk in chunks))


def _chunk(chunk: object) -> _Chunk:
    state = _state(chunk, "ChunkStorageMetadata")
    return _Chunk(_sizes(state["offsets"]), _sizes(state["sizes"]))


def _index(index: object) -> _Index:
    state = _state(index, "MetadataIndex")
    offset = state.get("offset")
    return _Index(_word(state["fqn"]), () if offset is None else _sizes(offset))


def _info(info: object) -> _Info:
    return _Info(_word(_state(info, "_StorageInfo")["relative_path"]))


def _state(value: object, name: str) -> dict[object, object]:
    if not isinstance(value, _Built) or value.kind.rpartition(".")[2] != name or not isinstance(value.state, dict):
        raise InputError(f"expected torch's {name}, found {value.kind if isinstance(value, _Built) else type(value).__name__}")
    return value.state


def _word(value: object) -> str:
    """A string, or a name such as a dtype's. Nothing else is made text: a tuple may hold one twice that holds one twice."""
    if isinstance(value, _Name):
        return value.text
    if not isinstance(value, str):
        raise InputError(f"expected text, found {type(value).__name__}")
    return value


def _sizes(value: object) -> tuple[int, ...]:
    """The numbers of a torch.Size."""
    numbers = value
    if isinstance(value, _Built) and value.kind == "torch.Size" and isinstance(value.arguments, tuple):
        numbers = value.arguments[0] if value.arguments else ()
    if not isinstance(numbers, tuple | list) or not all(isinstance(n, int) for n in numbers):
        raise InputError("expected a torch.Size of whole numbers")
    return tuple(n for n in numbers if isinstance(n, int))


def _run(data: bytes, progress: Told) -> object:
    """What is left on the stack at the pickle's end; progress is told the share of its bytes that is read. Raises InputError
    for an instruction that plain metadata has no use for.
    """
    stack: list[object] = []
    memo: dict[int, object] = {}
    for number, (opcode, argument, at) in enumerate(pickletools.genops(io.BytesIO(data))):
        if number % _INSTRUCTIONS == 0:
            progress((at or 0) / len(data))
        name = opcode.name
        if name == "STOP":
            return stack.pop()
        if name in ("PROTO", "FRAME"):
            continue
        if name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in ("BINPUT", "LONG_BINPUT", "PUT"):
            memo[_place(argument)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(memo[_place(argument)])
        elif name == "MARK":
            stack.append(_MARK)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name]())
        elif name in _LITERALS:
            stack.append(argument)
        elif name == "GLOBAL":
            stack.append(_Name(str(argument).replace(" ", ".")))
        elif name in _STEPS:
            _STEPS[name](stack)
        else:
            raise InputError(f"byte {at}: {name}, an instruction for which a checkpoint's metadata has no use")
    raise InputError("the pickle ends too early")


def _place(argument: object) -> int:
    assert isinstance(argument, int)  # pickletools decodes the memo's places so
    return argument


def _to_mark(stack: list[object]) -> list[object]:
    found: list[object] = []
    while (top := stack.pop()) is not _MARK:
        found.append(top)
    return found[::-1]


def _tuple(n: int | None) -> Callable[[list[object]], None]:
    def step(stack: list[object]) -> None:
        items = _to_mark(stack) if n is None else [stack.pop() for _ in range(n)][::-1]
        stack.append(tuple(items))

    return step


def _list(stack: list[object]) -> None:
    stack.append(_to_mark(stack))


def _dict(stack: list[object]) -> None:
    items = _to_mark(stack)
    stack.append({})
    _store(stack[-1], items)


def _append(stack: list[object]) -> None:
    item = stack.pop()
    _extend(stack[-1], [item])


def _appends(stack: list[object]) -> None:
    items = _to_mark(stack)
    _extend(stack[-1], items)


def _extend(target: object, items: list[object]) -> None:
    if isinstance(target, _Built):
        target.listed += items
    elif isinstance(target, list):
        target += items
    else:
        raise InputError("items are added to what is no list")


def _setitem(stack: list[object]) -> None:
    value, key = stack.pop(), stack.pop()
    _store(stack[-1], [key, value])


def _setitems(stack: list[object]) -> None:
    items = _to_mark(stack)
    _store(stack[-1], items)


def _store(target: object, items: list[object]) -> None:
    if isinstance(target, _Built):
        target = target.items
    if not isinstance(target, dict):
        raise InputError("items are stored in what is no dictionary")
    target.update(zip(_hashable(items[::2]), items[1::2], strict=True))


def _hashable(items: list[object]) -> list[object]:
    """The items, none a tuple: to hash one that is nested a million deep overflows the stack, and no metadata needs it."""
    for item in items:
        if isinstance(item, tuple):
            raise InputError("a tuple is a key, for which a checkpoint's metadata has no use")
    return items


def _stack_global(stack: list[object]) -> None:
    name, module = stack.pop(), stack.pop()
    stack.append(_Name(f"{_word(module)}.{_word(name)}"))


def _make(stack: list[object]) -> None:
    arguments, kind = stack.pop(), stack.pop()
    stack.append(_Built(kind.text if isinstance(kind, _Name) else "?", arguments))


def _build(stack: list[object]) -> None:
    state, built = stack.pop(), stack[-1]
    if not isinstance(built, _Built):
        raise InputError("a state is set on what isn't an object")
    built.state = state


def _set(stack: list[object]) -> None:
    items = _to_mark(stack)
    _extend_set(stack[-1], items)


def _extend_set(target: object, items: list[object]) -> None:
    if not isinstance(target, set):
        raise InputError("items are added to what is no set")
    target.update(_hashable(items))


def _pop(stack: list[object]) -> None:
    stack.pop()


_CONSTANTS: Final[Mapping[str, Callable[[], object]]] = {
    "NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False, "EMPTY_TUPLE": tuple, "EMPTY_LIST": list,
    "EMPTY_DICT": dict, "EMPTY_SET": set,
}  # fmt: skip
_LITERALS: Final = frozenset({
    "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "INT", "LONG", "BINFLOAT", "FLOAT", "UNICODE", "BINUNICODE",
    "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "STRING", "BINSTRING", "SHORT_BINSTRING",
})  # fmt: skip
_STEPS: Final[Mapping[str, Callable[[list[object]], None]]] = {
    "TUPLE": _tuple(None), "TUPLE1": _tuple(1), "TUPLE2": _tuple(2), "TUPLE3": _tuple(3), "LIST": _list, "DICT": _dict,
    "APPEND": _append, "APPENDS": _appends, "SETITEM": _setitem, "SETITEMS": _setitems, "ADDITEMS": _set,
    "STACK_GLOBAL": _stack_global, "REDUCE": _make, "NEWOBJ": _make, "BUILD": _build, "POP": _pop,
}  # fmt: skip
