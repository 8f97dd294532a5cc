"""Schedules of layers: ordinary functions of primitives, from a definition and the decisions of space.py.

There are two: products (gemm into acc, then the vector unit) and simple layers (the vector unit alone). In both, a tile
of y is one iteration of a pipelined loop; everything that it needs is computed there, in scratchpads, and what was
loaded is kept for tiles that read the same.
"""

from __future__ import annotations

from celosia.compiler.expr import Axis, Schedule, Select, Stage, Tensor, create_schedule
from celosia.compiler.expr.loops import Declared
from celosia.compiler.expr.nodes import Cast
from celosia.compiler.tensorize.define import Definition
from celosia.compiler.tensorize.intrinsics import declared
from celosia.compiler.tensorize.space import Decisions
from celosia.hw.config import Config


def schedule(cfg: Config, d: Definition, c: Decisions) -> Schedule:
    """The loops of `d` under the decisions `c`, which must be a point of its space."""
    return _Template(cfg, d, c).product() if d.acc is not None else _Template(cfg, d, c).simple()


class _Template:
    def __init__(self, cfg: Config, d: Definition, c: Decisions) -> None:
        self.cfg, self.d, self.c = cfg, d, c
        self.s = create_schedule(d.y)
        self.hw: dict[str, Declared] = declared(cfg)

    def product(self) -> Schedule:
        """Tiles of y; in each, acc is the whole reduction, or what a loop over pieces of it has left there."""
        s, d, c = self.s, self.d, self.c
        assert d.acc is not None and d.weights is not None
        s[d.near].set_scope("inp")
        s[d.acc].set_scope("acc")
        weights = s.cache_read(d.weights, "wgt", d.acc)
        places, tile = self._tiles()
        self._pass(tile)
        acc = s[d.acc]
        image, block, row, column, piece, b, m, k, r, t, e, lane = acc.order
        steps = [row, column, k, r, t, piece, b, m, e, lane]
        if c.order == "split":
            acc.compute_at(s[d.y], places)
            pieces, k = acc.split(k, c.k, "peel")
            steps[2] = k
            tiles, block = acc.split(block, c.n, "peel")
            acc.reorder(pieces, tiles, image, block, *steps)
            acc.pipeline(tiles)
            reader, loop = acc, tiles
        elif c.order == "pieces":
            acc.compute_at(s[d.y], places)
            reader = acc
            loop, steps[2] = acc.split(k, c.k, "peel")
            acc.reorder(loop, image, block, *steps)
            acc.pipeline(loop)
        else:
            acc.compute_at(s[d.y], tile)
            shares = []
            if d.problem.share > 1:
                share, block = acc.split(block, d.problem.share, "peel")
                shares.append(share)
            acc.reorder(image, *shares, block, *steps)
            reader, loop = s[d.y], tile
        acc.tensorize(piece, self.hw["gemm"])
        self._bring(d.near, reader, loop, "inp")
        s[weights].compute_at(reader, loop)
        s[weights].keep()
        s[weights].tensorize(s[weights].order[4], self.hw["load_wgt"])
        return s

    def simple(self) -> Schedule:
        s, d = self.s, self.d
        s[d.near].set_scope(d.near_scope)
        _, tile = self._tiles()
        self._pass(tile)
        self._bring(d.near, s[d.y], tile, d.near_scope)
        return s

    def _tiles(self) -> tuple[Axis, Axis]:
        """Cut y into tiles: (the loop over places, the innermost loop over tiles)."""
        y, c, p = self.s[self.d.y], self.c, self.cfg.out_pieces
        image, group, row, column, b, _ = y.order
        block = group
        if p > 1:
            block, group = y.split(group, p, "guard")
        blocks, block = y.split(block, c.n, "peel")
        rows, row = y.split(row, c.y, "peel")
        columns, column = y.split(column, c.x, "peel")
        outside: tuple[Axis, ...] = {
            "weights": (blocks, image, rows, columns), "rows": (image, rows, blocks, columns),
            "input": (image, rows, columns, blocks), "split": (image, rows, columns, blocks),
            "pieces": (blocks, image, rows, columns),
        }[c.order]  # fmt: skip
        if c.order == "pieces":  # one tile, after all pieces
            alone, block = y.split(block, c.n, "peel")
            outside = (*outside, alone)
        inside = (block, row, column) if p == 1 else (group, block, row, column)
        y.reorder(*outside, *inside)
        if p > 1:
            y.unroll(group)
        y.pipeline(outside[-1])
        y.tensorize(b, self.hw["store"])
        return columns, outside[-1]

    def _pass(self, tile: Axis) -> None:
        """The pass of the vector unit at the tile, with all that it reads beside A."""
        s, d = self.s, self.d
        y = s[d.y]
        s[d.out].set_scope("out")
        s[d.out].compute_at(y, tile)
        s[d.out].tensorize(next(axis for axis in s[d.out].order if axis.name == "piece"), self.hw[d.vector.name])
        for source, scope in ((d.par, "par"), (d.table, "lut")):
            if source is not None:
                near = s.cache_read(source, scope, d.out)
                s[near].compute_at(y, tile)
                s[near].keep()
                s[near].tensorize(s[near].order[1], self.hw[f"load_{scope}"])
        if d.b is not None:
            s[d.b].set_scope("vin")
            self._bring(d.b, y, tile, "vin")

    def _bring(self, near: Tensor, reader: Stage, loop: Axis, scope: str) -> None:
        """Load an activation at `loop`, in parts, an entry's pieces apart."""
        stage = self.s[near]
        stage.compute_at(reader, loop)
        stage.keep()
        image, block, row, column, piece, b, _ = stage.order
        parts, block = stage.split(block, self.c.part, "peel")
        stage.reorder(parts, piece, image, block, row, column)
        stage.unroll(parts)
        stage.unroll(piece)
        stage.tensorize(b, self.hw[_load(stage, scope)])


def _load(stage: Stage, scope: str) -> str:
    """Which intrinsic brings a tensor into `scope`."""
    if isinstance(stage.body, Select):
        return f"padded_load_{scope}"
    return "widening_load" if isinstance(stage.body, Cast) else f"load_{scope}"
