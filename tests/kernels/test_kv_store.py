"""How rows are stored: every 16-bit value in every 8-bit format, and the fused and the paged ops against what they stand for."""

from __future__ import annotations

import itertools

import pytest
import torch

import gristmill_kernels as gk
from gristmill_kernels import dispatch
from tests.kernels.conformance import oracle
from tests.kernels.conformance.cases_kvcache import FLOAT8

FAMILIES = [
    family for family in dispatch.families_of("store_kv") if dispatch.why_not("store_kv", family, ("cpu",) + (torch.float16,) * 2) is None
]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scale", [1.0, 0.37])
@pytest.mark.parametrize("cache_dtype", FLOAT8, ids=FLOAT8.values())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_every_16_bit_value_is_stored_as_defined(dtype: torch.dtype, cache_dtype: torch.dtype, scale: float, family: str) -> None:
    rows = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).view(64, 2, 512)
    cache = torch.zeros(64, 2, 512).to(cache_dtype)
    values = torch.zeros(64, 2, 512).to(cache_dtype)
    with dispatch.using(family):
        gk.store_kv(rows, rows, cache, values, torch.arange(64, dtype=torch.int32), k_scale=scale)
    expected = torch.from_numpy(oracle.to_float8(oracle.float32_quotient(rows.float().numpy(), scale), FLOAT8[cache_dtype]))
    got = cache.double()
    assert torch.equal(got.isnan(), rows.isnan()) and torch.equal(got.nan_to_num(), expected.nan_to_num())
    if cache_dtype is torch.float8_e4m3fnuz:
        assert (cache.view(torch.uint8)[rows.isnan()] == 0x80).all()
    else:  # a zero keeps its sign
        assert torch.equal(cache.view(torch.uint8)[~rows.isnan()] >= 0x80, rows[~rows.isnan()].signbit())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, *FLOAT8])
def test_the_fused_op_stores_and_rotates_the_same_bits_as_the_two(cache_dtype: torch.dtype, family: str, seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(40, heads, 72, generator=source).bfloat16() for heads in (6, 2, 2))
    table = torch.randn(30, 64, generator=source)
    positions = torch.randint(-2, 32, (40,), generator=source).int()
    slots = torch.randperm(60, generator=source)[:40].int()
    slots[::7] = -1
    results = []
    with dispatch.using(family):
        for fused in (False, True):
            own_q, own_k = q.clone(), k.clone()
            k_cache, v_cache = torch.zeros(60, 2, 72).to(cache_dtype), torch.zeros(60, 2, 72).to(cache_dtype)
            if fused:
                gk.apply_rope_store_kv(own_q, own_k, v, k_cache, v_cache, positions, slots, table, is_neox=False, k_scale=0.3)
            else:
                gk.apply_rope(own_q, own_k, positions, table, is_neox=False)
                gk.store_kv(own_k, v, k_cache, v_cache, slots, k_scale=0.3)
            results.append([tensor.view(torch.uint8) for tensor in (own_q, own_k, k_cache, v_cache)])
    assert all(torch.equal(apart, together) for apart, together in zip(*results))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("page_size", [1, 4, 16, 7])
def test_slots_allocated_over_many_steps_form_whole_pages(page_size: int, family: str, seed: int) -> None:
    """Prefill in chunks and decode steps, mixed: every request's slots lie in pages of its own, each filled in order."""
    source = torch.Generator().manual_seed(seed)
    requests = 9
    free = torch.randperm(400, generator=source).int()
    lens = torch.zeros(requests, dtype=torch.int32)
    slots: list[list[int]] = [[] for _ in range(requests)]
    with dispatch.using(family):
        for step in range(12):
            last = torch.tensor([own[-1] if own else -1 for own in slots], dtype=torch.int32)
            if step % 3 == 2:
                grown = lens + 1
                new, taken = gk.alloc_decode(grown, last, free, page_size)
                pieces = [[slot] for slot in new.tolist()]
            else:
                grown = lens + torch.randint(0, 2 * page_size + 2, (requests,), generator=source).int()
                new, taken = gk.alloc_extend(lens, grown, last, free, page_size)
                pieces = [piece.tolist() for piece in new.split((grown - lens).tolist())]
            free, lens = free[int(taken) :], grown
            for own, piece in zip(slots, pieces):
                own.extend(piece)
    assert [len(own) for own in slots] == lens.tolist()
    pages = [sorted({slot // page_size for slot in own}) for own in slots]
    assert sum(map(len, pages)) == len({page for own in pages for page in own}) == sum(-(-length // page_size) for length in lens.tolist())
    assert all(slot % page_size == position % page_size for own in slots for position, slot in enumerate(own))
    assert all(b == a + 1 for own in slots for position, (a, b) in enumerate(itertools.pairwise(own), 1) if position % page_size)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_refused_call_writes_nothing(family: str) -> None:
    i32 = torch.int32
    out, num_pages = torch.full((9,), 7, dtype=i32), torch.full((1,), 7, dtype=i32)
    one, pages = torch.tensor([4], dtype=i32), torch.tensor([2, -1], dtype=i32)
    cache, moved = torch.zeros(4, 1, 2), torch.ones(2, 1, 2)
    calls = [
        lambda: gk.alloc_extend(one * 0, one * 2, one, pages[:1], 4, out=out, num_pages=num_pages),  # too few pages
        lambda: gk.alloc_extend(one * 0, one * 2, one, pages, 4, out=out, num_pages=num_pages),  # a page that is none
        lambda: gk.alloc_extend(one * 0, one * 4, one, torch.arange(4, dtype=i32), 4, out=out, num_pages=num_pages),  # out too short
        lambda: gk.alloc_extend(one * 0 - 1, one, one, pages, 4, out=out, num_pages=num_pages),  # a negative prefix
        lambda: gk.alloc_decode(one + 1, one, pages[1:], 4, out=out[:1], num_pages=num_pages),  # a page that is none
        lambda: gk.alloc_decode(one + 1, one, torch.tensor([2**29], dtype=i32), 4, out=out[:1], num_pages=num_pages),  # beyond int32
        lambda: gk.page_table(torch.zeros(1, 8, dtype=i32), one * 0, one + 1, 2, out=out[:2].view(1, 2)),  # too narrow
        lambda: gk.page_table(torch.zeros(1, 8, dtype=i32), one * 0, one + 5, 9, out=out[:2].view(1, 2)),  # beyond the table
        lambda: gk.mla_indices(torch.zeros(1, 8, dtype=i32), one * 0, one + 1, 2, out=out[:2], indptr=out[3:5]),
        lambda: gk.window_kv_indices(torch.zeros(1, 8, dtype=i32), one * 0, one, 9, out=out[:2], indptr=out[3:5]),
        lambda: gk.draft_kv_indices(torch.zeros(1, 8, dtype=i32), one * 0, one, 3, 2, out=out.view(3, 3), indptr=out.view(3, 3)),
        lambda: gk.store_kv(moved, moved, cache, cache.clone(), torch.tensor([0, 4], dtype=i32)),
        lambda: gk.copy_slots(cache, None, torch.tensor([1, 4], dtype=i32), torch.tensor([0, 1], dtype=i32)),
        lambda: gk.transfer_kv(moved, None, cache, None, torch.tensor([0, 2], dtype=i32), torch.tensor([0, 1], dtype=i32)),
    ]
    with dispatch.using(family):
        for call in calls:
            with pytest.raises(RuntimeError):
                call()
    assert (out == 7).all() and int(num_pages) == 7 and not cache.any()
