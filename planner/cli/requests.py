"""What a user asks to move, as options of commands: a model with two layouts, a bare tensor, or two layout files."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields
from functools import wraps
from inspect import Parameter
from typing import Annotated, get_type_hints

import typer

from shardroute.planner.arguments import tensor_problem
from shardroute.planner.cli.options import check_known, inventory_of, model_of, spec_of
from shardroute.planner.cli.output import progress
from shardroute.planner.exchange import problem_between
from shardroute.planner.layouts import CONVENTIONS, Model, model_names
from shardroute.planner.layouts.notation import MAX_RANKS
from shardroute.planner.problems import Problem
from shardroute.planner.refits import groups_problem
from shardroute.planner.shares import Told, parts
from shardroute.topologies.errors import InputError

_MODEL, _TENSOR, _FILES = "A model", "A bare tensor", "Layouts of your own"
_KNOWN = ", ".join(sorted(CONVENTIONS))

MtpOption = Annotated[bool, typer.Option("--mtp", help="With the layers that predict further tokens.", rich_help_panel=_MODEL)]
PrecisionOption = Annotated[
    str | None,
    typer.Option("--precision", help="fp8-block or mxfp8: quantised weights, their scales with them.", rich_help_panel=_MODEL),
]


@dataclass(frozen=True, slots=True)
class Request:
    """What to move: a title for people, facts about how each side lies, and the problem."""

    title: str
    facts: tuple[tuple[str, str], ...]
    problem: Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The options of the three ways to ask, as given, in the order in which --help lists them."""

    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            help="A shipped model (`shardroute models`), or the path of a config.json.",
            rich_help_panel=_MODEL,
            autocompletion=model_names,
        ),
    ] = None
    from_spec: Annotated[
        str | None, typer.Option("--from", help='Training layout, "TP4 x PP8 x EP16".', rich_help_panel=_MODEL)
    ] = None
    to_spec: Annotated[
        str | None,
        typer.Option(
            "--to",
            help='Inference layout, "TP8 x DP16". Several groups of their own: "TP8 x DP8 + TP4 x DP16".',
            rich_help_panel=_MODEL,
        ),
    ] = None
    scale: Annotated[
        int | None,
        typer.Option(
            "--scale",
            help="Shrink every matrix by this factor (a square), keeping the model's structure.",
            rich_help_panel=_MODEL,
        ),
    ] = None
    from_convention: Annotated[
        str | None,
        typer.Option(
            "--from-convention",
            help=f"Who stores the training side: {_KNOWN}. Default: megatron, or fsdp for FSDP and HSDP.",
            rich_help_panel=_MODEL,
        ),
    ] = None
    to_convention: Annotated[
        str | None,
        typer.Option(
            "--to-convention",
            help=f"Who stores the inference side, or each of its groups (vllm + sglang): {_KNOWN}. Default: vllm.",
            rich_help_panel=_MODEL,
        ),
    ] = None
    to_first_rank: Annotated[
        int | None,
        typer.Option(
            "--to-first-rank",
            help="GPU that the destination begins on; 0: the source's own (colocated). Default: after the source's.",
            rich_help_panel=_MODEL,
        ),
    ] = None
    mtp: MtpOption = False
    precision: PrecisionOption = None
    shape: Annotated[str | None, typer.Option("--shape", help="256,2048,7168", rich_help_panel=_TENSOR)] = None
    dtype: Annotated[str | None, typer.Option("--dtype", help="bf16 (the default), f32, ...", rich_help_panel=_TENSOR)] = None
    from_mesh: Annotated[
        str | None, typer.Option("--from-mesh", help="Axes of the source mesh in rank order, ep=16", rich_help_panel=_TENSOR)
    ] = None
    from_placements: Annotated[
        str | None,
        typer.Option(
            "--from-placements",
            help="One an axis: S0 (shard dim 0), R (replicate), SS0:4 (strided shard, split factor 4), P (addends of a sum)",
            rich_help_panel=_TENSOR,
        ),
    ] = None
    to_mesh: Annotated[
        str | None, typer.Option("--to-mesh", help="Axes of the destination mesh, dp=8,tp=32", rich_help_panel=_TENSOR)
    ] = None
    to_placements: Annotated[str | None, typer.Option("--to-placements", help="R,S1", rich_help_panel=_TENSOR)] = None
    from_ranks: Annotated[
        str | None,
        typer.Option("--from-ranks", help="Ranks of the source mesh, 0-15 or 0,2,4; default: from 0.", rich_help_panel=_TENSOR),
    ] = None
    to_ranks: Annotated[
        str | None,
        typer.Option("--to-ranks", help="Ranks of the destination mesh; default: after the source's.", rich_help_panel=_TENSOR),
    ] = None
    from_json: Annotated[
        str | None,
        typer.Option(
            "--from-json",
            help="The source: a layout file (docs/layouts.md), or a checkpoint (safetensors, torch.distributed.checkpoint).",
            rich_help_panel=_FILES,
        ),
    ] = None
    to_json: Annotated[
        str | None, typer.Option("--to-json", help="A layout file for the destination.", rich_help_panel=_FILES)
    ] = None

    def request(self, done: Told | None = None) -> Request:
        """The request that the options make; `done` is told the share, and where it is None, progress is shown. Raises InputError
        when they make none, or two at once.
        """
        of_model, of_tensor, of_files = self.given()
        if self.model is not None:
            return self.request_of(self.model_of(self.model), done)
        if self.shape is not None:
            _refuse("--shape", of_model | of_files)
            return self._of_tensor(self.shape)
        if self.from_json is not None or self.to_json is not None:
            _refuse("--from-json" if self.from_json is not None else "--to-json", of_model | of_tensor)
            return self._of_files(done)
        raise InputError(
            "nothing to move: give --model with --from and --to, or --shape with the two meshes, or --from-json with --to-json"
        )

    def model_of(self, name: str) -> Model:
        """The model of that name or path, with what the options say of it (--scale, --mtp, --precision)."""
        return model_of(name, 1 if self.scale is None else self.scale, mtp=self.mtp, precision=self.precision)

    def request_of(self, model: Model, done: Told | None = None) -> Request:
        """The request to move this model between the two layouts; `done` and InputErrors are those of `request`."""
        _, of_tensor, of_files = self.given()
        _refuse("--model", of_tensor | of_files)
        if self.from_spec is None or self.to_spec is None:
            raise InputError('--model needs both layouts: --from "TP4 x PP8 x EP16" (training) and --to "TP8 x DP16" (inference)')
        to_conventions = [name.strip() for name in ("vllm" if self.to_convention is None else self.to_convention).split(" + ")]
        if self.from_convention is not None:
            check_known("--from-convention", self.from_convention, sorted(CONVENTIONS))
        for name in to_conventions:
            check_known("--to-convention", name, sorted(CONVENTIONS))
        if self.to_first_rank is not None and not 0 <= self.to_first_rank < MAX_RANKS:
            raise InputError(f"--to-first-rank {self.to_first_rank}: expected 0 or more, below {MAX_RANKS}")
        specs = spec_of("--from", self.from_spec), [spec_of("--to", group) for group in self.to_spec.split(" + ")]
        with progress("laying out") if done is None else nullcontext(done) as told:
            problem, summary = groups_problem(
                model,
                *specs,
                from_convention=self.from_convention,
                to_first_rank=self.to_first_rank,
                to_conventions=to_conventions,
                progress=told,
            )
        shrunk = f", scaled down {summary.scale} times" if summary.scale > 1 else ""
        return Request(f"{summary.model}: {self.from_spec} -> {self.to_spec}{shrunk}", problem.about, problem)

    def given(self) -> tuple[dict[str, object], dict[str, object], dict[str, object]]:
        """The options of a model, of a bare tensor and of two files, None where one isn't given."""
        of_model: dict[str, object] = {
            "--model": self.model, "--from": self.from_spec, "--to": self.to_spec, "--scale": self.scale,
            "--from-convention": self.from_convention, "--to-convention": self.to_convention, "--mtp": self.mtp or None,
            "--precision": self.precision, "--to-first-rank": self.to_first_rank,
        }  # fmt: skip
        of_tensor: dict[str, object] = {
            "--shape": self.shape, "--dtype": self.dtype, "--from-mesh": self.from_mesh,
            "--from-placements": self.from_placements, "--to-mesh": self.to_mesh, "--to-placements": self.to_placements,
            "--from-ranks": self.from_ranks, "--to-ranks": self.to_ranks,
        }  # fmt: skip
        return of_model, of_tensor, {"--from-json": self.from_json, "--to-json": self.to_json}

    def _of_tensor(self, shape: str) -> Request:
        problem = tensor_problem(
            shape,
            self.dtype or "bf16",
            self.from_mesh,
            self.from_placements,
            self.to_mesh,
            self.to_placements,
            from_ranks=self.from_ranks,
            to_ranks=self.to_ranks,
        )
        title = f"tensor {shape}: {self.from_mesh} {self.from_placements} -> {self.to_mesh} {self.to_placements}"
        return Request(title, (), problem)

    def _of_files(self, done: Told | None) -> Request:
        if self.from_json is None or self.to_json is None:
            raise InputError("layouts of your own come in two files: --from-json SOURCE and --to-json DESTINATION")
        told: Sequence[Told | None] = (None, None) if done is None else parts(done, (1.0, 1.0))
        source = inventory_of("--from-json", self.from_json, told[0])
        target = inventory_of("--to-json", self.to_json, told[1])
        if source.aliases and target.aliases:
            raise InputError(
                f"{self.from_json} and {self.to_json} name aliases: a plan can't yet use bytes that already lie in place; "
                "leave the aliases out (the bytes are then copied), or see with `check --from-json --to-json` what they save"
            )
        return Request(f"{self.from_json} -> {self.to_json}", (), problem_between(source, target))


def with_request_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with all options of `Asked` in place of its parameter `asked`; Typer reads options off the signature."""
    signature, hints = inspect.signature(command, eval_str=True), get_type_hints(Asked, include_extras=True)
    names = [option.name for option in fields(Asked)]
    options = [Parameter(o.name, Parameter.KEYWORD_ONLY, default=o.default, annotation=hints[o.name]) for o in fields(Asked)]
    parameters: list[Parameter] = []
    for parameter in signature.parameters.values():
        parameters += options if parameter.name == "asked" else [parameter.replace(kind=Parameter.KEYWORD_ONLY)]

    @wraps(command)
    def run(**given: object) -> None:
        asked = Asked(**{name: given.pop(name) for name in names})  # type: ignore[arg-type]  # Typer has converted them
        command(asked=asked, **given)

    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]  # inspect's own protocol
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _refuse(chosen: str, others: Mapping[str, object]) -> None:
    given = [name for name, value in others.items() if value is not None]
    if given:
        raise InputError(
            f"{chosen} and {given[0]} don't go together: a plan is of a model, of a bare tensor, or of two layout files"
        )
