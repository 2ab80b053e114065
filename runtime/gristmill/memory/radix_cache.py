"""The token pools of the scheduler: free lists, and the prefix cache that fills what is left over and gives it back when asked.

A slot is free, in the tree, or private to one request. The tree's part is evictable or locked by the leases of live requests, so
free + evictable + locked = total, where private slots count as locked. The pool of sliding-window layers, if any, is kept in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from gristmill.memory.slots import SlotAllocator, SlotError
from gristmill.memory.window import WindowSpec


class TreeConfig(NamedTuple):
    """How a tree is made: `eviction` names which prefix goes first, `window` is the sliding window in tokens (0: none)."""

    page_size: int = 1
    eviction: str = "lru"
    window: int = 0
    events: bool = False


class Tree(Protocol):
    """What is used of gristmill_kernels._host.RadixTree; a node is the number of the prefix that ends there, 0 the empty one."""

    def match(self, ids: np.ndarray, extra_key: str = "") -> tuple[int, np.ndarray]: ...
    def match_length(self, ids: np.ndarray, extra_key: str = "") -> int: ...
    def match_path(self, ids: np.ndarray, extra_key: str = "") -> tuple[int, np.ndarray]: ...
    def insert(self, ids: np.ndarray, slots: np.ndarray, extra_key: str = "", priority: int = 0) -> tuple[int, int]: ...
    def lock(self, node: int) -> None: ...
    def unlock(self, node: int) -> None: ...
    def evict(self, num_tokens: int) -> np.ndarray: ...
    def take_events(self) -> list[Any]: ...
    @property
    def evictable(self) -> int: ...
    @property
    def locked(self) -> int: ...
    @property
    def size(self) -> int: ...

    # with a sliding window
    def match_window(self, ids: np.ndarray, extra_key: str = "") -> tuple[int, np.ndarray, int, np.ndarray]: ...
    def match_window_length(self, ids: np.ndarray, extra_key: str = "") -> int: ...
    def insert_window(
        self, ids: np.ndarray, slots: np.ndarray, window_start: int, window_slots: np.ndarray, extra_key: str = "", priority: int = 0
    ) -> tuple[int, int, np.ndarray]: ...
    def lock_window(self, node: int, start: int, end: int) -> None: ...
    def unlock_window(self, node: int, start: int, end: int) -> None: ...
    def evict_window(self, num_tokens: int) -> np.ndarray: ...
    def take_freed_window(self) -> np.ndarray: ...
    @property
    def window_evictable(self) -> int: ...
    @property
    def window_locked(self) -> int: ...
    @property
    def window_size(self) -> int: ...


TreeFactory = Callable[[TreeConfig], Tree]


def native_tree(config: TreeConfig) -> Tree:
    """The C++ tree; imported here so that tests of everything else need no built kernels."""
    from gristmill_kernels._host import RadixTree

    return RadixTree(config.page_size, config.eviction, config.window, config.events)


class Lease(NamedTuple):
    """A locked prefix of the tree: positions [0, n_tokens) of one request. `tree` is None where the cache is off."""

    tree: Tree | None
    node: int
    n_tokens: int


class Match(NamedTuple):
    """A cached prefix that was found and locked. `window_slots` are those of positions [window_start, lease.n_tokens)."""

    lease: Lease
    slots: np.ndarray
    window_start: int = 0
    window_slots: np.ndarray = np.empty(0, dtype=np.int32)


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
        tree_factory: Makes an empty tree; None turns the prefix cache off.
        eviction: Which cached prefix goes first: lru, lfu, fifo, priority or slru.
        window: The pool of the sliding-window layers, None for models without.
        events: Record what enters and leaves the tree, for `take_events`.
    """

    def __init__(
        self,
        total_slots: int,
        page_size: int = 1,
        tree_factory: TreeFactory | None = native_tree,
        *,
        eviction: str = "lru",
        window: WindowSpec | None = None,
        events: bool = False,
    ) -> None:
        self.page_size = page_size
        self.allocator = SlotAllocator(total_slots, page_size)
        self.window_allocator = SlotAllocator(window.slots, page_size) if window is not None else None
        self._factory = tree_factory
        self._tree_config = TreeConfig(page_size, eviction, window.window if window is not None else 0, events)
        self._tree: Tree | None = tree_factory(self._tree_config) if tree_factory else None
        self._retired: list[Tree] = []
        self._cleared = False  # flushed since the last take_events

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

    def window_counts(self) -> PoolCounts:
        """The same for the sliding-window pool; all 0 without one."""
        if self.window_allocator is None:
            return PoolCounts(0, 0, 0, 0)
        total, free = self.window_allocator.total, self.window_allocator.free
        evictable = sum(tree.window_evictable for tree in self.trees)
        return PoolCounts(total, free, evictable, total - free - evictable)

    def pages(self, n_tokens: int) -> int:
        """`n_tokens` rounded up to whole pages, in tokens."""
        return -(-n_tokens // self.page_size) * self.page_size

    def take(self, n_slots: int) -> np.ndarray:
        """`n_slots` slots (whole pages), evicting cached prefixes when too few are free."""
        missing = n_slots - self.allocator.free
        if missing > 0 and self._tree is not None:
            self._evict(self._tree, missing)
        return self.allocator.take(n_slots)

    def give(self, slots: np.ndarray) -> None:
        """Free private slots, in whole pages."""
        self.allocator.give(slots)

    def probe(self, ids: np.ndarray, extra_key: str) -> int:
        """How many leading tokens of `ids` are cached; touches nothing."""
        if self._tree is None:
            return 0
        if self.window_allocator is not None:
            return self._tree.match_window_length(ids, extra_key)
        return self._tree.match_length(ids, extra_key)

    def probe_path(self, ids: np.ndarray, extra_key: str) -> tuple[int, np.ndarray]:
        """`probe`, and the nodes of the tree on the way there, root side first."""
        if self._tree is None:
            return 0, np.empty(0, dtype=np.int64)
        length, path = self._tree.match_path(ids, extra_key)
        return (length if self.window_allocator is None else self.probe(ids, extra_key)), path

    def acquire(self, ids: np.ndarray, extra_key: str) -> Match:
        """Find and lock the longest cached prefix of `ids`."""
        tree = self._tree
        if tree is None:
            return Match(Lease(None, 0, 0), np.empty(0, dtype=np.int32))
        if self.window_allocator is None:
            node, slots = tree.match(ids, extra_key)
            tree.lock(node)
            return Match(Lease(tree, node, len(slots)), slots)
        node, slots, start, window_slots = tree.match_window(ids, extra_key)
        tree.lock(node)
        lease = Lease(tree, node, len(slots))
        self.lock_window(lease, start, len(slots))
        return Match(lease, slots, start, window_slots)

    def give_up(self, match: Match) -> None:
        """Unlock a match that is not used after all."""
        self.unlock_window(match.lease, match.window_start, match.lease.n_tokens)
        self.release(match.lease)

    def extend(self, lease: Lease, ids: np.ndarray, slots: np.ndarray, extra_key: str, priority: int = 0) -> tuple[Lease, int]:
        """Offer the computed prefix `ids` with its `slots` (whole pages), of which [0, lease.n_tokens) is leased already.

        Returns:
            (new lease, n_present). Of the offered positions, the tree adopts [n_present, len(ids)); [lease.n_tokens, n_present) were
            there already under other slots, so the request's own stay its own. After a flush nothing is adopted: the lease
            comes back unchanged with n_present = len(ids).
        """
        tree = self._tree_for(lease, ids)
        if tree is None:
            return lease, len(ids)
        node, n_present = tree.insert(ids, slots, extra_key, priority)
        return self._move(lease, tree, node, len(ids)), n_present

    def extend_window(
        self,
        lease: Lease,
        ids: np.ndarray,
        slots: np.ndarray,
        window_start: int,
        window_slots: np.ndarray,
        extra_key: str,
        priority: int = 0,
    ) -> tuple[Lease, int, list[tuple[int, int]]]:
        """`extend`, with the slots of the window pool for positions [window_start, len(ids)).

        Returns:
            (new lease, n_present, taken): the window slots of the position ranges `taken` are the tree's now, locked for the request
            until `unlock_window`; the others stay the request's own.
        """
        tree = self._tree_for(lease, ids)
        if tree is None:
            return lease, len(ids), []
        node, n_present, flat = tree.insert_window(ids, slots, window_start, window_slots, extra_key, priority)
        lease = self._move(lease, tree, node, len(ids))
        taken = list(zip(flat[::2].tolist(), flat[1::2].tolist()))
        for start, end in taken:
            self.lock_window(lease, start, end)
        return lease, n_present, taken

    def _tree_for(self, lease: Lease, ids: np.ndarray) -> Tree | None:
        """The tree that may adopt `ids`; None: it has them, or the lease is of another tree."""
        if len(ids) % self.page_size:
            raise SlotError(f"{len(ids)} tokens are not whole pages of {self.page_size}")
        return lease.tree if lease.tree is not None and lease.tree is self._tree and len(ids) > lease.n_tokens else None

    def _move(self, lease: Lease, tree: Tree, node: int, n_tokens: int) -> Lease:
        tree.lock(node)
        tree.unlock(lease.node)
        return Lease(tree, node, n_tokens)

    def release(self, lease: Lease) -> None:
        """Unlock a lease. What only it kept of a tree from before a flush is freed at once."""
        tree = lease.tree
        if tree is None:
            return
        tree.unlock(lease.node)
        if tree is not self._tree:
            self._evict(tree, tree.evictable)
            if not tree.size and tree in self._retired:
                self._retired.remove(tree)

    def flush(self) -> int:
        """Forget every cached prefix; returns how many slots became free at once."""
        tree = self._tree
        if tree is None or self._factory is None:
            return 0
        freed = self._evict(tree, tree.evictable)
        self._evict_window(tree, tree.window_evictable if self.window_allocator is not None else 0)
        if tree.size:
            self._retired.append(tree)
        self._tree = self._factory(self._tree_config)
        self._cleared = True
        return freed

    def take_events(self) -> list[tuple[Any, ...]]:
        """What entered and left the cache since the last call, in order: the tree's events, after ("cleared",) if it was flushed meanwhile.

        What a tree from before a flush does is nobody's business: nothing in it is found any more.
        """
        if self._tree is None or not self._tree_config.events:
            return []
        for tree in self._retired:
            tree.take_events()
        events: list[tuple[Any, ...]] = self._tree.take_events()
        if self._cleared:
            self._cleared = False
            events.insert(0, ("cleared",))
        return events

    def _evict(self, tree: Tree, n_tokens: int) -> int:
        freed = tree.evict(n_tokens)
        self.allocator.give(freed)
        if self.window_allocator is not None:
            self.window_allocator.give(tree.take_freed_window())
        return len(freed)

    # --- the sliding-window pool

    def take_window(self, n_slots: int) -> np.ndarray:
        """`n_slots` slots of the window pool (whole pages), evicting when too few are free."""
        assert self.window_allocator is not None
        missing = n_slots - self.window_allocator.free
        if missing > 0 and self._tree is not None:
            self._evict_window(self._tree, missing)
        return self.window_allocator.take(n_slots)

    def give_window(self, slots: np.ndarray) -> None:
        """Free private slots of the window pool, in whole pages."""
        assert self.window_allocator is not None
        self.window_allocator.give(slots)

    def lock_window(self, lease: Lease, start: int, end: int) -> None:
        """Hold the tree's window slots of positions [start, end) of a leased prefix."""
        if self.window_allocator is not None and lease.tree is not None and start < end:
            lease.tree.lock_window(lease.node, start, end)

    def unlock_window(self, lease: Lease, start: int, end: int) -> None:
        """Let them go, all or a part. Those of a tree from before a flush are freed at once."""
        tree = lease.tree
        if self.window_allocator is None or tree is None or start >= end:
            return
        tree.unlock_window(lease.node, start, end)
        if tree is not self._tree:
            self._evict_window(tree, tree.window_evictable)

    def _evict_window(self, tree: Tree, n_tokens: int) -> None:
        if self.window_allocator is not None and n_tokens > 0:
            self.window_allocator.give(tree.evict_window(n_tokens))
