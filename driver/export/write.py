"""`celosia export`: the folder of C that a Program becomes."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from celosia.compiler.compile import compile as compile_model
from celosia.compiler.options import Options, Source
from celosia.compiler.program import Program
from celosia.compiler.program.files import OutputError, replacing
from celosia.driver.export import hardware
from celosia.driver.export.build_files import HOSTED, MARK, cmake, main_program, makefile
from celosia.driver.export.places import ExportError, places_of
from celosia.driver.export.source import Model, identifier
from celosia.driver.export.targets import ExportTarget, find_export_target

RUNTIME = Path(__file__).with_name("runtime")
COMMON = "celosia.h", "celosia.c", "celosia_mapped.h", "device_mapped.c"
LINUX = "celosia_linux.h", *HOSTED


@dataclass(frozen=True)
class Exported:
    """A model as files: their contents by their names in the folder."""

    model: Model
    target: ExportTarget
    files: dict[str, bytes]


def export_program(program: Program, target: ExportTarget, name: str | None = None) -> Exported:
    """`program`, whose kernels are objects for `target`, as C. name: in C, by default the model's. ExportError."""
    model = Model(_name(program, name), program, places_of(program))
    texts = {
        hardware.HEADER: hardware.header(),
        "Makefile": makefile(target),
        "CMakeLists.txt": cmake(target),
        f"{model.name}.h": model.header(),
        f"{model.name}.c": model.source(),
        f"{model.name}_data.c": model.data(),
    }
    if target.hosted:
        texts[f"{model.name}_main.c"] = main_program(model)
    files = {file: text.encode() for file, text in texts.items()}
    for file in (*COMMON, *(LINUX if target.hosted else ())):
        files[file] = (RUNTIME / file).read_bytes()
    for kernel in program.kernels:
        files[f"{model.name}_kernels/{kernel.name}.o"] = kernel.code
    return Exported(model, target, files)


def _name(program: Program, given: str | None) -> str:
    if given is None:
        return identifier(program.name.lower(), "model")
    if identifier(given, "") != given:
        raise ExportError(f"{given!r} is no name in C; take letters, digits and _, the first one no digit")
    return given


def export(source: Source, target: str, options: Options, name: str | None = None) -> Exported:
    """An ONNX model as C for `target`. TargetError, ExportError, and what `compile` raises."""
    wanted = find_export_target(target)
    options = Options(**{**vars(options), "target": wanted.target})
    program = compile_model(source, **vars(options))
    return export_program(program, wanted, name)


def require_folder(folder: Path, target: str) -> None:
    """OutputError where there can be no such folder, ExportError where it holds models for another target."""
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"cannot write {folder}: it is no folder; give the name of one")
    if not folder.exists() and not folder.absolute().parent.is_dir():
        raise OutputError(f"cannot write {folder}: there is no folder {folder.absolute().parent}")
    held = target_of(folder)
    if held not in (None, target):
        raise ExportError(f"{folder} holds models for {held}, not for {target}; give another folder")


def target_of(folder: Path) -> str | None:
    """What the models in a folder were exported for; None where there are none."""
    try:
        lines = (folder / "Makefile").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    return next((line.removeprefix(MARK) for line in lines if line.startswith(MARK)), None)


def write(exported: Exported, folder: Path) -> None:
    """All files into `folder`, beside other models of the same target; each wholly or not at all. OutputError."""
    require_folder(folder, exported.target.name)
    kernels = folder / f"{exported.model.name}_kernels"
    try:
        folder.mkdir(exist_ok=True)
        shutil.rmtree(kernels, ignore_errors=True)  # of an earlier export
        if any("/" in file for file in exported.files):
            kernels.mkdir()
    except OSError as error:
        raise OutputError(f"cannot write {folder}: {error.strerror or error}") from None
    for file, data in exported.files.items():
        with replacing(folder / file) as temporary:
            temporary.write_bytes(data)
