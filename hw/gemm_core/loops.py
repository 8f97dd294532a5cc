"""Nested affine loops: one address per operand and cycle, computed by incremental adders without multipliers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import or_

from amaranth import Cat, Const, Module, Mux, Signal, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from celosia.hw.lib.probes import probes
from celosia.hw.lib.signals import Reg
from celosia.hw.spec.isa import EXTENT_BITS


def _select_one_hot(one_hot: Signal, values: Sequence[Value]) -> Value:
    """Return the value whose bit in `one_hot` is set; 0 if none is. It takes one AND and an OR."""
    return reduce(or_, (Mux(chosen, value, 0) for chosen, value in zip(one_hot, values)))


class Loops(wiring.Component):
    """Walk nested loops, one iteration a cycle; each operand's address is base + sum of index * stride.

        loops = Loops(GEMM_LOOPS, {"acc": (acc_bits, OUTER_LOOPS), "inp": (inp_bits, GEMM_LOOPS)},
                      reduction=("k", "r", "s"))
        m.d.comb += [*loops.load(instr.payload.fields), loops.instr.valid.eq(instr.valid), ...]

    The next instruction is accepted in the cycle in which the last iteration of the previous one is taken, without a
    gap. Other fields of an instruction are not kept here. A unit that needs them copies them into registers when
    `instr.valid & instr.ready`; the copy then holds from the first iteration to the last.

    Parameters
    ----------
    names : loops from the outermost to the innermost.
    operands : for each operand the bits of its address, which wraps, and the loops in which it has a stride: the
        outermost one, and any others in their order.
    reduction : the innermost loops, whose iterations are combined into one output. May be empty.

    Members
    -------
    instr : In(stream)    `extent_<loop>` (at least 1), `<operand>_base` and `<operand>_<loop>`, named as in `isa.py`.
    step : Out(stream)    One iteration: the address of each operand, by its name; `first` and `last` iteration of the
                          reduction, `end`: the last iteration of the instruction. Comes from registers.
    ahead : Out           `valid`, `last` and addresses that `step` will have in the next cycle, unless `halt` comes.
    halt : In(1)          Drops the present instruction and accepts none.
    """

    def __init__(
        self,
        names: Sequence[str],
        operands: Mapping[str, tuple[int, Sequence[str]]],
        reduction: Sequence[str] = (),
    ) -> None:
        self.names, self.operands, self.reduction = tuple(names), dict(operands), tuple(reduction)
        for operand, (_, loops) in self.operands.items():
            if loops[:1] != self.names[:1] or tuple(loops) != tuple(name for name in self.names if name in loops):
                raise ValueError(f"loops of {operand} must be of {self.names}, from the first on, not {tuple(loops)}")
        if self.reduction and self.names[-len(self.reduction) :] != self.reduction:
            raise ValueError(f"the reduction must be the last of {self.names}, not {self.reduction}")
        self.fields = data.StructLayout(
            {f"extent_{loop}": EXTENT_BITS for loop in self.names}
            | {f"{operand}_base": bits for operand, (bits, _) in self.operands.items()}
            | {f"{operand}_{loop}": bits for operand, (bits, loops) in self.operands.items() for loop in loops}
        )
        addresses = {operand: bits for operand, (bits, _) in self.operands.items()}
        super().__init__({
            "instr": In(stream.Signature(self.fields)),
            "step": Out(stream.Signature(data.StructLayout(addresses | {"first": 1, "last": 1, "end": 1}))),
            "ahead": Out(data.StructLayout(addresses | {"valid": 1, "last": 1})),
            "halt": In(1),
        })  # fmt: skip

    def load(self, fields: data.View[data.StructLayout]) -> list[object]:
        """Return the assignments of an instruction's fields to the payload of `instr`."""
        return [self.instr.payload[name].eq(fields[name]) for name, _ in self.fields]

    def elaborate(self, platform: object) -> Module:
        m = Module()
        depth = len(self.names)
        outer = depth - len(self.reduction)
        new, step = self.instr.payload, self.step.payload

        busy = Signal()
        first = Reg()
        held = Reg(self.fields)
        at_last = Reg(depth)
        # rise[i]: every loop inside loop i is at its last index, so the index of loop i changes with the next step.
        # goes_on[i]: it then increases; else it returns to 0. Hundreds of registers depend on both and on all_done, so
        # these are registers, computed a step ahead.
        rise = Reg(depth)
        goes_on = Reg(depth)
        reduction_done = Signal()
        all_done = Reg()
        renew = Signal()
        m.d.comb += [
            reduction_done.eq(rise[outer - 1] if outer else all_done),
            self.step.valid.eq(busy & ~self.halt),
            renew.eq(~busy | (self.step.ready & all_done)),
            self.instr.ready.eq(~self.halt & renew),
            step.first.eq(first),
            step.last.eq(reduction_done),
            step.end.eq(all_done),
        ]
        loading = Signal()
        stepping = Signal()
        m.d.comb += [
            loading.eq(self.instr.valid & self.instr.ready),
            stepping.eq(self.step.valid & self.step.ready),
        ]

        with m.If(loading):
            m.d.sync += [busy.eq(1), first.eq(1)]
        with m.Elif(stepping):
            m.d.sync += [busy.eq(~all_done), first.eq(reduction_done)]
        with m.If(self.halt):
            m.d.sync += busy.eq(0)

        # If no iteration follows, registers are loaded from `instr` whether it is valid or not. Their content does not
        # count while not `busy`, and so the enables of hundreds of registers need not wait for the handshake.
        advance = Signal(depth)
        m.d.comb += advance.eq(rise & self.step.ready.replicate(depth))
        with m.If(renew):
            m.d.sync += held.eq(new)
        coming = self._track_last_indices(m, held, renew, rise, at_last, advance)
        with m.If(renew | self.step.ready):
            m.d.sync += [
                at_last.eq(coming),
                rise.eq(Cat(coming[i + 1 :].all() for i in range(depth))),
                goes_on.eq(Cat(coming[i + 1 :].all() & ~coming[i] for i in range(depth))),
                all_done.eq(coming.all()),
            ]
        m.d.comb += [
            self.ahead.valid.eq(~self.halt & Mux(renew, self.instr.valid, busy)),
            self.ahead.last.eq(Mux(renew | self.step.ready, coming[outer:].all(), reduction_done)),
        ]
        self._compute_addresses(m, held, renew, goes_on, advance)
        probes(self, busy=busy, held=held, at_last=at_last, rise=rise, goes_on=goes_on)
        return m

    def _track_last_indices(
        self,
        m: Module,
        held: data.View[data.StructLayout],
        renew: Signal,
        rise: Signal,
        at_last: Signal,
        advance: Signal,
    ) -> Signal:
        """Return the next value of `at_last`: a bit for each loop, whether it is at its last index.

        held: the instruction whose loops run. renew: `instr` replaces it. rise: the loops whose index would change with
        the next step. advance: the loops whose index changes in this cycle.
        """
        new = self.instr.payload
        left = [Reg(EXTENT_BITS, name=f"left_{loop}") for loop in self.names]
        # single: the loop's extent is 1. near: its index is the last but one.
        single, near = ([Reg(name=f"{name}_{loop}") for loop in self.names] for name in ("single", "near"))
        coming = Signal(len(self.names))
        for i, loop in enumerate(self.names):
            extent, start = held[f"extent_{loop}"], new[f"extent_{loop}"]
            with m.If(renew):
                m.d.comb += coming[i].eq(start == 1)
                m.d.sync += [left[i].eq(start), single[i].eq(start == 1), near[i].eq(start == 2)]
            with m.Else():
                m.d.comb += coming[i].eq(Mux(rise[i], Mux(at_last[i], single[i], near[i]), at_last[i]))
            with m.If(~renew & advance[i]):
                m.d.sync += [
                    left[i].eq(Mux(at_last[i], extent, left[i] - 1)),
                    near[i].eq(Mux(at_last[i], extent == 2, left[i] == 3)),
                ]
        probes(self, left=left, single=single, near=near)
        return coming

    def _compute_addresses(
        self, m: Module, held: data.View[data.StructLayout], renew: Signal, goes_on: Signal, advance: Signal
    ) -> None:
        """Compute the address of each operand.

        held: the instruction whose loops run. renew: `instr` replaces it. goes_on: one-hot, the loop whose index
        increases with the next step. advance: that loop and all loops inside it, in the cycle of the step.
        """
        new, step = self.instr.payload, self.step.payload
        # begin[operand, loop] is the address at the first iteration with the present index of the loop; the address for
        # the next index is that plus the stride. A loop without a stride begins where the loop around it does.
        begin = {
            (operand, loop): Reg(bits, name=f"{operand}_begin_{loop}")
            for operand, (bits, loops) in self.operands.items()
            for loop in loops
        }
        for operand, (bits, loops) in self.operands.items():
            origin, stride, following = (
                Signal(bits, name=f"{operand}_{suffix}") for suffix in ("origin", "stride", "following")
            )
            m.d.comb += following.eq(origin + stride)
            m.d.comb += step[operand].eq(begin[operand, loops[-1]])
            outer_loops = self.names[: self.names.index(loops[-1]) + 1]
            begin_of_loop = [
                begin[operand, [outer for outer in loops if outer in outer_loops[: i + 1]][-1]]
                for i in range(len(outer_loops))
            ]
            strides = [held[f"{operand}_{loop}"] if loop in loops else Const(0) for loop in outer_loops]
            m.d.comb += [
                origin.eq(_select_one_hot(goes_on, begin_of_loop)),
                stride.eq(_select_one_hot(goes_on, strides)),
            ]
            innermost, base = begin[operand, loops[-1]], new[f"{operand}_base"]
            innermost_advances = advance[self.names.index(loops[-1])]
            m.d.comb += self.ahead[operand].eq(Mux(renew, base, Mux(innermost_advances, following, innermost)))
            for loop in loops:
                with m.If(renew):
                    m.d.sync += begin[operand, loop].eq(base)
                with m.Elif(advance[self.names.index(loop)]):
                    m.d.sync += begin[operand, loop].eq(following)
        probes(self, begin=begin)
