"""Timing of memory ports and of the engines in front of them.

A Channel says in which cycles beats can move. WriteBursts and ReadBursts place the bursts of an instruction (a train)
on a Channel, long ones in closed form.
"""

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
    """One burst or several consecutive ones: cycle of the first beat, cycle after the last one, number of beats."""

    first: int
    end: int
    beats: int


Transfers = Sequence[Transfer]
"""The transfers of one channel, in order."""


class Channel:
    """One direction of a port: at most one beat a cycle, none while memory refreshes.

    A slot is a cycle in which a beat may move. next: the first cycle after all beats so far. ends: cycles of the last
    beats of the last bursts, as many as memory accepts at once; one more burst waits for the first of them to end.
    """

    def __init__(self, memory: MemoryModel) -> None:
        self._period, self._refresh = memory.refresh_period, memory.refresh_cycles
        self._slots_per_period = self._period - self._refresh
        self.next = 0
        self.ends = deque([-NEVER] * memory.outstanding, memory.outstanding)
        # In the cycles from the first until the second of these each cycle is a slot: no refresh lies between them.
        self._all_slots_from, self._all_slots_before = 0, 0 if self._period else NEVER

    def cycle_of_slot(self, cycle: int, slots: int) -> int:
        """Return the cycle of the slot that is `slots` after the first slot from `cycle` on."""
        if self._all_slots_from <= cycle and cycle + slots < self._all_slots_before:
            return cycle + slots
        if not self._period:
            return cycle + slots
        turn, cycle_of_period = divmod(cycle, self._period)
        turns, slots_left = divmod(max(0, cycle_of_period - self._refresh) + slots, self._slots_per_period)
        begin = (turn + turns) * self._period
        self._all_slots_from, self._all_slots_before = begin + self._refresh, begin + self._period
        return begin + self._refresh + slots_left

    def cycles_of_slots(self, cycle: int, slots: Sequence[int]) -> list[int]:
        """Return `cycle_of_slot` of each of `slots`, which ascend."""
        if self._all_slots_from <= cycle and cycle + slots[-1] < self._all_slots_before:
            return [cycle + slot for slot in slots]
        return [self.cycle_of_slot(cycle, slot) for slot in slots]

    def place_burst(self, earliest: int, beats: int) -> tuple[int, int]:
        """Move a burst of `beats` beats as soon as possible from cycle `earliest` on, and after all others.

        Returns the cycles of its first and of its last beat.
        """
        first = self.next if self.next > earliest else earliest
        last = first + beats - 1
        if first < self._all_slots_from or last >= self._all_slots_before:
            first = self.cycle_of_slot(first, 0)
            last = self.cycle_of_slot(first, beats - 1)
        self.ends.append(last)
        self.next = last + 1
        return first, last

    def record(self, first: int, end: int, beats: int) -> None:
        """Record beats that move from cycle `first` until `end`. Only channels that share DRAM need to know them."""

    def state(self) -> tuple[int, ...]:
        """Return what `restore` needs to undo all that moves from now on."""
        return self.next, *self.ends

    def restore(self, state: tuple[int, ...]) -> None:
        """Forget all that moved since `state` was returned."""
        self.next = state[0]
        self.ends.extend(state[1 : 1 + len(self.ends)])

    def move(self, first: int, cycles: int, beats: int) -> int:
        """Move the beats of a burst in at least `cycles` slots, the first in cycle `first`.

        Returns the cycle of the last beat. cycles is larger than beats where the unit is slower than the port.
        """
        last = self.cycle_of_slot(first, cycles - 1)
        self.ends.append(last)
        self.next = last + 1
        return last

    @property
    def regular_until(self) -> int:
        """Cycle until which every cycle from `next` on is a slot, except during refreshes.

        Only a train that ends before it may be placed as a whole, in closed form.
        """
        return NEVER

    def slots_before(self, cycle: int) -> int:
        """Return a lower bound of the number of slots from `next` until `cycle`."""
        cycles = max(0, cycle - self.next)
        return cycles - (cycles // self._period + 1) * self._refresh if self._period else cycles

    def refreshes(self, begin: int, end: int, limit: int) -> int:
        """Count the cycles of the refreshes that begin between `begin` and `end`, at most `limit` cycles of each."""
        return (end // self._period - begin // self._period) * min(self._refresh, limit) if self._period else 0

    def refresh_after(self, cycle: int) -> int:
        """Return the cycle in which the next refresh after `cycle` begins; NEVER without refreshes."""
        return cycle // self._period * self._period + self._period if self._period else NEVER


class SharedChannel(Channel):
    """A direction of a port whose DRAM moves fewer bytes a cycle than all channels together can.

    The channels that have beats to move take turns. So the number of beats that this channel can have moved by a cycle
    follows from the transfers of the others (other_transfers, one sequence for each). It is a piecewise linear function
    of the cycle, kept as its corners. DRAM saves up one more beat while nothing moves.

    transfers: all transfers so far.
    """

    def __init__(self, memory: MemoryModel, bus_bytes: int, other_transfers: Sequence[Transfers]) -> None:
        super().__init__(memory)
        self.transfers: list[Transfer] = []
        self._beat_rate = memory.bytes_per_cycle / bus_bytes  # beats a cycle of all channels
        changes: dict[int, list[float]] = {0: [0.0, 0]}  # by cycle: change of the others' rate, and of how many move
        for first, end, beats in chain.from_iterable(other_transfers):
            if not beats:
                continue
            end = max(end, first + ceil(beats / self._beat_rate))  # until DRAM has saved up as much again
            rate = beats / (end - first)
            for cycle, sign in ((first, 1), (end, -1)):
                change = changes.setdefault(cycle, [0.0, 0])
                change[0] += sign * rate
                change[1] += sign
        # Corners: from each of these cycles on, this channel's beats a cycle, and the beats it could have moved before.
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
        """Cycle until which every cycle from `next` on is a slot, except during refreshes. See Channel.

        It is the cycle in which this channel's rate falls below one beat a cycle, since others use DRAM; `next` if the
        rate is lower already.
        """
        place = bisect_right(self._cycles, self.next)
        if self._rates[place - 1] < 1.0:
            return self.next
        return self._cycles[place] if place < len(self._cycles) else NEVER

    def cycle_of_slot(self, cycle: int, slots: int) -> int:
        """Return the cycle of the slot that is `slots` after the first slot from `cycle` on. See Channel."""
        cycle = super().cycle_of_slot(cycle, 0)
        return cycle if not slots else self._cycle_after(cycle, slots)

    def cycles_of_slots(self, cycle: int, slots: Sequence[int]) -> list[int]:
        """Return `cycle_of_slot` of each of `slots`. See Channel."""
        return [self.cycle_of_slot(cycle, slot) for slot in slots]

    def place_burst(self, earliest: int, beats: int) -> tuple[int, int]:
        """Move a burst as soon as possible. Return the cycles of its first and of its last beat. See Channel."""
        first = self.cycle_of_slot(max(earliest, self.next), 0)
        return first, self.move(first, beats, beats)

    def record(self, first: int, end: int, beats: int) -> None:
        """Record beats that move from cycle `first` until `end`."""
        self.transfers.append(Transfer(first, end, beats))

    def state(self) -> tuple[int, ...]:
        """Return what `restore` needs to undo all that moves from now on."""
        return *super().state(), len(self.transfers)

    def restore(self, state: tuple[int, ...]) -> None:
        """Forget all that moved since `state` was returned."""
        super().restore(state)
        del self.transfers[state[-1] :]

    def move(self, first: int, cycles: int, beats: int) -> int:
        """Move the beats of a burst, which take longer where other channels use DRAM. See Channel."""
        is_alone = self._rates[bisect_right(self._cycles, first) - 1] == min(1.0, self._beat_rate)
        saved_beats = int(is_alone and first > self.next + 1 / self._beat_rate)
        last = super().cycle_of_slot(first, max(cycles, beats) - 1)
        if beats - 1 > saved_beats:
            last = max(last, self._cycle_after(first, beats - 1 - saved_beats))
        self.ends.append(last)
        self.next = max(last + 1, self._cycle_after(last, 1))
        self.transfers.append(Transfer(first, self.next, beats))
        return last

    def _cycle_after(self, cycle: int, beats: int) -> int:
        """Return the cycle by which this channel can have moved `beats` more beats since `cycle`."""
        place = bisect_right(self._cycles, cycle) - 1
        target = self._through[place] + (cycle - self._cycles[place]) * self._rates[place] + beats
        place = bisect_right(self._through, target) - 1
        end = ceil(self._cycles[place] + (target - self._through[place]) / self._rates[place])
        return end + self.refreshes(cycle, end, self._refresh)


class WriteBursts:
    """Bursts of STORE on their channel.

    lead: cycles from the request of a burst to its first beat at the earliest. turn: cycles from the last beat of a
    burst to the first beat of the burst that takes its place among those outstanding. outstanding: most bursts that are
    under way at once. ends: cycles of the last beats of the last bursts. last_ask: cycle of the last request.
    """

    def __init__(self, channel: Channel, lead: int, turn: int, outstanding: int) -> None:
        self.channel, self.lead, self.turn = channel, lead, turn
        self.outstanding = outstanding
        self.ends = deque([-NEVER] * (outstanding + 1), outstanding + 1)
        self.last_ask = -NEVER

    def send_train(self, ask: int, bursts: int, slots: int, beats: int, early: int = 0) -> tuple[int, int]:
        """Send a train of bursts, the first requested in cycle `ask` or later.

        bursts, slots, beats: their number, the slots that all of them take, and the beats of all. early: slots by which
        a burst that has waited is shorter, since its first beat is packed already. Returns the cycles of the first and
        of the last beat.
        """
        channel = self.channel
        ask = max(ask, self.next_ask)
        first = channel.cycle_of_slot(max(ask + self.lead, channel.next, channel.ends[0] + self.turn - 1), 0)
        last = channel.cycle_of_slot(first, slots - 1)
        if last < channel.regular_until and bursts > 1 and not self.is_latency_bound(bursts, slots):
            self._spread_ends(bursts, first, last)
            channel.ends.extend(list(self.ends)[-bursts:])
            channel.next = last + 1
            channel.record(first, last + 1, beats)
        elif bursts <= 2 * self.outstanding or channel.regular_until < NEVER:
            last = self._place_each(first, bursts, slots, early, beats)
        else:
            last = self._place_windows(first, bursts, slots, early)
            channel.record(first, last + 1, beats)
        self.last_ask = max(ask + bursts - 1, self.ends[0] + END_TO_ASK)
        return first, last

    @property
    def next_ask(self) -> int:
        """Earliest cycle in which the next burst may be requested."""
        return max(self.last_ask + 1, self.ends[1] + END_TO_ASK)

    def is_latency_bound(self, bursts: int, slots: int) -> bool:
        """Return whether the channel idles in such a train since memory's latency exceeds the outstanding bursts."""
        return (self.outstanding - 1) * slots < (self.turn - 1) * bursts

    def _spread_ends(self, bursts: int, first: int, last: int) -> None:
        """Record the ends of the last of `bursts` bursts, spread evenly from cycle `first` to cycle `last`."""
        ends, span = self.ends, last - first + 1
        for bursts_left in range(min(bursts, self.outstanding + 1) - 1, -1, -1):
            ends.append(last - span * bursts_left // bursts)

    def _place_each(self, first: int, bursts: int, slots: int, early: int, beats: int = 0) -> int:
        """Place bursts one by one, the first beat in cycle `first`. Return the cycle of the last beat.

        slots, early: as for `send_train`. beats: of all bursts; 0 where the caller records the transfer itself.
        """
        channel, ends, turn = self.channel, self.ends, self.turn
        slots_done, moved, start, waited = 0, 0, first, False
        for number in range(1, bursts + 1):
            slots_after, moved_after = slots * number // bursts, beats * number // bursts
            end = channel.move(start, slots_after - slots_done - (early if waited else 0), moved_after - moved)
            slots_done, moved = slots_after, moved_after
            ends.append(end)
            start = max(channel.next, ends[1] + turn, channel.ends[0] + turn - 1)
            waited = start > channel.next
        return end

    def _place_windows(self, first: int, bursts: int, slots: int, early: int) -> int:
        """Place the bursts of a latency-bound train. Return the cycle of the last beat.

        As many bursts as may be outstanding (a window) come at once, and the next ones after a round trip. Windows
        between two refreshes are alike and are placed in closed form, so that the model's run time does not grow with
        the train; the others are placed burst by burst.
        """
        window = self.outstanding
        bursts_left, slots_of_window = bursts - window, slots * window // bursts
        last = self._place_each(first, window, slots_of_window, early)
        period = self.turn - 1 + -(-slots // bursts) - early
        while bursts_left > 0:
            before_refresh = (self.channel.refresh_after(self.ends[1]) - last - 1) // period
            windows = max(0, min(bursts_left // window, before_refresh))
            if windows:
                for _ in range(window + 1):
                    self.ends.append(self.ends[0] + windows * period)
                last = self.ends[-1]
                self.channel.next = last + 1
                bursts_left -= windows * window
            count = min(bursts_left, window)
            if count:
                start = max(last + 1, self.ends[1] + self.turn)
                last = self._place_each(start, count, max(count, slots_of_window * count // window), early)
                bursts_left -= count
        return last


class ReadBursts:
    """Bursts of LOAD's engine on a read channel, and those of fetch between them, in the order of their requests.

    A train of LOAD is open from `begin_train` to `finish_train`. Its bursts are placed one by one where a burst of
    fetch may come between them; regular parts are placed in closed form. outstanding: most bursts that the engine has
    under way at once. firsts, ends: cycles of the first and last beats of LOAD's last bursts. last_ask: cycle of the
    request of its last burst.
    """

    def __init__(self, channel: Channel, latency: int, outstanding: int) -> None:
        self.channel, self.outstanding = channel, outstanding
        self.lead = ASK_TO_ADDRESS + latency
        """Cycles from the request of a burst to its first beat at the earliest."""
        self.turn = END_TO_ASK + self.lead
        """Cycles from the last beat of a burst to the first one of the burst that takes its place."""
        self._latency = latency
        self.firsts, self.ends = (deque([-NEVER] * (2 * outstanding + 1), 2 * outstanding + 1) for _ in range(2))
        self.last_ask = -NEVER
        # Cycles in which the arbiter granted the last request, of LOAD or fetch, and in which memory took its address.
        self._granted = self._accepted = -NEVER
        self._last_was_fetch = False  # whether it was a request of fetch
        self._bursts = self._slots = self._placed = 0  # the train: all bursts, their slots, and bursts placed
        self._begin = 0  # first cycle in which its first burst may be requested

    @property
    def bursts_left(self) -> int:
        """Bursts of the train that have not been placed."""
        return self._bursts - self._placed

    @property
    def next_ask(self) -> int:
        """Earliest cycle in which LOAD's next burst may be requested."""
        return max(self._granted + 1, self._accepted, self.ends[-self.outstanding] + END_TO_ASK)

    def begin_train(self, ask: int, bursts: int, slots: int) -> int:
        """Begin a train of `bursts` bursts, which take `slots` in all; the first is requested in cycle `ask` or later.

        Returns the cycle of its first beat.
        """
        self._begin, self._bursts, self._slots, self._placed = ask, bursts, slots, 0
        self._place_each(1)
        return self.firsts[-1]

    def place_fetch_burst(self, ask: int, slots: int) -> tuple[int, int]:
        """Compute when a burst that fetch asks for in cycle `ask` moves, between LOAD's bursts on the shared port.

        Returns the cycle in which the arbiter grants it, and that in which its last beat moves.
        """
        request = ask + ASK_TO_REQUEST
        self.place_until(request)
        granted = max(request, self._granted + 1, self._accepted)
        if self._last_was_fetch and self.bursts_left and max(self._begin, self.next_ask) <= granted:
            self._place_each(self._placed + 1)  # after a burst of fetch it is LOAD's turn
            granted = max(granted, self._granted + 1, self._accepted)
        self._granted, self._last_was_fetch = granted, True
        self._accepted = max(granted + ASK_TO_ADDRESS, self.channel.ends[0] + 1)
        return granted, self.channel.place_burst(self._accepted + self._latency, max(1, slots))[1]

    def fetch_goes_first(self, ask: int, load_ask: int) -> bool:
        """Return whether fetch's burst, requested in cycle `ask`, is granted before LOAD's, requested in `load_ask`."""
        granted = max(ask + ASK_TO_REQUEST, self._granted + 1, self._accepted)
        return granted < load_ask or (granted == load_ask and not self._last_was_fetch)

    def place_until(self, until: int = NEVER) -> None:
        """Place the bursts of the open train that are requested before cycle `until`."""
        bursts, first_regular, last_regular = self._bursts, self.outstanding + 1, self._bursts - 2 * self.outstanding
        while self._placed < bursts:
            if first_regular <= self._placed < last_regular:
                if max(self._begin, self.next_ask) >= until:
                    return
                self._place_in_closed_form(until)
                self._place_each(self._placed + 1)
            else:
                through = min(first_regular, bursts) if self._placed < first_regular else bursts
                self._place_each(through, until)
                if self._placed < through:
                    return

    def finish_train(self) -> int:
        """Place the rest of the open train. Return the cycle of its last beat."""
        self.place_until()
        return self.ends[-1]

    def predicted_end(self) -> int:
        """Return the cycle of the open train's last beat if fetch requests no more bursts. Changes nothing."""
        saved, channel = self.__dict__ | {"firsts": self.firsts.copy(), "ends": self.ends.copy()}, self.channel
        of_channel = channel.state()
        last = self.finish_train()
        self.__dict__.update(saved)
        channel.restore(of_channel)
        return last

    def is_latency_bound(self, bursts: int, slots: int) -> bool:
        """Return whether the channel idles in such a train since memory's latency exceeds the outstanding bursts."""
        return (self.outstanding - 1) * slots < (self.turn - 1) * bursts

    def delay(self, cycles: int) -> None:
        """Delay the remembered bursts of the last train by `cycles`, since LOAD's buffer was full."""
        for number in range(1, min(self._bursts, len(self.ends)) + 1):
            self.firsts[-number] += cycles
            self.ends[-number] += cycles
        self.last_ask = max(self.last_ask, self.ends[-self.outstanding - 1] + END_TO_ASK)

    def _place_each(self, through: int, until: int = NEVER) -> None:
        """Place bursts of the open train one by one until `through` are placed, or the next is requested at `until`.

        Most of the model's run time is spent here, so that the loop works on local variables.
        """
        channel, firsts, ends, window, begin = self.channel, self.firsts, self.ends, self.outstanding, self._begin
        granted, accepted, latency, place_burst = self._granted, self._accepted, self._latency, channel.place_burst
        placed, bursts, slots = self._placed, self._bursts, self._slots
        slots_before = slots * placed // bursts
        while placed < through:
            ask = max(begin, granted + 1, accepted, ends[-window] + END_TO_ASK)
            if ask >= until:
                break
            placed += 1
            slots_through = slots * placed // bursts
            granted, accepted = ask, max(ask + ASK_TO_ADDRESS, channel.ends[0] + 1)
            first, last = place_burst(accepted + latency, max(1, slots_through - slots_before))
            slots_before = slots_through
            firsts.append(first)
            ends.append(last)
        if placed > self._placed:
            self.last_ask = self._granted = granted
            self._accepted, self._placed, self._last_was_fetch = accepted, placed, False

    def _slots_of_first(self, bursts: int) -> int:
        """Return the slots that the first `bursts` bursts of the train take."""
        return self._slots * bursts // self._bursts

    def _place_in_closed_form(self, until: int) -> None:
        """Place at once all bursts that are requested before `until` for sure, as far as their ends are regular.

        This keeps the model fast for long trains. Bursts follow each other either without a gap, or in windows of
        `outstanding` bursts with a constant period.
        """
        window, bursts_left, regular = self.outstanding, self.bursts_left - self.outstanding, self.channel.regular_until
        if not self.is_latency_bound(self._bursts, self._slots):
            count, before = bursts_left, min(until, regular)
            if before < NEVER:
                count = min(count, self.channel.slots_before(before) * self._bursts // self._slots - 1)
            if count > 2 * window:
                begin, granted = self.channel.next, self._granted + count
                slots_before = self._slots_of_first(self._placed)
                self._placed += count
                moved = self._slots_of_first(self._placed) - slots_before
                channel = self.channel
                channel.record(begin, channel.cycle_of_slot(begin, moved - 1) + 1, moved)
                numbers = range(self._placed - min(count, len(self.ends)), self._placed + 1)
                slots = [self._slots_of_first(number) - slots_before for number in numbers]
                last_slots = [slot - 1 for slot in slots[1:]]
                self._record_bursts(
                    channel.cycles_of_slots(begin, slots[:-1]), channel.cycles_of_slots(begin, last_slots)
                )
                self.last_ask = self._granted = max(self._granted, granted)  # one request a cycle
            return
        ends = self.ends
        period = ends[-1] - ends[-1 - window]
        if self.channel.refresh_after(ends[-2 * window]) <= ends[-1]:
            return  # a refresh has made this period longer
        if any(ends[-1 - i] - ends[-1 - i - window] != period for i in range(1, window)):
            return
        count = min(bursts_left // window, (self.channel.refresh_after(ends[-window]) - ends[-1] - 1) // period)
        if until < NEVER:
            count = min(count, (until - self.last_ask) // period - 1)
        if regular < NEVER:
            count = min(count, (regular - ends[-1]) // period - 1)
        if count > 0:
            moved = self._slots_of_first(self._placed + count * window) - self._slots_of_first(self._placed)
            self.channel.record(ends[-1] + 1, ends[-1] + 1 + count * period, moved)
            self._placed += count * window
            self._record_bursts(
                [first + count * period for first in list(self.firsts)[-window:]],
                [last + count * period for last in list(ends)[-window:]],
            )

    def _record_bursts(self, firsts: Sequence[int], lasts: Sequence[int]) -> None:
        """Record the first and last beats of the last bursts that `_place_in_closed_form` has placed."""
        self.firsts.extend(firsts)
        self.ends.extend(lasts)
        self.channel.ends.extend(lasts)
        self.channel.next = lasts[-1] + 1
        self.last_ask = self._granted = self.ends[-1 - self.outstanding] + END_TO_ASK
        self._accepted = max(self._granted + ASK_TO_ADDRESS, self.channel.ends[0] + 1)
