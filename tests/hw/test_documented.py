"""Check that the docstring of each component names its parameters and the members of its signature."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from functools import cache
from unittest.mock import patch

import pytest
from amaranth.hdl import Fragment
from amaranth.lib import wiring

import celosia.hw
from celosia.hw.lib.layout import unit_members
from celosia.hw.spec.blocks import Blocks, Dsp
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import Opcode
from celosia.hw.top import Accelerator

ALL_PARTS = Config(
    block_in=8, block_out=8, bus_bytes=4, inp_depth=64, wgt_depth=32, acc_depth=64, vin_depth=64, out_depth=64,
    par_depth=16, queue_depth=4, taps=3, tap_depth=32, forward=True, residual_cycles=2, ports=2, trace_depth=16,
    alu=True, int32=True, pump=2, softmax=2, weight_bits=4, norm=2,
)  # fmt: skip
"""A Config with each optional part of the hardware."""
NOT_YET = ("celosia.hw.vector_unit.",)
"""Packages whose docstrings are not checked yet."""


def component_classes() -> Iterator[type[wiring.Component]]:
    for module in pkgutil.walk_packages(celosia.hw.__path__, "celosia.hw."):
        if not module.name.startswith(NOT_YET):
            for member in vars(importlib.import_module(module.name)).values():
                if (
                    inspect.isclass(member)
                    and issubclass(member, wiring.Component)
                    and member.__module__ == module.name
                ):
                    yield member


@cache
def signatures() -> dict[type[wiring.Component], set[str]]:
    """Return the names of the members of each component, in an accelerator with all parts."""
    members: dict[type[wiring.Component], set[str]] = {}
    build = wiring.Component.__init__

    def record(self: wiring.Component, signature: object = None) -> None:
        build(self, signature)
        members.setdefault(type(self), set()).update(self.signature.members)

    with patch.object(wiring.Component, "__init__", record):
        Fragment.get(Accelerator(ALL_PARTS), Blocks(Dsp.e1))
    return members


def sections(doc: str) -> dict[str, str]:
    """Return the texts below the underlined headlines of a docstring, by headline."""
    parts = re.split(r"^([A-Z][^\n]*)\n-{3,}\n", inspect.cleandoc(doc), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2]))


def undocumented(component: type[wiring.Component], members: set[str]) -> set[str]:
    """Return the parameters and members that the docstring of a component does not name."""
    text = sections(component.__doc__ or "")
    ports = text.get("Members", "")
    if "`unit_members`" in ports:
        ports += unit_members.__doc__ or ""
        assert members >= set(unit_members(ALL_PARTS, Opcode.LOAD))
    named = {name: names(text.get("Parameters", "")) for name in inspect.signature(component).parameters}
    named |= dict.fromkeys(members, names(ports))
    return {name for name, documented in named.items() if name not in documented}


def names(section: str) -> set[str]:
    """Return the names that a section describes: those in front of the first colon of each line."""
    return {name for line in section.splitlines() if ":" in line for name in re.findall(r"\w+", line.split(":")[0])}


@pytest.mark.parametrize("component", [*component_classes()], ids=lambda each: each.__name__)
def test_docstring_names_parameters_and_members(component: type[wiring.Component]) -> None:
    assert component in signatures(), "ALL_PARTS lacks it"
    assert not undocumented(component, signatures()[component])


def test_missing_names_are_reported() -> None:
    class Part(wiring.Component):
        """A part.

        Parameters
        ----------
        width : bits.

        Members
        -------
        i, o : In(width)
        """

        def __init__(self, width: int, depth: int) -> None:
            super().__init__({})

    assert undocumented(Part, {"i", "o", "valid"}) == {"depth", "valid"}
