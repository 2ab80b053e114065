"""Request slots are given back once, and only when no step in flight names them."""

from __future__ import annotations

import pytest

from gristmill.memory.req_table import ReqTable
from gristmill.memory.slots import SlotError


def test_slots_run_out_and_come_back() -> None:
    table = ReqTable(2, 10)
    first, second = table.take(), table.take()
    assert {first, second} == {0, 1}
    assert table.n_free == 0
    table.give(first)
    assert table.take() == first


def test_a_slot_in_flight_cannot_be_given_back() -> None:
    table = ReqTable(2, 10)
    slot = table.take()
    table.inflight[slot] = 1
    with pytest.raises(SlotError, match="1 steps in flight"):
        table.give(slot)


def test_a_slot_cannot_be_given_back_twice() -> None:
    table = ReqTable(2, 10)
    slot = table.take()
    table.give(slot)
    with pytest.raises(SlotError, match="twice"):
        table.give(slot)


def test_the_last_page_fits_the_table() -> None:
    assert ReqTable(1, 10, page_size=8).slots.shape == (1, 16)
