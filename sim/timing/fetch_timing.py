"""Timing of Fetch: instructions come in bursts between those of LOAD, and go to the queues of the units."""

from __future__ import annotations

from collections import deque

from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import Unit, instruction_bytes
from celosia.hw.spec.pipeline import FETCH_BURSTS, fetch_burst
from celosia.sim.timing.latency import BEAT_TO_WORD, FIRST_ASK, REQUEST_TO_ASK, WORD_TO_QUEUE
from celosia.sim.timing.memory_timing import ReadBursts
from celosia.sim.timing.work import NEVER


class Fetch:
    """Fetch: reads instruction words ahead and puts them into the units' queues, in order.

    A full queue delays all later instructions. port: fetch shares it with a channel of LOAD. units: the unit of each
    instruction. address: byte of the first word in DRAM. queued_at: cycles in which instructions entered their queues.
    left_at[u]: cycles in which the instructions of unit u left its queue, as far as known; the caller appends to it.
    """

    def __init__(self, cfg: Config, port: ReadBursts, units: list[int], address: int) -> None:
        size = instruction_bytes(cfg)
        self._port = port
        self._beats_per_word = max(1, size // cfg.bus_bytes)  # beats of a word
        self._words_per_beat = max(1, cfg.bus_bytes // size)  # words of a beat
        self._max_burst = fetch_burst(cfg)
        self._buffer_beats = FETCH_BURSTS * self._max_burst
        self.beats = -(-len(units) * size // cfg.bus_bytes)
        self._beat_offset = address // cfg.bus_bytes % self._max_burst
        self._asked_beats = 0  # beats asked for
        self._may_ask = FIRST_ASK
        self._arrived: deque[tuple[int, int]] = deque()  # bursts not used up: beats through each, cycle of its last one
        self._joined: list[int] = []  # cycle in which each word was complete
        self._checked: list[int] = []  # cycle in which each word had been checked
        self.queued_at: list[int] = []
        self._units, self._depth, self._queued = units, cfg.queue_depth, [0] * len(Unit)
        self.left_at: list[list[int]] = [[] for _ in Unit]

    def queue_words(self) -> int:
        """Put all words that have arrived into their queues, as far as room is known.

        Returns the mask of the units whose queue was empty, so that their next instruction is a new one.
        """
        mask = 0
        while self._queue_word():
            unit = self._units[len(self.queued_at) - 1]
            if self._queued[unit] == len(self.left_at[unit]) + 1:
                mask |= 1 << unit
        return mask

    def _queue_word(self) -> bool:
        """Put the next word into its queue; False where it has not arrived, or it is not known when there is room."""
        number = len(self.queued_at)
        if number == len(self._units):
            return False
        if number == len(self._checked):
            needed_beats = (number // self._words_per_beat + 1) * self._beats_per_word
            if self._asked_beats < needed_beats:
                return False
            while self._arrived[0][0] < needed_beats:
                self._arrived.popleft()
            beats, last = self._arrived[0]
            # Fetch joins a word after it has checked the previous word. It checks a word after the previous word has
            # gone to its queue.
            earliest_join = self._checked[-1] - WORD_TO_QUEUE + self._beats_per_word if number else 0
            self._joined.append(max(earliest_join, last - (beats - needed_beats) + BEAT_TO_WORD))
            self._checked.append(max(self._joined[-1], self.queued_at[-1] + 1 if number else 0) + WORD_TO_QUEUE)
        unit = self._units[number]
        must_have_left = self._queued[unit] - self._depth  # number of the instruction whose place this one takes
        if must_have_left >= len(self.left_at[unit]):
            return False
        has_room = self.left_at[unit][must_have_left] + 1 if must_have_left >= 0 else 0
        self.queued_at.append(max(self._checked[number], has_room))
        self._queued[unit] += 1
        return True

    def next_ask(self) -> int:
        """Return the cycle in which the next burst is requested: once the buffer has room for the longest one.

        NEVER if all words are requested, or the cycle is not known yet.
        """
        if self._asked_beats == self.beats:
            return NEVER
        used_up = self._asked_beats + self._max_burst - self._buffer_beats
        if used_up <= 0:
            return self._may_ask
        word = -(-used_up // self._beats_per_word) * self._words_per_beat - 1
        return max(self._may_ask, self._joined[word]) if word < len(self._joined) else NEVER

    def read_burst(self, ask: int) -> None:
        """Read the next burst, requested in cycle `ask`. It ends at a multiple of the longest burst."""
        to_boundary = self._max_burst - (self._beat_offset + self._asked_beats) % self._max_burst
        beats = min(self.beats - self._asked_beats, to_boundary)
        self._asked_beats += beats
        granted, last = self._port.place_fetch_burst(ask, beats)
        self._may_ask = granted + REQUEST_TO_ASK
        self._arrived.append((self._asked_beats, last))
