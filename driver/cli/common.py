"""Code that commands share: checks before long work, loading or compiling a Program, and printing results."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from os.path import realpath
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from celosia.driver.cli.errors import say
from celosia.sim.devices import SSH_PREFIX, WITH_CYCLES

if TYPE_CHECKING:
    from rich.console import RenderableType

    from celosia.compiler.graph.importing.dimensions import Shapes
    from celosia.compiler.graph.importing.set_inputs import InputValues
    from celosia.compiler.graph.passes import Watch
    from celosia.compiler.program import Program, TensorInfo
    from celosia.driver.data.images import Pixels
    from celosia.driver.remote.deploy import Remote
    from celosia.driver.show.progress import Stages


@dataclass(frozen=True)
class Trust:
    """Options by which a user decides what of a Program's file may run.

    trusted: its machine code. digest: the same, if the file has this SHA-256. rebuild: compile its kernels again here,
    from their loops.
    """

    trusted: bool = False
    digest: str | None = None
    rebuild: bool = False


def raise_unknown_device(name: str, known_names: Iterable[str]) -> NoReturn:
    """Raise BadParameter for a device `name` that is neither one of `known_names` nor a board over ssh."""
    from celosia.hw.spec.config import did_you_mean

    known_names = [*known_names]
    suggestion = did_you_mean(name, known_names)
    raise typer.BadParameter(
        f"there is no device {name!r}{suggestion}; take {', '.join(known_names)} or {SSH_PREFIX}USER@BOARD"
    )


def write_json(path: Path | None, data: Any) -> None:
    """Write plain data as JSON to a file that the user named; do nothing for None. OutputError."""
    if path is not None:
        from celosia.compiler.program.safe_files import write_text

        write_text(path, json.dumps(data, indent=1) + "\n")


def show(parts: Iterable[RenderableType], **options: Any) -> None:
    """Print tables and texts one below the other on standard output. options: of Rich's `print`."""
    from celosia.driver.show.text_table import console

    output = console()
    for part in parts:
        output.print(part, **options)


@contextmanager
def progress_stages(quiet: bool) -> Iterator[Stages]:
    """Show the stages of a command on standard error in a context, unless it is quiet. The module is slow to import."""
    from celosia.driver.show.progress import Stages

    with Stages(quiet) as stages:
        yield stages


def check_destinations(sources: list[Path], *paths: Path | None) -> None:
    """Raise OutputError where one of `paths` cannot be written, or is one of `sources`, before minutes of work.

    None stands for a file that is not to be written.
    """
    from celosia.compiler.program.safe_files import OutputError, check_writable

    seen = {realpath(path): "an input" for path in sources}
    for path in paths:
        if path is None:
            continue
        check_writable(path)
        if realpath(path) in seen and (path.is_file() or not path.exists()):  # /dev/null may be given twice
            raise OutputError(f"cannot write {path}: it is {seen[realpath(path)]}, too; give another name")
        seen[realpath(path)] = "another output"


def parse_memory(memory: str | None, device: str) -> dict[str, Any]:
    """Return --memory as options of a device, {} if it is left out. BadParameter, BoardError."""
    if memory is None:
        return {}
    if device not in WITH_CYCLES:
        raise typer.BadParameter(f"--memory needs --device {' or '.join(WITH_CYCLES)}: the others model no memory")
    from celosia.hw.boards.board import BoardError
    from celosia.hw.boards.boards import memory_model

    try:
        return {"memory": memory_model(memory)}
    except BoardError:
        raise
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def parse_address(text: str | None) -> dict[str, Any]:
    """Return --address as options of a board's device, {} if it is left out. BadParameter."""
    if text is None:
        return {}
    try:
        return {"base": int(text, 0)}
    except ValueError:
        raise typer.BadParameter(f"--address {text} is no number; write it as 0x43c00000") from None


def pool_address(pool: str | None, is_insecure_allowed: bool) -> str | None:
    """Return the address of --pool, marked as trusted where --insecure-pool allows any network interface."""
    from celosia.driver.tune.fleet import allow_any_interface

    return allow_any_interface(pool) if is_insecure_allowed else pool


def import_files(paths: Sequence[Path] | None) -> None:
    """Run the Python files of --import, which register operators. ModelError where one cannot be run."""
    from importlib.util import module_from_spec, spec_from_file_location

    from celosia.compiler.graph.errors import ModelError

    for number, path in enumerate(paths or ()):
        if not path.is_file():
            raise ModelError(f"there is no file {path}; --import takes a Python file, such as my_ops.py")
        spec = spec_from_file_location(f"celosia_imported_{number}", path)
        if spec is None or spec.loader is None:
            raise ModelError(f"{path} is no Python file; --import takes one, such as my_ops.py")
        module = module_from_spec(spec)
        sys.modules[spec.name] = module
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            raise ModelError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error


def check_source(path: Path) -> None:
    """Raise ModelError where a model's file does not exist, before anything slow such as a login on a board."""
    if not path.exists():
        from celosia.compiler.graph.errors import ModelError

        raise ModelError(f"there is no model at {path}")


def is_program(source: Path) -> bool:
    """Return whether `source` is the file of a Program."""
    from celosia.compiler.program import Program

    return source.is_file() and Program.is_program(source)


def read_inputs(
    source: Path,
    arguments: list[str] | None,
    random: bool,
    pixels: Pixels,
    shapes: Shapes | None = None,
    set: InputValues | None = None,
) -> dict[str, Any]:
    """Read and check the inputs of a model or Program before anything is compiled. Return arrays by input name.

    arguments: the texts of --input. random: make up inputs that are missing. pixels: conversion of images. shapes:
    those of --shape. set: the values of --set. Raises InputError, ModelError, ProgramError.
    """
    from celosia.compiler.graph.importer import read
    from celosia.compiler.graph.importing.dimensions import inputs_of, open_axes, sizes_of, with_shapes
    from celosia.compiler.graph.importing.set_inputs import set_inputs
    from celosia.compiler.program import Program
    from celosia.driver.data import arrays

    inputs: tuple[TensorInfo, ...]
    labels: dict[tuple[str, int], str] = {}
    if is_program(source):
        program = Program.load(source)
        inputs = tuple(
            replace(tensor, shape=(-1, *tensor.shape[1:])) if tensor.name in program.batched else tensor
            for tensor in program.inputs
        )
    else:
        proto = set_inputs(read(source, data=False), set or {})
        proto = with_shapes(proto, shapes or {}, sizes_of(proto, shapes or {}))
        inputs, labels = inputs_of(proto), open_axes(proto)
    return arrays.read_inputs(arguments or [], inputs, random, pixels, labels)


def image_conversion(mean: list[float] | None, std: list[float] | None, quiet: bool) -> Pixels:
    """Return the conversion of images to inputs by --mean and --std.

    It prints how it changes the first image that does not fit.
    """
    from celosia.driver.data.images import Pixels

    return Pixels(tuple(mean or (0.0,)), tuple(std or (1.0,)), printer_of_first_sentence(quiet))


def printer_of_first_sentence(quiet: bool) -> Callable[[str], None]:
    """Return a function that prints the first sentence it gets on standard error, and drops later ones."""
    shown: set[str] = set()

    def print_first(sentence: str) -> None:
        """Print the sentence, unless one was printed before."""
        if not shown and not quiet:
            say(f"celosia: {sentence}; of others this is not said", error=True)
        shown.add(sentence)

    return print_first


def parse_keep(texts: list[str] | None) -> str | list[str]:
    """Return the values TENSOR or all of --keep or --dump as `compile`'s argument `keep`."""
    return "all" if "all" in (texts or []) else texts or []


def advise(program: Program, quiet: bool) -> None:
    """Print advice if nothing of a model runs on the accelerator."""
    from celosia.driver.show import program_summary as show

    if not quiet and (advice := show.advice(program)) is not None:
        say(f"celosia: {advice}", error=True)


def parse_shapes(texts: list[str] | None) -> dict[str, tuple[int, ...]]:
    """Return the shapes of --shape by input name. ModelError where one is invalid, or an input has two."""
    from celosia.compiler.graph.errors import ModelError

    shapes: dict[str, tuple[int, ...]] = {}
    for text in texts or []:
        name, equals, sizes = text.rpartition("=")
        try:
            shape = tuple(int(size) for size in sizes.split(",")) if sizes else ()
        except ValueError:
            equals = ""
        if not equals:
            raise ModelError(f"--shape {text} is no shape of an input; write it as --shape NAME=1,80,400")
        if name in shapes:
            raise ModelError(f"--shape is given twice for input {name!r}; give it once")
        shapes[name] = shape
    return shapes


def parse_set(texts: list[str] | None) -> dict[str, str]:
    """Return the values of --set by input name. ModelError where one has no value, or an input has two."""
    from celosia.compiler.graph.errors import ModelError

    values: dict[str, str] = {}
    for text in texts or []:
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise ModelError(f"--set {text} sets no input; write it as --set NAME=16000")
        if name in values:
            raise ModelError(f"--set is given twice for input {name!r}; give it once")
        values[name] = value
    return values


def load_or_compile(
    source: Path, config: str | None, stages: Stages, no_check: bool, watch: Watch | None = None,
    target: str | None = None, shapes: Shapes | None = None, keep: str | Sequence[str] = (), trust: Trust | None = None,
    place: Mapping[str, str] = {}, rounding: str | None = None, set: InputValues | None = None,
) -> Program:  # fmt: skip
    """Load the Program in `source`, or compile the ONNX model there for `target`.

    watch: called with each pass's name and the graph after it. shapes, place, rounding, set: options for a model, see
    `compile`. keep: tensors that it also returns; ProgramError where a Program was compiled without them. trust:
    what of a Program's file may run, by default its checked loops. ProgramError for options that do not apply to
    a Program; errors of `compile` and `Program.load`.
    """
    from celosia.compiler.program import Program, ProgramError
    from celosia.hw.spec.config import Config

    cfg = None if config is None else Config.load(config)
    if is_program(source):
        stages("reading the Program")
        program = Program.load(source, *(() if trust is None else (trust.trusted, trust.digest)))
        if trust is not None and trust.rebuild:
            from celosia.compiler.target import find_target

            program.machine, program.library = find_target(target).machine if target else "", b""
        if cfg is not None and cfg.digest != program.config.digest:
            raise ProgramError(
                f"{source} was compiled for Config {program.config.name}, not for {cfg.name}; compile the model again "
                f"with --config {config}, or leave --config out"
            )
        if shapes:
            inputs = ", ".join(f"{tensor.name} {program.shape_text(tensor)}" for tensor in program.inputs)
            raise ProgramError(
                f"{source} is compiled already, for {inputs}; leave --shape out, or compile the model with it"
            )
        if set:
            raise ProgramError(f"{source} is compiled already; leave --set out, or compile the model with it")
        _require_kept(source, program, keep)
        if place:
            raise ProgramError(f"{source} is compiled already; leave --place out, or compile the model with it")
        if rounding not in (None, program.rounding):
            raise ProgramError(
                f"{source} was compiled with --rounding {program.rounding}; leave --rounding out, or compile it again"
            )
        return program
    if trust is not None and trust.digest is not None:
        raise ProgramError(f"{source} is an ONNX model, and --digest is for a Program, which `celosia compile` writes")
    from celosia.compiler.compile import compile as compile_model

    return compile_model(
        source, cfg or "pynq", progress=stages, watch=watch, target=target, check=not no_check, shapes=shapes,
        keep=keep, place=place, set=set, **rounding_option(rounding),
    )  # fmt: skip


def rounding_option(text: str | None) -> dict[str, Any]:
    """Return --rounding as an argument of `compile`, {} if it is left out."""
    return {} if text is None else {"rounding": text}


def compile_options(shape: list[str] | None, place: Sequence[str] | None, rounding: str | None) -> dict[str, Any]:
    """Return these options as arguments of `load_or_compile`. BadParameter, ModelError."""
    return {"shapes": parse_shapes(shape), "place": parse_place(place), "rounding": rounding}


def parse_place(texts: Sequence[str] | None) -> dict[str, str]:
    """Return --place as `compile`'s argument: NODE=CHOICE by node, `cost` under "*". BadParameter."""
    place = {}
    for text in texts or ():
        name, equals, choice = text.rpartition("=")
        if text != "cost" and not (name and equals and choice):
            raise typer.BadParameter(f"--place takes NODE=cpu, NODE=accelerator or cost, not {text!r}")
        place[name or "*"] = choice
    return place


def _require_kept(source: Path, program: Program, keep: str | Sequence[str]) -> None:
    """Raise ProgramError where the Program does not return the tensors of --keep."""
    from celosia.compiler.program import ProgramError

    returned_names = {tensor.name for tensor in (*program.outputs, *program.kept)}
    missing = [name for name in ([] if keep == "all" else keep) if name not in returned_names]
    if missing or (keep == "all" and not program.kept):
        subject = f"tensor {missing[0]!r}" if missing else "the tensors inside the model"
        raise ProgramError(
            f"{source} was compiled to return its outputs, not {subject}; compile the model again with --keep "
            f"{missing[0] if missing else 'all'}, or give the ONNX model here"
        )


def load_or_compile_for_board(
    source: Path, config: str | None, stages: Stages, remote: Remote, no_check: bool, shapes: Shapes | None = None,
    keep: str | Sequence[str] = (), trust: Trust | None = None, place: Mapping[str, str] = {},
    set: InputValues | None = None,
) -> Program:  # fmt: skip
    """Load the Program in `source`, or compile the model there for the processor of the board behind `remote`."""
    from celosia.driver.remote import deploy

    target = deploy.target_of(remote.status()) if not is_program(source) or (trust and trust.rebuild) else None
    return load_or_compile(
        source, config, stages, no_check, target=target, shapes=shapes, keep=keep, trust=trust, place=place, set=set
    )
