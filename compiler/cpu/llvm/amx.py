"""Intel AMX: match loop nests with tile products, and write the tile instructions.

    for k in steps:
      unrolled rows (at most 16):  [unrolled columns (at most 6):]
        vectorized 16:  acc[row, column, lane] sum= dot4(x[row, k], w[k, column, lane])

is such a nest where 16 steps lie behind each other in x. Its rows are those of tile A and of the accumulators, its
steps are the rows of tile B (Intel, "64 and IA-32 Architectures Software Developer's Manual", TDPBUSD).

In all functions `b` is the IRBuilder that writes the instructions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from celosia.compiler.expr.affine import coefficient, flatten, linear
from celosia.compiler.expr.loops import For, Update
from celosia.compiler.expr.nodes import Call, Expr, Load, Tensor, Var
from celosia.compiler.target import AMX_FEATURES, TILE_COLUMNS, TILE_ROWS, TILE_STEPS

V = Any
I8, I64 = ir.IntType(8), ir.IntType(64)
TILE_A, TILE_B = 6, 7
"""Numbers of the tiles with the operands; tiles 0 to 5 are accumulators."""


@dataclass(frozen=True)
class AmxNest:
    """A loop nest that tiles can compute.

    k: variable of the reduction loop, of `steps` iterations. rows: number of rows. columns: the loop over columns of
    accumulators, if there is one. x, w, acc: operands and sum. x_row, acc_row: elements from one row to the next.
    w_step: elements from one step to the next. zero: variables of the loops over rows and lanes, which are 0 at a
    tile's start.
    """

    k: Var
    steps: int
    rows: int
    columns: For | None
    x: Load
    w: Load
    acc: tuple[Tensor, tuple[Expr, ...]]
    x_row: int
    w_step: int
    acc_row: int
    zero: tuple[Var, ...]

    @property
    def width(self) -> int:
        """Number of columns of accumulator tiles, 1 without a loop over them."""
        return 1 if self.columns is None else self.columns.extent


def match(nest: For, features: frozenset[str]) -> AmxNest | None:
    """Return `nest` as tile products; None where it computes something else or the processor has no tiles.

    features: of the processor, in LLVM's names.
    """
    if not features >= AMX_FEATURES or nest.kind != "serial" or nest.extent < TILE_STEPS:
        return None
    loops: list[For] = []
    body: Any = nest.body
    while isinstance(body, For):
        loops.append(body)
        body = body.body
    match body:
        case Update("sum", tensor, index, Call("dot4", (Load() as x, Load() as w))):
            pass
        case _:
            return None
    if [loop.kind for loop in loops] not in (["unrolled", "vectorized"], ["unrolled", "unrolled", "vectorized"]):
        return None
    rows, *middle, lanes = loops
    columns = middle[0] if middle else None
    if rows.extent not in TILE_ROWS or lanes.extent != 16 or (columns and columns.extent > TILE_COLUMNS):
        return None
    xs, ws, accs = (linear(flatten(t.shape, i)) for t, i in ((x.tensor, x.index), (w.tensor, w.index), (tensor, index)))

    def strides(loop: Var) -> tuple[int | None, int | None, int | None]:
        """Return the elements of x, w and acc from one iteration of a loop to the next."""
        return coefficient(xs, loop), coefficient(ws, loop), coefficient(accs, loop)

    of_k, of_rows, of_lanes = strides(nest.var), strides(rows.var), strides(lanes.var)
    if of_k[0] != 1 or not of_k[1] or of_k[2] != 0 or of_lanes != (0, 1, 1):
        return None
    if not of_rows[0] or of_rows[1] != 0 or not of_rows[2]:
        return None
    if columns is not None and (strides(columns.var)[0] != 0 or None in strides(columns.var)):
        return None
    return AmxNest(
        nest.var, nest.extent, rows.extent, columns, x, w, (tensor, index), of_rows[0], of_k[1], of_rows[2],
        (rows.var, lanes.var),
    )  # fmt: skip


def configure(b: Any, module: Any, rows: int) -> None:
    """Write the instruction that gives all tiles `rows` rows of 64 bytes, except B, which has 16 rows."""
    name = f"tiles.{rows}"
    if name not in module.globals:
        sizes = [64, 0] * 8 + [0] * 16  # bytes of a row of tiles 0 to 15, as 16 bits each
        counts = [rows] * TILE_B + [TILE_STEPS] + [0] * 8
        values = [1, 0, *[0] * 14, *sizes, *counts]
        table = ir.GlobalVariable(module, ir.ArrayType(I8, 64), name)
        table.initializer = ir.Constant(table.value_type, values)
        table.global_constant = True
        table.linkage = "internal"
        table.align = 64
    b.call(_declare(module, "ldtilecfg", ir.PointerType()), [_as_pointer(module.globals[name])])


def release(b: Any, module: Any) -> None:
    """Write the instruction that releases all tiles."""
    b.call(_declare(module, "tilerelease"), [])


def load(b: Any, tile: int, pointer: V, row_bytes: int) -> None:
    """Write the load of a tile whose rows are `row_bytes` apart from `pointer` on."""
    fn = _declare(b.module, "tileloadd64", I8, ir.PointerType(), I64)
    b.call(fn, [I8(tile), pointer, I64(row_bytes)])


def store(b: Any, tile: int, pointer: V, row_bytes: int) -> None:
    """Write the store of a tile whose rows are `row_bytes` apart from `pointer` on."""
    fn = _declare(b.module, "tilestored64", I8, ir.PointerType(), I64)
    b.call(fn, [I8(tile), pointer, I64(row_bytes)])


def multiply(b: Any, tile: int) -> None:
    """Write tile += A * B, the products of four uint8 of A and four int8 of B added to an int32."""
    b.call(_declare(b.module, "tdpbusd", I8, I8, I8), [I8(tile), I8(TILE_A), I8(TILE_B)])


def _declare(module: Any, name: str, *types: Any) -> V:
    """Return the declaration of LLVM's intrinsic llvm.x86.`name`, which takes `types` and returns nothing."""
    full = f"llvm.x86.{name}"
    return module.globals.get(full) or ir.Function(module, ir.FunctionType(ir.VoidType(), types), full)


def _as_pointer(variable: V) -> V:
    """Return a global variable as an opaque pointer, which llvmlite's own type for it is not."""
    variable.type = ir.PointerType()
    return variable
