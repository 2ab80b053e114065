"""The free list of token slots, in whole pages. Whether a request or the prefix cache owns what is not free, it does not know."""

from __future__ import annotations

import numpy as np

MAX_PAGE_SIZE = 64


class SlotError(RuntimeError):
    """A slot was taken or given back against the rules: a fault of the engine, never of a request."""


class SlotAllocator:
    """Hands out the slots [0, total) in pages of `page_size` consecutive slots; what fills no page at the end is unused.

    Args:
        total_slots: Slots of the pool, in tokens.
        page_size: Tokens per page, 1 to 64.
    """

    def __init__(self, total_slots: int, page_size: int = 1) -> None:
        if not 1 <= page_size <= MAX_PAGE_SIZE:
            raise ValueError(f"page_size is {page_size}; it must be 1 to {MAX_PAGE_SIZE}")
        if total_slots < page_size:
            raise ValueError(f"a pool of {total_slots} slots holds no page of {page_size}")
        self.page_size = page_size
        self.n_pages = total_slots // page_size
        self._stack = np.arange(self.n_pages - 1, -1, -1, dtype=np.int32)  # free pages are [0, _n_free), the next one at its end
        self._n_free = self.n_pages
        self._is_free = np.ones(self.n_pages, dtype=bool)
        self._offsets = np.arange(page_size, dtype=np.int32)

    @property
    def total(self) -> int:
        """Usable slots."""
        return self.n_pages * self.page_size

    @property
    def free(self) -> int:
        """Free slots, a multiple of page_size."""
        return self._n_free * self.page_size

    def take(self, n_slots: int) -> np.ndarray:
        """`n_slots` slots (a multiple of page_size), page after page, as int32."""
        n_pages, rest = divmod(n_slots, self.page_size)
        if rest or n_pages < 0:
            raise SlotError(f"{n_slots} slots are not whole pages of {self.page_size}")
        if n_pages > self._n_free:
            raise SlotError(f"{n_slots} slots were asked for and {self.free} are free")
        self._n_free -= n_pages
        pages = self._stack[self._n_free : self._n_free + n_pages][::-1].copy()
        self._is_free[pages] = False
        if self.page_size == 1:
            return pages
        return (pages[:, None] * np.int32(self.page_size) + self._offsets).reshape(-1)

    def give(self, slots: np.ndarray) -> None:
        """Take whole pages back. Raises SlotError for a slot that is free already, given twice, or outside its page."""
        if not slots.size:
            return
        pages = slots
        if self.page_size > 1:
            if slots.size % self.page_size:
                raise SlotError(f"{slots.size} slots are not whole pages of {self.page_size}")
            blocks = slots.reshape(-1, self.page_size)
            pages = blocks[:, 0] // self.page_size
            if (blocks != pages[:, None] * self.page_size + self._offsets).any():
                raise SlotError("slots of one page were given back in parts")
        if pages.min() < 0 or pages.max() >= self.n_pages:
            raise SlotError(f"slot {int(slots.max())} is not in the pool of {self.total}")
        if self._is_free[pages].any() or np.unique(pages).size != pages.size:
            raise SlotError("a slot was given back twice")
        self._is_free[pages] = True
        self._stack[self._n_free : self._n_free + pages.size] = pages
        self._n_free += pages.size

    def free_slots(self) -> np.ndarray:
        """Every free slot, in no order; for checks."""
        pages = self._stack[: self._n_free]
        return (pages[:, None] * np.int32(self.page_size) + self._offsets).reshape(-1)
