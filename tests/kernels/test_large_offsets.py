"""Offsets beyond 2^31 elements: tensors of which only a few pages are ever touched, so this needs address space, not memory."""

from __future__ import annotations

import pytest
import torch

from gristmill_kernels import dispatch
from gristmill_kernels.attention import plan_decode

WIDTH = 576
BORDER = 2**31 // WIDTH  # the row that straddles element 2^31
HIGH_SLOTS = [BORDER - 1, BORDER, BORDER + 1, BORDER + 5]
FAMILIES = [family for family in dispatch.families_of("rms_norm") if dispatch.why_not("rms_norm", family, ("cpu", torch.bfloat16)) is None]


def untouched(numel: int, dtype: torch.dtype) -> torch.Tensor:
    try:
        return torch.empty(numel, dtype=dtype)
    except RuntimeError as error:
        pytest.skip(f"this machine lacks the address space: {error}")


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def far_rows(rows: torch.Tensor) -> torch.Tensor:
    """The same rows, so far apart that the last one begins beyond element 2^31."""
    count = rows.shape[0]
    stride = (2**31 + 64) // (count - 1)
    width = rows[0].numel()
    view = untouched(stride * (count - 1) + width, rows.dtype).as_strided(rows.shape, (stride, *rows[0].contiguous().stride()))
    view.copy_(rows)
    assert (count - 1) * stride >= 2**31
    return view


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("wide", ["keys", "values"])
def test_rows_around_the_border_are_stored_and_attended_like_low_ones(family: str, wide: str, seed: int) -> None:
    source = generator(seed)
    k_width, v_width = (WIDTH, 64) if wide == "keys" else (64, WIDTH)
    slots = torch.tensor(HIGH_SLOTS, dtype=torch.int32)
    k = torch.randn(4, 1, k_width, generator=source).bfloat16()
    v = torch.randn(4, 1, v_width, generator=source).bfloat16()
    q = torch.randn(4, 3, k_width, generator=source).bfloat16()

    def attend(num_slots: int, at: torch.Tensor) -> list[torch.Tensor]:
        k_cache = untouched(num_slots * k_width, torch.bfloat16).view(num_slots, 1, k_width)
        v_cache = untouched(num_slots * v_width, torch.bfloat16).view(num_slots, 1, v_width)
        dispatch.overload("store_kv", family)(k_cache, v_cache, k, v, at)
        assert torch.equal(k_cache[at.long()], k) and torch.equal(v_cache[at.long()], v)
        results = []
        pointers = torch.tensor([0, 4], dtype=torch.int32)
        for op, args in (
            ("extend_attention", (pointers, pointers, at, None, None, None, True)),
            ("decode_attention", (torch.arange(5, dtype=torch.int32), at, None, None, None)),
        ):
            out, lse = torch.full((4, 3, v_width), float("nan"), dtype=torch.bfloat16), torch.full((4, 3), float("nan"))
            dispatch.overload(op, family)(out, lse, q, k_cache, v_cache, *args, WIDTH**-0.5, 0.0, -1, 1.0, 1.0)
            results += [out, lse]
        return results

    for high, low in zip(attend(BORDER + 8, slots), attend(16, torch.tensor([3, 0, 9, 12], dtype=torch.int32))):
        assert torch.equal(high, low)


@pytest.mark.parametrize("family", FAMILIES)
def test_query_rows_far_apart_give_the_same_attention(family: str, seed: int) -> None:
    source = generator(seed)
    q = torch.randn(3, 2, 64, generator=source).bfloat16()
    k_cache, v_cache = (torch.randn(9, 1, 64, generator=source).bfloat16() for _ in range(2))
    pointers = torch.tensor([0, 3], dtype=torch.int32)

    def attend(q: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        args = (pointers, pointers, torch.tensor([2, 4, 8], dtype=torch.int32), None, None, None, True, 0.125, 0.0, -1, 1.0, 1.0)
        dispatch.overload("extend_attention", family)(out, None, q, k_cache, v_cache, *args)
        return out

    near = attend(q, torch.empty_like(q))
    assert torch.equal(attend(far_rows(q), far_rows(torch.zeros_like(q))), near)


@pytest.mark.parametrize("family", FAMILIES)
def test_row_ops_on_rows_far_apart_give_the_same_rows(family: str, seed: int) -> None:
    source = generator(seed)
    x = torch.randn(3, 128, generator=source).bfloat16()
    weight = torch.randn(128, generator=source).bfloat16()
    norm, add_norm, silu = (dispatch.overload(name, family) for name in ("rms_norm", "fused_add_rms_norm", "silu_and_mul"))

    near, far = torch.empty_like(x), far_rows(torch.zeros_like(x))
    norm(near, x, weight, 1e-6)
    norm(far, far_rows(x), weight, 1e-6)
    assert torch.equal(near, far)

    near, near_sum, far, far_sum = x.clone(), x.clone(), far_rows(x), far_rows(x)
    add_norm(near, near_sum, weight, 1e-6)
    add_norm(far, far_sum, weight, 1e-6)
    assert torch.equal(near, far) and torch.equal(near_sum, far_sum)

    near, far = torch.empty(3, 64).bfloat16(), far_rows(torch.zeros(3, 64).bfloat16())
    silu(near, x)
    silu(far, far_rows(x))
    assert torch.equal(near, far)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_far_apart_have_the_same_codes_and_scales(family: str, seed: int) -> None:
    x = torch.randn(3, 256, generator=generator(seed)).bfloat16()
    for name, group in (("per_token_quant_int8", 256), ("per_token_quant_fp8", 256), ("per_group_quant_fp8", 128)):
        dtype, size = torch.int8 if name.endswith("int8") else torch.float8_e4m3fn, (group,) if "group" in name else ()
        near, far = (torch.zeros(3, 256, dtype=torch.uint8) for _ in range(2))
        near, far = near.view(dtype), far_rows(far).view(dtype)
        scales, far_scales = torch.empty(3, 256 // group), far_rows(torch.zeros(3, 256 // group))
        dispatch.overload(name, family)(near, scales, x, *size)
        dispatch.overload(name, family)(far, far_scales, far_rows(x), *size)
        assert torch.equal(near.view(torch.uint8), far.view(torch.uint8)) and torch.equal(scales, far_scales)
    scale = torch.tensor([0.01])
    near, far = torch.zeros(3, 256, dtype=torch.float8_e5m2), far_rows(torch.zeros(3, 256, dtype=torch.uint8)).view(torch.float8_e5m2)
    dispatch.overload("quant_fp8", family)(near, x, scale)
    dispatch.overload("quant_fp8", family)(far, far_rows(x), scale)
    assert torch.equal(near.view(torch.uint8), far.view(torch.uint8))


@pytest.mark.parametrize("family", FAMILIES)
def test_rope_rotates_rows_far_apart(family: str, seed: int) -> None:
    source = generator(seed)
    q, k = torch.randn(3, 2, 64, generator=source).bfloat16(), torch.randn(3, 1, 64, generator=source).bfloat16()
    table = torch.randn(8, 64, generator=source)
    positions = torch.tensor([1, 5, 7], dtype=torch.int32)
    far_q, far_k = far_rows(q), far_rows(k)
    rope = dispatch.overload("apply_rope", family)
    rope(far_q, far_k, positions, table, True)
    rope(q, k, positions, table, True)
    assert torch.equal(q, far_q) and torch.equal(k, far_k)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_rows_far_apart_give_the_same_ids(family: str, seed: int) -> None:
    logits = torch.randn(3, 200, generator=generator(seed)).bfloat16()
    one, zero = torch.ones(3), torch.zeros(3)
    seeds = torch.arange(3)
    for op, args in (("greedy", ()), ("sample", (one, torch.full((3,), 50, dtype=torch.int32), one, zero, seeds, seeds.int()))):
        near, far = torch.empty(3, dtype=torch.int32), torch.empty(3, dtype=torch.int32)
        dispatch.overload(op, family)(near, logits, *args)
        dispatch.overload(op, family)(far, far_rows(logits), *args)
        assert torch.equal(near, far) and int(near.min()) >= 0


@pytest.mark.parametrize("family", FAMILIES)
def test_linear_and_merge_take_rows_far_apart(family: str, seed: int) -> None:
    from tests.kernels.conformance.harness import packed

    source = generator(seed)
    x, weight = torch.randn(3, 64, generator=source).bfloat16(), torch.randn(48, 64, generator=source).bfloat16()
    near, far = torch.empty(3, 48).bfloat16(), far_rows(torch.zeros(3, 48).bfloat16())
    linear, data = dispatch.overload("packed_linear", family), packed(weight, family)
    linear(near, x, data, None, 48, 64)
    linear(far, far_rows(x), data, None, 48, 64)
    assert torch.equal(near, far)

    o_a, o_b, lse_a, lse_b = (torch.randn(*shape, generator=source) for shape in ((3, 2, 64), (3, 2, 64), (3, 2), (3, 2)))
    o_a, o_b = o_a.bfloat16(), o_b.bfloat16()
    near, near_lse, far, far_lse = torch.empty_like(o_a), torch.empty(3, 2), far_rows(torch.zeros_like(o_a)), torch.empty(3, 2)
    merge = dispatch.overload("merge_state", family)
    merge(near, near_lse, o_a, lse_a, o_b, lse_b)
    merge(far, far_lse, far_rows(o_a), lse_a, far_rows(o_b), lse_b)
    assert torch.equal(near, far) and torch.equal(near_lse, far_lse)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_request_table_is_read_and_written_beyond_the_border(family: str) -> None:
    table = untouched(2**31 + 64, torch.int32).as_strided((3, 40), (2**30 + 8, 1))
    rows, starts, lens = (torch.tensor(values, dtype=torch.int32) for values in ([2, 0], [5, 0], [30, 3]))
    slots = torch.arange(33, dtype=torch.int32)
    dispatch.overload("write_req_to_token", family)(table, rows, starts, lens, slots)
    assert torch.equal(table[2, 5:35], slots[:30]) and torch.equal(table[0, :3], slots[30:])
    indptr, indices = torch.empty(3, dtype=torch.int32), torch.empty(33, dtype=torch.int32)
    dispatch.overload("kv_indices", family)(indptr, indices, table, rows, starts + lens, starts)
    assert torch.equal(indices, slots) and indptr.tolist() == [0, 30, 33]


@pytest.mark.parametrize("family", FAMILIES)
def test_more_row_ops_on_rows_far_apart_give_the_same_rows(family: str, seed: int) -> None:
    source = generator(seed)
    x = torch.randn(3, 128, generator=source).bfloat16()
    weight = torch.randn(128, generator=source).bfloat16()
    for name, options in (("gemma_rms_norm", (weight, 1e-6)), ("layer_norm", (weight, weight, 1e-6))):
        near, far = torch.empty_like(x), far_rows(torch.zeros_like(x))
        dispatch.overload(name, family)(near, x, *options)
        dispatch.overload(name, family)(far, far_rows(x), *options)
        assert torch.equal(near, far), name
    near, near_sum, far, far_sum = x.clone(), x.clone(), far_rows(x), far_rows(x)
    dispatch.overload("gemma_fused_add_rms_norm", family)(near, near_sum, weight, 1e-6)
    dispatch.overload("gemma_fused_add_rms_norm", family)(far, far_sum, weight, 1e-6)
    assert torch.equal(near, far) and torch.equal(near_sum, far_sum)
    for name, options in (("gelu_and_mul", ()), ("gelu_tanh_and_mul", ()), ("swiglu_oai", (1.702, 7.0))):
        near, far = torch.empty(3, 64).bfloat16(), far_rows(torch.zeros(3, 64).bfloat16())
        dispatch.overload(name, family)(near, x, *options)
        dispatch.overload(name, family)(far, far_rows(x), *options)
        assert torch.equal(near, far), name


def high_pool(width: int, dtype: torch.dtype) -> torch.Tensor:
    """A cache [S, 1, width] of which only the slots around element 2^31 are ever touched."""
    slots = 2**31 // WIDTH + 10
    return untouched(slots * WIDTH, dtype).as_strided((slots, 1, width), (WIDTH, width, 1))


def as_bytes(rows: torch.Tensor) -> torch.Tensor:
    return rows.contiguous().view(torch.uint8)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_rows_around_the_border_are_rotated_and_stored_like_low_ones(family: str, cache_dtype: torch.dtype, seed: int) -> None:
    source = generator(seed)
    q, k, v = (torch.randn(4, 1, width, generator=source).bfloat16() for width in (96, 96, 40))
    table = torch.randn(8, 64, generator=source)
    positions = torch.tensor([1, 5, 7, 0], dtype=torch.int32)
    k_cache, v_cache = high_pool(96, cache_dtype), high_pool(40, cache_dtype)
    assert HIGH_SLOTS[-1] * k_cache.stride(0) > 2**31
    low_k, low_v = torch.zeros(4, 1, 96).to(cache_dtype), torch.zeros(4, 1, 40).to(cache_dtype)
    op, store = dispatch.overload("apply_rope_store_kv", family), dispatch.overload("store_kv", family)
    low_slots, high_slots = torch.arange(4, dtype=torch.int32), torch.tensor(HIGH_SLOTS, dtype=torch.int32)
    op(q.clone(), k.clone(), low_k, low_v, v, positions, table, low_slots, True, 0.5, 2.0)
    op(far_rows(q), far_rows(k), k_cache, v_cache, far_rows(v), positions, table, high_slots, True, 0.5, 2.0)
    for low, high in ((low_k, k_cache), (low_v, v_cache)):
        assert torch.equal(as_bytes(low), as_bytes(high[HIGH_SLOTS[0] : HIGH_SLOTS[-1] + 1][[slot - HIGH_SLOTS[0] for slot in HIGH_SLOTS]]))
    store(low_k, low_v, k, v, low_slots, 0.5, 2.0)
    store(k_cache, v_cache, k, v, high_slots, 0.5, 2.0)
    for low, high in ((low_k, k_cache), (low_v, v_cache)):
        for row, slot in enumerate(HIGH_SLOTS):
            assert torch.equal(as_bytes(low[row]), as_bytes(high[slot]))


@pytest.mark.parametrize("family", FAMILIES)
def test_slots_around_the_border_are_moved(family: str, seed: int) -> None:
    rows = torch.randn(4, 1, 64, generator=generator(seed)).bfloat16()
    slots, few = torch.tensor(HIGH_SLOTS, dtype=torch.int32), torch.arange(4, dtype=torch.int32)
    transfer, copy = dispatch.overload("transfer_kv", family), dispatch.overload("copy_slots", family)
    cache, back = high_pool(64, torch.bfloat16), torch.zeros_like(rows)
    transfer(cache, None, rows, None, few, slots)
    transfer(back, None, cache, None, slots, few)
    assert torch.equal(back, rows)
    copy(cache[None], None, slots[2:], slots[:2])  # down across the border
    transfer(back, None, cache, None, slots, few)
    assert torch.equal(back, rows[[2, 3, 2, 3]])

    layers = untouched(2**31 + 512, torch.bfloat16).as_strided((3, 4, 1, 64), (2**30, 64, 64, 1))  # the last layer begins at element 2^31
    layers[:] = rows
    copy(layers, None, few[:1], few[3:])
    assert torch.equal(layers[2], rows[[0, 1, 2, 0]])


@pytest.mark.parametrize("family", FAMILIES)
def test_more_index_lists_read_and_write_beyond_the_border(family: str) -> None:
    table = untouched(2**31 + 64, torch.int32).as_strided((3, 40), (2**30 + 8, 1))
    table[2], table[0] = torch.arange(40).int(), torch.arange(80, 120).int()
    rows, lens = torch.tensor([2, 0], dtype=torch.int32), torch.tensor([30, 9], dtype=torch.int32)
    indptr, indices = torch.zeros(3, dtype=torch.int32), torch.zeros(80, dtype=torch.int32)
    dispatch.overload("window_kv_indices", family)(indptr, indices, table, rows, lens, None, None, 4)
    assert indptr.tolist() == [0, 5, 10] and indices[:10].tolist() == [*range(25, 30), *range(84, 89)]
    last = torch.zeros(2, dtype=torch.int32)
    dispatch.overload("mla_indices", family)(indptr, indices, last, table, rows, lens, 8)
    assert indptr.tolist() == [0, 4, 6] and indices[:6].tolist() == [0, 1, 2, 3, 10, 11] and last.tolist() == [6, 1]
    far = untouched(2**31 + 64, torch.int32).as_strided((2, 4), (2**31 + 8, 1))
    far[1, 2:] = -5
    dispatch.overload("page_table", family)(far, table, rows, lens, 8)
    assert far[0].tolist() == [0, 1, 2, 3] and far[1].tolist() == [10, 11, -5, -5]
    wide = untouched(2**31 + 64, torch.int32).as_strided((3, 45), (2**30 + 8, 1))
    bounds = untouched(2**31 + 64, torch.int32).as_strided((3, 3), (2**30 + 8, 1))
    dispatch.overload("draft_kv_indices", family)(bounds, wide, table, rows, lens, None, 3, 1)
    assert bounds.tolist() == [[0, 31, 41], [0, 32, 43], [0, 33, 45]]
    assert wide[2].tolist() == [*range(33), *range(80, 92)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=["bf16", "e4m3fn"])
def test_latent_rows_around_the_border_are_stored_and_attended_like_low_ones(family: str, cache_dtype: torch.dtype, seed: int) -> None:
    source = generator(seed)
    rows = torch.randn(4, WIDTH, generator=source).bfloat16()
    q = torch.randn(4, 3, WIDTH, generator=source).bfloat16()

    def attend(num_slots: int, slots: list[int]) -> list[torch.Tensor]:
        cache, at = untouched(num_slots * WIDTH, cache_dtype).view(num_slots, WIDTH), torch.tensor(slots, dtype=torch.int32)
        dispatch.overload("mla_store", family)(cache, rows[:, :512], rows[:, 512:], at, 1.0)
        results = [cache[at.long()].float()]
        for qo_indptr, kv_indptr, lists in (
            (None, torch.arange(5, dtype=torch.int32), at),
            (torch.tensor([0, 4], dtype=torch.int32), torch.tensor([0, 4], dtype=torch.int32), at),
        ):
            out, lse = torch.full((4, 3, 512), float("nan"), dtype=torch.bfloat16), torch.full((4, 3), float("nan"))
            args = (qo_indptr, kv_indptr, lists, None, None, WIDTH**-0.5, 1.0)
            dispatch.overload("mla_decode", family)(out, lse, q[..., :512], q[..., 512:], cache, *args)
            results += [out, lse]
        return results

    high, low = attend(BORDER + 8, HIGH_SLOTS), attend(16, [3, 0, 9, 12])
    assert all(torch.equal(a, b) for a, b in zip(high, low))
    assert torch.equal(low[0], rows.to(cache_dtype).float())


@pytest.mark.parametrize("family", FAMILIES)
def test_an_8_bit_pool_is_read_around_the_border(family: str, seed: int) -> None:
    source = generator(seed)
    k, v = (torch.randn(4, 1, WIDTH, generator=source).to(torch.float8_e5m2) for _ in range(2))
    q, pointers = torch.randn(4, 3, WIDTH, generator=source), torch.tensor([0, 4], dtype=torch.int32)

    def attend(num_slots: int, slots: list[int]) -> torch.Tensor:
        at = torch.tensor(slots, dtype=torch.int32)
        k_cache, v_cache = (untouched(num_slots * WIDTH, k.dtype).view(num_slots, 1, WIDTH) for _ in range(2))
        k_cache[at.long()], v_cache[at.long()] = k, v
        out = torch.full((4, 3, WIDTH), float("nan"))
        args = (pointers, pointers, at, None, None, None, True, WIDTH**-0.5, 0.0, -1, 0.5, 2.0)
        dispatch.overload("extend_attention", family)(out, None, q, k_cache, v_cache, *args)
        return out

    assert torch.equal(attend(BORDER + 8, HIGH_SLOTS), attend(16, [3, 0, 9, 12]))


@pytest.mark.parametrize("family", FAMILIES)
def test_contiguous_keys_and_queries_are_read_beyond_the_border(family: str, seed: int) -> None:
    """Rows of a packed tensor so far apart that token count times stride passes 2^31."""
    source = generator(seed)
    q, k, v = (torch.randn(3, heads, 64, generator=source).bfloat16() for heads in (2, 1, 1))
    pointers = torch.tensor([0, 3], dtype=torch.int32)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        args = (pointers, pointers, None, None, None, True, 0.125, 0.0, -1)
        dispatch.overload("ragged_attention", family)(out, None, q, k, v, *args)
        return out

    near = attend(q, k, v, torch.empty_like(q))
    for far in ((far_rows(q), k, v), (q, far_rows(k), v), (q, k, far_rows(v))):
        assert torch.equal(attend(*far, torch.empty_like(q)), near)
    assert torch.equal(attend(q, k, v, far_rows(torch.zeros_like(q))), near)


@pytest.mark.parametrize("family", FAMILIES)
def test_states_far_apart_merge_like_near_ones(family: str, seed: int) -> None:
    source = generator(seed)
    o, lse = torch.randn(3, 2, 2, 64, generator=source).bfloat16(), torch.randn(3, 2, 2, generator=source)
    merge = dispatch.overload("merge_states", family)
    near, near_lse, far, far_lse = torch.empty_like(o[0]), torch.empty(2, 2), torch.empty_like(o[0]), torch.empty(2, 2)
    merge(near, near_lse, o, lse)
    merge(far, far_lse, far_rows(o), lse)
    assert torch.equal(near, far) and torch.equal(near_lse, far_lse)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family == "native"])
def test_the_size_of_a_workspace_beyond_the_border_is_computed_in_64_bits(family: str) -> None:
    """32,700 pieces of 128 heads of 512 values: the refusal of a small workspace names the number of elements."""
    batch, heads, width = 32_700, 128, 512
    needed = batch * heads * (width + 2)
    assert needed > 2**31
    indptr = torch.arange(batch + 1, dtype=torch.int32)
    plan = plan_decode(indptr, heads, 1, width, num_workers=2, workspace=untouched(needed, torch.float32))
    # Rows of no extent: the call is refused before anything is read or written.
    q, out = torch.zeros(1, heads, 8).expand(batch, -1, -1), torch.zeros(1, heads, width).expand(batch, -1, -1)
    pool = torch.zeros(1, 1, width)
    args = (indptr, torch.zeros(batch, dtype=torch.int32), None, plan.schedule, torch.zeros(10), 1.0, 0.0, -1, 1.0, 1.0)
    with pytest.raises(RuntimeError, match=f"at least {needed} elements, got 10"):
        dispatch.overload("decode_attention", family)(out, None, q, pool[..., :8], pool, *args)
