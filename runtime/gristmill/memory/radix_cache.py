"""The token pool of the scheduler: the free list, and the prefix cache that fills what is left over and gives it back when asked.

A slot is free, in the tree, or private to one request. The tree's part is evictable or locked by the leases of live requests, so
free + evictable + locked = total, where private slots count as locked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from gristmill.memory.slots import SlotAllocator, SlotError


class Tree(Protocol):
    """What is used of gristmill_kernels._host.RadixTree; a node is the number of the prefix that ends there, 0 the empty one."""

    def match(self, ids: np.ndarray, extra_key: str = "") -> tuple[int, np.ndarray]: ...
    def match_length(self, ids: np.ndarray, extra_key: str = "") -> int: ...
    def match_path(self, ids: np.ndarray, extra_key: str = "") -> tuple[int, np.ndarray]: ...
    def insert(self, ids: np.ndarray, slots: np.ndarray, extra_key: str = "") -> tuple[int, int]: ...
    def lock(self, node: int) -> None: ...
    def unlock(self, node: int) -> None: ...
    def evict(self, num_tokens: int) -> np.ndarray: ...
    @property
    def evictable(self) -> int: ...
    @property
    def locked(self) -> int: ...
    @property
    def size(self) -> int: ...


TreeFactory = Callable[[int], Tree]


def native_tree(page_size: int) -> Tree:
    """The C++ tree; imported here so that tests of everything else need no built kernels."""
    from gristmill_kernels._host import RadixTree

    return RadixTree(page_size)


class Lease(NamedTuple):
    """A locked prefix of the tree: positions [0, n_tokens) of one request. `tree` is None where the cache is off."""

    tree: Tree | None
    node: int
    n_tokens: int


class PoolCounts(NamedTuple):
    """Slots by state; free + evictable + locked = total."""

    total: int
    free: int
    evictable: int
    locked: int


class RadixCache:
    """Token slots with a prefix cache over them.

    A flush starts a new tree. Prefixes of the old one that live requests still read stay locked in it, are matched by nobody
    and are freed as those requests leave, so a flush never waits for a request to end and never takes a slot from a live table.

    Args:
        total_slots: Slots of the pool, in tokens.
        page_size: Tokens per page; only whole pages are cached.
        tree_factory: Makes an empty tree for a page size; None turns the prefix cache off.
    """

    def __init__(self, total_slots: int, page_size: int = 1, tree_factory: TreeFactory | None = native_tree) -> None:
        self.page_size = page_size
        self.allocator = SlotAllocator(total_slots, page_size)
        self._factory = tree_factory
        self._tree: Tree | None = tree_factory(page_size) if tree_factory else None
        self._retired: list[Tree] = []

    @property
    def enabled(self) -> bool:
        return self._tree is not None

    @property
    def tree(self) -> Tree | None:
        """The current tree, None where the cache is off."""
        return self._tree

    @property
    def trees(self) -> list[Tree]:
        """The current tree and those from before a flush that are still read."""
        return [*([self._tree] if self._tree is not None else []), *self._retired]

    @property
    def total(self) -> int:
        return self.allocator.total

    @property
    def available(self) -> int:
        """Slots that `take` can hand out now: free or evictable."""
        return self.allocator.free + (self._tree.evictable if self._tree is not None else 0)

    def counts(self) -> PoolCounts:
        free, evictable = self.allocator.free, sum(tree.evictable for tree in self.trees)
        return PoolCounts(self.total, free, evictable, self.total - free - evictable)

    def pages(self, n_tokens: int) -> int:
        """`n_tokens` rounded up to whole pages, in tokens."""
        return -(-n_tokens // self.page_size) * self.page_size

    def take(self, n_slots: int) -> np.ndarray:
        """`n_slots` slots (whole pages), evicting the least recently used prefixes when too few are free."""
        missing = n_slots - self.allocator.free
        if missing > 0 and self._tree is not None:
            self.allocator.give(self._tree.evict(missing))
        return self.allocator.take(n_slots)

    def give(self, slots: np.ndarray) -> None:
        """Free private slots, in whole pages."""
        self.allocator.give(slots)

    def probe(self, ids: np.ndarray, extra_key: str) -> int:
        """How many leading tokens of `ids` are cached; touches nothing."""
        return self._tree.match_length(ids, extra_key) if self._tree is not None else 0

    def probe_path(self, ids: np.ndarray, extra_key: str) -> tuple[int, np.ndarray]:
        """`probe`, and the nodes of the tree on the way there, root side first."""
        return self._tree.match_path(ids, extra_key) if self._tree is not None else (0, np.empty(0, dtype=np.int64))

    def acquire(self, ids: np.ndarray, extra_key: str) -> tuple[Lease, np.ndarray]:
        """Lock the longest cached prefix of `ids`; returns the lease and the prefix's slots."""
        if self._tree is None:
            return Lease(None, 0, 0), np.empty(0, dtype=np.int32)
        node, slots = self._tree.match(ids, extra_key)
        self._tree.lock(node)
        return Lease(self._tree, node, len(slots)), slots

    def extend(self, lease: Lease, ids: np.ndarray, slots: np.ndarray, extra_key: str) -> tuple[Lease, int]:
        """Offer the computed prefix `ids` with its `slots` (whole pages), of which [0, lease.n_tokens) is leased already.

        Returns:
            (new lease, n_present). Of the offered positions, the tree adopts [n_present, len(ids)); [lease.n_tokens, n_present) were
            there already under other slots, so the request's own stay its own. After a flush nothing is adopted: the lease
            comes back unchanged with n_present = len(ids).
        """
        if len(ids) % self.page_size:
            raise SlotError(f"{len(ids)} tokens are not whole pages of {self.page_size}")
        tree = lease.tree
        if tree is None or tree is not self._tree or len(ids) <= lease.n_tokens:
            return lease, len(ids)
        node, n_present = tree.insert(ids, slots, extra_key)
        tree.lock(node)
        tree.unlock(lease.node)
        return Lease(tree, node, len(ids)), n_present

    def release(self, lease: Lease) -> None:
        """Unlock a lease. What only it kept of a tree from before a flush is freed at once."""
        tree = lease.tree
        if tree is None:
            return
        tree.unlock(lease.node)
        if tree is not self._tree:
            self.allocator.give(tree.evict(tree.evictable))
            if not tree.size and tree in self._retired:
                self._retired.remove(tree)

    def flush(self) -> int:
        """Forget every cached prefix; returns how many slots became free at once."""
        tree = self._tree
        if tree is None or self._factory is None:
            return 0
        freed = tree.evict(tree.evictable)
        self.allocator.give(freed)
        if tree.size:
            self._retired.append(tree)
        self._tree = self._factory(self.page_size)
        return len(freed)
