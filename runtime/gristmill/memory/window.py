"""The second pool of models whose sliding-window layers keep only the newest tokens: who may take how much of it.

A request holds window slots for positions [start, end) only: from a window below what was applied to what is planned. So what it can ever
hold is known when it is admitted. That much is reserved, and from then on its growth cannot fail: this pool is never a reason
to retract a request. Slots that requests do not use are the prefix cache's, which gives them up when asked.
"""

from __future__ import annotations

from typing import NamedTuple

from gristmill.errors import GristmillError
from gristmill.memory.slots import SlotAllocator

_MAX_UNAPPLIED_ROWS = 4  # decode rows of one request that may be in flight


class WindowSpec(NamedTuple):
    """A sliding-window pool as the workers announce it: `slots` in tokens, and how far back a token looks, itself included."""

    slots: int
    window: int


class Reservations:
    """What each request may hold of the window pool, in whole pages.

    Args:
        spec: The pool.
        page_size: Tokens per page, as in the full pool.
        lookahead: Slots that a decoding request gets at once.
        chunk_tokens: Prompt tokens that one step computes at most.

    Raises:
        GristmillError: The pool cannot serve even one request.
    """

    def __init__(self, spec: WindowSpec, page_size: int, lookahead: int, chunk_tokens: int) -> None:
        self.total = SlotAllocator(max(spec.slots, page_size), page_size).total
        self.window, self._page = spec.window, page_size
        self.trim_tokens = self._pages(max(1, min(64, spec.window // 4)))  # what is below the window is given back in portions of this
        self._steady = self._pages(spec.window + self.trim_tokens + 2 * page_size)
        self._slack = lookahead + self._pages(_MAX_UNAPPLIED_ROWS)  # what decoding may add before anything below the window comes back
        room = (self.total - self._steady - self._slack) // 2 // page_size * page_size
        if room < page_size:
            raise GristmillError(
                f"the sliding-window pool holds {self.total} tokens and one request of a window of {spec.window} needs "
                f"{self._steady + self._slack + 2 * page_size}: raise --pool-tokens"
            )
        self.chunk_tokens = min(self._pages(chunk_tokens), room)
        self.reserved = 0

    def _pages(self, n_tokens: int) -> int:
        return -(-n_tokens // self._page) * self._page

    def prefill(self, limit: int) -> int:
        """What a request of at most `limit` tokens may hold while its prompt is computed: one chunk in flight, one being planned."""
        return min(self._pages(limit), self._steady + 2 * self.chunk_tokens) + self._slack

    def decode(self, limit: int) -> int:
        """What it may hold when its prompt is computed."""
        return min(self._pages(limit), self._steady) + self._slack

    def missing(self, limit: int) -> int:
        """How many slots are missing for a request of at most `limit` tokens to start; 0 or less: it fits."""
        return self.reserved + self.prefill(limit) - self.total

    def chunk(self, kv: int, n: int, start: int, reserved: int) -> int:
        """How many of the next `n` prompt tokens after `kv` a request may compute that holds slots from `start` on."""
        room = start + reserved - self._slack - kv
        return max(0, min(n, self.chunk_tokens, room))
