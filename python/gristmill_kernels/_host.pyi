"""Torch-free C++ parts of the kernels package: the radix tree and what the CPU can execute. Sources in csrc/host."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_Ints = npt.NDArray[np.integer] | Sequence[int]

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
    """

    def __init__(self, page_size: int = 1) -> None: ...
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

    def insert(self, ids: _Ints, slots: _Ints, extra_key: str = "") -> tuple[int, int]:
        """Adopts the slots of `ids` from where the tree has none, and touches the path. What fills no page at the end is ignored.

        Args:
            ids: Token ids from the beginning of the prompt.
            slots: One slot per id, not negative.
            extra_key: Namespace.

        Returns:
            (node, n_present): the node at the end of the last whole page, and how many leading tokens were there before.
            Slots [n_present, whole pages) now belong to the tree; the caller keeps the others where they differ from the tree's.
        """

    def lock(self, node: int) -> None:
        """Keeps `node` and all its ancestors from eviction, once more. Raises ValueError for an id that is gone."""

    def unlock(self, node: int) -> None:
        """Takes one `lock` back; what becomes evictable counts as just used. Raises ValueError if `node` has no lock of its own."""

    def evict(self, num_tokens: int) -> npt.NDArray[np.int32]:
        """Gives up unlocked slots, least recently used leaves first, until `num_tokens` (rounded up to pages) or all are out.

        The last leaf is cut at its tail if that is enough; its id then names the shorter prefix.

        Returns:
            The freed int32 slots; fewer than asked only when `evictable` was less.
        """

    def clear(self) -> npt.NDArray[np.int32]:
        """Empties every namespace and returns the freed slots. Raises RuntimeError while anything is locked."""

    def all_slots(self) -> npt.NDArray[np.int32]:
        """Every slot the tree holds, in no order. O(size), for tests and leak checks."""

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
