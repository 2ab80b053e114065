"""The sliding-window part of the C++ radix tree: against its Python twin under random operations, then its promises by example."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, consumes, initialize, invariant, rule

from gristmill_kernels._host import RadixTree
from tests.kernels.host.test_radix_tree import Prompt, TwinComparison, keys, priorities, prompts
from tests.kernels.host.twin import POLICIES
from tests.kernels.host.twin import RadixTree as Twin

Held: TypeAlias = tuple[tuple[int, int], int, int]  # ((C++ id, twin id), the positions whose window slots are locked)


class WindowComparison(TwinComparison):
    """All operations of the plain comparison and those of the window, mixed. Whoever is in `reading` holds both locks."""

    reading = Bundle("reading")

    @initialize(
        page_size=st.integers(1, 8),
        window=st.integers(1, 30),
        eviction=st.sampled_from(POLICIES),
        first=st.lists(prompts, min_size=2, max_size=8),
        watch_always=st.booleans(),
    )
    def create(self, page_size: int, eviction: str, first: list[Prompt], watch_always: bool, window: int = 1) -> None:
        self.start(RadixTree(page_size, eviction, window, events=True), Twin(page_size, eviction, window), first, watch_always)
        for prompt in first[::2]:
            self.insert_window(prompt, "", 0)

    def insert_window(self, prompt: Prompt, key: str, from_page: int, priority: int = 0) -> tuple[int, int]:
        ids = self.spell(prompt)
        slots = self.new_slots(len(ids))
        start = min(from_page, len(ids) // self.tree.page_size) * self.tree.page_size
        window_slots = self.new_slots(len(ids) - start)
        node, present, taken = self.tree.insert_window(ids, slots, start, window_slots, key, priority)
        twin_node, twin_present, twin_taken = self.twin.insert_window(ids, slots, start, window_slots, key, priority)
        assert present == twin_present
        assert taken.dtype == np.int32 and taken.tolist() == twin_taken.tolist()
        self.same_node(node, twin_node)
        return node, twin_node

    def match_window(self, prompt: Prompt, key: str) -> Held:
        ids = self.spell(prompt)
        length = self.tree.match_window_length(ids, key)
        found, expected = self.tree.match_window(ids, key), self.twin.match_window(ids, key)
        (node, slots, start, window_slots), (twin_node, twin_slots, twin_start, twin_window_slots) = found, expected
        assert slots.dtype == window_slots.dtype == np.int32
        assert (length, start) == (len(twin_slots), twin_start)
        assert slots.tolist() == twin_slots.tolist()
        assert window_slots.tolist() == twin_window_slots.tolist() and len(window_slots) == length - start
        self.same_node(node, twin_node)
        return (node, twin_node), start, length

    def hold(self, held: Held) -> Held:
        (node, twin_node), start, end = held
        self.lock((node, twin_node))
        self.tree.lock_window(node, start, end)
        self.twin.lock_window(twin_node, start, end)
        return held

    def unlock_window(self, pair: tuple[int, int], start: int, end: int) -> None:
        self.tree.unlock_window(pair[0], start, end)
        self.twin.unlock_window(pair[1], start, end)

    @rule(prompt=prompts, key=keys, from_page=st.integers(0, 12), priority=priorities)
    def only_insert_window(self, prompt: Prompt, key: str, from_page: int, priority: int) -> None:
        self.insert_window(prompt, key, from_page, priority)

    @rule(prompt=prompts, key=keys)
    def only_match_window(self, prompt: Prompt, key: str) -> None:
        self.match_window(prompt, key)

    @rule(target=reading, prompt=prompts, key=keys)
    def match_and_hold(self, prompt: Prompt, key: str) -> object:
        return self.hold(self.match_window(prompt, key))

    @rule(target=reading, held=reading)
    def hold_again(self, held: Held) -> object:
        return self.hold(held)

    @rule(held=consumes(reading))
    def let_go(self, held: Held) -> None:
        pair, start, end = held
        self.unlock_window(pair, start, end)
        self.unlock(pair)

    @rule(target=reading, held=consumes(reading), pages=st.integers(0, 4))
    def let_go_below(self, held: Held, pages: int) -> object:
        """What a decoding request does as its window moves on."""
        pair, start, end = held
        border = min(end, start + pages * self.tree.page_size)
        self.unlock_window(pair, start, border)
        return pair, border, end

    @rule(target=reading, held=consumes(reading), prompt=prompts, key=keys, from_page=st.integers(0, 12), back=st.integers(0, 4))
    def insert_longer_and_move_the_hold(self, held: Held, prompt: Prompt, key: str, from_page: int, back: int) -> object:
        pair = self.insert_window(prompt, key, from_page)
        place = self.twin.ids.get(pair[1], ("", ()))
        start = end = len(place[1])
        while start and back and self.twin._window_at(place, start - 1):
            start, back = start - self.tree.page_size, back - 1
        longer = self.hold((pair, start, end))
        self.let_go(held)
        return longer

    @rule(held=reading, first=st.integers(0, 12), pages=st.integers(0, 6), unlock=st.booleans())
    def both_refuse_the_same_ranges(self, held: Held, first: int, pages: int, unlock: bool) -> None:
        (node, twin_node), _, _ = held
        start, end = first * self.tree.page_size, (first + pages) * self.tree.page_size
        if end > len(self.twin.ids.get(twin_node, ("", ()))[1]):
            return
        change, undo = ("unlock_window", "lock_window") if unlock else ("lock_window", "unlock_window")
        try:
            getattr(self.twin, change)(twin_node, start, end)
        except ValueError:
            with pytest.raises(ValueError, match="no window"):
                getattr(self.tree, change)(node, start, end)
            return
        getattr(self.tree, change)(node, start, end)
        self.tree.check()
        getattr(self.twin, undo)(twin_node, start, end)
        getattr(self.tree, undo)(node, start, end)

    @rule(held=reading, prompt=prompts, more=st.integers(0, 3))
    def let_a_part_go_through_a_longer_prefix(self, held: Held, prompt: Prompt, more: int) -> None:
        """Another node whose path covers the positions will do; taken back through the first."""
        pair, start, end = held
        key, prefix = self.twin.ids.get(pair[1], ("", ()))
        ids = [*prefix, *[more] * self.tree.page_size]
        slots = self.new_slots(len(ids))
        longer = self.tree.insert(ids, slots, key)[0], self.twin.insert(ids, slots, key)[0]
        self.same_node(*longer)
        self.unlock_window(longer, start, end)
        self.hold(held)
        self.unlock(pair)

    @rule(pages=st.integers(0, 4), more=st.integers(0, 7))
    def evict_window(self, pages: int, more: int) -> None:
        size = self.tree.page_size
        num_tokens = pages * size + more % size
        before = self.tree.window_evictable
        freed = self.tree.evict_window(num_tokens)
        assert len(freed) == min(before, -(-num_tokens // size) * size)
        assert freed.tolist() == self.twin.evict_window(num_tokens).tolist()

    @rule()
    def take_freed(self) -> None:
        assert sorted(self.tree.take_freed_window().tolist()) == sorted(self.twin.take_freed_window().tolist())
        assert self.tree.take_freed_window().tolist() == []

    @invariant()
    def window_counters_and_slots_agree(self) -> None:
        tree, twin = self.tree, self.twin
        assert (tree.window_evictable, tree.window_locked, tree.window_size) == (
            twin.window_evictable,
            twin.window_locked,
            twin.window_size,
        )
        assert sorted(tree.all_window_slots().tolist()) == sorted(twin.all_window_slots().tolist())

    def teardown(self) -> None:
        for _ in range(self.tree.window_evictable // self.tree.page_size // 2):
            self.evict_window(1, 0)
        super().teardown()
        self.take_freed()


TestWindowAgainstTwin = WindowComparison.TestCase
TestWindowAgainstTwin.settings = settings(max_examples=250, stateful_step_count=40, deadline=None)


def window_tree(num_tokens: int, window: int, page_size: int = 1) -> tuple[RadixTree, int]:
    """Tokens 0, 1, 2, ... in slots of the same numbers and window slots 1000 higher; and the node at their end."""
    tree = RadixTree(page_size, window=window)
    ids = np.arange(num_tokens)
    node, _, taken = tree.insert_window(ids, ids, 0, ids + 1000)
    assert taken.tolist() == [0, num_tokens]
    return tree, node


def test_a_prefix_without_its_last_window_is_not_usable() -> None:
    tree, _ = window_tree(12, window=4)
    assert tree.evict_window(3).tolist() == [1000, 1001, 1002]
    assert [tree.match_window_length(range(n)) for n in (12, 8, 7, 6, 3)] == [12, 8, 7, 0, 0]
    node, slots, start, window_slots = tree.match_window(range(9))
    assert (slots.tolist(), start, window_slots.tolist()) == (list(range(9)), 5, [1005, 1006, 1007, 1008])
    assert node == tree.match(range(9))[0]
    assert tree.match_length(range(6)) == 6, "the full-attention part stays"


def test_all_window_slots_from_the_beginning_make_short_prefixes_usable() -> None:
    tree, _ = window_tree(12, window=100)
    assert tree.match_window_length(range(5)) == 5
    tree.evict_window(1)
    assert tree.match_window_length(range(12)) == 0


@pytest.mark.parametrize(("window", "start"), [(4, 8), (5, 4), (7, 4), (8, 4), (9, 0)])
def test_the_page_that_holds_the_first_position_of_the_window_is_needed(window: int, start: int) -> None:
    tree, _ = window_tree(12, window, page_size=4)
    _, _, window_start, window_slots = tree.match_window(range(12))
    assert (window_start, len(window_slots)) == (start, 12 - start)
    tree.evict_window(start)
    assert tree.match_window_length(range(12)) == 12
    node, _, _, _ = tree.match_window(range(12))
    tree.evict_window(1)
    assert tree.match_window_length(range(12)) == 0
    assert node == tree.match(range(12))[0]


def test_an_insert_fills_gaps_and_says_which() -> None:
    tree = RadixTree(2, window=4)
    ids = list(range(12))
    tree.insert(ids, ids)
    _, present, taken = tree.insert_window(ids[:8], ids[:8], 4, [104, 105, 106, 107])
    assert (present, taken.tolist()) == (8, [4, 8])
    _, present, taken = tree.insert_window([*ids, 12, 13], [*ids, 12, 13], 2, range(202, 214))
    assert (present, taken.tolist()) == (12, [2, 4, 8, 14])
    assert tree.match_window([*ids, 12, 13])[3].tolist() == [210, 211, 212, 213]
    assert sorted(tree.all_window_slots()) == [104, 105, 106, 107, 202, 203, 208, 209, 210, 211, 212, 213]


def test_a_held_window_stays_and_the_rest_goes() -> None:
    tree, node = window_tree(12, window=4)
    tree.lock(node)
    tree.lock_window(node, 8, 12)
    tree.insert_window([0, 1, 2, 99], range(4), 4, [])  # splits a node above the held ones
    assert (tree.window_locked, tree.window_evictable) == (4, 8)
    assert tree.evict_window(100).tolist() == list(range(1000, 1008))
    assert tree.evict_window(1).tolist() == []
    tree.unlock_window(node, 8, 9)
    assert (tree.window_locked, tree.window_evictable) == (3, 1)
    tree.unlock_window(node, 9, 12)
    tree.unlock(node)
    assert (tree.window_locked, tree.window_evictable) == (0, 4)


def test_window_slots_of_evicted_tokens_come_back_separately() -> None:
    tree, _ = window_tree(8, window=4, page_size=2)
    assert tree.evict(3).tolist() == [4, 5, 6, 7]
    assert sorted(tree.take_freed_window().tolist()) == [1004, 1005, 1006, 1007]
    tree.clear()
    assert sorted(tree.take_freed_window().tolist()) == [1000, 1001, 1002, 1003]
    assert (tree.window_size, tree.size) == (0, 0)


def test_the_window_of_what_was_matched_last_goes_last() -> None:
    tree = RadixTree(window=2)
    for first in (10, 20, 30):
        tree.insert_window([first, 1, 2], [0, 1, 2], 1, [first, first + 1])
    tree.match_window([10, 1, 2])
    assert tree.evict_window(6).tolist() == [20, 21, 30, 31, 10, 11]


def test_a_plain_match_does_not_keep_window_slots() -> None:
    tree = RadixTree(window=2)
    for first in (10, 20):
        tree.insert_window([first, 1, 2], [0, 1, 2], 1, [first, first + 1])
    tree.match([10, 1, 2])
    assert tree.evict_window(2).tolist() == [10, 11]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda tree, node: tree.insert_window([1, 2], [0, 1], 1, [5]), "window_start must be a multiple of the page size 2 from 0 to 2"),
        (lambda tree, node: tree.insert_window([1, 2], [0, 1], 4, []), "window_start must be a multiple of the page size 2 from 0 to 2"),
        (lambda tree, node: tree.insert_window([1, 2], [0, 1], 0, [5]), "one entry per id from window_start on: got 1 for 2"),
        (lambda tree, node: tree.insert_window([1, 2], [0, 1], 0, [5, -5]), "window_slots must not be negative, got -5 at position 1"),
        (lambda tree, node: tree.lock_window(node, 3, 8), "multiples of the page size 2 with 0 <= start <= end <= 8, got 3 and 8"),
        (lambda tree, node: tree.lock_window(node, 4, 10), "multiples of the page size 2 with 0 <= start <= end <= 8, got 4 and 10"),
        (lambda tree, node: tree.unlock_window(node, 4, 2), "multiples of the page size 2 with 0 <= start <= end <= 8, got 4 and 2"),
        (lambda tree, node: tree.lock_window(0, 0, 2), "with 0 <= start <= end <= 0, got 0 and 2"),
        (lambda tree, node: tree.lock_window(node, 0, 6), "has no window slots for positions 0 to 2"),
        (lambda tree, node: tree.lock_window(77, 0, 2), "node 77 is not in the tree"),
        (lambda tree, node: tree.unlock_window(node, 4, 8), "has no window lock on positions 4 to 6: every unlock_window must follow"),
        (lambda tree, node: tree.unlock(node), "still has a window lock: call unlock_window before unlock"),
        (lambda tree, node: tree.lock_window(tree.insert_window([7, 8], [0, 1], 0, [5, 6])[0], 0, 2), "is not locked: call lock before"),
        (lambda tree, node: RadixTree().match_window([1]), "this tree has no sliding window: make it with window > 0"),
        (lambda tree, node: RadixTree().evict_window(1), "this tree has no sliding window"),
        (lambda tree, node: tree.evict_window(-1), "num_tokens must not be negative, got -1"),
    ],
)
def test_a_wrong_argument_is_named_and_changes_nothing(call: Callable[[RadixTree, int], object], message: str) -> None:
    tree, node = window_tree(8, window=4, page_size=2)
    tree.evict_window(2)
    tree.lock(node)
    tree.lock_window(node, 6, 8)
    with pytest.raises(ValueError, match=message):
        call(tree, node)
    tree.check()
    assert (tree.locked, tree.window_locked) == (8, 2)
    tree.unlock_window(node, 6, 8)
    tree.unlock(node)
    assert tree.locked == tree.window_locked == 0
