"""Run by test_interpreter.py in a process with TRITON_INTERPRET=1: what the conformance suite has no cases for. Widths beyond it, offsets
beyond int32, leading dimensions that cannot be merged, and arguments that reach out of bounds, where a kernel must write nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import gristmill_kernels as gk
from gristmill_kernels import dispatch
from gristmill_kernels.schema import OPS
from tests.kernels import hostile_indices

F16 = torch.float16


@pytest.fixture(autouse=True)
def only_triton() -> Iterator[None]:
    with dispatch.using("triton"):
        yield


def i32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def by_reference(name: str, *args: object) -> None:
    dispatch.overload(name, "reference")(*args)


def by_triton(name: str, *args: object) -> None:
    dispatch.select(name, OPS[name].key_of(*args))(*args)  # the fixture leaves no other choice


def far_rows(rows: torch.Tensor) -> torch.Tensor:
    """The same rows, so far apart that the last one begins beyond element 2^31: address space, not memory."""
    stride = (2**31 + 64) // (rows.shape[0] - 1)
    try:
        base = torch.empty(stride * (rows.shape[0] - 1) + rows[0].numel(), dtype=rows.dtype)
    except RuntimeError as error:
        pytest.skip(f"this machine lacks the address space: {error}")
    view = base.as_strided(rows.shape, (stride, *rows[0].contiguous().stride()))
    view.copy_(rows)
    return view


@pytest.mark.parametrize("width", [1, 2, 3, 127, 1025, 5120, 20480])
def test_rows_of_any_width(width: int, seed: int) -> None:
    x, weight, residual = normal(seed, 3, width), normal(seed + 1, width), normal(seed + 2, 3, width)
    for name, args in (("rms_norm", (x, weight, 1e-6)), ("gemma_rms_norm", (x, weight, 1e-6)), ("layer_norm", (x, weight, weight, 1e-6))):
        out, expected = torch.empty_like(x), torch.empty_like(x)
        by_triton(name, out, *args)
        by_reference(name, expected, *args)
        torch.testing.assert_close(out, expected, rtol=3e-7, atol=1e-12)
    mine, theirs = (x.clone(), residual.clone()), (x.clone(), residual.clone())
    by_triton("fused_add_rms_norm", *mine, weight, 1e-6)
    by_reference("fused_add_rms_norm", *theirs, weight, 1e-6)
    torch.testing.assert_close(mine, theirs, rtol=3e-7, atol=1e-12)
    both = normal(seed + 3, 3, 2 * width)
    for name, more in (("silu_and_mul", ()), ("gelu_and_mul", ()), ("gelu_tanh_and_mul", ()), ("swiglu_oai", (1.702, 7.0))):
        out, expected = torch.empty_like(x), torch.empty_like(x)
        by_triton(name, out, both, *more)
        by_reference(name, expected, both, *more)
        torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)


def test_leading_dimensions_that_cannot_be_merged(seed: int) -> None:
    base = normal(seed, 5, 9, 7, 11, 30)
    x, weight = base[::2, ::3, ::2, ::5, :24], normal(seed + 1, 24)
    out, expected = torch.empty_like(base)[::2, ::3, ::2, ::5, :24], torch.empty(x.shape)
    gk.rms_norm(x, weight, out=out)
    by_reference("rms_norm", expected, x, weight, 1e-6)
    torch.testing.assert_close(out, expected, rtol=3e-7, atol=1e-12)


def test_rows_far_apart_give_the_same(seed: int) -> None:
    x, weight, table = normal(seed, 3, 128, dtype=F16), normal(seed + 1, 128, dtype=F16), normal(seed + 2, 8, 64)
    assert torch.equal(gk.rms_norm(x, weight), gk.rms_norm(far_rows(x), weight, out=far_rows(torch.zeros_like(x))))
    assert torch.equal(gk.silu_and_mul(x), gk.silu_and_mul(far_rows(x), out=far_rows(torch.zeros(3, 64, dtype=F16))))
    q, k = normal(seed + 3, 3, 2, 64, dtype=F16), normal(seed + 4, 3, 1, 64, dtype=F16)
    far_q, far_k, far_table = far_rows(q), far_rows(k), far_rows(table)
    gk.apply_rope(far_q, far_k, i32(1, 5, 7), far_table)
    gk.apply_rope(q, k, i32(1, 5, 7), table)
    assert torch.equal(q, far_q) and torch.equal(k, far_k)


def test_far_rows_have_the_same_codes_and_scales(seed: int) -> None:
    x = normal(seed, 3, 128, dtype=F16)
    for function in (gk.per_token_quant_fp8, gk.per_token_quant_int8, gk.per_group_quant_fp8):
        codes, scales = function(x)
        far_codes, far_scales = far_rows(torch.zeros(3, 128, dtype=torch.uint8)).view(codes.dtype), far_rows(torch.zeros(3, 1))
        function(far_rows(x), out=far_codes, scales=far_scales)
        assert torch.equal(codes.view(torch.uint8), far_codes.view(torch.uint8)) and torch.equal(scales, far_scales)


def test_slots_beyond_the_border_are_written_and_moved(seed: int) -> None:
    k, v = normal(seed, 3, 1, 64, dtype=F16), normal(seed + 1, 3, 1, 8, dtype=F16)
    k_cache, v_cache = far_rows(torch.zeros(6, 1, 64, dtype=F16)), far_rows(torch.zeros(6, 1, 8, dtype=F16))
    gk.store_kv(k, v, k_cache, v_cache, i32(5, -1, 2))
    assert torch.equal(k_cache[[5, 2]], k[[0, 2]]) and torch.equal(v_cache[[5, 2]], v[[0, 2]]) and not k_cache[[0, 1, 3, 4]].any()
    gk.copy_slots(k_cache, v_cache, i32(5), i32(4))
    assert torch.equal(k_cache[4], k[0]) and torch.equal(v_cache[4], v[0])
    back = torch.zeros(2, 1, 64, dtype=F16)
    gk.transfer_kv(k_cache, None, back, None, i32(5), i32(1))
    assert torch.equal(back[1], k[0]) and not back[0].any()


def test_the_request_table_beyond_the_border() -> None:
    table = far_rows(torch.full((3, 40), -9, dtype=torch.int32))
    slots = torch.arange(33, dtype=torch.int32)
    gk.write_req_to_token(table, i32(2, 0), i32(5, 0), i32(30, 3), slots)
    assert torch.equal(table[2, 5:35], slots[:30]) and torch.equal(table[0, :3], slots[30:])
    _, indices = gk.kv_indices(table, i32(2, 0), i32(35, 3), kv_start=i32(5, 0))
    assert torch.equal(indices, slots)


def test_copies_that_follow_one_another_keep_what_later_ones_need(seed: int) -> None:
    """Compaction: slot i receives slot i + 1, in order, over more pairs than a program reads at once."""
    pool = normal(seed, 2, 40, 2, 24, dtype=F16)
    expected = torch.cat([pool[:, 1:], pool[:, -1:]], 1)
    gk.copy_slots(pool, None, torch.arange(1, 40, dtype=torch.int32), torch.arange(39, dtype=torch.int32))
    assert torch.equal(pool, expected)


def test_more_requests_than_a_program_adds_up_at_once() -> None:
    lens = torch.arange(2500, dtype=torch.int32) % 3
    expected = torch.cat([torch.zeros(1, dtype=torch.int32), lens.cumsum(0).int()])
    assert torch.equal(gk.qo_indptr(lens), expected)
    last, free = torch.full_like(lens, 6), torch.arange(3000, dtype=torch.int32)
    out, expected_slots, count, expected_count = (torch.empty(size, dtype=torch.int32) for size in (2500, 2500, 1, 1))
    by_triton("alloc_decode", out, count, lens, last, free, 2)
    by_reference("alloc_decode", expected_slots, expected_count, lens, last, free, 2)
    assert torch.equal(out, expected_slots) and torch.equal(count, expected_count)


def test_lists_that_take_several_rounds(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Eleven requests added up four at a time, lists copied eight entries at a time by more and by fewer programs than they need."""
    from gristmill_kernels.triton import indices, launch

    monkeypatch.setattr(indices, "_BATCH_BLOCK", 4)
    monkeypatch.setattr(indices, "_CHUNK", 8)
    monkeypatch.setattr(launch, "_CPU", launch.Facts("cpu", 3, 1))
    source = torch.Generator().manual_seed(seed)
    table = torch.randint(0, 90, (12, 60), generator=source).int()
    rows, lens = torch.randperm(12, generator=source)[:11].int(), torch.randint(0, 40, (11,), generator=source).int()
    ones, free = torch.ones_like(lens), torch.randperm(200, generator=source).int()
    slots = torch.arange(int(lens.sum()), dtype=torch.int32)
    calls = {
        "kv_indices": ([12, int(lens.sum())], (table, rows, lens, None)),
        "window_kv_indices": ([12, int(lens.sum())], (table, rows, lens, ones, torch.arange(90).int().flip(0), 17)),
        "mla_indices": ([12, int(lens.sum()), 11], (table, rows, lens, 3)),
        "qo_indptr": ([12], (lens,)),
        "write_req_to_token": ([(12, 60)], (rows, ones, lens, slots)),
        "draft_kv_indices": ([(3, 23), (3, 2 * int(lens.sum()) + 66)], (table, rows, lens, None, 3, 2)),
        "alloc_extend": ([int((40 - lens).sum()), 1], (lens, 40 * ones, lens + 100, free, 3)),
        "alloc_decode": ([11, 1], (lens, lens + 100, free, 3)),
    }
    for name, (shapes, args) in calls.items():
        mine, theirs = ([torch.full(shape if isinstance(shape, tuple) else (shape,), -5).int() for shape in shapes] for _ in range(2))
        by_triton(name, *mine, *args)
        by_reference(name, *theirs, *args)
        for got, expected in zip(mine, theirs):
            assert torch.equal(got, expected), name


def guarded(size: int, value: int = -5) -> tuple[torch.Tensor, torch.Tensor]:
    """A list of `size` entries within a longer one, all of them `value`; returns (list, whole)."""
    whole = torch.full((size + 32,), value, dtype=torch.int32)
    return whole[16 : 16 + size], whole


def test_nothing_is_written_out_of_bounds() -> None:
    table = torch.arange(8, dtype=torch.int32).view(2, 4)
    out, whole = guarded(2)
    gk.kv_indices(table, i32(0, 7), i32(3, 2), out=out)  # too little room, and a row that is not there
    assert whole[16:18].tolist() == [0, 1] and (whole[18:] == -5).all() and (whole[:16] == -5).all()
    out, whole = guarded(9)
    gk.kv_indices(table, i32(1), i32(9), out=out)  # positions behind the table
    assert whole[16:20].tolist() == [4, 5, 6, 7] and (whole[20:] == -5).all()
    gk.write_req_to_token(table, i32(0, 5), i32(2, 0), i32(9, 1), i32(70, 71, 72))
    assert table.flatten().tolist() == [0, 1, 70, 71, 4, 5, 6, 7]
    k, pool = torch.ones(2, 1, 8), torch.zeros(4, 1, 8)
    gk.store_kv(k, k, pool[:3], pool[:3].clone(), i32(3, 1))  # slot 3 lies behind the three of the pool
    assert (pool[1] == 1).all() and not pool[[0, 2, 3]].any()
    gk.copy_slots(pool[:3], None, i32(1, 1), i32(3, 2))
    assert (pool[2] == 1).all() and not pool[3].any()


def test_what_has_no_page_gets_slot_minus_one() -> None:
    slots, pages = gk.alloc_extend(i32(0, 3), i32(5, 9), i32(0, 10), i32(7), 4, out=i32(*[0] * 11))
    assert slots.tolist() == [28, 29, 30, 31, -1, 11, -1, -1, -1, -1, -1] and pages.tolist() == [4]
    slots, pages = gk.alloc_decode(i32(1, 5, 0, 6), i32(0, 0, 0, 8), i32(7), 4)
    assert slots.tolist() == [28, -1, -1, 9] and pages.tolist() == [2]


def test_a_broken_row_stays_a_broken_row(seed: int) -> None:
    x, weight = normal(seed, 7, 48), normal(seed + 1, 48)
    broken = x.clone()
    broken[3] = float("nan")
    others = [0, 1, 2, 4, 5, 6]
    for function in (lambda rows: gk.rms_norm(rows, weight), gk.silu_and_mul, gk.swiglu_oai):
        assert torch.equal(function(x)[others], function(broken)[others]) and function(broken)[3].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz])
def test_every_float16_becomes_the_8_bit_float_of_the_definition(dtype: torch.dtype) -> None:
    k = torch.arange(-(2**15), 2**15).to(torch.int16).view(F16).view(64, 1, 1024)
    mine, theirs = (torch.zeros(64, 1, 1024, dtype=torch.uint8).view(dtype) for _ in range(2))
    slots = torch.arange(64, dtype=torch.int32)
    for scale in (1.0, 0.37, 300.0):
        by_triton("store_kv", mine, mine.clone(), k, k, slots, scale, 1.0)
        by_reference("store_kv", theirs, theirs.clone(), k, k, slots, scale, 1.0)
        same = (mine.view(torch.uint8) == theirs.view(torch.uint8)) | (mine.float().isnan() & theirs.float().isnan())
        assert same.all()


def test_index_ops_make_of_nonsense_what_the_model_says(seed: int) -> None:
    assert hostile_indices.check(lambda name, args: dispatch.select(name, OPS[name].key_of(*args)), seed, 10)
