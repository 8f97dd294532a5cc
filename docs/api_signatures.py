"""Give the page api.md the signatures that `celosia.compile` and `celosia.Runtime` have in Python.

mkdocstrings reads sources without running them. It sees neither the parameters that the decorator `expand_options` adds
nor those of `Runtime.__new__`.
"""

from __future__ import annotations

from typing import Any

import griffe


class PublicSignatures(griffe.Extension):
    """Griffe extension that replaces the parameters of `compile` and of the constructor of `Runtime`."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Replace the parameters after griffe has loaded the package celosia."""
        if pkg.name != "celosia":
            return
        function, options = pkg["compiler.compile.compile"], pkg["compiler.options.Options"]
        fields = [field for field in options.attributes.values() if "property" not in field.labels]
        function.parameters = griffe.Parameters(
            function.parameters["source"],
            *(
                griffe.Parameter(
                    field.name, annotation=field.annotation, kind=griffe.ParameterKind.positional_or_keyword,
                    default="{}" if "default_factory=dict" in str(field.value) else field.value,
                )
                for field in fields
            ),
        )  # fmt: skip
        runtime = pkg["driver.runtime.Runtime"]
        runtime.set_member("__init__", griffe.Function("__init__", parameters=runtime["__new__"].parameters))
