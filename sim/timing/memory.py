"""The memory and the engines in front of it: trains of bursts, in closed form."""

from __future__ import annotations

from collections import deque

from celosia.hw.config import Config
from celosia.hw.pipeline import MAX_BURST
from celosia.sim.memory import MemoryModel
from celosia.sim.timing.latency import END_TO_ASK
from celosia.sim.timing.work import NEVER


def check_memory(memory: MemoryModel) -> None:
    """ValueError for a memory that `predict` does not model."""
    if memory.stall or memory.jitter or memory.freeze_after is not None:
        raise ValueError(f"the timing model has no memory that pauses at random or freezes, so not {memory}")
    if memory.refresh_period and memory.refresh_cycles >= memory.refresh_period:
        raise ValueError(f"{memory} refreshes all the time; refresh_cycles must be below refresh_period")


class Channel:
    """One direction of the memory: a beat a cycle at most, none while it refreshes.

    A slot is a cycle in which a beat may move. next: the first cycle that no beat has taken yet. ends: the last beats
    of as many bursts as memory accepts before one has ended; a further one waits for the first of them.
    """

    def __init__(self, cfg: Config, memory: MemoryModel) -> None:
        self._period, self._refresh = memory.refresh_period, memory.refresh_cycles
        self._open = self._period - self._refresh
        # Where the DRAM is slower than the bus, a beat takes several cycles.
        self.beat = max(1.0, cfg.bus_bytes / memory.bytes_per_cycle) if memory.bytes_per_cycle else 1.0
        # And where it has less than both directions can move, a beat that way takes this many slots of the other way.
        both = memory.bytes_per_cycle / cfg.bus_bytes if memory.bytes_per_cycle else 2.0
        self.shared = self.beat * min(1.0, max(0.0, 2.0 - both))
        self.next = 0
        self.ends = deque([-NEVER] * memory.outstanding, memory.outstanding)

    def after(self, cycle: int, slots: int) -> int:
        """The cycle of the slot that is `slots` after the first one from `cycle` on."""
        if not self._period:
            return cycle + slots
        turn, within = divmod(cycle, self._period)
        turns, rest = divmod(max(0, within - self._refresh) + slots, self._open)
        return (turn + turns) * self._period + self._refresh + rest

    def refresh_after(self, cycle: int) -> int:
        """The next cycle in which a refresh begins."""
        return cycle // self._period * self._period + self._period if self._period else NEVER


class Engine:
    """The bursts of LOAD or of STORE on their channel.

    lead: cycles from asking for a burst to its first beat at the earliest. turn: from the last beat of a burst to the
    first of the one that takes its place among those outstanding.
    """

    def __init__(self, channel: Channel, lead: int, turn: int, outstanding: int) -> None:
        self.channel, self.lead, self.turn = channel, lead, turn
        self.outstanding = outstanding
        self._bursts, self.burst = 0, MAX_BURST  # of the last train: how many, and slots of each
        self.ends = deque([-NEVER] * (outstanding + 1), outstanding + 1)  # last beats of the last bursts
        self.disturbed: deque[tuple[int, int]] = deque()  # when the other direction took how many slots
        self.asked = -NEVER  # when the last burst was asked for

    def train(self, ask: int, bursts: int, slots: int, early: int = 0) -> tuple[int, int]:
        """Send `bursts` bursts, which take `slots` in all, the first asked for in cycle `ask` or later.

        early: slots by which a burst that has waited for its turn is shorter, since its first beat is there already.
        Returns the cycles of the first and of the last beat.
        """
        channel = self.channel
        ask = max(ask, self.next_ask)
        first = channel.after(max(ask + self.lead, channel.next, channel.ends[0] + self.turn - 1), 0)
        if bursts > 1 and not self.waits(bursts, slots):
            last = channel.after(first, slots - 1)
            self._fill(bursts, first, last)
            channel.ends.extend(list(self.ends)[-bursts:])
        elif bursts <= 2 * self.outstanding:
            last = self._each(first, bursts, slots, early)
        else:
            last = self._bunches(first, bursts, slots, early)
        channel.next = last + 1
        self._bursts, self.burst = bursts, slots // bursts
        self.asked = max(ask + bursts - 1, self.ends[0] + END_TO_ASK)
        return first, last

    @property
    def next_ask(self) -> int:
        """When the next burst may be asked for at the earliest."""
        return max(self.asked + 1, self.ends[1] + END_TO_ASK)

    def waits(self, bursts: int, slots: int) -> bool:
        """Whether the channel is idle in such a train because so many bursts may be outstanding and no more."""
        return (self.outstanding - 1) * slots < (self.turn - 1) * bursts

    def delay(self, cycles: int) -> None:
        """The last train's bursts that are remembered came later by `cycles`."""
        for number in range(-min(self._bursts, len(self.ends)), 0):
            self.ends[number] += cycles
        self.asked = max(self.asked, self.ends[0] + END_TO_ASK)

    def disturb(self, first: int) -> None:
        """What the other direction did since cycle `first`, before the last beat, makes that one later."""
        while self.disturbed and self.disturbed[0][0] <= self.ends[-1]:
            begin, slots = self.disturbed.popleft()
            if begin >= first:
                self.delay(slots)
                self.channel.next += slots

    def _fill(self, bursts: int, first: int, last: int) -> None:
        """Spread the ends of the last bursts evenly."""
        ends, span = self.ends, last - first + 1
        for left in range(min(bursts, self.outstanding + 1) - 1, -1, -1):
            ends.append(last - span * left // bursts)

    def _each(self, first: int, bursts: int, slots: int, early: int) -> int:
        """Bursts one by one, the first beat in cycle `first`; returns the last beat's."""
        ends, taken, turn, after = self.ends, self.channel.ends, self.turn, self.channel.after
        done, start, end = 0, first, first - 1
        for number in range(1, bursts + 1):
            through = slots * number // bursts
            end = after(start, through - done - 1 - (early if start > end + 1 else 0))
            done = through
            ends.append(end)
            taken.append(end)
            start = max(end + 1, ends[1] + turn, taken[0] + turn - 1)
        return end

    def _bunches(self, first: int, bursts: int, slots: int, early: int) -> int:
        """As `_each`, for trains in which memory waits for requests: as many bursts as may be outstanding come at once,
        and after a round trip the next ones. Only those that a refresh meets are looked at."""
        window = self.outstanding
        left, of_bunch = bursts - window, slots * window // bursts
        last = self._each(first, window, of_bunch, early)
        period = self.turn - 1 + -(-slots // bursts) - early
        while left > 0:
            clear = max(0, min(left // window, (self.channel.refresh_after(self.ends[1]) - last - 1) // period))
            if clear:
                for _ in range(window + 1):
                    self.ends.append(self.ends[0] + clear * period)
                last = self.ends[-1]
                left -= clear * window
            count = min(left, window)
            if count:
                start = max(last + 1, self.ends[1] + self.turn)
                last = self._each(start, count, max(count, of_bunch * count // window), early)
                left -= count
        return last
