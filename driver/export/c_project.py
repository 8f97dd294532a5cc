"""Compile a model and write the folder of C files that `celosia export` makes of it."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from celosia.compiler.compile import compile as compile_model
from celosia.compiler.options import Options, Source
from celosia.compiler.program import CpuStep, Program
from celosia.compiler.program.safe_files import OutputError, make_folder, replacing, require_folder
from celosia.driver.export import c_header as hardware
from celosia.driver.export.build_files import (
    HOSTED,
    TARGET_LINE_START,
    TOOLCHAIN,
    cmake,
    main_program,
    makefile,
    toolchain,
)
from celosia.driver.export.memory_map import NotExportable, assign_locations
from celosia.driver.export.objects import undefined_symbols
from celosia.driver.export.source import CModel, identifier
from celosia.driver.export.targets import ExportTarget, find_export_target

RUNTIME = Path(__file__).with_name("runtime")
"""Folder of the C runtime."""
COMMON = "celosia.h", "celosia.c", "celosia_mapped.h", "device_mapped.c"
"""Files of the C runtime for all targets."""
LINUX = "celosia_linux.h", *HOSTED
"""Files of the C runtime for targets with an operating system."""
BUILD_FILES = {"Makefile": makefile, "CMakeLists.txt": cmake, TOOLCHAIN: toolchain}
"""Functions that return the text of a build file for a target, by file name."""


@dataclass(frozen=True)
class Exported:
    """An exported model in memory.

    files: content by name in the folder. functions: names of C library functions that its kernels call.
    """

    model: CModel
    target: ExportTarget
    files: dict[str, bytes]
    functions: tuple[str, ...] = ()


def export_program(program: Program, target: ExportTarget, name: str | None = None) -> Exported:
    """Export `program`, whose kernels must be objects for `target`, as C.

    name: of the model in C, by default its own name as an identifier. NotExportable.
    """
    if name is not None:
        require_name(name)
    memory_map, functions = assign_locations(program), required_c_functions(program, target)
    model = CModel(name or identifier(program.name.lower()), program, memory_map)
    texts = {  # Makefile and NAME_celosia.c come first: `require_own_files` recognises folder and model by them
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
    """Return the files of the C runtime, by name, which are equal for all models of a target."""
    files = {file: (RUNTIME / file).read_bytes() for file in (*COMMON, *(LINUX if target.hosted else ()))}
    return files | {hardware.HEADER: hardware.header_text().encode()}


FREESTANDING = frozenset(("memcpy", "memmove", "memset", "memcmp"))
"""Functions that a C compiler expects in any environment, also a freestanding one."""
BARE_METAL_MATH = frozenset(
    name + suffix
    for name in ("ceil", "cos", "exp", "exp2", "fabs", "floor", "fma", "fmax", "fmin", "fmod", "log", "log10", "log2",
                 "round", "sin", "sqrt", "tan", "trunc")
    for suffix in ("", "f")
)  # fmt: skip
"""Functions that exist without an operating system: in ziglang's runtime, and in newlib's libm."""


def required_c_functions(program: Program, target: ExportTarget) -> tuple[str, ...]:
    """Return the names of C library functions that kernels call, sorted.

    Without those of FREESTANDING and the compiler's own, which begin with an underscore. NotExportable where the target
    does not have one of them.
    """
    functions: set[str] = set()
    for step in program.steps:
        if isinstance(step, CpuStep) and step.kernel is not None:
            names = undefined_symbols(program.kernels[step.kernel].code) - FREESTANDING
            called = {name for name in names if not name.startswith("_")}
            functions |= called
            missing = sorted(called - BARE_METAL_MATH)
            if missing and not target.hosted:
                node = step.nodes[-1]
                fused = f" (with {len(step.nodes) - 1} others in its kernel)" if len(step.nodes) > 1 else ""
                raise NotExportable(
                    f"{node.op} ({node.name}){fused} cannot be exported for {target.name}: it calls {missing[0]} of "
                    "the C library, which is not there without an operating system; replace the operator, or take "
                    "another target"
                )
    return tuple(sorted(functions))


def require_model(source: Path, name: str | None) -> None:
    """Raise NotExportable where `source` is a Program, or `name` is no identifier of C.

    A Program cannot be exported: its kernels are for the processor that it was compiled for.
    """
    if source.is_file() and Program.is_program(source):
        raise NotExportable(
            f"{source} is a Program, compiled for one processor; give the ONNX model that it was made of"
        )
    if name is not None:
        require_name(name)


def require_name(name: str) -> None:
    """Raise NotExportable where `name` is no identifier of C that a model may have."""
    if not name or identifier(name) != name:
        suggestion = identifier(name)
        raise NotExportable(f"{name!r} is no name in C, or has a meaning there; take another one, such as {suggestion}")


def export(source: Source, target: str, options: Options, name: str | None = None) -> Exported:
    """Export an ONNX model as C for `target`. TargetError, NotExportable, and the errors of `compile`."""
    export_target = find_export_target(target)
    options = Options(**{**vars(options), "target": export_target.target})
    program = compile_model(source, **vars(options))
    return export_program(program, export_target, name)


def require_target(folder: Path, target: str) -> None:
    """Raise OutputError where the folder cannot be made, NotExportable where it holds models for another target."""
    require_folder(folder)
    folder_target = read_folder_target(folder)
    if folder_target not in (None, target):
        raise NotExportable(f"{folder} holds models for {folder_target}, not for {target}; give another folder")


def read_folder_target(folder: Path) -> str | None:
    """Return the target that the models in a folder were exported for, from its Makefile; None where there are none."""
    try:
        lines = (folder / "Makefile").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    return next((line.removeprefix(TARGET_LINE_START) for line in lines if line.startswith(TARGET_LINE_START)), None)


def require_own_files(exported: Exported, folder: Path) -> None:
    """Raise OutputError where a file to write exists and no earlier export wrote it: a user's file is not
    overwritten."""
    is_export_folder = read_folder_target(folder) is not None
    is_own_model = is_export_folder and (folder / f"{exported.model.name}_celosia.c").exists()
    shared_files = {*runtime_files(exported.target), *BUILD_FILES}
    for file in exported.files:
        path = folder / Path(file).parts[0]
        if path.exists() and not (is_export_folder if file in shared_files else is_own_model):
            raise OutputError(
                f"{path} is there, and not of `celosia export`, which would write over it; take another folder"
            )


def write_project(exported: Exported, folder: Path) -> None:
    """Write all files into `folder`, beside other models of the same target. Each file is written atomically.

    OutputError, NotExportable.
    """
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
