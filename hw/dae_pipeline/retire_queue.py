"""Queue that retires instructions of several channels in program order."""

from __future__ import annotations

from amaranth import Cat, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from celosia.hw.dae_pipeline.fifo import StreamFifo
from celosia.hw.lib.layout import Pulse, done_layout
from celosia.hw.lib.probes import probes


class RetireQueue(wiring.Component):
    """Retire the instructions of LOAD in program order, whichever channel ends first.

    An instruction may be executed by several channels; it has ended when all of these have ended it.

    Parameters
    ----------
    channels : int  Number of channels; each ends its instructions in order.
    depth : int     Largest number of instructions that have not retired.

    Members
    -------
    handed : In(stream)     An instruction is dispatched. channels: a bit for each channel that executes it. done: the
                            payload of its `done`.
    ended : In(channels)    Pulses: the channel has ended the oldest of its instructions.
    done : Out(Pulse)       One for each instruction, when it and all earlier ones have ended; one a cycle.
    empty : Out(1)          All dispatched instructions have retired.
    """

    def __init__(self, channels: int, depth: int) -> None:
        self._channels, self._depth = channels, depth
        self._layout = data.StructLayout({"channels": channels, "done": done_layout})
        super().__init__({
            "handed": In(stream.Signature(self._layout)),
            "ended": In(channels),
            "done": Out(Pulse(done_layout)),
            "empty": Out(1),
        })  # fmt: skip

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.order = order = StreamFifo(self._layout, self._depth)
        wiring.connect(m, wiring.flipped(self.handed), order.i)
        oldest = order.o.payload
        # For each channel, the number of instructions that it has ended and that have not retired.
        counts = [Signal(range(self._depth + 1), name=f"ended{channel}") for channel in range(self._channels)]
        retires = Signal()
        has_ended = Cat(pulse | (count != 0) for pulse, count in zip(self.ended, counts))
        m.d.comb += [
            retires.eq(order.o.valid & (has_ended | ~oldest.channels).all()),
            order.o.ready.eq(retires),
            self.done.valid.eq(retires),
            self.done.payload.eq(oldest.done),
            self.empty.eq(~order.o.valid),
        ]
        for channel, (pulse, count) in enumerate(zip(self.ended, counts)):
            down = retires & oldest.channels[channel]
            with m.If(pulse != down):
                m.d.sync += count.eq(Mux(pulse, count + 1, count - 1))
        probes(self, order=order, counts=counts)
        return m
