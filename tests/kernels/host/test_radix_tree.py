"""The C++ radix tree: against its Python twin under random operations, then the promises that one example shows best."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from gristmill_kernels._host import RadixTree
from tests.kernels.host.mirror import Mirror
from tests.kernels.host.twin import POLICIES, page_hash
from tests.kernels.host.twin import RadixTree as Twin

# (which earlier prompt it continues, how many of its pages are kept, the kinds of the pages after those, tokens that fill no page).
# Spelled out for the page size at hand, so that prefixes meet, nest and split all the time at every page size.
Prompt: TypeAlias = tuple[int, int, list[int], int]
prompts = st.tuples(st.integers(0, 7), st.integers(0, 8), st.lists(st.integers(0, 3), max_size=4), st.integers(0, 15))
keys = st.sampled_from(["", "", "", "adapter", "ключ"])
priorities = st.integers(-2, 2)


class TwinComparison(RuleBasedStateMachine):
    """Runs every operation on both trees. `held` are nodes that were locked: (C++ id, twin id)."""

    held = Bundle("held")

    @initialize(
        page_size=st.sampled_from([1, 2, 3, 4, 7, 16]),
        eviction=st.sampled_from(POLICIES),
        first=st.lists(prompts, min_size=2, max_size=8),
        watch_always=st.booleans(),
    )
    def create(self, page_size: int, eviction: str, first: list[Prompt], watch_always: bool) -> None:
        self.start(RadixTree(page_size, eviction, events=True), Twin(page_size, eviction), first, watch_always)

    def start(self, tree: RadixTree, twin: Twin, first: list[Prompt], watch_always: bool) -> None:
        self.tree, self.twin = tree, twin
        self.mirror, self.watch_always = Mirror(tree.page_size), watch_always
        self.next_slot = 0
        self.earlier: list[list[int]] = []  # page kinds of the last prompts
        self.names: dict[object, int] = {}  # place -> the C++ id it was given
        for prompt in first:
            self.insert(prompt, "")

    def spell(self, prompt: Prompt) -> list[int]:
        """Pages of kinds 0 to 2 hold one token value; kind 3 differs from kind 0 in its last token only."""
        base, keep, more, rest = prompt
        kinds = [*(self.earlier[base % len(self.earlier)][:keep] if self.earlier else []), *more]
        self.earlier = [*self.earlier[-7:], kinds]
        size = self.tree.page_size
        pages = [[0] * (size - 1) + [3] if kind == 3 else [kind] * size for kind in kinds]
        return [token for page in pages for token in page] + [0] * min(rest, size - 1)

    def same_node(self, node: int, twin_node: int) -> None:
        assert (node == 0) == (twin_node == 0)
        if node:
            assert self.names.setdefault(self.twin.ids[twin_node], node) == node, "a live prefix changed its id"
            assert len(set(self.names.values())) == len(self.names), "two prefixes share an id"

    def match(self, prompt: Prompt, key: str) -> tuple[int, int]:
        ids = self.spell(prompt)
        length = self.tree.match_length(ids, key)
        path_length, path = self.tree.match_path(ids, key)
        assert path_length == length and path.dtype == np.int64
        node, slots = self.tree.match(ids, key)
        twin_node, twin_slots = self.twin.match(ids, key)
        assert length == len(slots)
        assert slots.dtype == np.int32 and slots.tolist() == twin_slots.tolist()
        self.same_node(node, twin_node)
        split_path = self.tree.match_path(ids[:length], key)[1].tolist()  # match may have split the last node of the path
        assert (split_path[-1] if split_path else 0) == node
        assert path[:-1].tolist() == split_path[: max(0, len(path) - 1)] and len(path) == len(split_path)
        return node, twin_node

    def new_slots(self, count: int) -> list[int]:
        self.next_slot += count
        return list(range(self.next_slot - count, self.next_slot))

    def insert(self, prompt: Prompt, key: str, priority: int = 0) -> tuple[int, int]:
        ids = self.spell(prompt)
        slots = self.new_slots(len(ids))
        node, present = self.tree.insert(ids, slots, key, priority)
        twin_node, twin_present = self.twin.insert(ids, slots, key, priority)
        assert present == twin_present
        self.same_node(node, twin_node)
        return node, twin_node

    def lock(self, pair: tuple[int, int]) -> tuple[int, int]:
        self.tree.lock(pair[0])
        self.twin.lock(pair[1])
        return pair

    @rule(prompt=prompts, key=keys)
    def only_match(self, prompt: Prompt, key: str) -> None:
        self.match(prompt, key)

    @rule(prompt=prompts, key=keys, priority=priorities)
    def only_insert(self, prompt: Prompt, key: str, priority: int) -> None:
        self.insert(prompt, key, priority)

    @rule(target=held, prompt=prompts, key=keys)
    def match_and_lock(self, prompt: Prompt, key: str) -> object:
        return self.lock(self.match(prompt, key))

    @rule(target=held, pair=held)
    def lock_again(self, pair: tuple[int, int]) -> object:
        return self.lock(pair)

    @rule(pair=consumes(held))
    def unlock(self, pair: tuple[int, int]) -> None:
        self.tree.unlock(pair[0])
        self.twin.unlock(pair[1])

    @rule(target=held, pair=consumes(held), prompt=prompts, key=keys)
    def insert_longer_and_move_the_lock(self, pair: tuple[int, int], prompt: Prompt, key: str) -> object:
        longer = self.lock(self.insert(prompt, key))
        self.unlock(pair)
        return longer

    @rule(pages=st.integers(0, 3), more=st.integers(0, 15))
    def evict(self, pages: int, more: int) -> None:
        size = self.tree.page_size
        num_tokens = pages * size + more % size
        before = self.tree.evictable
        freed = self.tree.evict(num_tokens)
        assert len(freed) == min(before, -(-num_tokens // size) * size)
        assert sorted(freed.tolist()) == sorted(self.twin.evict(num_tokens).tolist())
        self.names = {place: node for place, node in self.names.items() if place in self.twin.pages}

    @precondition(lambda self: self.tree.size > 20 * self.tree.page_size)
    @rule()
    def clear(self) -> None:
        if self.twin.locked:
            with pytest.raises(RuntimeError, match="tokens are locked"):
                self.tree.clear()
            return
        assert sorted(self.tree.clear().tolist()) == sorted(self.twin.clear().tolist())
        assert self.tree.size == self.tree.node_count == 0
        self.names.clear()

    @rule()
    def watch(self) -> None:
        """Replaying the events gives the tree's pages, however many came at once."""
        self.mirror.replay(self.tree.take_events())
        assert self.mirror.hashes == self.twin.hashes()

    @invariant()
    def events_agree(self) -> None:
        if self.watch_always:
            self.watch()

    @invariant()
    def counters_and_slots_agree(self) -> None:
        assert (self.tree.evictable, self.tree.locked, self.tree.size) == (self.twin.evictable, self.twin.locked, self.twin.size)
        assert self.tree.evictable + self.tree.locked == self.tree.size
        slots = self.tree.all_slots().tolist()
        assert len(set(slots)) == len(slots) == self.tree.size
        self.tree.check()

    def teardown(self) -> None:
        """The whole order: page by page, everything unlocked is freed in the same sequence."""
        while self.tree.evictable:
            self.evict(1, 0)
        self.watch()


TestAgainstTwin = TwinComparison.TestCase
TestAgainstTwin.settings = settings(max_examples=250, stateful_step_count=40, deadline=None)


def tree_with(*prompts: list[int], page_size: int = 1, eviction: str = "lru") -> RadixTree:
    """Prompts inserted one after the other; the slot of a token is 100 times the prompt's number plus its position."""
    tree = RadixTree(page_size, eviction)
    for number, ids in enumerate(prompts):
        tree.insert(ids, [100 * number + position for position in range(len(ids))])
    return tree


def test_duplicate_slots_stay_the_callers() -> None:
    tree = tree_with([1, 2, 3])
    node, present = tree.insert([1, 2, 9], [50, 51, 52])
    assert present == 2
    assert tree.match([1, 2, 9])[1].tolist() == [0, 1, 52]
    assert node == tree.match([1, 2, 9])[0]


def test_the_tail_that_fills_no_page_is_not_adopted() -> None:
    tree = RadixTree(4)
    assert tree.insert([1, 2, 3], [0, 1, 2]) == (0, 0)
    assert tree.size == tree.node_count == 0
    tree.insert([1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 5])
    assert tree.all_slots().tolist() == [0, 1, 2, 3]


def test_a_partly_equal_page_is_not_a_match() -> None:
    tree = tree_with(list(range(8)), page_size=4)
    node, slots = tree.match([0, 1, 2, 3, 4, 5, 6, 99])
    assert slots.tolist() == [0, 1, 2, 3]
    assert tree.match([0, 1, 2, 99])[0] == 0
    assert node != 0


def test_namespaces_never_match_each_other() -> None:
    tree = RadixTree()
    tree.insert([1, 2, 3], [0, 1, 2], "adapter-a")
    assert tree.match([1, 2, 3])[0] == 0
    assert tree.match([1, 2, 3], "adapter-b")[0] == 0
    assert tree.match([1, 2, 3], extra_key="adapter-a")[1].tolist() == [0, 1, 2]


def test_a_split_keeps_the_lock_on_the_whole_prefix() -> None:
    tree = tree_with([1, 2, 3, 4])
    node, _ = tree.match([1, 2, 3, 4])
    tree.lock(node)
    tree.insert([1, 2, 8], [50, 51, 52])
    assert (tree.locked, tree.evictable) == (4, 1)
    assert tree.evict(10).tolist() == [52]
    tree.unlock(node)
    assert (tree.locked, tree.evictable) == (0, 4)


def test_evict_takes_the_least_recently_used_leaf_first() -> None:
    tree = tree_with([1, 1], [2, 2], [3, 3])
    tree.match([1, 1])
    assert sorted(tree.evict(2).tolist()) == [100, 101]
    assert sorted(tree.evict(2).tolist()) == [200, 201]
    assert sorted(tree.evict(2).tolist()) == [0, 1]


def test_what_was_just_unlocked_is_evicted_last() -> None:
    tree = tree_with([1, 1], [2, 2])
    node, _ = tree.match([1, 1])
    tree.lock(node)
    tree.match([2, 2])
    tree.unlock(node)
    assert sorted(tree.evict(2).tolist()) == [100, 101]


def test_a_leaf_is_cut_at_its_tail_in_whole_pages() -> None:
    tree = tree_with(list(range(12)), page_size=4)
    assert tree.evict(5).tolist() == [4, 5, 6, 7, 8, 9, 10, 11]
    assert tree.match(list(range(12)))[1].tolist() == [0, 1, 2, 3]


def test_a_parent_is_evicted_after_its_children() -> None:
    tree = tree_with([1, 2, 3], [1, 2, 4])
    assert sorted(tree.evict(2).tolist()) == [2, 102]
    assert tree.evict(2).tolist() == [0, 1]
    assert tree.node_count == 0


def test_lookups_for_a_policy_change_nothing() -> None:
    tree = tree_with([1, 1, 1], [2, 2, 2])
    assert tree.match_length([1, 1, 9]) == 2
    assert tree.node_count == 2
    assert sorted(tree.evict(3).tolist()) == [0, 1, 2]


def test_the_path_of_a_match_names_its_nodes_and_changes_nothing() -> None:
    tree = tree_with([1, 2, 3, 4], [1, 2, 7])
    upper, lower = tree.match([1, 2])[0], tree.match([1, 2, 3, 4])[0]
    length, nodes = tree.match_path([1, 2, 3, 9])
    assert (length, nodes.tolist(), nodes.dtype) == (3, [upper, lower], np.int64)
    assert tree.node_count == 3
    assert tree.match_path([5])[0] == 0
    assert tree.match_path([1], "adapter")[1].tolist() == []


def eviction_order(tree: RadixTree) -> list[int]:
    """Prompts of one token each, by their token, in the order in which they go."""
    return [int(tree.evict(1)[0]) // 100 for _ in range(tree.evictable)]


def test_lfu_keeps_what_was_matched_often() -> None:
    tree = tree_with([1], [2], [3], eviction="lfu")
    for prompt in ([1], [1], [3]):
        tree.match(prompt)
    tree.insert([2], [9])  # finding its tokens there is no use: a prompt in chunks does that to itself
    assert eviction_order(tree) == [1, 2, 0]


def test_fifo_ignores_use() -> None:
    tree = tree_with([1], [2], [3], eviction="fifo")
    tree.match([1])
    tree.insert([2], [9])
    assert eviction_order(tree) == [0, 1, 2]


def test_priority_goes_before_recency_and_reaches_the_ancestors() -> None:
    tree = RadixTree(1, "priority")
    tree.insert([1, 2], [0, 1], priority=0)
    tree.insert([3], [100], priority=-1)
    tree.insert([1, 2, 4], [0, 1, 200], priority=5)
    tree.insert([5], [300], priority=1)
    assert tree.evict(2).tolist() == [100, 300]
    assert tree.evict(1).tolist() == [200]
    assert sorted(tree.evict(2).tolist()) == [0, 1]


def test_slru_gives_up_what_was_used_once_before_what_was_used_again() -> None:
    tree = tree_with([1], [2], [3], [4], eviction="slru")
    tree.match([2])
    tree.match([1])
    tree.match([2])
    assert eviction_order(tree) == [2, 3, 0, 1]


@pytest.mark.parametrize("eviction", POLICIES)
def test_a_parent_is_never_evicted_before_its_children(eviction: str) -> None:
    tree = tree_with([1, 2, 3], eviction=eviction)
    for number in range(5):
        tree.match([1, 2])
        tree.insert([1, 2, 10 + number], [0, 0, 500 + number], priority=number)
    freed = [int(tree.evict(1)[0]) for _ in range(8)]
    assert freed[-2:] == [1, 0]
    tree.check()


def test_events_name_pages_by_a_chain_of_their_tokens() -> None:
    tree = RadixTree(2, events=True)
    tree.insert([1, 2, 3, 4, 5], range(5), "key")
    tree.insert([1, 2, 8, 9], range(10, 14), "key")
    first, second, other = (page_hash(("key", prefix)) for prefix in ((1, 2), (1, 2, 3, 4), (1, 2, 8, 9)))
    stored, more = tree.take_events()
    assert (*stored[:3], stored[3].tolist(), stored[4]) == ("stored", None, [first, second], [1, 2, 3, 4], "key")
    assert (*more[:3], more[3].tolist(), more[4]) == ("stored", first, [other], [8, 9], "key")
    assert tree.take_events() == []
    tree.match([1, 2], "key")
    tree.evict(3)
    assert tree.take_events() == [("removed", [second, other])]
    tree.clear()
    assert tree.take_events() == [("removed", [first])]


def test_a_tree_without_events_has_none() -> None:
    tree = tree_with([1, 2, 3])
    tree.evict(1)
    assert tree.take_events() == []


def test_memory_grows_by_eight_bytes_a_token_and_is_given_back() -> None:
    tree = RadixTree()
    empty = tree.memory_bytes
    tree.insert(np.arange(100_000), np.arange(100_000))
    assert 800_000 <= tree.memory_bytes - empty <= 802_000
    tree.insert(np.arange(1, 1001), np.arange(1000))
    tree.evict(101_000)
    assert tree.memory_bytes - empty < 2_000


def test_an_evicted_node_is_refused_and_its_id_never_returns() -> None:
    tree = tree_with([1, 2])
    node, _ = tree.match([1, 2])
    tree.evict(2)
    for call in (tree.lock, tree.unlock):
        with pytest.raises(ValueError, match=rf"node {node} is not in the tree"):
            call(node)
    assert tree.insert([1, 2], [0, 1])[0] != node


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda tree: RadixTree(0), ValueError, "page_size must be at least 1, got 0"),
        (lambda tree: RadixTree(1, "mru"), ValueError, "eviction must be lru, lfu, fifo, priority or slru, got 'mru'"),
        (lambda tree: RadixTree(1, window=-1), ValueError, "window must not be negative, got -1"),
        (lambda tree: tree.insert([1, 2], [0]), ValueError, "slots must have one entry per id: got 2 ids and 1 slots"),
        (lambda tree: tree.insert([1], [-1]), ValueError, "slots must not be negative, got -1 at position 0"),
        (lambda tree: tree.match([[1, 2]]), ValueError, "ids must be one-dimensional, got 2 dimensions"),
        (lambda tree: tree.match([1.5]), TypeError, "ids must hold integers, got dtype float64"),
        (lambda tree: tree.match([True]), TypeError, "ids must hold integers, got dtype bool"),
        (lambda tree: tree.match([2**31]), ValueError, "ids must fit 32 bits, got 2147483648"),
        (lambda tree: tree.match("text"), ValueError, "ids must be one-dimensional"),
        (lambda tree: tree.evict(-1), ValueError, "num_tokens must not be negative, got -1"),
        (lambda tree: tree.unlock(1), ValueError, "node 1 is not locked"),
        (lambda tree: tree.lock(77), ValueError, "node 77 is not in the tree"),
    ],
)
def test_a_wrong_argument_is_named(call: Callable[[RadixTree], object], error: type[Exception], message: str) -> None:
    tree = tree_with([1, 2, 3])
    with pytest.raises(error, match=message):
        call(tree)
    tree.check()
    assert tree.size == 3


def test_integer_types_and_strides_are_honoured() -> None:
    tree = tree_with([1, 2, 3])
    for ids in (np.array([1, 2, 3], dtype=np.int64), np.array([1, 9, 2, 9, 3], dtype=np.int32)[::2], (1, 2, 3), range(1, 4)):
        assert tree.match(ids)[1].tolist() == [0, 1, 2]


def on_small_stack(work: Callable[[], None]) -> None:
    """Runs `work` on a thread with 256 KiB of stack: recursion over a long chain would end the process."""
    failures: list[BaseException] = []

    def body() -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    previous = threading.stack_size(256 * 1024)
    try:
        thread = threading.Thread(target=body)
        thread.start()
    finally:
        threading.stack_size(previous)
    thread.join()
    if failures:
        raise failures[0]


def test_a_deep_chain_needs_no_stack() -> None:
    def work() -> None:
        depth = 20_000
        ids = np.arange(depth, dtype=np.int32)
        tree = RadixTree()
        for length in range(1, depth + 1, 64):  # node by node in steps, then every one of them split from the deep end
            tree.insert(ids[:length], ids[:length])
        for length in range(depth - 1, depth - 4000, -1):
            tree.match(ids[:length])
        node, _ = tree.insert(ids, ids)
        assert tree.node_count > 4000
        tree.lock(node)
        assert (tree.locked, tree.evictable) == (depth, 0)
        tree.check()
        tree.unlock(node)
        assert len(tree.evict(depth - 5)) == depth - 5
        tree.insert(ids, ids)
        del tree

    on_small_stack(work)


def test_a_prompt_of_a_million_tokens() -> None:
    ids = np.arange(1_000_000, dtype=np.int32) % 50_000
    slots = np.arange(1_000_000, dtype=np.int32)
    tree = RadixTree(16)
    _, present = tree.insert(ids, slots)
    assert (present, tree.size) == (0, 1_000_000)
    assert np.array_equal(tree.match(ids)[1], slots)
    assert len(tree.match(ids[:500_001])[1]) == 500_000
    assert len(tree.evict(300_000)) == 300_000
    assert len(tree.clear()) == 700_000


def test_many_leaves_are_evicted_in_order_of_use() -> None:
    rng = np.random.default_rng(20240711)
    tree, count = RadixTree(), 30_000
    for leaf in range(count):
        tree.insert([7, leaf], [2 * leaf, 2 * leaf + 1])
    order = rng.permutation(count)
    for leaf in order:
        tree.match([7, int(leaf)])
    freed = np.concatenate([tree.evict(1) for _ in range(count)])
    assert np.array_equal(freed, 2 * order + 1)
    assert tree.evict(5).tolist() == [0]
