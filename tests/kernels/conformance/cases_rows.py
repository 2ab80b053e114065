"""Cases of the ops that work row by row: norms, rope, activation, storing KV, index lists."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from tests.kernels.conformance import oracle
from tests.kernels.conformance.harness import DTYPES, Call, Case, Inputs, Output, elementwise, inner, short

LAYOUTS = ("dense", "padded", "ragged")
EPS = 1e-6


def _np(x: Tensor):
    return x.double().numpy()


def _rounded_case(op: str, label: str, dtype: torch.dtype, build) -> Case:
    return Case(op, label, build, ("cpu", dtype))


def _rms_norm(shape: tuple[int, ...], dtype: torch.dtype, layout: str, scale: float, in_place: bool) -> Case:
    def build(inputs: Inputs) -> Call:
        x = inputs.normal(*shape, dtype=dtype, layout=layout, scale=scale)
        weight = inputs.normal(shape[-1], dtype=dtype)
        expected = torch.from_numpy(oracle.rms_norm(_np(x), _np(weight), EPS))
        out = x if in_place else inputs.blank(shape, dtype, layout)
        return Call((out, x, weight, EPS), [Output(out, expected, elementwise(expected, dtype))])

    size = "x".join(map(str, shape))
    return _rounded_case("rms_norm", f"{size}-{short(dtype)}-{layout}-scale{scale:g}{'-inplace' * in_place}", dtype, build)


def _fused_add_rms_norm(shape: tuple[int, ...], dtype: torch.dtype, layout: str) -> Case:
    def build(inputs: Inputs) -> Call:
        x = inputs.normal(*shape, dtype=dtype, layout=layout)
        residual = inputs.normal(*shape, dtype=dtype, layout=layout, scale=3.0)
        weight = inputs.normal(shape[-1], dtype=dtype)
        # The sum of two floats of a dtype is rounded once: exact.
        total = (x.double() + residual.double()).to(dtype)
        expected = torch.from_numpy(oracle.rms_norm(_np(total), _np(weight), EPS))
        return Call((x, residual, weight, EPS), [Output(x, expected, elementwise(expected, dtype)), Output(residual, total, None)])

    return _rounded_case("fused_add_rms_norm", f"{'x'.join(map(str, shape))}-{short(dtype)}-{layout}", dtype, build)


def norm_cases() -> list[Case]:
    shapes = [(1, 1), (1, 7), (3, 64), (5, 576), (2, 1000), (2, 4097), (4, 3, 80), (2, 2, 3, 40), (129,)]
    cases = [_rms_norm(shape, dtype, layout, 1.0, False) for shape in shapes for dtype, layout in zip(DTYPES, LAYOUTS)]
    cases += [_rms_norm((5, 72), dtype, layout, 1.0, layout == "padded") for dtype, layout in itertools.product(DTYPES, LAYOUTS)]
    cases += [_rms_norm((0, 64), torch.float32, "dense", 1.0, False), _rms_norm((3, 100), torch.bfloat16, "dense", 0.0, False)]
    cases += [_rms_norm((3, 100), dtype, "dense", scale, False) for dtype in DTYPES for scale in (1e-4, 1e4)]
    cases += [
        _fused_add_rms_norm(shape, dtype, layout) for shape in [(1, 7), (3, 576), (2, 3, 80)] for dtype, layout in zip(DTYPES, LAYOUTS)
    ]
    cases += [_fused_add_rms_norm((4, 33), dtype, "ragged") for dtype in DTYPES] + [_fused_add_rms_norm((0, 8), torch.float32, "dense")]
    return cases


def _apply_rope(heads: tuple[int, int], head_dim: int, rotary_dim: int, dtype: torch.dtype, is_neox: bool, packed: bool) -> Case:
    tokens, num_positions = 5, 50

    def build(inputs: Inputs) -> Call:
        if packed:  # q and k as slices of one qkv tensor
            width = (heads[0] + 2 * heads[1]) * head_dim
            qkv = inputs.normal(tokens, width, dtype=dtype, layout="padded")
            q = qkv[:, : heads[0] * head_dim].view(tokens, heads[0], head_dim)
            k = qkv[:, heads[0] * head_dim : (heads[0] + heads[1]) * head_dim].view(tokens, heads[1], head_dim)
        else:
            q = inputs.normal(tokens, heads[0], head_dim, dtype=dtype, layout="ragged")
            k = inputs.normal(tokens, heads[1], head_dim, dtype=dtype)
        angles = inputs.uniform(num_positions, rotary_dim // 2, high=7.0)
        table = inputs.of(torch.cat([angles.cos(), angles.sin()], dim=1))
        positions = inputs.int_list([0, num_positions - 1, -1, 7, num_positions])  # the third and the last lie outside
        outputs = []
        for x in (q, k):
            rotated, magnitude = map(torch.from_numpy, oracle.rope(_np(x), positions.numpy(), _np(table), is_neox))
            tolerance = inner(rotated, magnitude, dtype, eps=2.0**-22)
            outputs.append(Output(x, rotated, torch.where(magnitude > 0, tolerance, 0.0)))
        return Call((q, k, positions, table, is_neox), outputs)

    style = "neox" if is_neox else "interleaved"
    label = f"{heads[0]}:{heads[1]}x{head_dim}-rot{rotary_dim}-{style}-{short(dtype)}{'-packed' * packed}"
    return Case("apply_rope", label, build, ("cpu", dtype, head_dim, rotary_dim))


def rope_cases() -> list[Case]:
    cases = [
        _apply_rope((4, 2), head_dim, rotary_dim, dtype, is_neox, is_neox)
        for (head_dim, rotary_dim), dtype, is_neox in itertools.product([(64, 64), (80, 80), (96, 32), (40, 10)], DTYPES, (True, False))
    ]
    return cases + [_apply_rope((9, 3), 64, 64, torch.float32, True, True), _apply_rope((1, 1), 576, 64, torch.bfloat16, False, False)]


def _silu_and_mul(shape: tuple[int, ...], dtype: torch.dtype, layout: str, scale: float) -> Case:
    def build(inputs: Inputs) -> Call:
        x = inputs.normal(*shape, dtype=dtype, layout=layout, scale=scale)
        expected = torch.from_numpy(oracle.silu_and_mul(_np(x)))
        out = inputs.blank((*shape[:-1], shape[-1] // 2), dtype, layout)
        return Call((out, x), [Output(out, expected.to(dtype), elementwise(expected, dtype))])

    return _rounded_case("silu_and_mul", f"{'x'.join(map(str, shape))}-{short(dtype)}-{layout}-scale{scale:g}", dtype, build)


def activation_cases() -> list[Case]:
    shapes = [(1, 2), (3, 14), (2, 3072), (4, 3, 66), (0, 8), (7, 1000)]
    cases = [_silu_and_mul(shape, dtype, layout, 2.0) for shape in shapes for dtype, layout in zip(DTYPES, LAYOUTS)]
    return cases + [_silu_and_mul((3, 50), dtype, "ragged", scale) for dtype in DTYPES for scale in (1e-3, 60.0)]


def _store_kv(head_dim: int, head_dim_v: int, num_heads: int, dtype: torch.dtype, layout: str, slots: list[int]) -> Case:
    def build(inputs: Inputs) -> Call:
        k = inputs.normal(len(slots), num_heads, head_dim, dtype=dtype, layout=layout)
        v = inputs.normal(len(slots), num_heads, head_dim_v, dtype=dtype, layout=layout)
        k_cache, v_cache = inputs.blank((20, num_heads, head_dim), dtype, layout), inputs.blank((20, num_heads, head_dim_v), dtype, layout)
        outputs = []
        for cache, rows in ((k_cache, k), (v_cache, v)):
            expected = cache.clone()
            for token, slot in enumerate(slots):
                if slot >= 0:
                    expected[slot] = rows[token]
                else:
                    rows[token] = float("nan")  # padding holds anything
            outputs.append(Output(cache, expected, None))
        return Call((k_cache, v_cache, k, v, inputs.int_list(slots)), outputs)

    label = f"{num_heads}x{head_dim}/{head_dim_v}-{short(dtype)}-{layout}-{len(slots)}rows"
    return Case("store_kv", label, build, ("cpu", dtype, dtype))


def store_cases() -> list[Case]:
    slots = [3, -1, 19, 0, -1, 7]
    widths = [(64, 64, 2), (72, 40, 3), (576, 512, 1), (8, 8, 1), (13, 5, 2)]
    cases = [_store_kv(*width, dtype, layout, slots) for width in widths for dtype, layout in zip(DTYPES, LAYOUTS)]
    return cases + [_store_kv(64, 64, 2, torch.bfloat16, "dense", empty) for empty in ([], [-1, -1])]


def _kv_indices(lens: list[int], starts: list[int] | None, extra: int, layout: str) -> Case:
    def build(inputs: Inputs) -> Call:
        rows = inputs.permutation(len(lens) + 3)[: len(lens)].tolist()
        table = inputs.of(torch.randint(0, 10_000, (len(lens) + 3, 600), generator=inputs.generator).int(), layout)
        begin = starts or [0] * len(lens)
        flat = [slot for row, first, end in zip(rows, begin, lens) for slot in table[row, first : max(first, end)].tolist()]
        sizes = torch.tensor([0, *(max(0, end - first) for first, end in zip(begin, lens))])
        indptr, indices = inputs.blank((len(lens) + 1,), torch.int32), inputs.blank((len(flat) + extra,), torch.int32)
        written = indices[: len(flat)]  # what lies behind is left alone
        args = (indptr, indices, table, inputs.int_list(rows), inputs.int_list(lens), None if starts is None else inputs.int_list(starts))
        return Call(args, [Output(indptr, sizes.cumsum(0), None), Output(written, torch.tensor(flat), None)])

    label = f"{len(lens)}requests-{layout}{'-start' * (starts is not None)}-extra{extra}"
    return Case("kv_indices", label, build, ("cpu",))


def _qo_indptr(lens: list[int]) -> Case:
    def build(inputs: Inputs) -> Call:
        out = inputs.blank((len(lens) + 1,), torch.int32)
        return Call((out, inputs.int_list(lens)), [Output(out, torch.tensor([0, *lens]).cumsum(0), None)])

    return Case("qo_indptr", f"{len(lens)}requests", build, ("cpu",))


def _write_req_to_token(runs: list[tuple[int, int]], layout: str) -> Case:
    def build(inputs: Inputs) -> Call:
        rows = inputs.permutation(len(runs) + 2)[: len(runs)].tolist()
        table = inputs.blank((len(runs) + 2, 300), torch.int32, layout)
        slots = inputs.ints(0, 10_000, sum(length for _, length in runs))
        expected, taken = table.clone(), 0
        for row, (start, length) in zip(rows, runs):
            expected[row, start : start + length] = slots[taken : taken + length]
            taken += length
        args = (table, inputs.int_list(rows), inputs.int_list([run[0] for run in runs]), inputs.int_list([run[1] for run in runs]), slots)
        return Call(args, [Output(table, expected, None)])

    return Case("write_req_to_token", f"{len(runs)}runs-{layout}", build, ("cpu",))


def index_cases() -> list[Case]:
    cases = [
        _kv_indices(lens, None, 0, layout)
        for lens, layout in [([5], "dense"), ([1, 0, 257, 600], "padded"), ([], "dense"), ([0, 0], "dense")]
    ]
    cases += [
        _kv_indices([9, 300, 4, 0], [2, 44, 4, 0], 7, "padded"),
        _kv_indices([3, 5], [6, 1], 0, "ragged"),
        _kv_indices([17] * 40, None, 3, "dense"),
    ]
    cases += [_qo_indptr(lens) for lens in ([], [0], [1, 0, 512, 3], [1] * 200)]
    cases += [
        _write_req_to_token(runs, layout)
        for runs, layout in [([(0, 5)], "dense"), ([(3, 0), (290, 10), (0, 300)], "padded"), ([], "dense")]
    ]
    return cases


def all_cases() -> list[Case]:
    return norm_cases() + rope_cases() + activation_cases() + store_cases() + index_cases()
