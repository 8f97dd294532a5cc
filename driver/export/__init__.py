"""Export of Programs as C, which needs no Python where it runs (`celosia export`).

In the order in which data passes them:

- `targets.py`: processors to export for: LLVM's settings and compiler flags
- `c_project.py`: decides which files a folder holds, and whether it may be written; compiles the model, writes all
- `memory_map.py`: decides the offset of each tensor in the instance or among the constants, and their alignment;
  rejects models that C cannot run
- `forms.py`: layouts of tensors that a launch reads or writes, as data for the C runtime
- `source.py`: NAME.h, NAME.c and NAME_celosia.c: steps, constants and instructions as C arrays, with their
  attributes (`const`, alignment)
- `c_header.py`: the hardware's registers and times for the C runtime
- `build_files.py`: Makefile, CMakeLists.txt, and example programs
- `runtime/`: the C runtime, which is equal for all models of a target
- `objects.py`: which symbols a kernel's object file needs, and its code size
- `emulate.py`, `bridge.py`, `emulated/`: run exported models under an emulator, for tests and benchmarks
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from celosia.driver.choices import EXPORT_TARGETS

if TYPE_CHECKING:
    from celosia.compiler.options import Source


def export(
    source: Source, folder: str | Path, target: str = EXPORT_TARGETS[0], name: str | None = None, **options: Any
) -> None:
    """Write an ONNX model as C, which needs no Python where it runs (docs/export.md).

    Args:
        source: The model: its path, or its contents as an onnx.ModelProto.
        folder: Folder for the C files. It is made if it does not exist.
        target: "x86_64", "armv7-linux", "armv7-none", "aarch64-linux", "riscv32-none" or "wasm32".
        name: Name of the model in C. None: the name of the ONNX model.
        **options: Other arguments of `celosia.compile`, such as `config`.

    Raises:
        TargetError: There is no such target.
        NotExportable: C cannot run this model, or the folder holds models for another target.
        OutputError: A file cannot be written.
        ModelError: `celosia.compile` does not support the model. Its other errors are raised, too.
        ConfigError: The Config is invalid, or there is none of that name.

    Examples:
        >>> import celosia, tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> celosia.export(celosia.models.demo_model_path(), folder, "x86_64", "clothes", config="tiny")
        >>> (folder / "clothes.h").exists()
        True
    """
    from celosia.compiler.options import Options
    from celosia.driver.export import c_project

    c_project.write_project(c_project.export(source, target, Options(**options), name), Path(folder))
