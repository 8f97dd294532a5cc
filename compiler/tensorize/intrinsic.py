"""Intrinsics of the accelerator: what one is, and whether a loop nest computes what it is declared to compute.

An intrinsic has a behaviour, a tensor expression over tiles whose sizes come from the Config, and a lowering rule,
which names the instruction and which of its operands each tile is. The loops around an intrinsic become loops of the
instruction, as many as it has (render.py). intrinsics.py declares those of a Config.

`match` unifies the expression that the loops write with the behaviour: operations must be the same; tiles and
parameters of the behaviour are bound to the expressions in their place. Then every loop of the nest must step through
all operands as one axis of the behaviour does, so that each operand is a dense tile. So no schedule, of a template or
of a user, becomes instructions that compute something else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from celosia.compiler.expr.affine import coefficient, divisor, flatten, linear, simplify_index, structure
from celosia.compiler.expr.loops import Alloc, For, If, Intrinsic, Stmt, Store, Update, block
from celosia.compiler.expr.lower import reduction_identity
from celosia.compiler.expr.nodes import (
    INDEX,
    Axis,
    Binary,
    Call,
    Cast,
    Const,
    Expr,
    Load,
    Reduce,
    Select,
    Tensor,
    Var,
    rewrite,
    substitute,
    walk,
)
from celosia.hw.spec.isa import Opcode

Args = tuple[Expr | Tensor | int, ...]
"""Arguments of an intrinsic in a loop: the begin of each tile, the value of each parameter, whether a reduction
begins."""


@dataclass(frozen=True, eq=False)
class TileOperation:
    """An operation on tiles, which loops can be matched with.

    behaviour: a tensor computed from placeholders (tiles) and variables (parameters: the same for the whole tile).
    scopes: name of a tile -> its memory; "dram" is that of the caller.
    """

    name: str
    behaviour: Tensor
    scopes: Mapping[str, str]

    @cached_property
    def tiles(self) -> tuple[Tensor, ...]:
        """The tile that is written, then those that are read, in the order in which the expression reads them."""
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
        """Return the number of elements at whose multiples `tile` may begin."""
        return tile.size

    @property
    def size(self) -> int:
        """Elements that the operation writes."""
        return self.behaviour.size

    @property
    def reduces(self) -> bool:
        """Whether the behaviour is a reduction, which may begin in one call and continue in the next."""
        return isinstance(self.behaviour.body, Reduce)


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


# Matching of loops -------------------------------------------------------------------------------------------

COMMUTATIVE = ("add", "mul", "min", "max", "and", "or", "xor", "eq", "ne")
"""Binary operations whose operands may change places."""
Bindings = Mapping[Tensor | Var, tuple[Load, Load] | Expr]
"""Tile -> its access in the behaviour and in the loops; parameter or axis -> the expression that it stands for."""


class TileMismatch(ValueError):
    """Raised for loops that do not compute what the intrinsic does; the message says what differs."""


def match(intrinsic: TileOperation, nest: For, first: Expr, scope: Callable[[Tensor], str]) -> tuple[Expr, ...]:
    """Match an intrinsic with the loops `nest`, and return its arguments; see loops.Declared.

    first: the condition under which a reduction begins. scope: gives the memory of a tensor. Raises TileMismatch if the
    loops compute something else.
    """
    loops, statement = _split_nest(intrinsic.name, nest)
    behaviour, body = intrinsic.behaviour, intrinsic.behaviour.body
    assert body is not None
    inside = frozenset(loops)
    kind, value = (body.kind, body.value) if isinstance(body, Reduce) else (None, body)
    actual_kind = statement.kind if isinstance(statement, Update) else None
    if kind != actual_kind:
        raise TileMismatch(
            f"{intrinsic.name} is {_describe_reduction(kind)}, but {statement.tensor.name} is computed by "
            f"{_describe_reduction(actual_kind)}"
        )
    unifier = _Unifier(intrinsic, inside, scope)
    bindings = unifier.unify(value, statement.value, {})
    written = Load(behaviour, behaviour.axes), Load(statement.tensor, statement.index)
    if behaviour.dtype != statement.tensor.dtype:
        raise TileMismatch(f"{intrinsic.name} writes {behaviour.dtype}, not {statement.tensor.dtype}")
    pairs = {behaviour: written}
    for tile in intrinsic.tiles[1:]:
        pair = bindings[tile]
        assert isinstance(pair, tuple)
        pairs[tile] = pair
    _check_scopes(intrinsic, {tile: actual.tensor for tile, (_, actual) in pairs.items()}, scope)
    axes = (*behaviour.axes, *(body.axes if isinstance(body, Reduce) else unifier.wanted_axes))
    loops += unifier.actual_axes
    _check_loops(intrinsic.name, axes, loops, pairs)

    zero: dict[Var, Expr] = {loop: Const(0, INDEX) for loop in loops}
    args: list[Expr] = []
    for tile, (_, actual) in pairs.items():
        start = Load(actual.tensor, tuple(simplify_index(substitute(i, zero)) for i in actual.index))
        number = flatten(actual.tensor.shape, start.index) if start.index else Const(0, INDEX)
        if divisor(number) % (unit := intrinsic.unit(tile)):
            raise TileMismatch(
                f"{intrinsic.name}: tiles of {tile.name} begin at multiples of {unit} elements, not at {start}"
            )
        window = tuple(a for a in unifier.window if any(node is a for i in start.index for node in walk(i)))
        args.append(Reduce(unifier.kind, start, window) if window else start)
    for parameter in intrinsic.parameters:
        argument = bindings[parameter]
        assert isinstance(argument, Expr)
        args.append(argument)
    if kind is not None:
        args.append(first)
    return tuple(args)


def _describe_reduction(kind: str | None) -> str:
    """Return a reduction's kind as words of a message."""
    return "no reduction" if kind is None else f"a reduction by {kind}"


def _split_nest(name: str, nest: For) -> tuple[list[Axis], Store | Update]:
    """Return the loops of a perfect nest and the statement in them. Raises TileMismatch for other nests."""
    loops: list[Axis] = []
    stmt: Stmt = nest
    while isinstance(stmt, For):
        assert isinstance(stmt.var, Axis)
        loops.append(stmt.var)
        stmt = stmt.body
    if not isinstance(stmt, Store | Update):
        raise TileMismatch(f"{name}: the loops hold more than one assignment")
    return loops, stmt


class _Unifier:
    """Unifies the expression of an intrinsic (wanted) with that of the loops (actual).

    inside: loops of the tile, on which no parameter may depend. kind, window: the reduction inside the expression, and
    those of its loops that are around the tiles. wanted_axes, actual_axes: its loops within the tiles, in the behaviour
    and in the loops.
    """

    def __init__(self, intrinsic: TileOperation, inside: frozenset[Var], scope: Callable[[Tensor], str]) -> None:
        self.name, self.inside = intrinsic.name, inside
        self.intrinsic, self.scope = intrinsic, scope
        self.kind, self.window = "", tuple[Axis, ...]()
        self.wanted_axes, self.actual_axes = tuple[Axis, ...](), tuple[Axis, ...]()

    def fail(self, wanted: Expr, actual: Expr) -> TileMismatch:
        """Return the error for two expressions that differ."""
        return TileMismatch(f"{self.name} computes {wanted}, the loops compute {actual}")

    def unify(self, wanted: Expr, actual: Expr, bindings: Bindings) -> Bindings:
        """Unify two expressions. Returns `bindings` with the new ones added. Raises TileMismatch if they differ."""
        if isinstance(wanted, Var) and not isinstance(wanted, Axis):
            return self._bind_parameter(wanted, actual, bindings)
        if isinstance(wanted, Load) and isinstance(actual, Load):
            return self._bind_tile(wanted, actual, bindings)
        if isinstance(wanted, Axis) and isinstance(actual, Axis):
            if wanted.extent != actual.extent or bindings.get(wanted, actual) is not actual:
                raise self.fail(wanted, actual)
            return {**bindings, wanted: actual}
        if type(wanted) is not type(actual) or wanted.dtype != actual.dtype or not _same_node(wanted, actual):
            raise self.fail(wanted, actual)
        if isinstance(wanted, Reduce) and isinstance(actual, Reduce):
            around = len(actual.axes) - len(wanted.axes)
            if around < 0:
                raise self.fail(wanted, actual)
            self.kind, self.window = actual.kind, actual.axes[:around]
            self.wanted_axes, self.actual_axes = wanted.axes, actual.axes[around:]
            self.inside |= frozenset(actual.axes)
        if isinstance(wanted, Binary) and isinstance(actual, Binary) and wanted.op in COMMUTATIVE:
            try:
                return self._unify_all((wanted.a, wanted.b), (actual.a, actual.b), bindings)
            except TileMismatch as reason:
                try:
                    return self._unify_all((wanted.a, wanted.b), (actual.b, actual.a), bindings)
                except TileMismatch:
                    raise reason from None
        return self._unify_all(wanted.children(), actual.children(), bindings)

    def _unify_all(self, wanted: Sequence[Expr], actual: Sequence[Expr], bindings: Bindings) -> Bindings:
        """Unify pairs of expressions one after the other."""
        for one, other in zip(wanted, actual, strict=True):
            bindings = self.unify(one, other, bindings)
        return bindings

    def _bind_parameter(self, wanted: Var, actual: Expr, bindings: Bindings) -> Bindings:
        """Bind a parameter of the behaviour to an expression that reads no tensor and is the same for the whole
        tile."""
        known = bindings.get(wanted)
        if any(node in self.inside for node in walk(actual) if isinstance(node, Var)):
            raise TileMismatch(f"{self.name}: {wanted.name} is the same for the whole tile, but {actual} is not")
        if any(isinstance(node, Load) for node in walk(actual)):
            raise TileMismatch(f"{self.name}: {wanted.name} is no tensor, but {actual} reads one")
        if wanted.dtype != actual.dtype or (isinstance(known, Expr) and structure(known) != structure(actual)):
            raise self.fail(wanted, actual)
        return {**bindings, wanted: actual}

    def _bind_tile(self, wanted: Load, actual: Load, bindings: Bindings) -> Bindings:
        """Bind a tile of the behaviour to an access of the loops."""
        if wanted.dtype != actual.dtype:
            raise self.fail(wanted, actual)
        if wanted.index and any(isinstance(node, Load) for node in walk(wanted.index[-1])):  # a look-up
            bindings = self.unify(wanted.index[-1], actual.index[-1], bindings)
            begin: Expr = Const(0, INDEX)
            wanted = Load(wanted.tensor, (*wanted.index[:-1], begin))
            actual = Load(actual.tensor, (*actual.index[:-1], begin))
        _check_scopes(self.intrinsic, {wanted.tensor: actual.tensor}, self.scope)
        known = bindings.get(wanted.tensor)
        if isinstance(known, tuple) and [structure(e) for e in known] != [structure(wanted), structure(actual)]:
            raise self.fail(wanted, actual)
        return {**bindings, wanted.tensor: (wanted, actual)}


def _same_node(wanted: Expr, actual: Expr) -> bool:
    """Whether two nodes of one class are equal apart from their children."""
    match wanted, actual:
        case Const(a), Const(b):
            return a == b
        case Binary(a), Binary(b):
            return a == b
        case Reduce(a), Reduce(b):
            return a == b
        case Call(a, x), Call(b, y):
            return a == b and len(x) == len(y)
        case (Cast(), Cast()) | (Select(), Select()):
            return True
    return False


def _check_scopes(intrinsic: TileOperation, tensors: dict[Tensor, Tensor], scope: Callable[[Tensor], str]) -> None:
    """Raise TileMismatch if a tensor lies in another memory than its tile."""
    for tile, tensor in tensors.items():
        wanted, actual = intrinsic.scopes[tile.name], scope(tensor)
        if wanted != actual:
            raise TileMismatch(f"{intrinsic.name} wants {tile.name} in {wanted}, but {tensor.name} is in {actual}")


def _check_loops(
    name: str, axes: Sequence[Axis], loops: Sequence[Axis], pairs: dict[Tensor, tuple[Load, Load]]
) -> None:
    """Raise TileMismatch if the loops do not step through the tiles as the axes of the behaviour do."""
    offsets = [
        [linear(flatten(load.tensor.shape, load.index)) if load.index else {} for load in pair]
        for pair in pairs.values()
    ]

    def steps(axis: Axis, side: int) -> tuple[int, ...]:
        """Return the extent of an axis and its step in each tile; side: 0 for the behaviour, 1 for the loops."""
        tile_steps = []
        for pair, terms in zip(pairs.values(), offsets):
            step = coefficient(terms[side], axis)
            if step is None:
                raise TileMismatch(f"{name}: {pair[side]} is not affine in {axis.name}")
            tile_steps.append(step)
        return (axis.extent, *tile_steps)

    wanted = _merge_loops([steps(axis, 0) for axis in axes if axis.extent > 1])
    actual = _merge_loops([steps(axis, 1) for axis in loops if axis.extent > 1])
    if wanted == actual:
        return
    names = [tile.name for tile in pairs]

    def describe(rows: Sequence[tuple[int, ...]]) -> str:
        """Return loops and their steps in words, for the message."""
        texts = (
            f"{row[0]} with steps " + ", ".join(f"{step} in {n}" for step, n in zip(row[1:], names) if step)
            for row in rows
        )
        return "; ".join(texts) or "none"

    raise TileMismatch(f"{name} has loops of {describe(wanted)}; found {describe(actual)}")


def _merge_loops(rows: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Sort loops (extent, *steps), and merge each two that step evenly through all operands to one.

    Loops with the same iterations are then equal, however they were split and ordered.
    """
    rows = sorted(rows)
    for outer in rows:
        for inner in rows:
            if outer is not inner and all(a == inner[0] * b for a, b in zip(outer[1:], inner[1:])):
                rest = [row for row in rows if row is not outer and row is not inner]
                return _merge_loops([*rest, (outer[0] * inner[0], *inner[1:])])
    return rows
