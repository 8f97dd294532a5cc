"""Whether loops do what an intrinsic is declared to do.

The value that the loops write is laid over the behaviour of the intrinsic: operations must be the same, tiles and
parameters of the behaviour stand for what is found in their place. Then every loop of the nest must walk through all
operands as one axis of the behaviour does, so that each operand is a dense tile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from celosia.compiler.expr.affine import coefficient, flatten, linear
from celosia.compiler.expr.loops import For, Stmt, Store, Update
from celosia.compiler.expr.nodes import INDEX, Axis, Binary, Call, Cast, Const, Expr, Load, Reduce, Select, Tensor, Var
from celosia.compiler.expr.regions import divisor, simplify_index, structure
from celosia.compiler.expr.walk import substitute, walk

COMMUTATIVE = ("add", "mul", "min", "max", "and", "or", "xor", "eq", "ne")

Bindings = Mapping[Tensor | Var, tuple[Load, Load] | Expr]
"""For each tile its access in the behaviour and in the loops, for each parameter its value."""


class TileMismatch(ValueError):
    """Loops that do something else than the intrinsic; the message says what."""


def match(intrinsic: TileOperation, nest: For, first: Expr, scope: Callable[[Tensor], str]) -> tuple[Expr, ...]:
    """Match an intrinsic with the loops `nest`, and return its arguments; see loops.Declared. TileMismatch where it
    computes something else."""
    loops, statement = _unrolled(intrinsic.name, nest)
    behaviour, body = intrinsic.behaviour, intrinsic.behaviour.body
    assert body is not None
    inside = frozenset(loops)
    kind, value = (body.kind, body.value) if isinstance(body, Reduce) else (None, body)
    found_kind = statement.kind if isinstance(statement, Update) else None
    if kind != found_kind:
        raise TileMismatch(
            f"{intrinsic.name} is {_kind(kind)}, but {statement.tensor.name} is computed by {_kind(found_kind)}"
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
    loops += unifier.own_axes
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


def _kind(kind: str | None) -> str:
    return "no reduction" if kind is None else f"a reduction by {kind}"


def _unrolled(name: str, nest: For) -> tuple[list[Axis], Store | Update]:
    """The loops of a perfect nest and the statement in them."""
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
    """Lays expressions over each other. `inside`: loops of the tile, on which no parameter may depend."""

    def __init__(self, intrinsic: TileOperation, inside: frozenset[Var], scope: Callable[[Tensor], str]) -> None:
        self.name, self.inside = intrinsic.name, inside
        self.intrinsic, self.scope = intrinsic, scope
        self.kind, self.window = "", tuple[Axis, ...]()
        """The reduction in the midst of the expression, and its loops around the tiles."""
        self.wanted_axes, self.own_axes = tuple[Axis, ...](), tuple[Axis, ...]()
        """Its loops within the tiles, in the behaviour and in its place."""

    def fail(self, wanted: Expr, actual: Expr) -> TileMismatch:
        return TileMismatch(f"{self.name} computes {wanted}, the loops compute {actual}")

    def unify(self, wanted: Expr, actual: Expr, bindings: Bindings) -> Bindings:
        """Match two expressions; returns `bindings` with the axes, tiles and parameters that they add. TileMismatch."""
        if isinstance(wanted, Var) and not isinstance(wanted, Axis):
            return self._parameter(wanted, actual, bindings)
        if isinstance(wanted, Load) and isinstance(actual, Load):
            return self._tile(wanted, actual, bindings)
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
            self.wanted_axes, self.own_axes = wanted.axes, actual.axes[around:]
            self.inside |= frozenset(actual.axes)
        if isinstance(wanted, Binary) and isinstance(actual, Binary) and wanted.op in COMMUTATIVE:
            try:
                return self._all((wanted.a, wanted.b), (actual.a, actual.b), bindings)
            except TileMismatch as reason:
                try:
                    return self._all((wanted.a, wanted.b), (actual.b, actual.a), bindings)
                except TileMismatch:
                    raise reason from None
        return self._all(wanted.children(), actual.children(), bindings)

    def _all(self, wanted: Sequence[Expr], actual: Sequence[Expr], bindings: Bindings) -> Bindings:
        """Match pairs of expressions one after the other."""
        for one, other in zip(wanted, actual, strict=True):
            bindings = self.unify(one, other, bindings)
        return bindings

    def _parameter(self, wanted: Var, actual: Expr, bindings: Bindings) -> Bindings:
        """Bind a parameter of the behaviour to an expression without tensors, equal for the whole tile."""
        known = bindings.get(wanted)
        if any(node in self.inside for node in walk(actual) if isinstance(node, Var)):
            raise TileMismatch(f"{self.name}: {wanted.name} is the same for the whole tile, but {actual} is not")
        if any(isinstance(node, Load) for node in walk(actual)):
            raise TileMismatch(f"{self.name}: {wanted.name} is no tensor, but {actual} reads one")
        if wanted.dtype != actual.dtype or (isinstance(known, Expr) and structure(known) != structure(actual)):
            raise self.fail(wanted, actual)
        return {**bindings, wanted: actual}

    def _tile(self, wanted: Load, actual: Load, bindings: Bindings) -> Bindings:
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
    """Whether two nodes of one class are the same but for their children."""
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
    """TileMismatch where a tensor lies in another memory than its tile."""
    for tile, tensor in tensors.items():
        wanted, actual = intrinsic.scopes[tile.name], scope(tensor)
        if wanted != actual:
            raise TileMismatch(f"{intrinsic.name} wants {tile.name} in {wanted}, but {tensor.name} is in {actual}")


def _check_loops(
    name: str, axes: Sequence[Axis], loops: Sequence[Axis], pairs: dict[Tensor, tuple[Load, Load]]
) -> None:
    """TileMismatch where the loops do not walk through the tiles as the axes of the behaviour do."""

    sums = [
        [linear(flatten(load.tensor.shape, load.index)) if load.index else {} for load in pair]
        for pair in pairs.values()
    ]

    def steps(axis: Axis, of: int) -> tuple[int, ...]:
        own_steps = []
        for pair, terms in zip(pairs.values(), sums):
            step = coefficient(terms[of], axis)
            if step is None:
                raise TileMismatch(f"{name}: {pair[of]} is not affine in {axis.name}")
            own_steps.append(step)
        return (axis.extent, *own_steps)

    wanted = _merged([steps(axis, 0) for axis in axes if axis.extent > 1])
    actual = _merged([steps(axis, 1) for axis in loops if axis.extent > 1])
    if wanted == actual:
        return
    names = [tile.name for tile in pairs]

    def said(rows: Sequence[tuple[int, ...]]) -> str:
        texts = (
            f"{row[0]} with steps " + ", ".join(f"{step} in {n}" for step, n in zip(row[1:], names) if step)
            for row in rows
        )
        return "; ".join(texts) or "none"

    raise TileMismatch(f"{name} has loops of {said(wanted)}; found {said(actual)}")


def _merged(rows: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Loops (extent, steps) in order, where two that walk evenly through all operands are one."""
    rows = sorted(rows)
    for outer in rows:
        for inner in rows:
            if outer is not inner and all(a == inner[0] * b for a, b in zip(outer[1:], inner[1:])):
                rest = [row for row in rows if row is not outer and row is not inner]
                return _merged([*rest, (outer[0] * inner[0], *inner[1:])])
    return rows


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
