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
from tests.kernels.host.twin import RadixTree as Twin

# (which earlier prompt it continues, how many of its pages are kept, the kinds of the pages after those, tokens that fill no page).
# Spelled out for the page size at hand, so that prefixes meet, nest and split all the time at every page size.
Prompt: TypeAlias = tuple[int, int, list[int], int]
prompts = st.tuples(st.integers(0, 7), st.integers(0, 8), st.lists(st.integers(0, 3), max_size=4), st.integers(0, 15))
keys = st.sampled_from(["", "", "", "adapter", "ключ"])


class TwinComparison(RuleBasedStateMachine):
    """Runs every operation on both trees. `held` are nodes that were locked: (C++ id, twin id)."""

    held = Bundle("held")

    @initialize(page_size=st.sampled_from([1, 2, 3, 4, 7, 16]), first=st.lists(prompts, min_size=2, max_size=8))
    def create(self, page_size: int, first: list[Prompt]) -> None:
        self.tree, self.twin = RadixTree(page_size), Twin(page_size)
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
        node, slots = self.tree.match(ids, key)
        twin_node, twin_slots = self.twin.match(ids, key)
        assert length == len(slots)
        assert slots.dtype == np.int32 and slots.tolist() == twin_slots.tolist()
        self.same_node(node, twin_node)
        return node, twin_node

    def insert(self, prompt: Prompt, key: str) -> tuple[int, int]:
        ids = self.spell(prompt)
        slots = list(range(self.next_slot, self.next_slot + len(ids)))
        self.next_slot += len(ids)
        node, present = self.tree.insert(ids, slots, key)
        twin_node, twin_present = self.twin.insert(ids, slots, key)
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

    @rule(prompt=prompts, key=keys)
    def only_insert(self, prompt: Prompt, key: str) -> None:
        self.insert(prompt, key)

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


TestAgainstTwin = TwinComparison.TestCase
TestAgainstTwin.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def tree_with(*prompts: list[int], page_size: int = 1) -> RadixTree:
    """Prompts inserted one after the other; the slot of a token is 100 times the prompt's number plus its position."""
    tree = RadixTree(page_size)
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
