"""The file edge of models: a Hugging Face `config.json` becomes checked values that families read by key.

Rule: nothing is guessed. A key without a default in Transformers must be there; a value of the wrong kind is
refused; both errors name the file and the key.
"""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from shardroute.planner.layouts.tensors import dtype_name
from shardroute.topologies.documents import unique_keys
from shardroute.topologies.errors import InputError
from shardroute.topologies.files import read_file

# Published ones have some kB, those that list every quantised module some MB.
_MAX_BYTES: Final = 2**25
# Far above any model (126 layers, 512 experts, a vocabulary of 2^18), low enough that each is laid out in memory at once.
_MOST_LAYERS: Final = 10**4
_MOST_EXPERTS: Final = 10**5
_MOST_EXPERTS_OF_ALL_LAYERS: Final = 10**6
_MOST: Final = 2**24


class Config:
    """The values of one config.json, read through accessors that check them.

    `factor` divides every width (a size along which a matrix shrinks when the model is scaled); counts stay
    as they are. `widths` collects each width that was asked for, unscaled, so that the valid factors are
    known after one reading. `mtp` asks for the layers that predict further tokens.
    """

    def __init__(self, values: Mapping[str, object], where: str, factor: int = 1, mtp: bool = False) -> None:
        self.where = where
        self.factor = factor
        self.mtp = mtp
        self.widths: dict[str, int] = {}
        self._values = values
        self._n_layers = self._n_experts = 1

    @classmethod
    def read(cls, path: Path, mtp: bool = False) -> "Config":
        """The config in a file, or in the `config.json` of a folder. Else InputError."""
        file = path / "config.json" if os.path.isdir(path) else path
        try:
            data = read_file(file, _MAX_BYTES)
        except InputError as error:
            raise InputError(f"{error}; expected a Hugging Face config.json") from None
        try:
            values = json.loads(data.decode(), object_pairs_hook=unique_keys)
        except UnicodeDecodeError:
            raise InputError(f"{file}: expected the JSON of a Hugging Face config, found bytes that are no UTF-8 text") from None
        except (ValueError, RecursionError) as error:
            raise InputError(f"{file}: expected the JSON of a Hugging Face config ({error})") from None
        if not isinstance(values, dict):
            raise InputError(f"{file}: expected a JSON object, as a Hugging Face config is, found {_kind(values)}")
        return cls(values, str(file), mtp=mtp)

    def shrunk(self, factor: int) -> "Config":
        """The same config, read with every width divided by `factor`."""
        return Config(self._values, self.where, factor, self.mtp)

    @property
    def common_width(self) -> int:
        """The greatest common divisor of every width read so far: a factor is valid when it divides this."""
        return math.gcd(*self.widths.values())

    def spelled(self, *keys: str) -> str:
        """The first of these keys that is there, or the first of all: Transformers renamed some over time."""
        return next((key for key in keys if self._values.get(key) is not None), keys[0])

    def given(self, key: str) -> bool:
        """Whether a key is there and neither null, false nor 0."""
        return bool(self._values.get(key))

    def text(self, key: str) -> str:
        """A key whose value is text."""
        value = self._needed(key)
        if not isinstance(value, str):
            raise self._wrong(key, "text", value)
        return value

    def count(self, key: str, default: int | None = None, least: int = 1) -> int:
        """A whole number that scaling leaves alone; null or absent gives `default` when there is one."""
        value = self._needed(key) if default is None else self._optional(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self._wrong(key, f"a whole number of at least {least}", value)
        most = _MOST_LAYERS if "layers" in key else _MOST_EXPERTS if "experts" in key else _MOST
        if value > most:
            raise self._wrong(key, f"at most {most}", value)
        if "layers" in key:
            self._n_layers = max(self._n_layers, value)
        if "experts" in key:
            self._n_experts = max(self._n_experts, value)
        if self._n_layers * self._n_experts > _MOST_EXPERTS_OF_ALL_LAYERS:
            raise self._wrong(key, f"at most {_MOST_EXPERTS_OF_ALL_LAYERS} experts in all layers", value)
        return value

    def width(self, key: str, default: int | None = None, least: int = 1) -> int:
        """A size along which the model shrinks, already divided by `factor`; `default` is unscaled. 0 limits no scale."""
        full = self.count(key, default, least)
        if full:
            self.widths[key] = full
        if full % self.factor:
            raise InputError(f"{self.where}: {key} = {full} can't be divided by {self.factor}")
        return full // self.factor

    def flag(self, key: str, default: bool) -> bool:
        """A true or false; absent gives `default`, which must be what Transformers assumes."""
        value = self._optional(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false", value)
        return value

    def counts(self, key: str) -> tuple[int, ...]:
        """A list of whole numbers, empty when absent or null."""
        value = self._optional(key, [])
        if not isinstance(value, list) or not all(isinstance(n, int) and not isinstance(n, bool) for n in value):
            raise self._wrong(key, "a list of whole numbers", value)
        return tuple(value)

    @property
    def dtype(self) -> str:
        """The dtype of the weights: `dtype` (Transformers >= 4.56), else `torch_dtype`, else bf16."""
        for key in ("dtype", "torch_dtype"):
            if self._values.get(key) is not None:
                try:
                    return dtype_name(self.text(key))
                except InputError as error:
                    raise InputError(f"{self.where}: {key}: {error}") from None
        return "bf16"

    def _needed(self, key: str) -> object:
        if self._values.get(key) is None:
            raise InputError(f"{self.where}: key {key!r} is missing; the model's shapes can't be known without it")
        return self._values[key]

    def _optional(self, key: str, default: object) -> object:
        value = self._values.get(key)
        return default if value is None else value

    def _wrong(self, key: str, expected: str, found: object) -> InputError:
        return InputError(f"{self.where}: {key}: expected {expected}, found {json.dumps(found)}")


def _kind(value: object) -> str:
    return "a list" if isinstance(value, list) else json.dumps(value)
