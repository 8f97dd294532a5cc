"""Write the folder of C that `celosia export` makes of a Program."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from celosia.compiler.compile import compile as compile_model
from celosia.compiler.options import Options, Source
from celosia.compiler.program import CpuStep, Program
from celosia.compiler.program.safe_files import OutputError, make_folder, replacing, require_folder
from celosia.driver.export import c_header as hardware
from celosia.driver.export.build_files import HOSTED, MARK, TOOLCHAIN, cmake, main_program, makefile, toolchain
from celosia.driver.export.memory_map import NotExportable, assign_places
from celosia.driver.export.objects import undefined_symbols
from celosia.driver.export.source import CModel, identifier
from celosia.driver.export.targets import ExportTarget, find_export_target

RUNTIME = Path(__file__).with_name("runtime")
COMMON = "celosia.h", "celosia.c", "celosia_mapped.h", "device_mapped.c"
LINUX = "celosia_linux.h", *HOSTED
BUILD_FILES = {"Makefile": makefile, "CMakeLists.txt": cmake, TOOLCHAIN: toolchain}


@dataclass(frozen=True)
class Exported:
    """A model as files: their contents by their names in the folder. functions: of the C library, that kernels call."""

    model: CModel
    target: ExportTarget
    files: dict[str, bytes]
    functions: tuple[str, ...] = ()


def export_program(program: Program, target: ExportTarget, name: str | None = None) -> Exported:
    """Export `program`, whose kernels are objects for `target`, as C. name: in C, by default the model's.
    NotExportable."""
    if name is not None:
        require_name(name)
    places, functions = assign_places(program), required_c_functions(program, target)
    model = CModel(name or identifier(program.name.lower()), program, places)
    texts = {  # Makefile and NAME_celosia.c say whose folder and model it is: before what they are said of
        **{file: text(target) for file, text in BUILD_FILES.items()},
        f"{model.name}_celosia.c": model.data(),
        f"{model.name}.h": model.header(),
        f"{model.name}.c": model.source(),
    }
    if target.hosted:
        texts[f"{model.name}_main.c"] = main_program(model)
    files = {file: text.encode() for file, text in texts.items()} | runtime_files(target)
    for kernel in program.kernels:
        files[f"{model.name}_kernels/{kernel.name}.o"] = kernel.code
    return Exported(model, target, files, functions)


def runtime_files(target: ExportTarget) -> dict[str, bytes]:
    """Files of the C runtime that are equal for all models of a target."""
    files = {file: (RUNTIME / file).read_bytes() for file in (*COMMON, *(LINUX if target.hosted else ()))}
    return files | {hardware.HEADER: hardware.header_text().encode()}


ANYWHERE = frozenset(("memcpy", "memmove", "memset", "memcmp"))
"""Functions that a C compiler expects in any environment."""
WITHOUT_SYSTEM = frozenset(
    name + suffix
    for name in ("ceil", "cos", "exp", "exp2", "fabs", "floor", "fma", "fmax", "fmin", "fmod", "log", "log10", "log2",
                 "round", "sin", "sqrt", "tan", "trunc")
    for suffix in ("", "f")
)  # fmt: skip
"""Functions of ziglang's runtime without an operating system, and of newlib's libm."""


def required_c_functions(program: Program, target: ExportTarget) -> tuple[str, ...]:
    """Functions of the C library that kernels call, beside those of `ANYWHERE` and the compiler's own, which begin with
    _. NotExportable where the target does not bring one."""
    reasons: set[str] = set()
    for step in program.steps:
        if isinstance(step, CpuStep) and step.kernel is not None:
            names = undefined_symbols(program.kernels[step.kernel].code) - ANYWHERE
            reasons |= (called := {name for name in names if not name.startswith("_")})
            lacking = sorted(called - WITHOUT_SYSTEM)
            if lacking and not target.hosted:
                node = step.nodes[-1]
                fused = f" (with {len(step.nodes) - 1} others in its kernel)" if len(step.nodes) > 1 else ""
                raise NotExportable(
                    f"{node.op} ({node.name}){fused} cannot be exported for {target.name}: it calls {lacking[0]} of "
                    "the C library, which is not there without an operating system; replace the operator, or take "
                    "another target"
                )
    return tuple(sorted(reasons))


def require_model(source: Path, name: str | None) -> None:
    """Raise NotExportable where `source` is a Program, whose kernels are for another processor, or `name` is no name in
    C."""
    if source.is_file() and Program.is_program(source):
        raise NotExportable(
            f"{source} is a Program, compiled for one processor; give the ONNX model that it was made of"
        )
    if name is not None:
        require_name(name)


def require_name(name: str) -> None:
    """Raise NotExportable where it is no name in C."""
    if not name or identifier(name) != name:
        suggestion = identifier(name)
        raise NotExportable(f"{name!r} is no name in C, or has a meaning there; take another one, such as {suggestion}")


def export(source: Source, target: str, options: Options, name: str | None = None) -> Exported:
    """Export an ONNX model as C for `target`. TargetError, NotExportable, and the errors of `compile`."""
    wanted_target = find_export_target(target)
    options = Options(**{**vars(options), "target": wanted_target.target})
    program = compile_model(source, **vars(options))
    return export_program(program, wanted_target, name)


def require_target(folder: Path, target: str) -> None:
    """Raise OutputError where there can be no such folder, NotExportable where it holds models for another target."""
    require_folder(folder)
    held = target_of(folder)
    if held not in (None, target):
        raise NotExportable(f"{folder} holds models for {held}, not for {target}; give another folder")


def target_of(folder: Path) -> str | None:
    """Return the target that the models in a folder were exported for; None where there are none."""
    try:
        lines = (folder / "Makefile").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    return next((line.removeprefix(MARK) for line in lines if line.startswith(MARK)), None)


def require_own_files(exported: Exported, folder: Path) -> None:
    """Raise OutputError where a file to write exists already and is not from an earlier export."""
    exported_to = target_of(folder) is not None
    is_known = exported_to and (folder / f"{exported.model.name}_celosia.c").exists()
    common = {*runtime_files(exported.target), *BUILD_FILES}
    for file in exported.files:
        path = folder / Path(file).parts[0]
        if path.exists() and not (exported_to if file in common else is_known):
            raise OutputError(
                f"{path} is there, and not of `celosia export`, which would write over it; take another folder"
            )


def write_project(exported: Exported, folder: Path) -> None:
    """Write all files into `folder`, beside other models of the same target; each wholly or not at all. OutputError."""
    require_target(folder, exported.target.name)
    require_own_files(exported, folder)
    kernels = folder / f"{exported.model.name}_kernels"
    make_folder(folder)
    try:
        shutil.rmtree(kernels, ignore_errors=True)  # kernels of an earlier export
        if any("/" in file for file in exported.files):
            kernels.mkdir()
    except OSError as error:
        raise OutputError(f"cannot write {folder}: {error.strerror or error}") from None
    for file, data in exported.files.items():
        with replacing(folder / file) as temporary:
            temporary.write_bytes(data)
