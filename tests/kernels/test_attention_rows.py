"""Bit for bit: a row of latent, ragged or 8-bit attention is the same alone, in a batch, among several query rows, with any plan and any
number of threads. (Pools of the queries' dtype: test_batch_invariance.py.)"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import gristmill_kernels as gk
from gristmill_kernels import dispatch

MLA_KEY = ("cpu", torch.float32, torch.float32, 512, 64, 16)
FAMILIES = [family for family in dispatch.families_of("mla_decode") if dispatch.why_not("mla_decode", family, MLA_KEY) is None]
DTYPES = [pytest.param(torch.float32, id="fp32"), pytest.param(torch.bfloat16, id="bf16")]
CACHES = [pytest.param(None, id="same"), pytest.param(torch.float8_e4m3fn, id="e4m3fn"), pytest.param(torch.float8_e5m2, id="e5m2")]
LENS = [700, 1, 0, 256, 257, 39, 513]


@pytest.fixture(params=FAMILIES, autouse=True)
def family(request: pytest.FixtureRequest) -> Iterator[str]:
    with dispatch.using(request.param):
        yield request.param


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def bounds(lens: list[int]) -> Tensor:
    return torch.tensor([0, *lens]).cumsum(0).int()


class Latent:
    """Requests over a latent cache, with a query for every position."""

    def __init__(self, seed: int, lens: list[int], dtype: torch.dtype, cache_dtype: torch.dtype | None, heads: int = 16) -> None:
        source = torch.Generator().manual_seed(seed)
        total = sum(lens)
        self.lists = list(torch.randperm(total, generator=source).int().split(lens))
        self.cache = torch.randn(total, 576, generator=source).to(cache_dtype or dtype)
        self.q = [torch.randn(max(1, length), heads, 576, generator=source).to(dtype) for length in lens]
        self.heads = heads

    def attend(self, pieces: list[tuple[int, int, int]], workers: int = 0, several: bool = True) -> list[tuple[Tensor, Tensor]]:
        """Output and LSE of rows [begin, end) of each (request, begin, end), in one batch."""
        q = torch.cat([self.q[i][begin:end] for i, begin, end in pieces])
        lens = [end - begin for _, begin, end in pieces]
        lists = [self.lists[i][:end] for i, _, end in pieces]
        kv_indptr, lse = bounds([len(one) for one in lists]), torch.empty(len(q), self.heads)
        plan = gk.plan_decode(kv_indptr, self.heads, 1, 512, num_workers=workers, max_q_len=max(lens)) if workers else None
        out = gk.mla_decode(
            q[..., :512], q[..., 512:], self.cache, kv_indptr, torch.cat(lists), sm_scale=192**-0.5, kv_scale=0.5,
            qo_indptr=bounds(lens) if several else None, plan=plan, lse=lse,
        )  # fmt: skip
        return list(zip(out.split(lens), lse.split(lens)))


def same(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> bool:
    return torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache_dtype", CACHES)
def test_a_latent_row_does_not_depend_on_neighbours_or_plans(dtype: torch.dtype, cache_dtype: torch.dtype | None, seed: int) -> None:
    latent = Latent(seed, LENS, dtype, cache_dtype)
    last_rows = [(i, max(0, length - 1), max(1, length)) for i, length in enumerate(LENS)]
    together = latent.attend(last_rows, several=False)
    for piece, expected in zip(last_rows, together):
        assert same(latent.attend([piece], several=False)[0], expected)
    for workers in (1, 2, 7):
        planned = latent.attend(last_rows[::-1], workers, several=False)
        assert all(same(a, b) for a, b in zip(planned[::-1], together))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache_dtype", CACHES)
@pytest.mark.parametrize("heads", [16, 128])
def test_a_latent_row_is_the_same_alone_and_among_several_query_rows(
    dtype: torch.dtype, cache_dtype: torch.dtype | None, heads: int, seed: int
) -> None:
    latent = Latent(seed, [530, 70], dtype, cache_dtype, heads)
    whole = latent.attend([(0, 521, 530), (1, 66, 70)], workers=3)
    assert all(same(a, b) for a, b in zip(latent.attend([(1, 66, 70), (0, 521, 530)])[::-1], whole))
    for request, begin, end in ((0, 521, 522), (0, 524, 528), (0, 529, 530), (1, 66, 67), (1, 68, 70)):
        (part,) = latent.attend([(request, begin, end)])
        first = (521, 66)[request]
        expected = whole[request]
        assert same(part, (expected[0][begin - first : end - first], expected[1][begin - first : end - first])), f"rows [{begin}, {end})"


def test_latent_results_do_not_depend_on_the_number_of_threads(threads: None, seed: int) -> None:
    latent = Latent(seed, LENS, torch.bfloat16, None)
    results = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        results.append(latent.attend([(0, 690, 700), (4, 250, 257), (6, 512, 513)]))
    assert all(same(a, b) for other in results[1:] for a, b in zip(results[0], other))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", [(64, 64), (192, 128), (72, 24)], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"window_left": 90}, {"logit_cap": 20.0}, {"sinks": True}], ids=["plain", "window", "cap", "sinks"]
)
def test_a_ragged_row_equals_the_same_row_from_a_pool(dtype: torch.dtype, dims: tuple[int, int], options: dict, seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    if options.get("sinks"):
        options = {"sinks": torch.linspace(-1, 2, 6)}
    lens = [300, 0, 41]
    q, k, v = (torch.randn(sum(lens), heads, width, generator=source).to(dtype) for heads, width in zip((6, 2, 2), (dims[0], *dims)))
    indptr, slots = bounds(lens), torch.randperm(sum(lens), generator=source).int()
    pool_k, pool_v = torch.empty_like(k), torch.empty_like(v)
    pool_k[slots.long()], pool_v[slots.long()] = k, v
    lse_ragged, lse_pool = torch.empty(sum(lens), 6), torch.empty(sum(lens), 6)
    ragged = gk.ragged_attention(q, k, v, indptr, indptr, lse=lse_ragged, **options)
    pooled = gk.extend_attention(q, pool_k, pool_v, indptr, indptr, slots, lse=lse_pool, **options)
    assert torch.equal(ragged, pooled) and torch.equal(lse_ragged, lse_pool)
    alone = gk.ragged_attention(q[300:], k[300:], v[300:], bounds([41]), bounds([41]), **options)
    assert torch.equal(alone, ragged[300:])
    tail = gk.ragged_attention(q[257:300], k[:300], v[:300], bounds([43]), bounds([300]), **options)
    assert torch.equal(tail, ragged[257:300])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache_dtype", CACHES[1:])
@pytest.mark.parametrize("options", [{}, {"window_left": 90}, {"logit_cap": 20.0}], ids=["plain", "window", "cap"])
def test_rows_over_an_8_bit_cache_stand_alone(dtype: torch.dtype, cache_dtype: torch.dtype, options: dict, seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    length = 530
    k, v = (torch.randn(length, 2, 64, generator=source).to(cache_dtype) for _ in range(2))
    q = torch.randn(length, 6, 64, generator=source).to(dtype)
    slots = torch.randperm(length, generator=source).int()
    options = options | {"k_scale": 0.7, "v_scale": 1.9}
    whole = gk.extend_attention(q, k, v, bounds([length]), bounds([length]), slots, **options)
    for begin, end in ((0, 1), (16, 300), (513, 530)):
        part = gk.extend_attention(q[begin:end], k, v, bounds([end - begin]), bounds([end]), slots[:end].contiguous(), **options)
        assert torch.equal(part, whole[begin:end]), f"rows [{begin}, {end})"
    lens = [1, 16, 256, 257, 530]
    decoded = gk.decode_attention(q[[one - 1 for one in lens]], k, v, bounds(lens), torch.cat([slots[:one] for one in lens]), **options)
    assert torch.equal(decoded, whole[[one - 1 for one in lens]])
    planned = gk.decode_attention(
        q[[529, 0]], k, v, bounds([530, 1]), torch.cat([slots, slots[:1]]), **options,
        plan=gk.plan_decode(bounds([530, 1]), 6, 2, 64, num_workers=3, window_left=options.get("window_left", -1)),
    )  # fmt: skip
    assert torch.equal(planned, whole[[529, 0]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_8_bit_cache_gives_what_its_values_in_the_queries_dtype_give(dtype: torch.dtype, seed: int) -> None:
    """Conversion to bfloat16 or float32 is exact, so only the scales' rounding could differ, and they are powers of two here."""
    source = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(300, 2, 64, generator=source).to(torch.float8_e4m3fn) for _ in range(2))
    q = torch.randn(2, 6, 64, generator=source).to(dtype)
    lists = (bounds([300, 40]), torch.cat([torch.arange(300), torch.arange(40)]).int())
    narrow = gk.decode_attention(q, k, v, *lists, k_scale=0.5, v_scale=2.0)
    assert torch.equal(narrow, gk.decode_attention(q, k.to(dtype), v.to(dtype), *lists, k_scale=0.5, v_scale=2.0))


def test_latent_decode_equals_attention_over_the_same_rows(seed: int) -> None:
    latent = Latent(seed, [300], torch.bfloat16, None)
    ((out, lse),) = latent.attend([(0, 299, 300)], several=False)
    pool = latent.cache[:, None]
    other_lse = torch.empty(1, 16)
    other = gk.decode_attention(
        latent.q[0][299:300], pool, pool[..., :512], bounds([300]), latent.lists[0],
        sm_scale=192**-0.5, k_scale=0.5, v_scale=0.5, lse=other_lse,
    )  # fmt: skip
    assert torch.equal(out, other) and torch.equal(lse, other_lse)


def test_merged_chunks_are_the_whole_within_rounding(seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(700, 2, 64, generator=source) for _ in range(2))
    q = torch.randn(3, 6, 64, generator=source)
    whole_lse = torch.empty(3, 6)
    whole = gk.ragged_attention(q, k, v, bounds([3]), bounds([700]), causal=False, lse=whole_lse)
    parts, lses = [], []
    for part_k, part_v in zip(k.split([200, 0, 499, 1]), v.split([200, 0, 499, 1])):
        lses.append(torch.empty(3, 6))
        parts.append(gk.ragged_attention(q, part_k, part_v, bounds([3]), bounds([len(part_k)]), causal=False, lse=lses[-1]))
    out, lse = gk.merge_states(torch.stack(parts), torch.stack(lses))
    torch.testing.assert_close(out, whole, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, whole_lse, rtol=1e-6, atol=1e-6)
