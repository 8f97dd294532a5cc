"""Types of an intrinsic of the accelerator; intrinsics.py, norm.py and softmax.py declare them.

An intrinsic has a behaviour, a tensor expression over tiles whose sizes come from the Config, and a lowering rule,
which names the instruction and which of its operands each tile is. The loops around an intrinsic become loops of the
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
"""Arguments of an intrinsic in a loop: the begin of each tile, the value of each parameter, whether a reduction
begins."""


@dataclass(frozen=True)
class Compute:
    """Lowering to GEMM or VECTOR.

    operands: name of a tile -> name of the instruction's operand. fields: other fields of the instruction, computed
    from the values of the behaviour's parameters. slots: the instruction's loops over results that loops around the
    intrinsic can become. alone: whether it keeps its unit busy for long, so that no other tile should interleave.
    """

    opcode: Opcode
    operands: Mapping[str, str]
    fields: Callable[..., dict[str, int]] = lambda: {}
    slots: str = "nyx"
    alone: bool = False


ROW, POWERS = "row", "exp"
"""Scopes of tiles that are no operands: a row's numbers that the instruction computes itself, and the scratchpad of
powers, which it reads as a whole."""


@dataclass(frozen=True)
class ImplicitOperand:
    """Lowering to no instruction: the instruction that reads the result, in scope `ROW`, computes it itself."""


@dataclass(frozen=True)
class Move:
    """Lowering to LOAD or STORE; a tile is one element that it moves.

    The behaviour may have the parameters `inside`, whether a tile is read or padding, and `pad`, the value of padding.
    fields: other fields of the instruction.
    """

    opcode: Opcode
    fields: Callable[[], dict[str, int]] = lambda: {}


@dataclass(frozen=True, eq=False)
class TensorIntrinsic(TileOperation):
    """A tile operation of the accelerator, and the instruction that it becomes.

    units: name of a tile -> number of elements at whose multiples it may begin, if that is not its size.
    """

    rule: Compute | Move | ImplicitOperand
    units: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for tile in self.tiles:
            if tile.name not in self.scopes:
                raise ValueError(f"{self.name}: the memory of {tile.name} is not said")
            is_implicit = self.scopes[tile.name] in (ROW, POWERS)
            if isinstance(self.rule, Compute) and not is_implicit and tile.name not in self.rule.operands:
                raise ValueError(f"{self.name}: {tile.name} is no operand of {self.rule.opcode.name}")

    def unit(self, tile: Tensor) -> int:
        return self.units.get(tile.name, tile.size)

    def match(self, nest: For, first: Expr, scope: Callable[[Tensor], str]) -> Intrinsic:
        """Return the intrinsic statement that replaces the loops `nest`; see loops.Declared. Raises TileMismatch."""
        return Intrinsic(self.name, match(self, nest, first, scope), self)

    def window(self, args: Args) -> tuple[Axis, ...]:
        """Return the axes of the window over which tiles are reduced first; they occur in the index of a tile's
        begin."""
        reductions = sorted((arg.axes for arg in args if isinstance(arg, Reduce)), key=len, reverse=True)
        return tuple(dict.fromkeys(axis for axes in reductions for axis in axes))

    def split_args(self, args: Args) -> tuple[dict[Tensor, Load], dict[Var, Expr], Expr]:
        """Split arguments into the begins of tiles, the values of parameters, and whether a reduction begins.

        Raises ValueError if they do not fit the intrinsic.
        """
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
        """Return why a call of the intrinsic cannot have these arguments, for the verifier of loops; None if it can.

        scope: function that gives the memory of a tensor.
        """
        try:
            tiles, _, _ = self.split_args(args)
        except ValueError as error:
            return str(error)
        for tile, load in tiles.items():
            if scope(load.tensor) != self.scopes[tile.name]:
                return f"{tile.name} is in {scope(load.tensor)}, not in {self.scopes[tile.name]}"
        return None

    def meaning(self, args: Args) -> Stmt:
        """Return the loops that the intrinsic stands for, to be interpreted or compiled for the CPU."""
        tiles, values, first = self.split_args(args)
        behaviour, body = self.behaviour, self.behaviour.body
        assert body is not None

        def locate(tile: Tensor, index: tuple[Expr, ...]) -> tuple[Tensor, tuple[Expr, ...]]:
            """Return the tensor that a tile lies in, and the number of its element at `index` in the tile."""
            start = tiles[tile]
            base: Expr = flatten(start.tensor.shape, start.index) if start.index else Const(0, INDEX)
            return start.tensor, (base + flatten(tile.shape, index),)

        def replace_tile(e: Expr) -> Expr | None:
            return Load(*locate(e.tensor, e.index)) if isinstance(e, Load) and e.tensor in tiles else None

        def nest(axes: Sequence[Var], statement: Stmt) -> Stmt:
            """Return `statement` inside loops over `axes`."""
            for axis in reversed(axes):
                statement = For(axis, getattr(axis, "extent", 1), statement)
            return statement

        value = substitute(rewrite(body.value if isinstance(body, Reduce) else body, replace_tile), values)
        target, index = locate(behaviour, behaviour.axes)
        reduction = next((node for node in walk(value) if isinstance(node, Reduce)), None)
        if reduction is not None:
            sum_ = Tensor("window", (), reduction.dtype)
            after = rewrite(value, lambda e: Load(sum_, ()) if isinstance(e, Reduce) else None)
            begin = Store(sum_, (), reduction_identity(reduction.kind, reduction.dtype))
            step = nest((*self.window(args), *reduction.axes), Update(reduction.kind, sum_, (), reduction.value))
            return nest(behaviour.axes, Alloc(sum_, block(begin, step, Store(target, index, after)), "local"))
        if not isinstance(body, Reduce):
            return nest(behaviour.axes, Store(target, index, value))
        reset = If(first, Store(target, index, reduction_identity(body.kind, behaviour.dtype)))
        return nest(behaviour.axes, block(reset, nest(body.axes, Update(body.kind, target, index, value))))
