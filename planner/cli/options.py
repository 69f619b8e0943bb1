"""Options as the user typed them: an error about the value of one leads with its name."""

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from shardroute.planner.cli.output import progress
from shardroute.planner.exchange import Inventory, read_inventory
from shardroute.planner.exchange.read import reading_us
from shardroute.planner.file_kinds import CONFIG, LAYOUT, MACHINE, RATES, reading
from shardroute.planner.layouts import Model, ParallelSpec, load_model, parse_spec
from shardroute.planner.shares import Told
from shardroute.planner.steps import StepRates, load_rates, rates_names
from shardroute.topologies.errors import InfeasibleError, InputError, PlanError
from shardroute.topologies.files import check_writable
from shardroute.topologies.machines import Machine, parse_machine
from shardroute.topologies.units import parse_bytes

# "dgx-h100 x 32" without its count.
_COUNT = re.compile(r"\s*[x×]\s*\d+\s*$")


@contextmanager
def about(option: str) -> Iterator[None]:
    """Lead an error that the option's value brings about by the option, `--seq: ...`, unless the error names it itself."""
    try:
        yield
    except (InputError, InfeasibleError, PlanError) as error:
        if re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", str(error)):
            raise
        said = str(error).removeprefix(f"{option.lstrip('-').replace('-', ' ')}: ")
        raise type(error)(f"{option}: {said}") from error


def bytes_of(option: str, text: str) -> int:
    """The bytes that the option's text says. Raises InputError as `parse_bytes` does, led by the option."""
    with about(option):
        return parse_bytes(text)


def machine_of(text: str, option: str = "--machine") -> tuple[Machine, int | None]:
    """The machine and the count that the option's text says. Raises InputError as `parse_machine` does, led by the option."""
    with about(option), reading(_COUNT.sub("", text.strip()), MACHINE):
        return parse_machine(text)


def model_of(name: str, scale: int = 1, *, mtp: bool = False, precision: str | None = None) -> Model:
    """The model that --model, --scale, --mtp and --precision say. Raises InputError as `load_model` does, led by the option."""
    try:
        return load_model(name, scale, mtp=mtp, precision=precision)
    except InputError:
        # One option after the other, until the one that it is about.
        with about("--model"), reading(name, CONFIG):
            load_model(name)
        with about("--scale"):
            load_model(name, scale)
        with about("--mtp"):
            load_model(name, scale, mtp=mtp)
        with about("--precision"):
            load_model(name, scale, mtp=mtp, precision=precision)
        raise


def inventory_of(option: str, path: str, done: Told | None = None) -> Inventory:
    """What the option's layout file or checkpoint holds; `done` is told the share; where it is None, progress is shown. Raises
    InputError as `read_inventory` does, led by the option.
    """
    shown = progress(f"reading {path}", reading_us(path)) if done is None else nullcontext(done)
    with about(option), reading(path, LAYOUT), shown as told:
        return read_inventory(path, told)


def spec_of(option: str, text: str) -> ParallelSpec:
    """The layout that the option's text says. Raises InputError as `parse_spec` does, led by the option."""
    with about(option):
        return parse_spec(text)


def rates_of(machine: Machine, name: str | None) -> StepRates:
    """The rates that --rates says, else the machine's own. Raises InputError as `load_rates` does, led by the option."""
    if name is None:
        return load_rates(machine.name)
    if name not in rates_names() and not name.endswith(".toml"):
        raise InputError(f"--rates {name!r} is not known; expected one of {', '.join(rates_names())}, or a FILE.toml")
    with about("--rates"), reading(name, RATES):
        return load_rates(name)


def check_known(option: str, name: str, known: Collection[str]) -> None:
    """Raise InputError, with those that there are, for a name that isn't one of them."""
    if name not in known:
        raise InputError(f"{option} {name!r} is not known; expected one of {', '.join(known)}")


def check_output(path: str | None, what: str, option: str = "--output", suffixes: tuple[str, ...] = ()) -> None:
    """Raise InputError, before anything takes time, for a path that can't be written to, or that ends in none of the suffixes
    where there are some; `what` is what goes there. None is no path.
    """
    if path is None:
        return
    if suffixes and Path(path).suffix.lower() not in suffixes:
        ends = f"{', '.join(suffixes[:-1])} or {suffixes[-1]}" if len(suffixes) > 1 else suffixes[0]
        raise InputError(f"{option} {path}: {what} goes to a file that ends in {ends}")
    with about(option):
        check_writable(path, what)
