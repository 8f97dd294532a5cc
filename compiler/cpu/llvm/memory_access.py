"""Tensors in the LLVM IR of a kernel: their pointers, and loads and stores of elements or vectors; masks of positions.

In all functions `b` is the IRBuilder that writes the instructions, and `env` has the LLVM values of variables.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from llvmlite import ir

from celosia.compiler.cpu.llvm import operations
from celosia.compiler.cpu.llvm.operations import (
    I8,
    I64,
    V,
    align_size,
    is_vector,
    memory_type,
    pick_lanes,
    shuffle_mask,
    splat,
)
from celosia.compiler.cpu.schedule.caches import CACHE_LINE_BYTES, PrefetchedElement
from celosia.compiler.expr.affine import flatten, from_linear, interval, is_in_bounds, linear, stride_along
from celosia.compiler.expr.loops import Block, For, Stmt, Store, Update, statements, tensors_read
from celosia.compiler.expr.nodes import INDEX, Const, Expr, Load, Tensor, Var, depends_on, substitute
from celosia.compiler.program.dtypes import itemsize


class UnrolledLoop:
    """A loop that is being unrolled, in its current `iteration`.

    written: tensors that the body stores to. can_interleave: those whose stores of all iterations may be combined.
    loaded: vectors that were loaded for all iterations at once. pending_stores: vectors that the last iteration will
    store together with its own.
    """

    def __init__(self, var: Var, extent: int, body: Stmt) -> None:
        """Find the tensors that each iteration stores once and does not read, whose stores can be interleaved."""
        inside = list(statements(body))
        stores = Counter(s.tensor for s in inside if isinstance(s, Store | Update))
        reads = tensors_read(body)
        is_plain = all(isinstance(s, Block | Store) or (isinstance(s, For) and s.kind == "vectorized") for s in inside)
        self.var, self.extent, self.iteration = var, extent, 0
        self.written = frozenset(stores)
        self.can_interleave = {t for t, times in stores.items() if is_plain and times == 1 and t not in reads}
        self.loaded: dict[Any, list[V]] = {}
        self.pending_stores: dict[Tensor, list[V]] = {}

    def contiguous_lines(self, tensor: Tensor, index: tuple[Expr, ...], step: int | None, lanes: int) -> int | None:
        """Return the number of contiguous vectors that hold all elements that all iterations read, or None.

        step: distance of lanes in elements. It is one long vector where the iterations lie between the lanes, and one
        for each lane where iterations and lanes form a square tile.
        """
        if (
            tensor in self.written
            or stride_along(tensor, index, self.var) != 1
            or not is_in_bounds(Load(tensor, index))
        ):
            return None
        if step == self.extent:
            return 1
        return lanes if self.extent == lanes and lanes.bit_count() == 1 else None

    def interleaves_stores(self, tensor: Tensor, index: tuple[Expr, ...], step: int | None) -> bool:
        """Return whether the stores of all iterations interleave to one contiguous vector. step: distance of lanes."""
        return tensor in self.can_interleave and step == self.extent > 1 and stride_along(tensor, index, self.var) == 1


def transpose_lines(b: Any, contiguous_lines: list[V], count: int) -> list[V]:
    """Return `count` vectors: vector k has element k of every line, or every `count`-th element of a single line.

    A square tile has as many lines as lanes, a power of two: each round interleaves a line of the upper half with one
    of the lower half.
    """
    n = len(contiguous_lines)
    if n == 1:
        line = contiguous_lines[0]
        return [pick_lanes(b, line, range(k, line.type.count, count)) for k in range(count)]
    lanes = [list(range(n)), list(range(n, 2 * n))]
    mixed = [lane for pair in zip(*lanes) for lane in pair]
    halves = [shuffle_mask(mixed[start : start + n]) for start in (0, n)]
    for _ in range(n.bit_length() - 1):
        pairs = zip(contiguous_lines[: n // 2], contiguous_lines[n // 2 :])
        contiguous_lines = [b.shuffle_vector(upper, lower, half) for upper, lower in pairs for half in halves]
    return contiguous_lines


def interleave(b: Any, vectors: list[V]) -> V:
    """Interleave vectors: the first element of each, then the second of each, ...; the inverse of `transpose_lines`."""
    n, count = vectors[0].type.count, len(vectors)
    result = vectors[0]
    for k, vector in enumerate(vectors[1:], 1):
        longer = pick_lanes(b, vector, [*range(n), *[n] * (k * n - n)])
        result = b.shuffle_vector(result, longer, shuffle_mask(range(k * n + n)))
    return pick_lanes(b, result, (k * n + i for i in range(n) for k in range(count)))


MAX_STACK_TENSOR_BYTES = 16 << 10
"""Limit of a "local" tensor that lies on the stack; larger ones lie in the workspace."""
MAX_STACK_BYTES = 256 << 10
"""Limit of all tensors on the stack; further ones lie in the workspace."""


class MemoryWriter:
    """Writes the memory accesses of a kernel's body; BodyWriter adds statements and expressions.

    fn: the LLVM function. entry: builder of its first block, for allocations. b: builder at the current position.
    memory: pointer of each tensor. workspace: pointer of the kernel's workspace, of which `workspace_bytes` are used.
    shared_loop, share: see BodyWriter. The other fields have comments below.
    """

    def __init__(
        self, fn: Any, memory: dict[Tensor, V], workspace: V, loop: For | None = None, share: tuple[V, ...] = ()
    ) -> None:
        """Create the entry block, for allocations, and the first block of code."""
        self.fn, self.workspace, self.shared_loop, self.share = fn, workspace, loop, share
        self.features = fn.module.features
        self.entry = ir.IRBuilder(fn.append_basic_block("entry"))
        self.b = ir.IRBuilder(fn.append_basic_block("start"))
        self.entry.branch(self.b.block)
        self.entry.position_before(self.entry.block.terminator)
        self.memory = memory
        self.workspace_bytes = self.stack_bytes = 0
        self.vector: tuple[Var, int] | None = None  # the vectorised loop and its extent
        self.lane: int | None = None  # while an index is written: the lane whose scalar index it is
        self.unrolled: UnrolledLoop | None = None  # the innermost unrolled loop around
        self.tile_rows = 0  # rows of the AMX tiles that this function uses, 0 without
        self.prefetch_distance: dict[int, int] = {}  # loads by id -> elements that are fetched ahead
        self.prefetched: dict[Var, PrefetchedElement] = {}  # loop -> the element that each iteration fetches
        self.streaming_stores: frozenset[Tensor] = frozenset()  # outputs whose stores bypass the caches
        self.nan_free: frozenset[Tensor] = frozenset()  # extremes that are never NaN
        self.mask: V = None  # inside the arm of a selection: the lanes that may read

    def expr(self, e: Expr, env: dict[Var, V], memo: dict[Any, V]) -> V:
        """Write an expression, each node once for a `memo`, and return its value."""
        raise NotImplementedError

    def _alloc(self, tensor: Tensor, scope: str) -> V:
        """Allocate a tensor on the stack if it is small, else in the workspace. Returns its pointer."""
        if scope == "local" and tensor.nbytes <= min(MAX_STACK_TENSOR_BYTES, MAX_STACK_BYTES - self.stack_bytes):
            self.stack_bytes += align_size(tensor.nbytes)
            slot = self.entry.alloca(ir.ArrayType(memory_type(tensor.dtype), max(tensor.size, 1)))
            slot.align = operations.WORKSPACE_ALIGNMENT
            slot.type = ir.PointerType()  # llvmlite would check the type of what is stored against that of the array
            return slot
        offset = self.workspace_bytes
        self.workspace_bytes += align_size(tensor.nbytes)
        return self.entry.gep(self.workspace, [I64(offset)], inbounds=True, source_etype=ir.IntType(8))

    def _pointer(self, tensor: Tensor, element: V) -> V:
        """Write the pointer to the element with this row-major number."""
        if tensor.value is not None and tensor not in self.memory:
            self.memory[tensor] = self._table(tensor)
        return self.b.gep(self.memory[tensor], [element], inbounds=True, source_etype=memory_type(tensor.dtype))

    def _table(self, tensor: Tensor) -> V:
        """Define a constant tensor as a global of the module. Returns its pointer."""
        assert tensor.value is not None
        data = bytearray(tensor.value.tobytes())
        kind = ir.ArrayType(ir.IntType(8), max(len(data), 1))
        table = ir.GlobalVariable(self.fn.module, kind, f"{self.fn.name}.table{len(self.fn.module.global_values)}")
        table.linkage, table.global_constant, table.align = "private", True, operations.WORKSPACE_ALIGNMENT
        table.initializer = ir.Constant(kind, data or bytearray(1))
        table.type = ir.PointerType()
        return table

    def _offset(self, tensor: Tensor, index: tuple[Expr, ...], env: dict[Var, V], memo: dict[Any, V]) -> V:
        """Write the row-major element number of an index, as a scalar."""
        total: V = None
        constant = 0
        for atom, k in linear(flatten(tensor.shape, index)).items():
            if atom is None:
                constant += k
                continue
            term = self.expr(atom, env, memo)
            if k != 1:
                term = self.b.mul(term, I64(k), flags=("nsw",))
            total = term if total is None else self.b.add(total, term, flags=("nsw",))
        if total is None:
            return I64(constant)
        return self.b.add(total, I64(constant), flags=("nsw",)) if constant else total

    def _lane_stride(self, tensor: Tensor, index: tuple[Expr, ...]) -> int | None:
        """Return the distance of neighbouring lanes in elements; None where it varies.

        It is 0 outside of vectors, and while the code of a single lane is written.
        """
        if self.vector is None or self.lane is not None:
            return 0
        return stride_along(tensor, index, self.vector[0])

    def _lane_pointer(self, lane: int | None, tensor: Tensor, index: tuple[Expr, ...], env: dict[Var, V]) -> V:
        """Write the pointer to the element that one lane accesses; lane None outside of vectorised loops."""
        saved, self.lane = self.lane, lane
        element = self._offset(tensor, index, env, {})
        self.lane = saved
        return self._pointer(tensor, element)

    def _load(self, tensor: Tensor, index: tuple[Expr, ...], env: dict[Var, V]) -> V:
        """Load tensor[index] for all lanes: one element, a vector, a masked vector, or lane by lane, by the stride.

        Raises ValueError where a condition guards reads of lanes that are not contiguous.
        """
        element = memory_type(tensor.dtype)
        align = itemsize(tensor.dtype)
        step = self._lane_stride(tensor, index)
        if step == 0:
            if self.mask is not None and self.lane is None and not is_in_bounds(Load(tensor, index)):
                raise ValueError(f"{tensor.name}: all lanes read one element where a condition of each holds")
            at = self._lane_pointer(self.lane or 0, tensor, index, env)
            value = self.b.load(at, typ=element, align=align)
        else:
            assert self.vector is not None
            n = self.vector[1]
            wide = ir.VectorType(element, n)
            if self.mask is not None and not is_in_bounds(Load(tensor, index)):
                if step != 1:
                    raise ValueError(f"{tensor.name}: lanes {step} apart read where a condition holds")
                value = self._masked_load(tensor, index, env)
            elif step == 1:
                value = self.b.load(self._lane_pointer(0, tensor, index, env), typ=wide, align=align)
            elif (tile := self._load_tile(tensor, index, env)) is not None:
                assert self.unrolled is not None
                value = tile[self.unrolled.iteration]
            elif step == 2:  # both halves of what the lanes span, then every other element
                first = self._lane_pointer(0, tensor, index, env)
                second = self.b.gep(first, [I64(n - 1)], inbounds=True, source_etype=element)
                halves = [self.b.load(at, typ=wide, align=align) for at in (first, second)]
                pick = [2 * k if 2 * k < n else 2 * k + 1 for k in range(n)]
                value = self.b.shuffle_vector(*halves, ir.Constant(ir.VectorType(ir.IntType(32), n), pick))
            else:
                value = ir.Constant(wide, ir.Undefined)
                for lane in range(n):
                    at = self._lane_pointer(lane, tensor, index, env)
                    one = self.b.load(at, typ=element, align=align)
                    value = self.b.insert_element(value, one, ir.IntType(32)(lane))
        if tensor.dtype == "bool":
            value = self.b.icmp_unsigned("!=", value, ir.Constant(value.type, None))
        return value

    def _masked_load(self, tensor: Tensor, index: tuple[Expr, ...], env: dict[Var, V]) -> V:
        """Load a vector under the current mask.

        Where the processor would load lane by lane, a plain load replaces it if all of the vector is inside the tensor.
        """
        element, n = memory_type(tensor.dtype), self.mask.type.count
        saved, self.lane = self.lane, 0
        element_number = self._offset(tensor, index, env, {})
        self.lane = saved
        pointer, align = self._pointer(tensor, element_number), itemsize(tensor.dtype)
        if "neon" not in self.features or tensor.size < n:
            return operations.masked_load(self.b, pointer, self.mask, element, align)
        inside = self.b.icmp_unsigned("<=", element_number, I64(tensor.size - n))
        return operations.load_if(self.b, inside, pointer, self.mask, element, align)

    def _load_tile(self, tensor: Tensor, index: tuple[Expr, ...], env: dict[Var, V]) -> list[V] | None:
        """Load the elements that all iterations of the unrolled loop read. Returns a vector for each iteration.

        Returns None where the elements are not contiguous.
        """
        unrolled, vector = self.unrolled, self.vector
        if unrolled is None or vector is None:
            return None
        count = unrolled.contiguous_lines(tensor, index, self._lane_stride(tensor, index), vector[1])
        if count is None:
            return None
        # Loaded vectors are valid in this basic block only, in which instructions run from top to bottom.
        key = (tensor, *map(id, index), id(self.b.block))
        if key not in unrolled.loaded:
            first = env | {unrolled.var: I64(0)}
            starts = [self._lane_pointer(lane, tensor, index, first) for lane in range(count)]
            wide = ir.VectorType(memory_type(tensor.dtype), vector[1] * unrolled.extent // count)
            lines = [self.b.load(at, typ=wide, align=itemsize(tensor.dtype)) for at in starts]
            unrolled.loaded[key] = transpose_lines(self.b, lines, unrolled.extent)
        return unrolled.loaded[key]

    def _store(self, tensor: Tensor, index: tuple[Expr, ...], value: V, env: dict[Var, V]) -> None:
        """Store a value to tensor[index]: a scalar, a vector, or lane by lane, as the stride allows."""
        if tensor.dtype == "bool":
            byte = ir.IntType(8)
            value = self.b.zext(value, ir.VectorType(byte, value.type.count) if is_vector(value) else byte)
        align = itemsize(tensor.dtype)
        step = self._lane_stride(tensor, index)
        if self.vector is None:
            self.b.store(value, self._lane_pointer(None, tensor, index, env), align=align)
            return
        n = self.vector[1]
        if self.unrolled is not None and self._collect_interleaved_store(
            self.unrolled, tensor, index, splat(self.b, value, n), env
        ):
            return
        if step == 1:
            store = self.b.store(splat(self.b, value, n), self._lane_pointer(0, tensor, index, env), align=align)
            if tensor in self.streaming_stores and n * align == CACHE_LINE_BYTES:
                store.set_metadata("nontemporal", self.fn.module.add_metadata([ir.IntType(32)(1)]))
            return
        for lane in range(n):
            one = self.b.extract_element(value, ir.IntType(32)(lane)) if is_vector(value) else value
            self.b.store(one, self._lane_pointer(lane, tensor, index, env), align=align)

    def _collect_interleaved_store(
        self, unrolled: UnrolledLoop, tensor: Tensor, index: tuple[Expr, ...], value: V, env: dict[Var, V]
    ) -> bool:
        """Collect the values that the iterations of the unrolled loop store; the last one writes all of them.

        Returns False where they are not interleaved in memory, and nothing was collected.
        """
        if not unrolled.interleaves_stores(tensor, index, self._lane_stride(tensor, index)):
            return False
        values = unrolled.pending_stores.setdefault(tensor, [])
        values.append(value)
        if len(values) == unrolled.extent:
            pointer = self._lane_pointer(0, tensor, index, env | {unrolled.var: I64(0)})
            self.b.store(interleave(self.b, values), pointer, align=itemsize(tensor.dtype))
        return True


I1 = ir.IntType(1)
MAX_LANES = 128
"""Limit of the lanes of a position mask, whose numbers are compared as bytes."""


def position_mask(
    b: Any, op: str, x: Expr, y: Expr, lanes: tuple[Var, int], env: Mapping[Var, V], value: Callable[[Expr], V]
) -> V:
    """Write the mask of x < y or x <= y (op lt or le) of indices; None where neighbouring lanes are not one apart.

    Lane numbers are compared as bytes, instead of indices as 64-bit numbers. The mask is a constant where the values of
    `env` decide it. lanes: the vectorised variable and its extent. value: writes an expression that is equal in all
    lanes.
    """
    var, n = lanes
    difference = linear(y - x if op == "lt" else y - x + 1)  # positive where it holds
    step = difference.pop(var, 0)
    if abs(step) != 1 or n > MAX_LANES or any(depends_on(atom, var) for atom in difference if atom is not None):
        return None
    constants: dict[Var, Expr] = {
        v: Const(atom.constant, INDEX) for v, atom in env.items() if isinstance(atom, ir.Constant)
    }
    rest = from_linear(difference)
    span = interval(substitute(rest, constants))
    if span is not None and span[0] == span[1]:
        return ir.Constant(ir.VectorType(I1, n), [I1(int(span[0] + step * lane > 0)) for lane in range(n)])
    first = b.sub(I64(1), value(rest)) if step == 1 else value(rest)
    for bound, limit in (("smax", 0), ("smin", n)):
        first = operations.intrinsic(b, f"llvm.{bound}", first, I64(limit))
    numbers = ir.Constant(ir.VectorType(I8, n), [I8(lane) for lane in range(n)])
    return b.icmp_unsigned(">=" if step == 1 else "<", numbers, operations.splat(b, b.trunc(first, I8), n))


def constant_lanes(mask: V) -> list[bool] | None:
    """Return the lanes of a constant mask; None for other masks, and for one bit that all lanes share."""
    lanes = mask.constant if isinstance(mask, ir.Constant) else None
    return [bool(lane.constant) for lane in lanes] if isinstance(lanes, (list, tuple)) else None


def mask_and(b: Any, x: V, y: V) -> V:
    """Write x and y of masks; a constant where both are."""
    if (first := constant_lanes(x)) is None or (second := constant_lanes(y)) is None:
        return b.and_(x, y)
    return ir.Constant(x.type, [I1(int(p and q)) for p, q in zip(first, second, strict=True)])


def mask_not(b: Any, mask: V) -> V:
    """Write the complement of a mask; a constant where it is one."""
    lanes = constant_lanes(mask)
    return b.not_(mask) if lanes is None else ir.Constant(mask.type, [I1(int(not lane)) for lane in lanes])
