"""Timing of memory and of the engines in front of it: trains of bursts, in closed form."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from itertools import chain
from math import ceil
from typing import NamedTuple

from celosia.hw.boards.memory import MemoryModel
from celosia.sim.timing.latency import ASK_TO_ADDRESS, ASK_TO_REQUEST, END_TO_ASK
from celosia.sim.timing.work import NEVER


def check_memory(memory: MemoryModel) -> None:
    """Raise ValueError for a memory that `predict` does not model."""
    if memory.stall or memory.jitter or memory.freeze_after is not None:
        raise ValueError(f"the timing model has no memory that pauses at random or freezes, so not {memory}")
    if memory.refresh_period and memory.refresh_cycles >= memory.refresh_period:
        raise ValueError(f"{memory} refreshes all the time; refresh_cycles must be below refresh_period")


class Transfer(NamedTuple):
    """A burst, or several in a row: its first cycle, the cycle behind it, and its beats."""

    first: int
    end: int
    beats: int


Transfers = Sequence[Transfer]
"""The transfers of one channel, in order."""


class Channel:
    """One direction of a port: at most one beat a cycle, none while memory refreshes.

    A slot is a cycle in which a beat may move. next: the first cycle that no beat has taken yet. ends: the last beats
    of as many bursts as memory accepts before one has ended; a further one waits for the first of them. moved: its
    transfers so far.
    """

    def __init__(self, memory: MemoryModel) -> None:
        self._period, self._refresh = memory.refresh_period, memory.refresh_cycles
        self._open = self._period - self._refresh
        self.next = 0
        self.ends = deque([-NEVER] * memory.outstanding, memory.outstanding)
        self.moved: list[Transfer] = []

    def after(self, cycle: int, slots: int) -> int:
        """Cycle of the slot that is `slots` after the first slot from `cycle` on."""
        if not self._period:
            return cycle + slots
        turn, within = divmod(cycle, self._period)
        turns, rest = divmod(max(0, within - self._refresh) + slots, self._open)
        return (turn + turns) * self._period + self._refresh + rest

    def move(self, first: int, cycles: int, beats: int) -> int:
        """Move the beats of a burst in at least `cycles` slots, the first in cycle `first`. Return the cycle of the
        last beat."""
        last = self.after(first, cycles - 1)
        self.ends.append(last)
        self.next = last + 1
        self.moved.append(Transfer(first, self.next, beats))
        return last

    @property
    def regular_until(self) -> int:
        """Cycle until which every cycle from `next` on is a slot, except during refreshes."""
        return NEVER

    def slots_before(self, cycle: int) -> int:
        """Lower bound of the number of slots from `next` until `cycle`."""
        cycles = max(0, cycle - self.next)
        return cycles - (cycles // self._period + 1) * self._refresh if self._period else cycles

    def refreshes(self, begin: int, end: int, limit: int) -> int:
        """Cycles of the refreshes that begin between `begin` and `end`, at most `limit` of each."""
        return (end // self._period - begin // self._period) * min(self._refresh, limit) if self._period else 0

    def refresh_after(self, cycle: int) -> int:
        """Cycle in which the next refresh after `cycle` begins."""
        return cycle // self._period * self._period + self._period if self._period else NEVER


class SharedChannel(Channel):
    """A direction of a port whose DRAM moves fewer bytes a cycle than all channels together can.

    The channels that have beats to move take turns. So how many of its own a channel can have moved by a cycle follows
    from what the others move (`others`). It is kept as the corners of a line, between which beats come evenly. DRAM
    saves up one more beat while nothing moves.
    """

    def __init__(self, memory: MemoryModel, bus_bytes: int, other_transfers: Sequence[Transfers]) -> None:
        super().__init__(memory)
        self._beat_rate = memory.bytes_per_cycle / bus_bytes  # beats a cycle of all channels
        changes: dict[int, list[float]] = {0: [0.0, 0]}  # changes of the others' rate, and of the number that move
        for first, end, beats in chain.from_iterable(other_transfers):
            if not beats:
                continue
            end = max(end, first + ceil(beats / self._beat_rate))  # until DRAM has saved up as much again
            rate = beats / (end - first)
            for cycle, sign in ((first, 1), (end, -1)):
                change = changes.setdefault(cycle, [0.0, 0])
                change[0] += sign * rate
                change[1] += sign
        # From each of these cycles on: beats of its own a cycle, and how many could have moved before.
        self._cycles: list[int] = []
        self._rates: list[float] = []
        self._through: list[float] = []
        rate_of_others, active, through = 0.0, 0, 0.0
        for cycle in sorted(changes):
            active += round(changes[cycle][1])
            rate_of_others = rate_of_others + changes[cycle][0] if active else 0.0
            rate = min(1.0, max(self._beat_rate / (active + 1), self._beat_rate - rate_of_others))
            if self._rates and rate == self._rates[-1]:
                continue
            through += self._rates[-1] * (cycle - self._cycles[-1]) if self._rates else 0.0
            self._cycles.append(cycle)
            self._rates.append(rate)
            self._through.append(through)

    @property
    def regular_until(self) -> int:
        """Cycle until which every cycle is a slot, see Channel: here, until the rate falls below one beat a cycle."""
        place = bisect_right(self._cycles, self.next)
        if self._rates[place - 1] < 1.0:
            return self.next
        return self._cycles[place] if place < len(self._cycles) else NEVER

    def after(self, cycle: int, slots: int) -> int:
        """Cycle of the slot that is `slots` after the first slot from `cycle` on, see Channel."""
        cycle = super().after(cycle, 0)
        return cycle if not slots else self._cycle_after(cycle, slots)

    def move(self, first: int, cycles: int, beats: int) -> int:
        """Move the beats of a burst, see Channel; they take longer where others use DRAM."""
        is_alone = self._rates[bisect_right(self._cycles, first) - 1] == min(1.0, self._beat_rate)
        saved = int(is_alone and first > self.next + 1 / self._beat_rate)
        last = super().after(first, max(cycles, beats) - 1)
        if beats - 1 > saved:
            last = max(last, self._cycle_after(first, beats - 1 - saved))
        self.ends.append(last)
        self.next = max(last + 1, self._cycle_after(last, 1))
        self.moved.append(Transfer(first, self.next, beats))
        return last

    def _cycle_after(self, cycle: int, beats: int) -> int:
        """Return the cycle by which so many more beats can have moved since `cycle`."""
        place = bisect_right(self._cycles, cycle) - 1
        target = self._through[place] + (cycle - self._cycles[place]) * self._rates[place] + beats
        place = bisect_right(self._through, target) - 1
        end = ceil(self._cycles[place] + (target - self._through[place]) / self._rates[place])
        return end + self.refreshes(cycle, end, self._refresh)


class WriteBursts:
    """Bursts of STORE on their channel.

    lead: cycles from asking for a burst to its first beat at the earliest. turn: from the last beat of a burst to the
    first of the one that takes its place among those outstanding.
    """

    def __init__(self, channel: Channel, lead: int, turn: int, outstanding: int) -> None:
        self.channel, self.lead, self.turn = channel, lead, turn
        self.outstanding = outstanding
        self.ends = deque([-NEVER] * (outstanding + 1), outstanding + 1)  # last beats of the last bursts
        self.asked = -NEVER  # cycle of the last request

    def train(self, ask: int, bursts: int, slots: int, beats: int, early: int = 0) -> tuple[int, int]:
        """Send `bursts` bursts of `beats`, which take `slots` in all, the first asked for in cycle `ask` or later.

        early: slots by which a burst that has waited for its turn is shorter, since its first beat is there already.
        Returns the cycles of the first and of the last beat.
        """
        channel = self.channel
        ask = max(ask, self.next_ask)
        first = channel.after(max(ask + self.lead, channel.next, channel.ends[0] + self.turn - 1), 0)
        last = channel.after(first, slots - 1)
        if last < channel.regular_until and bursts > 1 and not self.is_latency_bound(bursts, slots):
            self._spread_ends(bursts, first, last)
            channel.ends.extend(list(self.ends)[-bursts:])
            channel.next = last + 1
            channel.moved.append(Transfer(first, last + 1, beats))
        elif bursts <= 2 * self.outstanding or channel.regular_until < NEVER:
            last = self._place_each(first, bursts, slots, early, beats)
        else:
            last = self._place_windows(first, bursts, slots, early)
            channel.moved.append(Transfer(first, last + 1, beats))
        self.asked = max(ask + bursts - 1, self.ends[0] + END_TO_ASK)
        return first, last

    @property
    def next_ask(self) -> int:
        """Earliest cycle in which the next burst may be asked for."""
        return max(self.asked + 1, self.ends[1] + END_TO_ASK)

    def is_latency_bound(self, bursts: int, slots: int) -> bool:
        """Return whether the channel idles in such a train since memory's latency exceeds the outstanding bursts."""
        return (self.outstanding - 1) * slots < (self.turn - 1) * bursts

    def _spread_ends(self, bursts: int, first: int, last: int) -> None:
        """Spread the ends of the last bursts evenly."""
        ends, span = self.ends, last - first + 1
        for left in range(min(bursts, self.outstanding + 1) - 1, -1, -1):
            ends.append(last - span * left // bursts)

    def _place_each(self, first: int, bursts: int, slots: int, early: int, beats: int = 0) -> int:
        """Place bursts one by one, the first beat in cycle `first`; return the cycle of the last beat. beats: of all
        (0: not noted)."""
        channel, ends, turn = self.channel, self.ends, self.turn
        slots_done, moved, start, waited = 0, 0, first, False
        for number in range(1, bursts + 1):
            through, then = slots * number // bursts, beats * number // bursts
            end = channel.move(start, through - slots_done - (early if waited else 0), then - moved)
            slots_done, moved = through, then
            ends.append(end)
            start = max(channel.next, ends[1] + turn, channel.ends[0] + turn - 1)
            waited = start > channel.next
        return end

    def _place_windows(self, first: int, bursts: int, slots: int, early: int) -> int:
        """Place the bursts of a train in which memory waits for requests: as many bursts as may be outstanding come at
        once, and after a round trip the next ones. Windows between two refreshes are alike and are skipped in closed
        form, so that a long train takes no time; the others are placed burst by burst. Returns the cycle of the last
        beat."""
        window = self.outstanding
        left, slots_of_window = bursts - window, slots * window // bursts
        last = self._place_each(first, window, slots_of_window, early)
        period = self.turn - 1 + -(-slots // bursts) - early
        while left > 0:
            clear = max(0, min(left // window, (self.channel.refresh_after(self.ends[1]) - last - 1) // period))
            if clear:
                for _ in range(window + 1):
                    self.ends.append(self.ends[0] + clear * period)
                last = self.ends[-1]
                self.channel.next = last + 1
                left -= clear * window
            count = min(left, window)
            if count:
                start = max(last + 1, self.ends[1] + self.turn)
                last = self._place_each(start, count, max(count, slots_of_window * count // window), early)
                left -= count
        return last


class ReadBursts:
    """Bursts of LOAD's engine on a read channel, and those of fetch between them, in the order of their requests.

    A train of LOAD is placed burst by burst while a burst of fetch may come between; regular parts are skipped in
    closed form. outstanding: bursts that the engine has under way at once. firsts, ends: first and last beats of LOAD's
    last bursts. asked: when its last burst was asked for.
    """

    def __init__(self, channel: Channel, latency: int, outstanding: int) -> None:
        self.channel, self.outstanding = channel, outstanding
        self.lead = ASK_TO_ADDRESS + latency
        """Cycles from asking for a burst to its first beat at the earliest."""
        self.turn = END_TO_ASK + self.lead
        """Cycles from the last beat of a burst to the first one of the burst that takes its place."""
        self._latency = latency
        self.firsts, self.ends = (deque([-NEVER] * (2 * outstanding + 1), 2 * outstanding + 1) for _ in range(2))
        self.asked = -NEVER
        self._granted = self._accepted = -NEVER  # the last request, of either: when it was chosen, when memory took it
        self._last_was_fetch = False  # whether it was a request of fetch
        self._bursts = self._slots = self._placed = 0  # the train: all bursts, their slots, and bursts placed
        self._begin = 0  # cycle from which its first burst may be asked for

    @property
    def left(self) -> int:
        """Bursts of the train that have not been placed."""
        return self._bursts - self._placed

    @property
    def next_ask(self) -> int:
        """Earliest cycle in which LOAD's next burst may be asked for."""
        return max(self._granted + 1, self._accepted, self.ends[-self.outstanding] + END_TO_ASK)

    def begin(self, ask: int, bursts: int, slots: int) -> int:
        """Begin a train of `bursts` bursts, which take `slots` in all, the first asked for in cycle `ask` or later.
        Return the cycle of its first beat."""
        self._begin, self._bursts, self._slots, self._placed = ask, bursts, slots, 0
        return self._place_next()

    def fetch(self, ask: int, slots: int) -> tuple[int, int]:
        """Place a burst of fetch, which asks in cycle `ask`. Return the cycles of its grant and of its last beat."""
        request = ask + ASK_TO_REQUEST
        self.advance(request)
        granted = max(request, self._granted + 1, self._accepted)
        if self._last_was_fetch and self.left and max(self._begin, self.next_ask) <= granted:
            self._place_next()  # after a burst of fetch it is LOAD's turn
            granted = max(granted, self._granted + 1, self._accepted)
        self._granted, self._last_was_fetch = granted, True
        return granted, self._place(granted, slots)[1]

    def fetch_goes_first(self, ask: int, load_ask: int) -> bool:
        """Return whether fetch's burst, asked for in cycle `ask`, is granted before LOAD's, asked for in `load_ask`."""
        chosen = max(ask + ASK_TO_REQUEST, self._granted + 1, self._accepted)
        return chosen < load_ask or (chosen == load_ask and not self._last_was_fetch)

    def advance(self, until: int = NEVER) -> None:
        """Place the bursts of the train that are asked for before cycle `until`."""
        while self.left and max(self._begin, self.next_ask) < until:
            if self._placed > self.outstanding and self.left > 2 * self.outstanding:
                self._place_in_closed_form(until)
            self._place_next()

    def finish(self) -> int:
        """Place the rest of the train. Return the cycle of its last beat."""
        self.advance()
        return self.ends[-1]

    def predicted_end(self) -> int:
        """Return the cycle of the train's last beat if fetch asks for nothing more. Changes nothing."""
        saved = self.__dict__ | {"firsts": self.firsts.copy(), "ends": self.ends.copy()}
        channel = self.channel
        next_slot, ends, moved = channel.next, channel.ends.copy(), len(channel.moved)
        last = self.finish()
        self.__dict__.update(saved)
        channel.next, channel.ends = next_slot, ends
        del channel.moved[moved:]
        return last

    def is_latency_bound(self, bursts: int, slots: int) -> bool:
        """Return whether the channel idles in such a train since memory's latency exceeds the outstanding bursts."""
        return (self.outstanding - 1) * slots < (self.turn - 1) * bursts

    def delay(self, cycles: int) -> None:
        """Delay the bursts of the last train by `cycles`."""
        for number in range(1, min(self._bursts, len(self.ends)) + 1):
            self.firsts[-number] += cycles
            self.ends[-number] += cycles
        self.asked = max(self.asked, self.ends[-self.outstanding - 1] + END_TO_ASK)

    def _place_next(self) -> int:
        """Place the next burst of the train; returns the cycle of its first beat."""
        slots = self._slots_of_first(self._placed + 1) - self._slots_of_first(self._placed)
        self.asked = self._granted = max(self._begin, self.next_ask)
        self._last_was_fetch = False
        first, last = self._place(self._granted, slots)
        self.firsts.append(first)
        self.ends.append(last)
        self._placed += 1
        return first

    def _slots_of_first(self, bursts: int) -> int:
        """Return the slots that the first `bursts` bursts of the train take."""
        return self._slots * bursts // self._bursts

    def _place(self, granted: int, slots: int) -> tuple[int, int]:
        """Return the cycles of the first and last beat of a burst whose request was granted in cycle `granted`."""
        channel = self.channel
        self._accepted = max(granted + ASK_TO_ADDRESS, channel.ends[0] + 1)
        first = channel.after(max(self._accepted + self._latency, channel.next), 0)
        return first, channel.move(first, max(1, slots), max(1, slots))

    def _place_in_closed_form(self, until: int) -> None:
        """Place at once all bursts that are sure to be asked for before `until`, as far as their ends are regular.

        Saves time: bursts follow either without a gap, or in windows of `outstanding` bursts with a constant period.
        """
        window, left, regular = self.outstanding, self.left - self.outstanding, self.channel.regular_until
        if not self.is_latency_bound(self._bursts, self._slots):
            count, before = left, min(until, regular)
            if before < NEVER:
                count = min(count, self.channel.slots_before(before) * self._bursts // self._slots - 1)
            if count > 2 * window:
                begin, gone, granted = self.channel.next, self._slots_of_first(self._placed), self._granted + count
                self._placed += count
                moved = self._slots_of_first(self._placed) - gone
                self.channel.moved.append(Transfer(begin, self.channel.after(begin, moved - 1) + 1, moved))
                for number in range(self._placed - min(count, len(self.ends)), self._placed):
                    slots = self._slots_of_first(number) - gone, self._slots_of_first(number + 1) - gone - 1
                    self._note_skipped(*(self.channel.after(begin, slot) for slot in slots))
                self.asked = self._granted = max(self._granted, granted)  # one is asked for in a cycle
            return
        ends = self.ends
        period = ends[-1] - ends[-1 - window]
        if self.channel.refresh_after(ends[-2 * window]) <= ends[-1]:
            return  # a refresh has made that longer
        if any(ends[-1 - i] - ends[-1 - i - window] != period for i in range(1, window)):
            return
        count = min(left // window, (self.channel.refresh_after(ends[-window]) - ends[-1] - 1) // period)
        if until < NEVER:
            count = min(count, (until - self.asked) // period - 1)
        if regular < NEVER:
            count = min(count, (regular - ends[-1]) // period - 1)
        if count > 0:
            moved = self._slots_of_first(self._placed + count * window) - self._slots_of_first(self._placed)
            self.channel.moved.append(Transfer(ends[-1] + 1, ends[-1] + 1 + count * period, moved))
            self._placed += count * window
            for first, last in list(zip(self.firsts, ends, strict=True))[-window:]:
                self._note_skipped(first + count * period, last + count * period)

    def _note_skipped(self, first: int, last: int) -> None:
        """Record the first and last beat of a burst that `_place_in_closed_form` has placed."""
        self.firsts.append(first)
        self.ends.append(last)
        self.channel.ends.append(last)
        self.channel.next = last + 1
        self.asked = self._granted = self.ends[-1 - self.outstanding] + END_TO_ASK
        self._accepted = max(self._granted + ASK_TO_ADDRESS, self.channel.ends[0] + 1)
