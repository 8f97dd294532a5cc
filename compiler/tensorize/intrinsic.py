"""Intrinsics of the accelerator.

An intrinsic is declared by its behaviour, a tensor expression over tiles whose sizes come from the Config, and by its
lowering rule, which says of which instruction the tiles are operands. The loops around an intrinsic become loops of the
instruction, as many as it has (see render.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from celosia.compiler.expr.affine import flatten
from celosia.compiler.expr.loops import Alloc, For, If, Intrinsic, Stmt, Store, Update, block
from celosia.compiler.expr.nest_parts import reduction_identity
from celosia.compiler.expr.nodes import INDEX, Axis, Const, Expr, Load, Reduce, Tensor, Var
from celosia.compiler.expr.walk import rewrite, substitute, walk
from celosia.compiler.tensorize.match import TileOperation, match
from celosia.hw.spec.isa import Opcode

Args = tuple[Expr | Tensor | int, ...]


@dataclass(frozen=True)
class Compute:
    """Lowering to GEMM or VECTOR.

    operands: the operand of the instruction that each tile is, by their names. fields: other fields of the instruction,
    from the values of the behaviour's parameters. alone: whether it keeps its unit for long.
    """

    opcode: Opcode
    operands: Mapping[str, str]
    fields: Callable[..., dict[str, int]] = lambda: {}
    slots: str = "nyx"
    """The instruction's loops over results that loops around the intrinsic can become."""
    alone: bool = False


ROW, POWERS = "row", "exp"
"""Scopes of tiles that are no operands: numbers of a row that an instruction computes for itself, and the scratchpad of
powers, which it reads as a whole."""


@dataclass(frozen=True)
class ImplicitOperand:
    """Lowering to no instruction: the one that reads the result, in scope `ROW`, computes it itself."""


@dataclass(frozen=True)
class Move:
    """Lowering to LOAD or STORE, whose elements the tiles are.

    The behaviour may have the parameters `inside`, whether a tile is read or padding, and `pad`, the value of padding.
    fields: other fields of the instruction.
    """

    opcode: Opcode
    fields: Callable[[], dict[str, int]] = lambda: {}


@dataclass(frozen=True, eq=False)
class TensorIntrinsic(TileOperation):
    """A tile operation of the accelerator, and the instruction that it becomes.

    units: elements whose multiples a tile may begin at, by its name, where that is not its size.
    """

    rule: Compute | Move | ImplicitOperand
    units: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for tile in self.tiles:
            if tile.name not in self.scopes:
                raise ValueError(f"{self.name}: the memory of {tile.name} is not said")
            inner = self.scopes[tile.name] in (ROW, POWERS)
            if isinstance(self.rule, Compute) and not inner and tile.name not in self.rule.operands:
                raise ValueError(f"{self.name}: {tile.name} is no operand of {self.rule.opcode.name}")

    def unit(self, tile: Tensor) -> int:
        return self.units.get(tile.name, tile.size)

    def match(self, nest: For, first: Expr, scope: Callable[[Tensor], str]) -> Intrinsic:
        """The intrinsic in the place of `nest`; see loops.Declared. Raises Mismatch."""
        return Intrinsic(self.name, match(self, nest, first, scope), self)

    def window(self, args: Args) -> tuple[Axis, ...]:
        """The loops over which tiles are combined before anything else; they occur in the index of a tile's begin."""
        reductions = sorted((arg.axes for arg in args if isinstance(arg, Reduce)), key=len, reverse=True)
        return tuple(dict.fromkeys(axis for axes in reductions for axis in axes))

    def split_args(self, args: Args) -> tuple[dict[Tensor, Load], dict[Var, Expr], Expr]:
        """Split arguments into the begins of tiles, the values of parameters, and whether a reduction begins.
        ValueError where they are others."""
        wanted = len(self.tiles) + len(self.parameters) + self.reduces
        if len(args) != wanted:
            raise ValueError(f"{self.name} has {wanted} arguments, not {len(args)}")
        tiles: dict[Tensor, Load] = {}
        for tile, arg in zip(self.tiles, args):
            arg = arg.value if isinstance(arg, Reduce) else arg
            if not isinstance(arg, Load) or arg.dtype != tile.dtype:
                raise ValueError(f"{self.name}: {tile.name} is the begin of a tile of {tile.dtype}, not {arg}")
            tiles[tile] = arg
        values: dict[Var, Expr] = {}
        for parameter, arg in zip(self.parameters, args[len(self.tiles) :]):
            if not isinstance(arg, Expr) or arg.dtype != parameter.dtype:
                raise ValueError(f"{self.name}: {parameter.name} is a {parameter.dtype}, not {arg}")
            values[parameter] = arg
        first = args[-1] if self.reduces else Const(True, "bool")
        if not isinstance(first, Expr) or first.dtype != "bool":
            raise ValueError(f"{self.name}: the last argument says whether the reduction begins, not {first}")
        return tiles, values, first

    def argument_error(self, args: Args, scope: Callable[[Tensor], str]) -> str | None:
        """Why it cannot have these arguments, whose memories `scope` tells; None where it can."""
        try:
            tiles, _, _ = self.split_args(args)
        except ValueError as error:
            return str(error)
        for tile, load in tiles.items():
            if scope(load.tensor) != self.scopes[tile.name]:
                return f"{tile.name} is in {scope(load.tensor)}, not in {self.scopes[tile.name]}"
        return None

    def meaning(self, args: Args) -> Stmt:
        """The loops that the intrinsic stands for."""
        tiles, values, first = self.split_args(args)
        behaviour, body = self.behaviour, self.behaviour.body
        assert body is not None

        def at(tile: Tensor, index: tuple[Expr, ...]) -> tuple[Tensor, tuple[Expr, ...]]:
            start = tiles[tile]
            base: Expr = flatten(start.tensor.shape, start.index) if start.index else Const(0, INDEX)
            return start.tensor, (base + flatten(tile.shape, index),)

        def actual(e: Expr) -> Expr | None:
            return Load(*at(e.tensor, e.index)) if isinstance(e, Load) and e.tensor in tiles else None

        def loops(axes: Sequence[Var], inner: Stmt) -> Stmt:
            for axis in reversed(axes):
                inner = For(axis, getattr(axis, "extent", 1), inner)
            return inner

        value = substitute(rewrite(body.value if isinstance(body, Reduce) else body, actual), values)
        target, index = at(behaviour, behaviour.axes)
        inner = next((node for node in walk(value) if isinstance(node, Reduce)), None)
        if inner is not None:
            sum_ = Tensor("window", (), inner.dtype)
            after = rewrite(value, lambda e: Load(sum_, ()) if isinstance(e, Reduce) else None)
            begin = Store(sum_, (), reduction_identity(inner.kind, inner.dtype))
            step = loops((*self.window(args), *inner.axes), Update(inner.kind, sum_, (), inner.value))
            return loops(behaviour.axes, Alloc(sum_, block(begin, step, Store(target, index, after)), "local"))
        if not isinstance(body, Reduce):
            return loops(behaviour.axes, Store(target, index, value))
        reset = If(first, Store(target, index, reduction_identity(body.kind, behaviour.dtype)))
        return loops(behaviour.axes, block(reset, loops(body.axes, Update(body.kind, target, index, value))))
