"""The free list hands out whole pages, each once, and refuses what it did not hand out."""

from __future__ import annotations

import random

import numpy as np
import pytest

from gristmill.memory.slots import SlotAllocator, SlotError


@pytest.mark.parametrize("page_size", [1, 2, 3, 16, 64])
def test_pages_are_consecutive_slots(page_size: int) -> None:
    allocator = SlotAllocator(10 * page_size, page_size)
    slots = allocator.take(3 * page_size).reshape(3, page_size)
    assert slots.dtype == np.int32
    assert (slots[:, 0] % page_size == 0).all()
    assert (np.diff(slots, axis=1) == 1).all()
    assert allocator.free == 7 * page_size


def test_slots_that_fill_no_page_are_left_out() -> None:
    allocator = SlotAllocator(37, 8)
    assert (allocator.total, allocator.free) == (32, 32)
    assert allocator.take(32).max() == 31


@pytest.mark.parametrize("page_size", [0, 65, -1])
def test_page_sizes_out_of_range_are_refused(page_size: int) -> None:
    with pytest.raises(ValueError, match=f"page_size is {page_size}"):
        SlotAllocator(1000, page_size)


def test_a_pool_without_a_page_is_refused() -> None:
    with pytest.raises(ValueError, match="holds no page of 16"):
        SlotAllocator(15, 16)


def test_more_than_is_free_is_refused_and_takes_nothing() -> None:
    allocator = SlotAllocator(8, 2)
    allocator.take(4)
    with pytest.raises(SlotError, match="6 slots were asked for and 4 are free"):
        allocator.take(6)
    assert allocator.free == 4


def test_giving_back_twice_is_refused() -> None:
    allocator = SlotAllocator(8)
    slots = allocator.take(2)
    with pytest.raises(SlotError, match="twice"):
        allocator.give(np.concatenate([slots, slots[:1]]))
    allocator.give(slots)
    with pytest.raises(SlotError, match="twice"):
        allocator.give(slots[:1])


@pytest.mark.parametrize("slots", [[0, 1, 2], [0, 1, 2, 4], [1, 2, 3, 4], [3, 2, 1, 0], [96, 97, 98, 99], [-4, -3, -2, -1]])
def test_what_is_no_page_of_the_pool_is_refused(slots: list[int]) -> None:
    allocator = SlotAllocator(16, 4)
    allocator.take(16)
    with pytest.raises(SlotError):
        allocator.give(np.array(slots, dtype=np.int32))


def test_random_use_never_hands_out_a_slot_twice(seed: int) -> None:
    g = random.Random(seed)
    page = g.choice([1, 2, 5, 16])
    allocator = SlotAllocator(40 * page, page)
    held: list[np.ndarray] = []
    for _ in range(300):
        if held and g.random() < 0.5:
            allocator.give(held.pop(g.randrange(len(held))))
        elif n := g.randrange(0, allocator.free // page + 1):
            held.append(allocator.take(min(n, 6) * page))
        everything = np.concatenate([allocator.free_slots(), *held])
        assert np.array_equal(np.sort(everything), np.arange(40 * page))
