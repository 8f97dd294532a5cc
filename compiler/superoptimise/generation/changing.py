"""Terms with other tensors, sizes and functions in the place of theirs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from celosia.compiler.superoptimise.generation.linear import plain
from celosia.compiler.superoptimise.rule import Absorbs, Monotone, RewriteRule, SameByte
from celosia.compiler.superoptimise.sizes import OneOf, OpenSize, SizeOf
from celosia.compiler.superoptimise.terms import ByteFunction, Composed, Leaf, Term

Names = Mapping[str, Any]
"""Of sizes, leaves or functions: what stands for them."""


def with_sizes(value: Any, sizes: Names) -> Any:
    """`value` with other sizes."""
    if isinstance(value, tuple):
        return tuple(with_sizes(each, sizes) for each in value)
    if isinstance(value, SizeOf):
        return plain(SizeOf(value.operation, with_sizes(value.left, sizes), with_sizes(value.right, sizes)))
    return sizes.get(value.name, value) if isinstance(value, OpenSize | OneOf) else value


def changed(term: Term, sizes: Names, leaves: Names = {}, functions: Names = {}) -> Term:  # noqa: B006
    """`term` with other sizes, other leaves (which are terms), and other functions."""
    if isinstance(term, Leaf):
        found = leaves.get(term.name, term)
        return replace(found, shape=with_sizes(found.shape, sizes)) if isinstance(found, Leaf) else found

    def attribute(value: Any) -> Any:
        return functions.get(value.name, value) if isinstance(value, ByteFunction) else with_sizes(value, sizes)

    args = tuple(changed(arg, sizes, leaves, functions) for arg in term.args)
    return Composed(term.op, args, tuple((name, attribute(value)) for name, value in term.attributes))


def rule_with(rule: RewriteRule, sizes: Names, leaves: Names = {}, functions: Names = {}) -> RewriteRule:  # noqa: B006
    """`rule` with other names."""
    before, after = (
        tuple(changed(term, sizes, leaves, functions) for term in side) for side in (rule.before, rule.after)
    )

    def condition(each: Any) -> Any:
        match each:
            case Monotone(f):
                return Monotone(functions.get(f.name, f))
            case SameByte(f):
                return SameByte(functions.get(f.name, f))
            case Absorbs(f, g):
                return Absorbs(functions.get(f.name, f), functions.get(g.name, g))
        return with_sizes(each, sizes)

    return replace(rule, before=before, after=after, where=tuple(map(condition, rule.where)))


def replaced(term: Term, old: Term, new: Term) -> Term:
    """`term` with `new` wherever `old` stands."""
    if term == old:
        return new
    if isinstance(term, Leaf):
        return term
    return replace(term, args=tuple(replaced(arg, old, new) for arg in term.args))


def with_leaves_in_turn(terms: Sequence[Term], name: str, chosen: Iterator[Leaf]) -> tuple[Term, ...]:
    """`terms` with the next one of `chosen` at each place of the leaf `name`."""

    def put(term: Term) -> Term:
        if isinstance(term, Leaf):
            return next(chosen) if term.name == name else term
        return replace(term, args=tuple(map(put, term.args)))

    return tuple(map(put, terms))


def canonical(rule: RewriteRule) -> RewriteRule:
    """`rule` with names in the order in which they stand there, so that rules that are alike have one text."""
    sizes, leaves, functions = dict[str, Any](), dict[str, Any](), dict[str, Any]()
    for leaf in rule.leaves:
        known = sum(each.constant == leaf.constant for each in leaves.values())
        stem = leaf.name.rstrip("0123456789") if leaf.constant else "x"
        leaves.setdefault(leaf.name, replace(leaf, name=f"{stem}{known + 1}"))
    for size in rule.sizes:
        sizes.setdefault(size.name, replace(size, name=f"s{len(sizes) + 1}"))
    for function in functions_of((*rule.before, *rule.after)):
        known = sum(name[0] == function.name[0] for name in functions)
        functions.setdefault(function.name, ByteFunction(f"{function.name[0]}{known + 1}"))
    return rule_with(rule, sizes, leaves, functions)


def functions_of(terms: Sequence[Term]) -> Iterator[ByteFunction]:
    """Those that stand in `terms`, as often as they do."""
    for term in terms:
        if isinstance(term, Composed):
            yield from functions_of(term.args)
            yield from (value for _, value in term.attributes if isinstance(value, ByteFunction))


def shape_of(term: Term) -> tuple[Any, ...]:
    """The sizes of `term`; None for those that windows give."""
    if isinstance(term, Leaf):
        return term.shape
    given = dict(term.attributes)
    if term.op in ("reshape", "spread"):
        return tuple(given["shape"])
    shapes = [shape_of(arg) for arg in term.args]
    first = list(shapes[0])
    if term.op == "transpose":
        return tuple(first[axis] for axis in given["perm"])
    if term.op == "slice":
        first[given["axis"]] = plain(SizeOf("-", given["stop"], given["start"]))
    elif term.op == "concat":
        along = [shape[given["axis"]] for shape in shapes]
        first[given["axis"]] = None if None in along else plain(SizeOf("+", *along))
    elif term.op == "pad":
        pads = zip(given["pads"], given["pads"][len(first) :])
        first = [
            None if size is None else plain(SizeOf("+", SizeOf("+", a, size), b)) for size, (a, b) in zip(first, pads)
        ]
    elif term.op == "multiply":
        first[-1] = shapes[2][1]
    elif term.op in ("convolve", "largest"):
        first[1:] = [shapes[2][0] if term.op == "convolve" else first[1], None, None]
    elif term.op == "phases":
        return (first[0], *[None] * 3)
    return tuple(first)
