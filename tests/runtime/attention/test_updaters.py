"""What the libraries are given, bit for bit: against lists written row by row, for batches of every kind."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gristmill.attention.flash_attn import updaters as flash_attn
from gristmill.attention.flashinfer import updaters as flashinfer

REQUESTS, CONTEXT = 6, 97


def batch(seed: int, decode: bool, padding: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Request slots, query and KV lengths; the last request slot is that of padding."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, REQUESTS))
    slots = rng.permutation(REQUESTS - 1)[:n]
    kv_lens = rng.integers(1, CONTEXT, n)
    q_lens = np.ones(n, int) if decode else rng.integers(1, kv_lens + 1)
    columns = (slots, q_lens, kv_lens), (np.full(padding, REQUESTS - 1), np.ones(padding, int), np.zeros(padding, int))
    slots, q_lens, kv_lens = (np.concatenate(pair).astype(np.int32) for pair in zip(*columns))
    return slots, q_lens, kv_lens


def cases() -> list[tuple[int, bool, int, int | None]]:
    return [(seed, decode, padding, before) for seed in range(20) for decode in (False, True) for padding in (0, 2) * decode or (0,)
            for before in (None, 0, 7, 30, 200)]  # fmt: skip


def first_seen(q_len: int, kv_len: int, before: int | None) -> int:
    return 0 if before is None else max(0, kv_len - q_len - before)


def test_flashinfer_lists_every_key_that_a_row_sees_and_no_other() -> None:
    for seed, decode, padding, before in cases():
        _, q_lens, kv_lens = batch(seed, decode, padding)
        got = flashinfer.plan_arrays(q_lens, kv_lens, before)
        qo, kv = [0], [0]
        for q_len, kv_len in zip(q_lens.tolist(), kv_lens.tolist()):
            seen = {key for query in range(kv_len - q_len, kv_len) for key in range(first_seen(1, query + 1, before), query + 1)}
            qo.append(qo[-1] + q_len)
            kv.append(kv[-1] + max(len(seen), 1))
        for array, want in zip(got, (qo, kv, [1] * len(q_lens))):
            assert array.dtype == np.int32 and array.tolist() == want, (seed, decode, padding, before)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_flash_attn_pages_and_lengths(page_size: int) -> None:
    """The table of the requests holds whole pages in any order; below the window it is stale, and such pages must not be named."""
    pages_of = np.random.default_rng(1).permutation(REQUESTS * CONTEXT)
    stale = 10**6
    for seed, decode, padding, before in cases():
        slots, q_lens, kv_lens = batch(seed, decode, padding)
        table, pages_per_row = np.full((REQUESTS, CONTEXT + 1), -1, np.int32), -(-CONTEXT // page_size)
        wanted, lengths = [], []
        for slot, q_len, kv_len in zip(slots.tolist(), q_lens.tolist(), kv_lens.tolist()):
            mine = pages_of[slot * pages_per_row : (slot + 1) * pages_per_row].tolist()
            first = first_seen(q_len, kv_len, before) // page_size
            if kv_len:
                table[slot, :kv_len] = [mine[p // page_size] * page_size + p % page_size for p in range(kv_len)]
                table[slot, : first * page_size] = stale
            wanted.append(mine[first : -(-kv_len // page_size)] if kv_len else [0])
            lengths.append(kv_len - first * page_size if kv_len else 1)
        on_device = [torch.from_numpy(array) for array in (q_lens, kv_lens)]
        seen = flash_attn.visible(*on_device, page_size, before)
        assert seen.kv_lens.dtype == torch.int32 and seen.kv_lens.tolist() == lengths
        needed = flash_attn.most_pages(q_lens, kv_lens, page_size, before)
        assert needed == max(map(len, wanted))
        counts = [needed]
        if decode:
            counts.append(flash_attn.pages_of_any_decode(CONTEXT + 1, page_size, before))
            assert counts[-1] >= needed
        for pages in counts:
            got = flash_attn.block_table(torch.from_numpy(table), torch.from_numpy(slots), page_size, pages, seen.first_page)
            assert got.dtype == torch.int32 and got.is_contiguous() and (got >= 0).all() and len(got) == len(slots)
            for row, want in zip(got.tolist(), wanted):
                assert row[: len(want)] == want, (seed, decode, padding, before)
        cu_q, cu_k = flash_attn.cumulated(q_lens, kv_lens, page_size, before)
        assert cu_q.dtype == cu_k.dtype == np.int32
        assert cu_q.tolist() == [0, *np.cumsum(q_lens)] and cu_k.tolist() == [0, *np.cumsum(lengths)]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "want"), [(8, 8, False), (8, 4, False), (6, 2, False), (32, 8, True), (5, 1, True), (71, 1, True)]
)
def test_which_decode_steps_use_tensor_cores(heads: int, kv_heads: int, want: bool) -> None:
    assert flashinfer.wants_tensor_cores(heads, kv_heads) is want


def test_the_workspace_of_flashinfer_holds_what_its_planner_asks_for() -> None:
    """Partial results of a captured step in float32: a tile of 16 query heads per row and split, for at least 264 blocks in all."""
    recommended = 128 << 20
    assert flashinfer.workspace_bytes(32, 8, 128, 132) == recommended
    assert flashinfer.workspace_bytes(32, 8, 128, 132, 256) == recommended
    rows = 1024
    assert flashinfer.workspace_bytes(32, 8, 128, 132, rows) >= 32 * (rows + rows * 4 // 16 - 1) * 16 * 129 * 4
    assert flashinfer.workspace_bytes(64, 8, 128, 132) >= 64 * (264 // 8) * 128 * 129 * 4
