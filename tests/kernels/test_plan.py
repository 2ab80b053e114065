"""Decode plans: what they list, that a refreshed plan keeps its tensors and layout (so that a captured graph stays valid), and that room
and workspace suffice."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gristmill_kernels as gk
from gristmill_kernels import _plan, schema

SPLIT = schema.SPLIT_TOKENS


def bounds(lens: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lens]).cumsum(0).int()


def read(plan: gk.DecodePlan) -> dict:
    """The schedule by its published layout."""
    words = plan.schedule.tolist()
    version, batch, items, workers, split, max_q_len, room, window_left = words[: schema.PLAN_HEADER]
    at, parts = schema.PLAN_HEADER, []
    for size in (workers + 1, batch + 1, room, room):
        parts.append(words[at : at + size])
        at += size
    assert at == len(words) == _plan.schedule_size(batch, workers, room)
    assert (version, split) == (schema.PLAN_VERSION, SPLIT)
    assert (batch, items, workers, room) == (plan.num_requests, plan.num_items, plan.num_workers, plan.max_items)
    assert (max_q_len, window_left) == (plan.max_q_len, plan.window_left)
    return dict(zip(("workers", "requests", "item_request", "item_start"), parts)) | {"items": items}


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    lens=st.lists(st.sampled_from([0, 1, 15, 255, 256, 257, 512, 700, 3000]), max_size=9),
    workers=st.integers(1, 9),
    room=st.integers(0, 5),
    max_q_len=st.integers(1, 9),
    window_left=st.sampled_from([-1, 0, 1, 255, 256, 900]),
)
def test_a_plan_lists_every_visible_piece_once(lens: list[int], workers: int, room: int, max_q_len: int, window_left: int) -> None:
    def first_visible(length: int) -> int:
        return 0 if window_left < 0 else max(0, length - max_q_len - window_left)

    expected = [
        (request, start)
        for request, length in enumerate(lens)
        for start in range(0, length, SPLIT)
        if min(start + SPLIT, length) > first_visible(length)
    ]
    options = {"num_workers": workers, "max_q_len": max_q_len, "window_left": window_left}
    plan = gk.plan_decode(bounds(lens), 8, 2, 16, **options, max_items=len(expected) + room)
    parts = read(plan)
    listed = list(zip(parts["item_request"], parts["item_start"]))
    assert listed == expected + [(-1, -1)] * room
    assert parts["requests"][0] == 0 and parts["requests"][-1] == parts["items"] == len(expected)
    for request, (begin, end) in enumerate(itertools.pairwise(parts["requests"])):
        assert all(one == request for one in parts["item_request"][begin:end])
    starts = parts["workers"]
    assert starts[0] == 0 and starts[-1] == len(expected) and starts == sorted(starts)
    loads = [sum(min(SPLIT, lens[r] - s) for r, s in expected[a:b]) for a, b in itertools.pairwise(starts)]
    assert max(loads) <= sum(loads) / workers + SPLIT, "work is spread evenly, up to one piece"
    assert len(expected) <= gk.max_decode_items(len(lens), sum(lens))
    size = gk.decode_workspace_size(len(lens), sum(lens), 8, 16, max_q_len)
    assert len(expected) * max_q_len * 8 * 18 <= size
    assert plan.workspace.numel() == plan.max_items * max_q_len * 8 * 18


def test_the_bound_on_items_is_reached() -> None:
    lens = [1, 257, 1, 513]
    assert gk.plan_decode(bounds(lens), 1, 1, 8, num_workers=1).num_items == 1 + 2 + 1 + 3 == gk.max_decode_items(4, sum(lens))
    assert gk.max_decode_items(4, 0) == 0


def test_a_refreshed_plan_keeps_its_tensors_and_its_layout() -> None:
    """What a captured graph holds on to: the addresses, and where each part of the schedule begins."""
    room = gk.max_decode_items(4, 5000)
    captured = gk.plan_decode(bounds([300, 1, 0, 900]), 4, 2, 8, num_workers=6, max_items=room)
    addresses = captured.schedule.data_ptr(), captured.workspace.data_ptr(), captured.schedule.shape
    for lens in ([301, 2, 1, 901], [0, 0, 0, 0], [5000, 0, 0, 0], [7, 8, 9, 10]):
        refreshed = gk.plan_decode(bounds(lens), 4, 2, 8, num_workers=6, out=captured)
        assert (refreshed.schedule.data_ptr(), refreshed.workspace.data_ptr(), refreshed.schedule.shape) == addresses
        fresh = gk.plan_decode(bounds(lens), 4, 2, 8, num_workers=6, max_items=room)
        assert torch.equal(captured.schedule, fresh.schedule)
        assert read(refreshed) == read(fresh)


def test_a_refreshed_plan_computes_what_a_new_one_does(seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(900, 2, 16, generator=source) for _ in range(2))
    q = torch.randn(3, 4, 16, generator=source)
    captured = gk.plan_decode(bounds([300, 1, 0]), 4, 2, 16, num_workers=2, max_items=gk.max_decode_items(3, 900))
    captured.workspace.fill_(float("nan"))
    for lens in ([300, 1, 0], [0, 600, 300], [899, 0, 1]):
        plan = gk.plan_decode(bounds(lens), 4, 2, 16, num_workers=2, out=captured)
        slots = torch.randperm(900, generator=source)[: sum(lens)].int()
        planned = gk.decode_attention(q, k, v, bounds(lens), slots, plan=plan)
        assert torch.equal(planned, gk.decode_attention(q, k, v, bounds(lens), slots))


def test_workspaces_beyond_32_bits_are_counted_exactly() -> None:
    """batch x heads x pieces x width beyond 2^31, and beyond 2^32."""
    assert gk.decode_workspace_size(256, 2**23, 128, 512) == (256 + 2**15) * 128 * 514 > 2**31
    assert gk.decode_workspace_size(1024, 2**26, 128, 512, 4) == (1024 + 2**18) * 4 * 128 * 514 > 2**32


BAD = [
    ({"num_workers": 0}, "num_workers is 0, but should be at least 1"),
    ({"max_q_len": 0}, "max_q_len is 0, but should be at least 1"),
    ({"head_dim_v": 0}, "head_dim_v is 0, but should be at least 1"),
    ({"max_items": 2}, "max_items is 2, but should be at least 3 for these lists"),
    ({"workspace": torch.zeros(3)}, "workspace has shape (3,), but should be contiguous float32 of at least 120 elements"),
    ({"kv_indptr_host": torch.zeros(2, 2, dtype=torch.int32)}, "kv_indptr_host has shape (2, 2), but should be [B + 1] on the CPU"),
]


@pytest.mark.parametrize(("changes", "sentence"), BAD, ids=[next(iter(changes)) for changes, _ in BAD])
def test_a_bad_argument_of_plan_decode_is_refused(changes: dict, sentence: str) -> None:
    arguments = {"kv_indptr_host": bounds([300, 1]), "num_qo_heads": 4, "num_kv_heads": 2, "head_dim_v": 8, "num_workers": 2}
    with pytest.raises(ValueError, match=re.escape("plan_decode: " + sentence)):
        gk.plan_decode(**(arguments | changes))


def test_a_plan_is_refreshed_only_for_what_it_was_made_for() -> None:
    captured = gk.plan_decode(bounds([300, 1]), 4, 2, 8, num_workers=2)
    for lens, options, sentence in (
        ([300], {}, "out.num_requests is 2, but should be 1 as in this call"),
        ([300, 1], {"num_workers": 3}, "out.num_workers is 2, but should be 3 as in this call"),
        ([300, 1], {"max_q_len": 2}, "out.max_q_len is 1, but should be 2 as in this call"),
        ([300, 1], {"window_left": 9}, "out.window_left is -1, but should be 9 as in this call"),
        ([600, 1], {}, "max_items is 3, but should be at least 4 for these lists"),
    ):
        with pytest.raises(ValueError, match=re.escape(sentence)):
            gk.plan_decode(bounds(lens), 4, 2, 8, **({"num_workers": 2} | options), out=captured)


def test_a_call_refuses_a_plan_for_something_else() -> None:
    q, pool, lists = torch.zeros(2, 4, 8), torch.zeros(301, 2, 8), (bounds([300, 1]), torch.arange(301).int())

    def decode(window_left: int = -1, **options: int) -> None:
        plan = gk.plan_decode(lists[0], 4, 2, 8, num_workers=2, **options)
        gk.decode_attention(q, pool, pool, *lists, window_left=window_left, plan=plan)

    decode()
    decode(window_left=5)
    with pytest.raises(ValueError, match=re.escape("plan.max_q_len is 2, but should be 1 for one query row per request")):
        decode(max_q_len=2)
    narrow = gk.plan_decode(lists[0], 4, 2, 8, num_workers=2, window_left=7)
    gk.decode_attention(q, pool, pool, *lists, window_left=3, plan=narrow)
    for window_left in (-1, 8):
        with pytest.raises(ValueError, match=re.escape(f"window_left is {window_left}, but should be from 0 to 7")):
            gk.decode_attention(q, pool, pool, *lists, window_left=window_left, plan=narrow)
