"""Make terms by the operators that a vocabulary chooses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from celosia.compiler.superoptimise.generation.enumeration import Candidate, Maker
from celosia.compiler.superoptimise.generation.linear import linear, plain
from celosia.compiler.superoptimise.rules.merging import Z
from celosia.compiler.superoptimise.sizes import Dim, OpenSize, SizeOf
from celosia.compiler.superoptimise.terms import ByteFunction, Leaf, Term, apply

Attributes = dict[str, Any]


def _made(op: str, args: Sequence[Candidate], sizes: tuple[Dim, ...], *more: Term, **given: Any) -> Candidate:
    term = apply(op, *(arg.term for arg in args), *more, **given)
    return Candidate(term, plain(sizes), 1 + sum(arg.size for arg in args), tuple(args))


def function(name: str) -> Maker:
    """A function of bytes, of as many tensors as it is given."""

    def make(*args: Candidate) -> Iterator[Candidate]:
        if all(arg.shape == args[0].shape for arg in args):
            yield _made("map", args, args[0].shape, f=ByteFunction(name))

    return make


def joining(axis: int) -> Maker:
    """Concat."""

    def make(a: Candidate, b: Candidate) -> Iterator[Candidate]:
        if len(a.shape) == len(b.shape) > axis:
            alike = all(p == q for place, (p, q) in enumerate(zip(a.shape, b.shape)) if place != axis)
            if alike:
                shape = (*a.shape[:axis], a.shape[axis] + b.shape[axis], *a.shape[axis + 1 :])
                yield _made("concat", (a, b), shape, axis=axis)

    return make


def cutting(axis: int, place: OpenSize) -> Maker:
    """Slice: what is before `place` and what is behind it; of a sum of two sizes, each of the two."""

    def make(x: Candidate) -> Iterator[Candidate]:
        if len(x.shape) <= axis:
            return
        size = x.shape[axis]
        at = [size.left] if isinstance(size, SizeOf) and size.operation == "+" else []
        for cut in (*at, place):
            if cut != size and not _opaque(cut):
                for start, stop in ((0, cut), *(((cut, size),) if not _opaque(size) else ())):
                    long = plain(SizeOf("-", stop, start))
                    shape = (*x.shape[:axis], long, *x.shape[axis + 1 :])
                    yield _made("slice", (x,), shape, axis=axis, start=start, stop=plain(stop))

    return make


def turning(perm: tuple[int, ...]) -> Maker:
    """Transpose."""

    def make(x: Candidate) -> Iterator[Candidate]:
        if len(x.shape) == len(perm):
            yield _made("transpose", (x,), tuple(x.shape[axis] for axis in perm), perm=perm)

    return make


def shaping(of: tuple[Dim, ...], to: tuple[Dim, ...]) -> Maker:
    """Reshape of what has the shape `of`."""

    def make(x: Candidate) -> Iterator[Candidate]:
        if x.shape == of:
            yield _made("reshape", (x,), to, shape=to)

    return make


def padding(value: Leaf, pads: tuple[Dim, ...]) -> Maker:
    """Pad."""

    def make(x: Candidate) -> Iterator[Candidate]:
        rank = len(x.shape)
        if 2 * rank == len(pads):
            shape = tuple(pads[axis] + size + pads[rank + axis] for axis, size in enumerate(x.shape))
            yield _made("pad", (x,), shape, value, pads=pads)

    return make


@dataclass(frozen=True)
class WindowSize(OpenSize):
    """Rows or columns of what windows give, of which only the name is known."""


def _opaque(dim: Dim) -> bool:
    return any(isinstance(atom, WindowSize) for atom in linear(dim))


def _windows(x: Candidate, kernel: tuple[Dim, ...], given: Attributes) -> list[Dim]:
    """Rows and columns: by name, where windows are not all one element and in their places."""
    plain_ones = kernel == (1, 1) and given["pads"] == (0, 0, 0, 0) and given["strides"] == (1, 1)
    if plain_ones:
        return list(x.shape[2:])
    about = [str(kernel), *(str(given[name]) for name in ("pads", "strides", "dilations"))]
    return [WindowSize(f"windows of {x.shape[2 + axis]} {axis} {about}") for axis in (0, 1)]


def pooling(kernel: tuple[Dim, ...], **given: Any) -> Maker:
    """MaxPool."""

    def make(x: Candidate) -> Iterator[Candidate]:
        if len(x.shape) == 4:
            shape = (*x.shape[:2], *_windows(x, kernel, given))
            yield _made("largest", (x,), shape, kernel=kernel, **given)

    return make


def phasing() -> Maker:
    """SpaceToDepth by two."""

    def make(x: Candidate) -> Iterator[Candidate]:
        n, c, h, w = x.shape
        if all(isinstance(size, SizeOf) and (size.operation, size.left) == ("*", 2) for size in (h, w)):
            yield _made("phases", (x,), (n, 4 * c, h.right, w.right), by=2)  # type: ignore[union-attr]

    return make


def adding() -> Maker:
    """The sum of accumulators."""

    def make(a: Candidate, b: Candidate) -> Iterator[Candidate]:
        if b.shape in (a.shape, ()) and a.shape and not a.constant:
            yield _made("plus", (a, b), a.shape)

    return make


# Products with constants ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Weights:
    """Constants of a product. rows: weights, zero points, bias, multipliers. kernel: () of matrices."""

    rows: tuple[Term, Term, Term, Term]
    outputs: Dim
    inputs: Dim
    kernel: tuple[Dim, ...] = ()


def weights(number: int, outputs: Dim, inputs: Dim, kernel: tuple[Dim, ...] = (), zero: Leaf | None = None) -> Weights:
    """Those that a model has. zero: of all weights, where it is one."""
    shape = (outputs, inputs, *kernel) if kernel else (inputs, outputs)
    w, wz, b, m = (
        Leaf(f"{name}{number}", (outputs,) if name != "w" else shape, True) for name in ("w", "wz", "b", "m")
    )
    zeros = wz if zero is None else apply("spread", zero, shape=(outputs,))
    return Weights((w, zeros, b, m), outputs, inputs, kernel)


def both(a: Weights, b: Weights) -> Weights:
    """The outputs of one behind those of the other."""
    axis = 0 if a.kernel else 1
    rows = [apply("concat", p, q, axis=axis if not place else 0) for place, (p, q) in enumerate(zip(a.rows, b.rows))]
    if a.rows[1] != b.rows[1] and {getattr(each, "op", "") for each in (a.rows[1], b.rows[1])} == {"spread"}:
        zero = a.rows[1].args[0]  # type: ignore[union-attr]
        rows[1] = apply("spread", zero, shape=(plain(a.outputs + b.outputs),))
    return Weights(tuple(rows), plain(a.outputs + b.outputs), a.inputs, a.kernel)  # type: ignore[arg-type]


def some(of: Weights, start: Dim, stop: Dim) -> Weights:
    """Some of the outputs."""
    axis = 0 if of.kernel else 1
    rows = [
        apply("slice", each, axis=axis if not place else 0, start=start, stop=stop)
        for place, each in enumerate(of.rows)
    ]
    return Weights(tuple(rows), plain(SizeOf("-", stop, start)), of.inputs, of.kernel)  # type: ignore[arg-type]


def widened(of: Weights, zero: Leaf, inputs: tuple[Dim, Dim], around: int = 0) -> Weights:
    """With zeros for more inputs before and behind, and around the kernel."""
    before, behind = inputs
    pads = (0, before, around, around, 0, behind, around, around)
    w = apply("pad", of.rows[0], zero, pads=pads)
    kernel = tuple(size + 2 * around if around else size for size in of.kernel)
    return Weights((w, *of.rows[1:]), of.outputs, plain(before + of.inputs + behind), kernel)


def convolving(by: Weights, xz: Leaf, group: int = 1, **given: Any) -> Maker:
    """A requantised convolution with constants, which counts as one operator."""

    def make(x: Candidate) -> Iterator[Candidate]:
        if len(x.shape) == 4 and x.shape[1] == plain(group * by.inputs):
            w, wz, b, m = by.rows
            acc = apply("convolve", x.term, xz, w, wz, b, group=group, **given)
            term = apply("requantise", acc, m, Z, axis=1)
            shape = (x.shape[0], by.outputs, *_windows(x, by.kernel, given))
            yield Candidate(term, shape, x.size + 1, (x,))

    return make


def multiplying(by: Weights, xz: Leaf) -> Maker:
    """A requantised product with constants, which counts as one operator."""

    def make(x: Candidate) -> Iterator[Candidate]:
        if x.shape[-1] == by.inputs:
            w, wz, b, m = by.rows
            acc = apply("multiply", x.term, xz, w, wz, b)
            term = apply("requantise", acc, m, Z, axis=len(x.shape) - 1)
            yield Candidate(term, (*x.shape[:-1], by.outputs), x.size + 1, (x,))

    return make
