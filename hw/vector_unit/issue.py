"""Issue of the vector unit: which instructions start, and when the steps of their loops enter the pipeline."""

from __future__ import annotations

from collections.abc import Sequence

from amaranth import Cat, Const, Module, Mux, Signal, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from celosia.hw.gemm_core.loops import Loops
from celosia.hw.lib.layout import Pulse, done_layout, instruction_layout
from celosia.hw.lib.probes import probes
from celosia.hw.lib.signals import Reg
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import (
    OUTER_LOOPS,
    TAP_LOOPS,
    VECTOR_LOOPS,
    ASource,
    BSource,
    Destination,
    Opcode,
    formats,
)
from celosia.hw.spec.scratchpads import scratchpads
from celosia.hw.vector_unit.constants import assign_constants, constants_layout
from celosia.hw.vector_unit.retire import RetireStage
from celosia.hw.vector_unit.slots import SlotScheduler
from celosia.hw.vector_unit.softmax_tracker import SoftmaxProgress, SoftmaxTracker


def vector_operands(cfg: Config) -> dict[str, tuple[int, Sequence[str]]]:
    """Return, for each operand of a VECTOR, the bits of its address and the loops that move it."""
    loops_of = {"a": VECTOR_LOOPS, "b": OUTER_LOOPS, "par": OUTER_LOOPS, "dst": OUTER_LOOPS}
    loops_of |= {"tap": TAP_LOOPS} if cfg.taps else {}
    widths = {field.name: field.width for field in formats(cfg)[Opcode.VECTOR].fields}
    return {name: (widths[f"{name}_base"], loops) for name, loops in loops_of.items()}


def step_layout(cfg: Config) -> data.StructLayout:
    """Return the layout of a step of a VECTOR's loops: the address of each operand, and three flags.

    first, last: the step is the first or last one of its reduction. end: it is the instruction's last step.
    """
    addresses = {name: bits for name, (bits, _) in vector_operands(cfg).items()}
    return data.StructLayout(addresses | {"first": 1, "last": 1, "end": 1})


class IssueStage(wiring.Component):
    """Accept instructions, issue the steps of their loops, and retire them.

    An instruction may start while the previous one is still in the pipeline, so the constants of two are kept. A step
    is issued only in a cycle from which its item meets no structural hazard (`SlotScheduler`), so that the pipeline
    never stalls. Softmaxes have no steps here: an engine of their own executes them (`SoftmaxTracker`).

    Parameters
    ----------
    cfg : Config

    Members
    -------
    instr : In(stream), done : Out(Pulse), halt : In(1)     See `unit_members`.
    active, stalled : Out(1)        See `unit_members`.
    idle : Out(1)                   No instruction is under way; one may be reported as done in this cycle.
    claimed : In(2)                 Banks of acc that GEMM reads `claim_lead` cycles later.
    step : Out(step_layout), valid : Out(1)      The step that the loops offer.
    fire : Out(1)                   The step is issued in this cycle.
    sets : Out(constants).array(2)  Constants of the two instructions with steps that may be under way.
    current : Out(1)                Number of the set of the last accepted instruction.
    now : Out(constants)            Constants of the instruction whose loops run.
    ends : In(1), ended : In        See `RetireStage`.
    lands : In(1)                   An entry is written to acc.
    starts_norm : Out(1)            A norm starts. This and the next two only matter in Configs with `norm`.
    norm_busy : In(1)               The norm's factors are still being computed, so no step of it may be issued.
    norm_ends : In(1)               `norm_busy` ends with this cycle.
    starts_softmax : Out(1)         A softmax starts.
    softmax : In(SoftmaxProgress)   State of the softmax engine.
    softmax_under_way : Out(1)      At least one softmax is under way.
    oldest_softmax : Out            Constants of the oldest softmax under way.
    """

    def __init__(self, cfg: Config) -> None:
        self._cfg = cfg
        constants = constants_layout(cfg)
        super().__init__({
            "instr": In(stream.Signature(instruction_layout(cfg, Opcode.VECTOR))), "done": Out(Pulse(done_layout)),
            "halt": In(1), "active": Out(1), "stalled": Out(1), "idle": Out(1), "claimed": In(2),
            "step": Out(step_layout(cfg)), "valid": Out(1), "fire": Out(1),
            "sets": Out(constants).array(2), "current": Out(1), "now": Out(constants),
            "ends": In(1), "ended": In(done_layout), "lands": In(1),
            "starts_norm": Out(1), "norm_busy": In(1), "norm_ends": In(1),
            "starts_softmax": Out(1), "softmax": In(SoftmaxProgress()), "softmax_under_way": Out(1),
            "oldest_softmax": Out(constants),
        })  # fmt: skip

    def elaborate(self, platform: object) -> Module:
        m = Module()
        cfg = self._cfg
        m.submodules.loops = loops = Loops(VECTOR_LOOPS, vector_operands(cfg), reduction=("r", "s"))
        m.submodules.slots = slots = SlotScheduler(cfg)
        m.submodules.retire = retire = RetireStage(bool(cfg.softmax))
        offered = Signal(self.now.shape())
        output = Signal()
        # A bubble is a cycle in which an item with a residual still works: the unit is active then, not stalled.
        m.d.comb += [
            *assign_constants(cfg, self.instr.payload, offered),
            self.step.eq(loops.step.payload), self.valid.eq(loops.step.valid), loops.step.ready.eq(slots.slot),
            self.fire.eq(loops.step.valid & slots.slot), output.eq(self.fire & loops.step.payload.last),
            self.active.eq(self.fire | slots.bubble | self.softmax_under_way),
            self.stalled.eq(loops.step.valid & ~slots.slot & ~slots.bubble),
        ]  # fmt: skip
        if cfg.norm:
            with m.If(self.norm_busy):
                m.d.comb += [self.active.eq(1), self.stalled.eq(0)]
        blocks_start: Value = Const(0)
        blocks_step: Value = Const(0)
        if cfg.softmax:
            softmaxes = self._build_softmax_tracker(m, loops, offered, output)
            blocks_start, blocks_step = softmaxes.blocks_start, softmaxes.blocks_step
        # With two instructions under way, the oldest one has the set that is not `current`.
        under_way = self._admit(m, loops, offered, blocks_start, retire.retires)
        self._keep_constants(m, loops, offered, under_way)
        self._connect_scheduler(m, loops, slots, output, blocks_step)
        self._connect_retirement(m, retire, self._constants_of_set(self.current ^ under_way[1]))
        m.d.comb += self.idle.eq((under_way == 0) & ~self.softmax_under_way)
        probes(self, loops=loops, slots=slots, retire=retire, under_way=under_way)
        return m

    def _admit(
        self, m: Module, loops: Loops, offered: data.View[data.StructLayout], blocks: Value, retires: Value
    ) -> Signal:
        """Accept instructions. Returns the number of instructions with steps under way, at most two.

        An instruction waits for the previous one if that writes acc, as its entries may wait for GEMM in a queue, or if
        that writes vin and the instruction reads vin. Softmaxes and norms wait until no steps are under way.

        offered: constants of the instruction offered. blocks: it must wait for a softmax. retires: the oldest
        instruction with steps retires.
        """
        fields, is_offered = self.instr.payload.fields, self.instr.valid
        is_softmax: Value = fields.softmax if self._cfg.softmax else Const(0)
        starts_alone = is_softmax
        under_way = Signal(2)
        feeds = Signal(2)  # the last instruction writes acc; it writes vin
        may_start = Signal()
        accept = Signal()
        waits = Signal()
        writes_vin = fields.destination == Destination.VIN
        writes_acc = fields.destination == Destination.ACC if self._cfg.int32 else Const(0)
        reads_vin = (fields.a_source == ASource.VIN) | (fields.b_source == BSource.VIN)
        if self._cfg.norm:
            starts_alone |= fields.norm
            m.d.comb += self.starts_norm.eq(accept & fields.norm)
        m.d.comb += [
            waits.eq((under_way != 0) & (feeds[0] | (feeds[1] & reads_vin) | starts_alone)),
            may_start.eq(~self.halt & ~under_way[1] & ~waits & ~blocks),
            *loops.load(fields),
            loops.instr.valid.eq(is_offered & may_start & ~is_softmax),
            loops.halt.eq(self.halt),
            self.instr.ready.eq(loops.instr.ready & may_start),
            accept.eq(is_offered & self.instr.ready & ~is_softmax),
            # The loops are always ready then, as no steps are under way.
            self.starts_softmax.eq(is_offered & may_start & is_softmax),
        ]
        with m.If(accept):
            m.d.sync += [self.current.eq(~self.current), feeds.eq(Cat(writes_acc, writes_vin))]
        with m.If(accept != retires):
            m.d.sync += under_way.eq(under_way + accept - retires)
        with m.If(self.halt):
            m.d.sync += under_way.eq(0)
        probes(self, feeds=feeds)
        return under_way

    def _keep_constants(
        self, m: Module, loops: Loops, offered: data.View[data.StructLayout], under_way: Signal
    ) -> None:
        """Keep the constants of two instructions in `sets`, and those of the instruction whose loops run in `now`.

        A set in no use is loaded with `offered` in every cycle, so that its enable need not wait for the handshake.
        """
        now = Reg(offered.shape())
        m.d.comb += self.now.eq(now)
        with m.If(loops.instr.ready):
            m.d.sync += now.eq(offered)
        for number, port in enumerate(self.sets):
            constants = Reg(offered.shape(), name=f"constants{number}")
            m.d.comb += port.eq(constants)
            with m.If(~under_way[1] & (self.current != number)):
                m.d.sync += constants.eq(offered)

    def _constants_of_set(self, number: Value) -> data.View[data.StructLayout]:
        """Return the constants of set `number`, one of the two instructions that may be under way."""
        even, odd = self.sets
        return data.View(self.now.shape(), Mux(number, Value.cast(odd), Value.cast(even)))

    def _connect_scheduler(self, m: Module, loops: Loops, slots: SlotScheduler, output: Signal, blocks: Value) -> None:
        """Connect `slots`, which decides whether the step that the loops offer in the next cycle may be issued.

        output: a step that completes an entry is issued. blocks: a softmax forbids the next step.
        """
        fields, now = self.instr.payload.fields, self.now
        a_vin = Mux(loops.instr.ready, fields.a_source == ASource.VIN, now.a_vin)
        m.d.comb += [
            slots.reads_acc.eq(~a_vin), slots.bank.eq(loops.ahead.a[scratchpads(self._cfg)["acc"].address_bits - 1]),
            slots.claimed.eq(self.claimed), slots.output.eq(output), slots.adds.eq(now.rescale_add),
            slots.to_acc.eq(now.to[Destination.ACC]), slots.lands.eq(self.lands), slots.halt.eq(self.halt),
        ]  # fmt: skip
        if self._cfg.norm:
            blocks |= Mux(loops.instr.ready, fields.norm, self.norm_busy & ~self.norm_ends)
        m.d.comb += slots.blocked.eq(blocks)

    def _connect_retirement(self, m: Module, retire: RetireStage, oldest: data.View[data.StructLayout]) -> None:
        """Connect `retire`, which reports instructions as done. oldest: constants of the oldest one with steps."""
        m.d.comb += [
            retire.ends.eq(self.ends), retire.ended.eq(self.ended), retire.halt.eq(self.halt),
            retire.softmax_ends.eq(self.softmax.finish), retire.softmax_under_way.eq(self.softmax_under_way),
        ]  # fmt: skip
        for name, _ in done_layout:
            m.d.comb += [retire.oldest[name].eq(oldest[name]), retire.softmax[name].eq(self.oldest_softmax[name])]
        wiring.connect(m, retire.done, wiring.flipped(self.done))

    def _build_softmax_tracker(
        self, m: Module, loops: Loops, offered: data.View[data.StructLayout], output: Signal
    ) -> SoftmaxTracker:
        """Build and connect the tracker of softmaxes, which says what may overlap with them.

        offered: constants of the instruction offered. output: a step that completes an entry is issued.
        """
        m.submodules.softmaxes = softmaxes = SoftmaxTracker(self._cfg)
        wiring.connect(m, wiring.flipped(self.softmax), softmaxes.engine)
        m.d.comb += [
            softmaxes.instr.eq(self.instr.payload), softmaxes.offered.eq(self.instr.valid),
            softmaxes.constants.eq(offered), softmaxes.spare.eq(self._constants_of_set(~self.current)),
            softmaxes.waits.eq(self.instr.valid & ~self.instr.ready), softmaxes.starts.eq(self.starts_softmax),
            softmaxes.loads.eq(loops.instr.ready), softmaxes.accept.eq(loops.instr.valid & loops.instr.ready),
            softmaxes.writes.eq(output), softmaxes.halt.eq(self.halt),
            self.softmax_under_way.eq(softmaxes.under_way), self.oldest_softmax.eq(softmaxes.oldest),
        ]  # fmt: skip
        probes(self, softmaxes=softmaxes)
        return softmaxes
