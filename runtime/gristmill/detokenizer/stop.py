"""Stop strings: the first occurrence in the text, however the text was cut into tokens.

A scanner holds text back only while it may still belong to a stop string, and reads every character once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class StopHit(NamedTuple):
    """Characters [start, end) of the text are `stop`."""

    start: int
    end: int
    stop: str


def _failure(pattern: str) -> list[int]:
    """Knuth-Morris-Pratt: failure[n] is the length of the longest proper border of pattern[:n]."""
    failure, k = [0, 0], 0
    for char in pattern[1:]:
        while k and pattern[k] != char:
            k = failure[k]
        k += pattern[k] == char
        failure.append(k)
    return failure


class StopScanner:
    """Searches the growing text of one choice for `stops` (not empty strings).

    The hit is the occurrence that starts first; of two that start together, the shorter. While a stop that starts earlier may
    still be completed, a hit is not decided. After a hit (`hit` is set) further text is ignored.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        self._patterns = [(stop, _failure(stop)) for stop in stops]
        self._matched = [0] * len(self._patterns)  # characters of each stop that the text ends with
        self._include = include_stop
        self._released = 0
        self._held = ""  # the text from character `_released` on
        self._n = 0
        self._candidate: StopHit | None = None
        self.hit: StopHit | None = None

    def feed(self, text: str) -> str:
        """The characters that can be shown now."""
        if not self._patterns:
            return text
        if self.hit is not None:
            return ""
        self._held += text
        for char in text:
            self._step(char)
            if self._candidate is not None and self._n - max(self._matched) >= self._candidate.start:
                return self._decide(self._candidate)
        held = max(self._matched)
        if self._candidate is not None:
            held = max(held, self._n - self._candidate.start)
        return self._release(len(self._held) - held)

    def finish(self) -> str:
        """The text has ended: the rest of it, or the cut at a hit that was waiting for an earlier one."""
        if self._candidate is not None and self.hit is None:
            return self._decide(self._candidate)
        return self._release(len(self._held))  # nothing after a hit

    def _step(self, char: str) -> None:
        self._n += 1
        for i, (stop, failure) in enumerate(self._patterns):
            k = self._matched[i]
            while k and stop[k] != char:
                k = failure[k]
            k += stop[k] == char
            if k == len(stop):
                start = self._n - k
                if self._candidate is None or (start, k) < (self._candidate.start, len(self._candidate.stop)):
                    self._candidate = StopHit(start, self._n, stop)
                k = failure[k]
            self._matched[i] = k

    def _decide(self, hit: StopHit) -> str:
        self.hit = hit
        shown = self._release((hit.end if self._include else hit.start) - self._released)
        self._held = ""
        return shown

    def _release(self, count: int) -> str:
        shown, self._held = self._held[:count], self._held[count:]
        self._released += count
        return shown
