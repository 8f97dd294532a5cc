"""Write the design of one property, or of a mutant: python -m proofs.build NAME CASE [FILE OLD NEW NEAR].

It runs in a new process, because the fault must be in the source before anything imports it.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from proofs.declare import Method, Mutant, all_properties
from proofs.plant import planted


class _Loader(SourceFileLoader):
    def __init__(self, name: str, path: str, mutant: Mutant) -> None:
        super().__init__(name, path)
        self._mutant = mutant

    def get_code(self, fullname: str) -> CodeType:
        source, mutant = Path(self.path).read_text(encoding="utf-8"), self._mutant
        try:
            return compile(planted(source, mutant.old, mutant.new, mutant.near), self.path, "exec")
        except ValueError as error:
            raise SystemExit(f"{self.path}: {error}") from None


class Planter(MetaPathFinder):
    """Import the module of a mutant with its fault."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant
        self._name = "celosia.hw." + mutant.file.removesuffix(".py").replace("/", ".")

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        import celosia.hw

        file = Path(celosia.hw.__path__[0]) / self._mutant.file
        return importlib.util.spec_from_file_location(fullname, file, loader=_Loader(fullname, str(file), self._mutant))


def main(name: str, case: str, *mutant: str) -> None:
    if mutant:
        sys.meta_path.insert(0, Planter(Mutant(*mutant)))
    proof = all_properties()[name]
    built = proof.build(int(case)) if case else proof.build()
    if proof.method is Method.NETLIST:
        print("\n".join(built))
    else:
        print(built.rtlil())


if __name__ == "__main__":
    main(*sys.argv[1:])
