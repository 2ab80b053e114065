"""The radix tree in its plainest form: a dictionary of whole prefixes, one entry per page. Slow and obvious; the oracle of the C++ one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

Prefix: TypeAlias = tuple[int, ...]
Place: TypeAlias = tuple[str, Prefix]  # (extra_key, all tokens from the beginning to the end of a page)


@dataclass
class Page:
    """One page of one prefix. A chain of pages stands for what the C++ tree keeps in compressed nodes."""

    slots: tuple[int, ...]
    used: int  # operation number of the last touch


@dataclass
class RadixTree:
    """Same interface and results as `gristmill_kernels._host.RadixTree`, page by page: ids, and the order inside `evict`, may differ.

    Evicts the unlocked page without children that was used longest ago. Two such pages never have the same age: an operation touches
    one path, and of one path only the last page has no children.
    """

    page_size: int = 1
    pages: dict[Place, Page] = field(default_factory=dict)
    ids: dict[int, Place] = field(default_factory=dict)
    locks: dict[Place, int] = field(default_factory=dict)
    clock: int = 0
    next_id: int = 1

    def _whole(self, ids: list[int]) -> Prefix:
        return tuple(ids[: len(ids) // self.page_size * self.page_size])

    def _path(self, key: str, prefix: Prefix) -> list[Place]:
        """The places of the pages of `prefix`, shortest first."""
        return [(key, prefix[:end]) for end in range(self.page_size, len(prefix) + 1, self.page_size)]

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

    def match_length(self, ids: list[int], extra_key: str = "") -> int:
        present = [place for place in self._path(extra_key, self._whole(ids)) if place in self.pages]
        return len(present) * self.page_size

    def match(self, ids: list[int], extra_key: str = "") -> tuple[int, np.ndarray]:
        place = (extra_key, tuple(ids[: self.match_length(ids, extra_key)]))
        self._touch(place)
        slots = [slot for above in self._path(*place) for slot in self.pages[above].slots]
        return self._id_of(place), np.array(slots, dtype=np.int32)

    def insert(self, ids: list[int], slots: list[int], extra_key: str = "") -> tuple[int, int]:
        present = self.match_length(ids, extra_key)
        place = (extra_key, self._whole(ids))
        for at in self._path(*place)[present // self.page_size :]:
            end = len(at[1])
            self.pages[at] = Page(tuple(slots[end - self.page_size : end]), 0)
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
            freed += self._drop(min(leaves, key=lambda place: self.pages[place].used))
        return np.array(freed, dtype=np.int32)

    def _drop(self, place: Place) -> tuple[int, ...]:
        self.locks.pop(place, None)
        self.ids = {node: at for node, at in self.ids.items() if at != place}
        return self.pages.pop(place).slots

    def clear(self) -> np.ndarray:
        if self.locked:
            raise RuntimeError(f"{self.locked} tokens are locked")
        freed = self.all_slots()
        self.pages.clear()
        self.ids.clear()
        self.locks.clear()
        return freed

    def all_slots(self) -> np.ndarray:
        return np.array([slot for page in self.pages.values() for slot in page.slots], dtype=np.int32)

    @property
    def locked(self) -> int:
        return len(self._locked_places()) * self.page_size

    @property
    def size(self) -> int:
        return len(self.pages) * self.page_size

    @property
    def evictable(self) -> int:
        return self.size - self.locked
