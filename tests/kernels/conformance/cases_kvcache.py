"""Cases of storing rows in the slot pool, with and without rope before it, and of moving slots: all stored bits are exact."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from tests.kernels.conformance import oracle
from tests.kernels.conformance.harness import DTYPES, Call, Case, Inputs, Output, anything, assert_matches, inner, short

LAYOUTS = ("dense", "padded", "ragged")
FLOAT8 = {torch.float8_e4m3fn: "e4m3fn", torch.float8_e5m2: "e5m2", torch.float8_e4m3fnuz: "e4m3fnuz"}
SLOTS = [3, -1, 19, 0, -1, 7]


def _stored(rows: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """What a cache of `dtype` must hold, as float64."""
    if scale == 1 and dtype is rows.dtype:
        return rows.double()
    quotient = oracle.float32_quotient(rows.float().numpy(), scale)
    if dtype in FLOAT8:
        return torch.from_numpy(oracle.to_float8(quotient, FLOAT8[dtype]))
    return torch.from_numpy(quotient).to(dtype).double()


def _special_values(dtype: torch.dtype, cache_dtype: torch.dtype, scale: float) -> Tensor:
    """Ties and their neighbours, what saturates, what vanishes, both zeros, infinities and NaN, as far as `dtype` has them."""
    if cache_dtype not in FLOAT8:
        return torch.tensor([0.0, -0.0, 1e-9, -1e-9, float("inf"), -float("inf"), float("nan")], dtype=torch.float64)
    grid = torch.from_numpy(oracle.float8_values(FLOAT8[cache_dtype]))
    middles = (grid[1:] + grid[:-1]) / 2
    beyond = torch.tensor(
        [grid[-1] * factor for factor in (1.0, 1.01, 1.05, 1.07, 2.0)] + [1e-9, 0.0, 3e4, 6e4, float("inf"), float("nan")]
    )
    one_side = torch.cat([middles, middles * 1.01, middles * 0.99, grid, beyond.double()]) * scale
    return torch.cat([one_side, -one_side]).to(dtype).double()


def _fill(inputs: Inputs, view: Tensor, cache_dtype: torch.dtype, scale: float) -> None:
    """Put special values among the random ones, wherever there is room."""
    special = _special_values(view.dtype, cache_dtype, scale)
    special = special[inputs.permutation(len(special))]
    flat = view.double().flatten()
    count = min(len(special), flat.numel() // 2)
    flat[:count] = special[:count]
    view.copy_(flat[inputs.permutation(flat.numel())].view(view.shape))


def _blank_pool(inputs: Inputs, shape: tuple[int, ...], dtype: torch.dtype, layout: str) -> Tensor:
    """A poisoned cache whose every other slot holds something to keep."""
    cache = inputs.blank(shape, dtype, layout)
    cache[::2] = torch.full(cache[::2].shape, 1.5).to(dtype)
    return cache


def _expected_cache(cache: Tensor, rows: Tensor, slots: list[int], scale: float) -> Tensor:
    expected, values = cache.double(), _stored(rows, scale, cache.dtype)
    for token, slot in enumerate(slots):
        if slot >= 0:
            expected[slot] = values[token]
    return expected


def _store_kv(
    widths: tuple[int, int, int], dtype: torch.dtype, cache_dtype: torch.dtype, layout: str, slots: list[int], scales: tuple[float, float]
) -> Case:
    head_dim, head_dim_v, num_heads = widths

    def build(inputs: Inputs) -> Call:
        outputs, caches, sources = [], [], []
        for width, scale in zip((head_dim, head_dim_v), scales):
            rows = inputs.normal(len(slots), num_heads, width, dtype=dtype, layout=layout, scale=2 * scale)
            if slots:
                _fill(inputs, rows, cache_dtype, scale)
            cache = _blank_pool(inputs, (20, num_heads, width), cache_dtype, layout)
            outputs.append(Output(cache, _expected_cache(cache, rows, slots, scale), None))
            for token, slot in enumerate(slots):
                if slot < 0:
                    rows[token] = float("nan")  # padding holds anything
            caches.append(cache)
            sources.append(rows)
        given = () if scales == (1.0, 1.0) and cache_dtype is dtype else scales
        return Call((*caches, *sources, inputs.int_list(slots), *given), outputs)

    label = (
        f"{num_heads}x{head_dim}/{head_dim_v}-{short(dtype)}-to-{FLOAT8.get(cache_dtype) or short(cache_dtype)}-{layout}-{len(slots)}rows"
    )
    return Case("store_kv", f"{label}-scale{scales[0]:g}/{scales[1]:g}", build, ("cpu", dtype, cache_dtype))


def store_cases() -> list[Case]:
    widths = [(64, 64, 2), (72, 40, 3), (576, 512, 1), (8, 8, 1), (13, 5, 2)]
    one = (1.0, 1.0)
    cases = [_store_kv(width, dtype, dtype, layout, SLOTS, one) for width in widths for dtype, layout in zip(DTYPES, LAYOUTS)]
    cases += [_store_kv((64, 64, 2), torch.bfloat16, torch.bfloat16, "dense", empty, one) for empty in ([], [-1, -1])]
    cases += [_store_kv((13, 40, 2), dtype, dtype, "ragged", SLOTS, (0.37, 1.0)) for dtype in DTYPES]
    cases += [
        _store_kv(width, dtype, cache_dtype, layout, SLOTS, scales)
        for (dtype, cache_dtype), width, layout, scales in zip(
            itertools.product(DTYPES, FLOAT8), itertools.cycle(widths), itertools.cycle(LAYOUTS), itertools.cycle([one, (0.37, 2.5)])
        )
    ]
    cases += [_store_kv((576, 512, 3), dtype, cache_dtype, "dense", SLOTS, one) for dtype in DTYPES for cache_dtype in FLOAT8]
    cases += [_store_kv((576, 120, 3), dtype, kind, "padded", SLOTS, (0.0421, 11.3)) for dtype in DTYPES for kind in FLOAT8]
    return cases + [_store_kv((8, 8, 1), torch.bfloat16, torch.float8_e5m2, "dense", [], one)]


def _apply_rope_store_kv(
    heads: tuple[int, int],
    dims: tuple[int, int, int],
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    is_neox: bool,
    packed: bool,
    scales: tuple[float, float],
) -> Case:
    head_dim, rotary_dim, head_dim_v = dims
    tokens, num_positions = len(SLOTS), 50

    def build(inputs: Inputs) -> Call:
        widths = (heads[0] * head_dim, heads[1] * head_dim, heads[1] * head_dim_v)
        if packed:  # q, k and v as slices of one qkv tensor
            q, k, v = inputs.normal(tokens, sum(widths), dtype=dtype, layout="padded").split(widths, 1)
            q, k, v = q.unflatten(1, (heads[0], head_dim)), k.unflatten(1, (heads[1], head_dim)), v.unflatten(1, (heads[1], head_dim_v))
        else:
            q = inputs.normal(tokens, heads[0], head_dim, dtype=dtype, layout="ragged")
            k = inputs.normal(tokens, heads[1], head_dim, dtype=dtype)
            v = inputs.normal(tokens, heads[1], head_dim_v, dtype=dtype, layout="padded")
        angles = inputs.uniform(num_positions, rotary_dim // 2, high=7.0)
        table = inputs.of(torch.cat([angles.cos(), angles.sin()], dim=1))
        positions = inputs.int_list([0, num_positions - 1, -1, 7, num_positions, 3])  # the third and the fifth lie outside
        outputs = []
        for x in (q, k):
            rotated, magnitude = map(torch.from_numpy, oracle.rope(x.double().numpy(), positions.numpy(), table.double().numpy(), is_neox))
            tolerance = inner(rotated, magnitude, dtype, eps=2.0**-22)
            outputs.append(Output(x, rotated, torch.where(magnitude > 0, tolerance, 0.0)))
        k_cache = _blank_pool(inputs, (20, heads[1], head_dim), cache_dtype, "padded")
        v_cache = _blank_pool(inputs, (20, heads[1], head_dim_v), cache_dtype, "ragged")
        k_before, v_expected = k_cache.clone(), _expected_cache(v_cache, v, SLOTS, scales[1])

        def verify() -> None:  # k is in place within its tolerance by now; the cache must hold exactly that k
            assert_matches(k_cache, _expected_cache(k_before, k, SLOTS, scales[0]), None, "the stored keys")

        outputs += [anything(k_cache), Output(v_cache, v_expected, None)]
        args = (q, k, k_cache, v_cache, v, positions, table, inputs.int_list(SLOTS), is_neox, *scales)
        return Call(args, outputs, verify)

    style = "neox" if is_neox else "interleaved"
    cache = FLOAT8.get(cache_dtype) or short(cache_dtype)
    label = f"{heads[0]}:{heads[1]}x{head_dim}-rot{rotary_dim}-v{head_dim_v}-{style}-{short(dtype)}-to-{cache}{'-packed' * packed}"
    return Case("apply_rope_store_kv", label, build, ("cpu", dtype, cache_dtype, head_dim, rotary_dim))


def rope_store_cases() -> list[Case]:
    dims = [(64, 64, 64), (80, 80, 80), (96, 32, 40), (40, 10, 13)]
    cases = [
        _apply_rope_store_kv((4, 2), dim, dtype, dtype, is_neox, is_neox, (1.0, 1.0))
        for dim, dtype, is_neox in itertools.product(dims, DTYPES, (True, False))
    ]
    cases += [
        _apply_rope_store_kv((6, 3), dim, dtype, cache_dtype, is_neox, not is_neox, scales)
        for (dtype, cache_dtype), dim, is_neox, scales in zip(
            itertools.product(DTYPES, FLOAT8),
            itertools.cycle(dims),
            itertools.cycle((True, False)),
            itertools.cycle([(1.0, 1.0), (0.21, 0.5)]),
        )
    ]
    return cases + [_apply_rope_store_kv((9, 3), (64, 64, 64), torch.float32, torch.float32, True, True, (0.3, 1.0))]


def _pool(inputs: Inputs, shape: tuple[int, ...], dtype: torch.dtype, layout: str) -> Tensor:
    return inputs.normal(*shape, dtype=dtype, layout=layout)


def _copy_slots(
    shape: tuple[int, int, int, int], head_dim_v: int | None, dtype: torch.dtype, layout: str, pairs: list[tuple[int, int]], label: str
) -> Case:
    def build(inputs: Inputs) -> Call:
        caches = [_pool(inputs, shape, dtype, layout)]
        if head_dim_v is not None:
            caches.append(_pool(inputs, (*shape[:3], head_dim_v), dtype, layout))
        outputs = []
        for cache in caches:
            expected = cache.double()
            for source, target in pairs:
                if source >= 0 and target >= 0:
                    expected[:, target] = cache[:, source].double()
            outputs.append(Output(cache, expected, None))
        lists = (inputs.int_list([pair[0] for pair in pairs]), inputs.int_list([pair[1] for pair in pairs]))
        return Call((caches[0], caches[1] if len(caches) > 1 else None, *lists), outputs)

    kind = FLOAT8.get(dtype) or short(dtype)
    name = f"{'x'.join(map(str, shape))}{'' if head_dim_v is None else f'/{head_dim_v}'}-{kind}-{layout}-{label}"
    return Case("copy_slots", name, build, ("cpu", dtype))


def _transfer_kv(
    shape: tuple[int, int, int], head_dim_v: int | None, dtype: torch.dtype, page_first: str, pairs: list[tuple[int, int]]
) -> Case:
    """`page_first` names the side whose pool is one layer of a [S, L, H, D] tensor."""

    def build(inputs: Inputs) -> Call:
        pools: dict[str, list[Tensor]] = {"src": [], "dst": []}
        outputs = []
        for width in (shape[2],) if head_dim_v is None else (shape[2], head_dim_v):
            for side, slots in (("src", shape[0]), ("dst", shape[0] + 5)):
                if side == page_first:
                    pools[side].append(_pool(inputs, (slots, 3, shape[1], width), dtype, "padded")[:, 1])
                else:
                    pools[side].append(_pool(inputs, (slots, shape[1], width), dtype, "ragged"))
            source, target = pools["src"][-1], pools["dst"][-1]
            expected = target.double()
            for src_slot, dst_slot in pairs:
                if src_slot >= 0 and dst_slot >= 0:
                    expected[dst_slot] = source[src_slot].double()
            outputs.append(Output(target, expected, None))
        (src_k, *src_v), (dst_k, *dst_v) = pools["src"], pools["dst"]
        lists = (inputs.int_list([pair[0] for pair in pairs]), inputs.int_list([pair[1] for pair in pairs]))
        return Call((dst_k, dst_v[0] if dst_v else None, src_k, src_v[0] if src_v else None, *lists), outputs)

    kind = FLOAT8.get(dtype) or short(dtype)
    size = f"{'x'.join(map(str, shape))}{'' if head_dim_v is None else f'/{head_dim_v}'}"
    return Case("transfer_kv", f"{size}-{kind}-{page_first}-pagefirst-{len(pairs)}pairs", build, ("cpu", dtype, "cpu", "cpu"))


def move_cases() -> list[Case]:
    pairs = [(3, 11), (-1, 4), (8, 2), (7, -1), (0, 0), (9, 19)]
    compaction = [(1, 0), (3, 1), (4, 2), (7, 3), (8, 4), (9, 5), (15, 6)]  # later sources are overwritten only by earlier pairs
    dtypes = [*DTYPES, *FLOAT8]
    cases = [
        _copy_slots(shape, head_dim_v, dtype, layout, pairs, "apart")
        for dtype, (shape, head_dim_v), layout in zip(
            dtypes, itertools.cycle([((2, 20, 2, 64), 40), ((3, 20, 1, 13), None), ((1, 20, 3, 8), 5)]), itertools.cycle(LAYOUTS)
        )
    ]
    cases += [_copy_slots((3, 20, 2, 24), 16, dtype, "padded", compaction, "compaction") for dtype in dtypes]
    cases += [
        _copy_slots((2, 20, 2, 8), 8, torch.bfloat16, "dense", few, label) for few, label in [([], "nothing"), ([(-1, -1)], "skipped")]
    ]
    cases += [
        _transfer_kv(shape, head_dim_v, dtype, side, pairs)
        for dtype, (shape, head_dim_v), side in zip(
            dtypes, itertools.cycle([((20, 2, 64), 40), ((20, 1, 576), None), ((20, 3, 13), 5)]), itertools.cycle(("dst", "src"))
        )
    ]
    spread = [(slot * 7 % 20, slot) for slot in range(25)]
    return cases + [_transfer_kv((20, 2, 16), 16, torch.bfloat16, "dst", few) for few in ([], [(-1, 3)], spread)]


def all_cases() -> list[Case]:
    return store_cases() + rope_store_cases() + move_cases()
