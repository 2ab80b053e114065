"""The pool with its prefix cache: every slot is free, evictable or locked; a lease keeps a prefix; a flush never takes what is in use."""

from __future__ import annotations

import numpy as np
import pytest

from gristmill.memory.radix_cache import RadixCache
from gristmill.memory.slots import SlotError


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def fill(cache: RadixCache, tokens: np.ndarray, key: str = "") -> np.ndarray:
    """Compute `tokens` and leave them to the tree; returns their slots."""
    slots = cache.take(len(tokens))
    lease = cache.acquire(tokens[:0], key).lease
    lease, n_present = cache.extend(lease, tokens, slots, key)
    cache.give(slots[:n_present])
    cache.release(lease)
    return slots


def test_a_computed_prefix_is_found_again_and_counted() -> None:
    cache = RadixCache(10)
    slots = fill(cache, ids(1, 2, 3, 4))
    assert cache.counts() == (10, 6, 4, 0)
    lease, found, *_ = cache.acquire(ids(1, 2, 3, 9), "")
    assert found.tolist() == slots[:3].tolist()
    assert lease.n_tokens == 3
    assert cache.counts() == (10, 6, 1, 3)
    cache.release(lease)
    assert cache.counts() == (10, 6, 4, 0)


def test_only_whole_pages_are_cached() -> None:
    cache = RadixCache(16, 4)
    with pytest.raises(SlotError, match="6 tokens are not whole pages of 4"):
        cache.extend(cache.acquire(ids(1), "")[0], ids(1, 2, 3, 4, 5, 6), cache.take(8)[:6], "")
    cache = RadixCache(16, 4)
    fill(cache, ids(1, 2, 3, 4, 5, 6, 7, 8))
    assert cache.probe(ids(1, 2, 3, 4, 5, 6, 7, 9), "") == 4


def test_namespaces_do_not_share() -> None:
    cache = RadixCache(10)
    fill(cache, ids(1, 2, 3), "a")
    assert cache.probe(ids(1, 2, 3), "") == 0
    assert cache.probe(ids(1, 2, 3), "a") == 3


def test_taking_evicts_the_least_recently_used_first_and_never_a_lease() -> None:
    cache = RadixCache(9)
    fill(cache, ids(1, 1, 1))
    fill(cache, ids(2, 2, 2))
    fill(cache, ids(3, 3, 3))
    lease, *_ = cache.acquire(ids(1, 1, 1), "")
    assert cache.available == 6
    cache.take(3)
    assert [cache.probe(ids(n, n, n), "") for n in (1, 2, 3)] == [3, 0, 3]
    cache.take(3)
    with pytest.raises(SlotError):
        cache.take(1)
    assert cache.probe(ids(1, 1, 1), "") == lease.n_tokens == 3


def test_duplicates_stay_the_requests_own() -> None:
    cache = RadixCache(10)
    first = fill(cache, ids(1, 2, 3))
    mine = cache.take(4)
    lease, *_ = cache.acquire(ids(1)[:0], "")
    lease, n_present = cache.extend(lease, ids(1, 2, 3, 4), mine, "")
    assert (lease.n_tokens, n_present) == (4, 3)
    _, slots, *_ = cache.acquire(ids(1, 2, 3, 4), "")
    assert slots.tolist() == [*first.tolist(), int(mine[3])]


def test_a_flush_frees_what_is_unused_and_forgets_the_rest() -> None:
    cache = RadixCache(10)
    fill(cache, ids(1, 2, 3))
    fill(cache, ids(7, 8))
    lease, slots, *_ = cache.acquire(ids(1, 2, 3), "")
    assert cache.flush() == 2
    assert cache.counts() == (10, 7, 0, 3)
    assert cache.probe(ids(1, 2, 3), "") == 0
    mine = cache.take(1)
    # what was computed on top of a forgotten prefix is not offered to others either
    lease, n_present = cache.extend(lease, ids(1, 2, 3, 4), np.concatenate([slots, mine]), "")
    assert (lease.n_tokens, n_present) == (3, 4)
    cache.give(mine)
    cache.release(lease)
    assert cache.counts() == (10, 10, 0, 0)
    assert len(cache.trees) == 1


def test_two_leases_of_a_flushed_prefix_free_it_with_the_last() -> None:
    cache = RadixCache(4)
    fill(cache, ids(1, 2))
    one, two = cache.acquire(ids(1, 2), "")[0], cache.acquire(ids(1), "")[0]
    cache.flush()
    cache.release(one)
    assert cache.counts() == (4, 3, 0, 1)
    cache.release(two)
    assert cache.counts() == (4, 4, 0, 0)


def test_switched_off_it_caches_nothing() -> None:
    cache = RadixCache(8, 2, tree_factory=None)
    assert not cache.enabled
    lease, slots, *_ = cache.acquire(ids(1, 2), "")
    mine = cache.take(2)
    lease, n_present = cache.extend(lease, ids(1, 2), mine, "")
    assert (len(slots), lease.n_tokens, n_present) == (0, 0, 2)
    cache.give(mine)
    cache.release(lease)
    assert cache.flush() == 0
    assert cache.counts() == (8, 8, 0, 0)
