"""The radix tree in its plainest form: a dictionary of whole prefixes, one entry per page. Slow and obvious; the oracle of the C++ one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

Prefix: TypeAlias = tuple[int, ...]
Place: TypeAlias = tuple[str, Prefix]  # (extra_key, all tokens from the beginning to the end of a page)

POLICIES = ("lru", "lfu", "fifo", "priority", "slru")
MASK = 2**64 - 1


@dataclass
class Page:
    """One page of one prefix. A chain of pages stands for what the C++ tree keeps in compressed nodes."""

    slots: tuple[int, ...]
    created: int  # operation number of the insert
    priority: int
    used: int = 0  # operation number of the last touch
    uses: int = 1  # the insert that made it, and every match since
    window_slots: tuple[int, ...] | None = None
    window_used: int = 0

    def turn(self, eviction: str) -> tuple[int, int]:
        """What `evict` compares: the leaf with the smallest goes first."""
        return {
            "lru": (self.used, 0),
            "lfu": (self.uses, self.used),
            "fifo": (self.created, 0),
            "priority": (self.priority, self.used),
            "slru": (int(self.uses > 1), self.used),
        }[eviction]


def mix(value: int, item: int) -> int:
    value = (value ^ item) * 0xFF51AFD7ED558CCD & MASK
    return value ^ value >> 32


def page_hash(place: Place) -> int:
    """The hash that events give to the page which ends at `place`; pages chain, so their borders do not matter."""
    key, prefix = place
    value = 0x9E3779B97F4A7C15
    for byte in key.encode():
        value = mix(value, byte)
    value ^= MASK
    for token in prefix:
        value = mix(value, token & 0xFFFFFFFF)
    return value


@dataclass
class RadixTree:
    """Same interface and results as `gristmill_kernels._host.RadixTree`, page by page: ids, and the order inside `evict`, may differ.

    Evicts the unlocked page without children whose turn it is by the policy. Two such pages never have the same turn: an operation
    touches one path, and of one path only the last page has no children.
    """

    page_size: int = 1
    eviction: str = "lru"
    window: int = 0
    pages: dict[Place, Page] = field(default_factory=dict)
    ids: dict[int, Place] = field(default_factory=dict)
    locks: dict[Place, int] = field(default_factory=dict)
    window_locks: dict[Place, int] = field(default_factory=dict)
    freed_window: list[int] = field(default_factory=list)
    clock: int = 0
    next_id: int = 1

    def _whole(self, ids: list[int]) -> Prefix:
        return tuple(ids[: len(ids) // self.page_size * self.page_size])

    def _path(self, key: str, prefix: Prefix, start: int = 0) -> list[Place]:
        """The places of the pages of `prefix` from position `start` on, shortest first."""
        return [(key, prefix[:end]) for end in range(start + self.page_size, len(prefix) + 1, self.page_size)]

    def _touch(self, place: Place) -> None:
        self.clock += 1
        for above in self._path(*place):
            self.pages[above].used = self.clock

    def _id_of(self, place: Place) -> int:
        if not place[1]:
            return 0
        for known, at in self.ids.items():
            if at == place:
                return known
        self.ids[self.next_id] = place
        self.next_id += 1
        return self.next_id - 1

    def _slots(self, place: Place) -> np.ndarray:
        return np.array([slot for above in self._path(*place) for slot in self.pages[above].slots], dtype=np.int32)

    def match_length(self, ids: list[int], extra_key: str = "") -> int:
        present = [place for place in self._path(extra_key, self._whole(ids)) if place in self.pages]
        return len(present) * self.page_size

    def match(self, ids: list[int], extra_key: str = "") -> tuple[int, np.ndarray]:
        return self._use((extra_key, tuple(ids[: self.match_length(ids, extra_key)])))

    def _use(self, place: Place) -> tuple[int, np.ndarray]:
        self._touch(place)
        for above in self._path(*place):
            self.pages[above].uses += 1
        return self._id_of(place), self._slots(place)

    def insert(self, ids: list[int], slots: list[int], extra_key: str = "", priority: int = 0) -> tuple[int, int]:
        present = self.match_length(ids, extra_key)
        place = (extra_key, self._whole(ids))
        for at in self._path(*place)[present // self.page_size :]:
            end = len(at[1])
            self.pages[at] = Page(tuple(slots[end - self.page_size : end]), self.clock + 1, priority)
        for at in self._path(*place):
            self.pages[at].priority = max(self.pages[at].priority, priority)
        self._touch(place)
        return self._id_of(place), present

    def _place(self, node: int) -> Place:
        if node not in self.ids:
            raise ValueError(f"node {node} is not in the tree")
        return self.ids[node]

    def lock(self, node: int) -> None:
        if node:
            place = self._place(node)
            self.locks[place] = self.locks.get(place, 0) + 1

    def unlock(self, node: int) -> None:
        if not node:
            return
        place = self._place(node)
        if not self.locks.get(place):
            raise ValueError(f"node {node} is not locked")
        before = self._locked_places()
        self.locks[place] -= 1
        if self._window_locked_places() - self._locked_places():
            self.locks[place] += 1
            raise ValueError(f"node {node} still has a window lock")
        self.clock += 1
        for released in before - self._locked_places():
            self.pages[released].used = self.clock

    def _locked_places(self) -> set[Place]:
        return {above for place, count in self.locks.items() if count for above in self._path(*place)}

    def evict(self, num_tokens: int) -> np.ndarray:
        freed: list[int] = []
        locked = self._locked_places()
        while len(freed) < num_tokens:
            parents = {(key, prefix[: -self.page_size]) for key, prefix in self.pages}
            leaves = [place for place in self.pages if place not in parents and place not in locked]
            if not leaves:
                break
            freed += self._drop(min(leaves, key=lambda place: self.pages[place].turn(self.eviction)))
        return np.array(freed, dtype=np.int32)

    def _drop(self, place: Place) -> tuple[int, ...]:
        self.locks.pop(place, None)
        self.ids = {node: at for node, at in self.ids.items() if at != place}
        page = self.pages.pop(place)
        self.freed_window += page.window_slots or ()
        return page.slots

    def clear(self) -> np.ndarray:
        if self.locked:
            raise RuntimeError(f"{self.locked} tokens are locked")
        freed = self.all_slots()
        for place in list(self.pages):
            self._drop(place)
        return freed

    def all_slots(self) -> np.ndarray:
        return np.array([slot for page in self.pages.values() for slot in page.slots], dtype=np.int32)

    def hashes(self) -> set[int]:
        return {page_hash(place) for place in self.pages}

    @property
    def locked(self) -> int:
        return len(self._locked_places()) * self.page_size

    @property
    def size(self) -> int:
        return len(self.pages) * self.page_size

    @property
    def evictable(self) -> int:
        return self.size - self.locked

    # -- the sliding window ----------------------------------------------------------------------------------------

    def _window_at(self, place: Place, position: int) -> bool:
        page = position // self.page_size + 1
        return self.pages[place[0], place[1][: page * self.page_size]].window_slots is not None

    def match_window_length(self, ids: list[int], extra_key: str = "") -> int:
        for length in range(self.match_length(ids, extra_key), 0, -self.page_size):
            place = (extra_key, tuple(ids[:length]))
            if all(self._window_at(place, position) for position in range(max(0, length - self.window), length)):
                return length
        return 0

    def match_window(self, ids: list[int], extra_key: str = "") -> tuple[int, np.ndarray, int, np.ndarray]:
        length = self.match_window_length(ids, extra_key)
        place = (extra_key, tuple(ids[:length]))
        start = max(0, length - self.window) // self.page_size * self.page_size
        node, slots = self._use(place)
        self._touch_window(place, start)
        window_slots = [slot for at in self._path(*place, start) for slot in self.pages[at].window_slots or ()]
        return node, slots, start, np.array(window_slots, dtype=np.int32)

    def _touch_window(self, place: Place, start: int) -> None:
        for at in self._path(*place, start):
            self.pages[at].window_used = self.clock

    def insert_window(
        self, ids: list[int], slots: list[int], window_start: int, window_slots: list[int], extra_key: str = "", priority: int = 0
    ) -> tuple[int, int, np.ndarray]:
        node, present = self.insert(ids, slots, extra_key, priority)
        place = (extra_key, self._whole(ids))
        taken: list[int] = []
        for at in self._path(*place, window_start):
            end = len(at[1])
            start = end - self.page_size
            if self.pages[at].window_slots is None:
                self.pages[at].window_slots = tuple(window_slots[start - window_start : end - window_start])
                taken = [*taken[:-1], end] if taken and taken[-1] == start else [*taken, start, end]
        self._touch_window(place, window_start)
        return node, present, np.array(taken, dtype=np.int32)

    def _window_range(self, node: int, start: int, end: int) -> list[Place]:
        key, prefix = self._place(node) if node else ("", ())
        return self._path(key, prefix[:end], start)

    def lock_window(self, node: int, start: int, end: int) -> None:
        covered = self._window_range(node, start, end)
        if not self._locked_places().issuperset(covered):
            raise ValueError(f"node {node} is not locked")
        if any(self.pages[at].window_slots is None for at in covered):
            raise ValueError(f"node {node} has no window slots there")
        for at in covered:
            self.window_locks[at] = self.window_locks.get(at, 0) + 1

    def unlock_window(self, node: int, start: int, end: int) -> None:
        covered = self._window_range(node, start, end)
        if not self._window_locked_places().issuperset(covered):
            raise ValueError(f"node {node} has no window lock there")
        self.clock += 1
        for at in covered:
            self.window_locks[at] -= 1
            if not self.window_locks[at]:
                self.pages[at].window_used = self.clock

    def _window_locked_places(self) -> set[Place]:
        return {at for at, count in self.window_locks.items() if count}

    def evict_window(self, num_tokens: int) -> np.ndarray:
        """The page used longest ago first; of one path, the page nearest the root."""
        freed: list[int] = []
        locked = self._window_locked_places()
        while len(freed) < num_tokens:
            candidates = [at for at, page in self.pages.items() if page.window_slots is not None and at not in locked]
            if not candidates:
                break
            page = self.pages[min(candidates, key=lambda at: (self.pages[at].window_used, len(at[1])))]
            freed += page.window_slots or ()
            page.window_slots = None
        return np.array(freed, dtype=np.int32)

    def take_freed_window(self) -> np.ndarray:
        freed, self.freed_window = self.freed_window, []
        return np.array(freed, dtype=np.int32)

    def all_window_slots(self) -> np.ndarray:
        return np.array([slot for page in self.pages.values() for slot in page.window_slots or ()], dtype=np.int32)

    @property
    def window_locked(self) -> int:
        return len(self._window_locked_places()) * self.page_size

    @property
    def window_size(self) -> int:
        return len(self.all_window_slots())

    @property
    def window_evictable(self) -> int:
        return self.window_size - self.window_locked
