"""Export of Programs as C, which needs no Python where it runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from celosia.driver.choices import EXPORT_TARGETS

if TYPE_CHECKING:
    from celosia.compiler.options import Source


def export(
    source: Source, folder: str | Path, target: str = EXPORT_TARGETS[0], name: str | None = None, **options: Any
) -> None:
    """Write an ONNX model as C for `target` to `folder`, which need not be there yet. See docs/export.md.

    name: in C, by default the model's. options: of `celosia.compile`. TargetError, NotExportable, OutputError, and what
    `compile` raises.

    >>> import celosia, tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> celosia.export(celosia.models.demo_model_path(), folder, "x86_64", "clothes", config="tiny")
    >>> (folder / "clothes.h").exists()
    True
    """
    from celosia.compiler.options import Options
    from celosia.driver.export import c_project as write

    write.write_project(write.export(source, target, Options(**options), name), Path(folder))
