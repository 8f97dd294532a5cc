"""Tile operations, declared by their behaviour as a tensor expression."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from celosia.compiler.expr.nodes import Load, Reduce, Tensor, Var
from celosia.compiler.expr.walk import walk


@dataclass(frozen=True, eq=False)
class TileOperation:
    """An operation on tiles.

    behaviour: a tensor computed from placeholders (tiles) and variables (parameters: the same for the whole tile).
    scopes: the memory of each tile, by its name; "dram" is that of the caller.
    """

    name: str
    behaviour: Tensor
    scopes: Mapping[str, str]

    @cached_property
    def tiles(self) -> tuple[Tensor, ...]:
        """The tile that is written, then those that are read, in the order of the expression."""
        assert self.behaviour.body is not None
        read = (node.tensor for node in walk(self.behaviour.body) if isinstance(node, Load))
        return self.behaviour, *dict.fromkeys(read)

    @cached_property
    def parameters(self) -> tuple[Var, ...]:
        """Variables that are no axes, in the order in which the behaviour names them."""
        assert self.behaviour.body is not None
        bound = {*self.behaviour.axes, *(a for n in walk(self.behaviour.body) if isinstance(n, Reduce) for a in n.axes)}
        free = (n for n in walk(self.behaviour.body) if isinstance(n, Var) and n not in bound)
        return tuple(dict.fromkeys(free))

    def unit(self, tile: Tensor) -> int:
        """Number of elements whose multiples `tile` may begin at."""
        return tile.size

    @property
    def size(self) -> int:
        """Elements that the operation writes."""
        return self.behaviour.size

    @property
    def reduces(self) -> bool:
        """Whether it combines elements."""
        return isinstance(self.behaviour.body, Reduce)
