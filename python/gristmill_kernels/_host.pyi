"""Torch-free C++ parts of the kernels package: the radix tree and what the CPU can execute. Sources in csrc/host."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

_Ints = npt.NDArray[np.integer] | Sequence[int]
_Stored = tuple[Literal["stored"], int | None, list[int], npt.NDArray[np.int32], str]
_Removed = tuple[Literal["removed"], list[int]]

def cpu_features() -> dict[str, bool]:
    """Instruction sets that the core has, the operating system saves and (AMX) has granted to this process."""

def isa_levels() -> list[str]:
    """Levels of the op libraries that may run here, best first: of "amx", "avx512bf16", "avx512", "avx2". Empty: generic only."""

def build_info() -> dict[str, str | int]:
    """How this module was built: version, platform, architecture, compiler, cpp_standard."""

class RadixTree:
    """Which prefixes of token ids have their KV in which slots. Whole pages only; not thread-safe.

    A node id names the prefix that ends at its node. It stays valid, and keeps naming the same tokens, until that node is evicted
    or cleared; from then on it raises ValueError and is never given out again. Node 0 is the empty prefix; locking it does nothing.

    Typical use by a scheduler::

        node, slots = tree.match(prompt)        # the cached prefix
        tree.lock(node)                         # safe from evict from here on
        ...                                     # compute the rest into slots of your own
        new, present = tree.insert(ids, all_slots)
        # all_slots[len(slots):present] were there already under other numbers: those stay yours to free
        # all_slots[present:len(ids) // page_size * page_size] belong to the tree now
        tree.lock(new)
        tree.unlock(node)

    Args:
        page_size: Tokens per page, at least 1.
        eviction: Which unlocked leaf `evict` takes first; always leaves before their parents. Recency is the time of the last match,
            insert or unlock. A use is the insert that made the tokens and every `match` since; finding them in an insert is none, because
            a prompt that is inserted chunk by chunk does so itself.
            "lru": least recently used. "lfu": fewest uses, then lru. "fifo": oldest insert, whatever happened since.
            "priority": smallest priority (the largest of all inserts that passed through), then lru.
            "slru": used once (on probation) before used again (protected), lru within both.
        window: Tokens of the sliding window whose slots are in a pool of their own; 0 for none. See `match_window`.
        events: Keep what was stored and removed for `take_events`. They pile up until taken.
    """

    def __init__(
        self,
        page_size: int = 1,
        eviction: str = "lru",
        window: int = 0,
        events: bool = False,
    ) -> None: ...
    def match(self, ids: _Ints, extra_key: str = "") -> tuple[int, npt.NDArray[np.int32]]:
        """The longest cached prefix of `ids`, and a touch for the eviction order. May split a node.

        Args:
            ids: Token ids, one-dimensional, any integer type that fits 32 bits.
            extra_key: Namespace: prefixes under different keys (an adapter, a tenant) never match each other.

        Returns:
            (node, slots): the node at its end (0 when nothing matches) and one int32 slot per matched token.
        """

    def match_length(self, ids: _Ints, extra_key: str = "") -> int:
        """How many tokens `match` would find, changing nothing: no split, no touch. For scheduling policies."""

    def match_path(self, ids: _Ints, extra_key: str = "") -> tuple[int, npt.NDArray[np.int64]]:
        """Like `match_length`, with the ids of the nodes that hold the prefix, root side first; the last may be matched in part."""

    def insert(self, ids: _Ints, slots: _Ints, extra_key: str = "", priority: int = 0) -> tuple[int, int]:
        """Adopts the slots of `ids` from where the tree has none, and touches the path. What fills no page at the end is ignored.

        Args:
            ids: Token ids from the beginning of the prompt.
            slots: One slot per id, not negative.
            extra_key: Namespace.
            priority: For eviction="priority": larger stays longer. Raises that of all tokens of `ids`, never lowers it.

        Returns:
            (node, n_present): the node at the end of the last whole page, and how many leading tokens were there before.
            Slots [n_present, whole pages) now belong to the tree; the caller keeps the others where they differ from the tree's.
        """

    def lock(self, node: int) -> None:
        """Keeps `node` and all its ancestors from eviction, once more. Raises ValueError for an id that is gone."""

    def unlock(self, node: int) -> None:
        """Takes one `lock` back; what becomes evictable counts as just used.

        Raises ValueError if `node` has no lock of its own, or if a window lock would be left without a lock beside it.
        """

    def evict(self, num_tokens: int) -> npt.NDArray[np.int32]:
        """Gives up unlocked slots, leaves first, in the policy's order, until `num_tokens` (rounded up to pages) or all are out.

        The last leaf is cut at its tail if that is enough; its id then names the shorter prefix.

        Returns:
            The freed int32 slots; fewer than asked only when `evictable` was less.
        """

    def clear(self) -> npt.NDArray[np.int32]:
        """Empties every namespace and returns the freed slots. Raises RuntimeError while anything is locked."""

    def take_events(self) -> list[_Stored | _Removed]:
        """What changed since the last call, in order; always empty without `events`.

        ("stored", parent, pages, tokens, extra_key): pages were added after page `parent` (None: at the beginning), with their tokens.
        ("removed", pages): pages are gone, each after all that followed it.

        A page is named by a 64-bit hash, the same in every process. With step(h, x) = g ^ (g >> 32), g = (h ^ x) * 0xff51afd7ed558ccd
        mod 2**64: start from 0x9e3779b97f4a7c15, step through the UTF-8 bytes of extra_key, invert all bits, then step through the
        tokens (as 32 bits) from the beginning of the prompt; the value after the last token of a page is its hash.
        """

    def all_slots(self) -> npt.NDArray[np.int32]:
        """Every slot the tree holds, in no order. O(size), for tests and leak checks."""

    # -- the sliding window: a second, optional slot per token ---------------------------------------------------------
    #
    # Layers with a sliding window read the last `window` tokens only and have a pool of their own. The tree may hold a window slot
    # beside a token's slot, and may lose it while the token stays. A prefix of n tokens is usable when all positions of
    # [n - window, n) have window slots. Everything is whole pages. All of these raise ValueError on a tree made with window=0.
    #
    #     node, slots, start, window_slots = tree.match_window(prompt)
    #     tree.lock(node); tree.lock_window(node, start, len(slots))          # window_slots are those of [start, len(slots))
    #     ...
    #     tree.unlock_window(node, start, len(slots)); tree.unlock(node)      # in this order

    def match_window(self, ids: _Ints, extra_key: str = "") -> tuple[int, npt.NDArray[np.int32], int, npt.NDArray[np.int32]]:
        """The longest usable prefix, and a touch like that of `match`; of the window slots, those returned are touched.

        Returns:
            (node, slots, window_start, window_slots): window_start is max(0, len(slots) - window) rounded down to a page, and
            window_slots are those of the positions from there on.
        """

    def match_window_length(self, ids: _Ints, extra_key: str = "") -> int:
        """How many tokens `match_window` would find, changing nothing."""

    def insert_window(
        self, ids: _Ints, slots: _Ints, window_start: int, window_slots: _Ints, extra_key: str = "", priority: int = 0
    ) -> tuple[int, int, npt.NDArray[np.int32]]:
        """An `insert` that also offers window slots.

        Args:
            ids: Token ids from the beginning of the prompt.
            slots: One slot per id.
            window_start: Position of the first window slot offered, a multiple of the page size.
            window_slots: One per id from there on, not negative.
            extra_key: Namespace.
            priority: As for `insert`.

        Returns:
            (node, n_present, taken): taken is a flat [start, end, start, end, ...] of the positions that had no window slot in the tree
            and now have the one offered, under tokens that were there before as well as new ones. The others stay the caller's.
        """

    def lock_window(self, node: int, start: int, end: int) -> None:
        """Keeps the window slots of positions [start, end) on the path to `node`, once more; both are multiples of the page size.

        Locks are counted per position: a range may be let go in parts, and through any node whose path covers it. Both ends become
        borders of nodes, so let many positions go at a time rather than one by one. Raises ValueError if a position has no window slot
        or the node is not under a lock.
        """

    def unlock_window(self, node: int, start: int, end: int) -> None:
        """Takes one `lock_window` of each of these positions back; what becomes evictable counts as just used."""

    def evict_window(self, num_tokens: int) -> npt.NDArray[np.int32]:
        """Gives up unlocked window slots, least recently used first, until `num_tokens` (rounded up to pages) or all are out.

        Any node may lose them, not only leaves; its other slots stay. Of what one request touched last, the part nearest the
        beginning goes first, because a longer continuation does not need it.
        """

    def take_freed_window(self) -> npt.NDArray[np.int32]:
        """The window slots of tokens that `evict` and `clear` removed since the last call."""

    def all_window_slots(self) -> npt.NDArray[np.int32]:
        """Every window slot that the tree holds, in no order."""

    @property
    def window(self) -> int:
        """Tokens of the sliding window, 0 for none."""
    @property
    def window_evictable(self) -> int:
        """Window slots that `evict_window` could free now."""
    @property
    def window_locked(self) -> int:
        """Window slots under at least one window lock."""
    @property
    def window_size(self) -> int:
        """Window slots held: window_evictable + window_locked."""

    def check(self) -> None:
        """Recomputes counters, links and eviction order, and raises RuntimeError at the first that is wrong. For tests."""

    @property
    def page_size(self) -> int:
        """Tokens per page."""
    @property
    def evictable(self) -> int:
        """Tokens that `evict` could free now."""
    @property
    def locked(self) -> int:
        """Tokens under at least one lock."""
    @property
    def size(self) -> int:
        """Tokens held: evictable + locked."""
    @property
    def node_count(self) -> int:
        """Nodes, roots not counted."""
    @property
    def memory_bytes(self) -> int:
        """Bytes of heap that the tree takes, with its containers and events as glibc lays them out. O(nodes)."""
