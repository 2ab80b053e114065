"""Request slots and what the scheduler keeps per slot, as arrays so that planning 256 decode rows is a handful of vector operations.

Row r of `slots` is the same table that the workers hold: append-only while a request lives.
"""

from __future__ import annotations

import numpy as np

from gristmill.memory.slots import SlotError


class ReqTable:
    """The state of the running requests by request slot.

    With `length` known or planned tokens, a decoding request has its KV planned in [0, length-1): the newest token is the next input.
    `width` positions per request are real; a last page may own slots beyond it, which are never written to a worker's table.
    """

    def __init__(self, max_reqs: int, width: int, page_size: int = 1) -> None:
        if max_reqs < 1 or width < 1:
            raise ValueError(f"a table of {max_reqs} requests x {width} tokens is empty")
        self.max_reqs, self.width = max_reqs, width
        columns = -(-width // page_size) * page_size
        # zeros come untouched from the system: rows cost memory only as far as they are used
        self.slots = np.zeros((max_reqs, columns), dtype=np.int32)  # position -> token slot, [0, n_slots)
        self.ids = np.zeros((max_reqs, width + 1), dtype=np.int32)  # known token ids, [0, n_ids)
        self.n_slots = np.zeros(max_reqs, dtype=np.int32)
        self.n_ids = np.zeros(max_reqs, dtype=np.int32)  # prompt and applied tokens
        self.length = np.zeros(max_reqs, dtype=np.int32)  # n_ids plus tokens that steps in flight will emit
        self.kv = np.zeros(max_reqs, dtype=np.int32)  # positions whose KV is computed or planned, [0, kv)
        self.limit = np.zeros(max_reqs, dtype=np.int32)  # tokens at which the request ends by length
        self.inflight = np.zeros(max_reqs, dtype=np.int32)  # sent, unapplied steps that name this slot
        self.live = np.zeros(max_reqs, dtype=bool)  # results count
        self.decoding = np.zeros(max_reqs, dtype=bool)  # everything known is planned, and it may go on
        self.eos_from = np.zeros(max_reqs, dtype=np.int32)  # first position whose token may end the request
        self.heeds_eos = np.zeros(max_reqs, dtype=bool)
        self.has_stop_ids = np.zeros(max_reqs, dtype=bool)
        self.masked = np.zeros(max_reqs, dtype=bool)
        self.idx = np.zeros(max_reqs, dtype=np.int32)  # the choice number that the detokenizer knows
        self._free = list(range(max_reqs - 1, -1, -1))
        self._is_free = [True] * max_reqs

    @property
    def n_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """A free request slot with everything at zero."""
        slot = self._free.pop()
        self._is_free[slot] = False
        self.inflight[slot] = 0
        return slot

    def give(self, slot: int) -> None:
        """Free a request slot. Raises SlotError while a step in flight names it."""
        if self._is_free[slot]:
            raise SlotError(f"request slot {slot} was given back twice")
        if self.inflight[slot]:
            raise SlotError(f"request slot {slot} was given back with {self.inflight[slot]} steps in flight")
        self.live[slot] = self.decoding[slot] = False
        self.n_slots[slot] = 0
        self._is_free[slot] = True
        self._free.append(slot)
