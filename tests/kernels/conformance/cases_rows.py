"""Cases of the ops that work row by row: norms, rope, activations."""

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


def _gemma_rms_norm(shape: tuple[int, ...], dtype: torch.dtype, layout: str, in_place: bool) -> Case:
    def build(inputs: Inputs) -> Call:
        x = inputs.normal(*shape, dtype=dtype, layout=layout)
        weight = inputs.normal(shape[-1], dtype=dtype, scale=0.3)
        expected = torch.from_numpy(oracle.rms_norm(_np(x), 1 + _np(weight), EPS))
        out = x if in_place else inputs.blank(shape, dtype, layout)
        return Call((out, x, weight, EPS), [Output(out, expected, elementwise(expected, dtype))])

    label = f"{'x'.join(map(str, shape))}-{short(dtype)}-{layout}{'-inplace' * in_place}"
    return _rounded_case("gemma_rms_norm", label, dtype, build)


def _gemma_fused_add_rms_norm(shape: tuple[int, ...], dtype: torch.dtype, layout: str) -> Case:
    def build(inputs: Inputs) -> Call:
        x = inputs.normal(*shape, dtype=dtype, layout=layout)
        residual = inputs.normal(*shape, dtype=dtype, layout=layout, scale=3.0)
        weight = inputs.normal(shape[-1], dtype=dtype, scale=0.3)
        total = (x.double() + residual.double()).to(dtype)
        expected = torch.from_numpy(oracle.rms_norm(_np(total), 1 + _np(weight), EPS))
        return Call((x, residual, weight, EPS), [Output(x, expected, elementwise(expected, dtype)), Output(residual, total, None)])

    return _rounded_case("gemma_fused_add_rms_norm", f"{'x'.join(map(str, shape))}-{short(dtype)}-{layout}", dtype, build)


def _layer_norm(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    layout: str,
    given: str = "wb",
    mean: float = 0.3,
    scale: float = 1.0,
    in_place: bool = False,
) -> Case:
    """`given` says which of weight and bias there are."""

    def build(inputs: Inputs) -> Call:
        x = inputs.normal(*shape, dtype=dtype, layout=layout, scale=scale)
        x += mean
        weight = inputs.normal(shape[-1], dtype=dtype) if "w" in given else None
        bias = inputs.normal(shape[-1], dtype=dtype) if "b" in given else None
        parts = [None if part is None else _np(part) for part in (weight, bias)]
        expected, magnitude = map(torch.from_numpy, oracle.layer_norm(_np(x), *parts, EPS))
        out = x if in_place else inputs.blank(shape, dtype, layout)
        return Call((out, x, weight, bias, EPS), [Output(out, expected, inner(expected, magnitude, dtype, eps=2.0**-22))])

    label = f"{'x'.join(map(str, shape))}-{short(dtype)}-{layout}-{given or 'plain'}-mean{mean:g}-scale{scale:g}{'-inplace' * in_place}"
    return _rounded_case("layer_norm", label, dtype, build)


def _gemma_and_layer_cases() -> list[Case]:
    shapes = [(1, 1), (1, 7), (3, 64), (5, 576), (2, 4097), (4, 3, 80), (2, 2, 3, 40)]
    cases = [_gemma_rms_norm(shape, dtype, layout, False) for shape in shapes for dtype, layout in zip(DTYPES, LAYOUTS)]
    cases += [_gemma_rms_norm((5, 72), dtype, "ragged", True) for dtype in DTYPES] + [
        _gemma_rms_norm((0, 64), torch.float32, "dense", False)
    ]
    cases += [
        _gemma_fused_add_rms_norm(shape, dtype, layout)
        for shape in [(1, 7), (3, 576), (2, 3, 80)]
        for dtype, layout in zip(DTYPES, LAYOUTS)
    ]
    cases += [_layer_norm(shape, dtype, layout) for shape in shapes for dtype, layout in zip(DTYPES, LAYOUTS)]
    cases += [_layer_norm((4, 33), dtype, "padded", given) for dtype in DTYPES for given in ("w", "b", "")]
    cases += [_layer_norm((3, 100), dtype, "dense", "wb", mean, scale) for dtype in DTYPES for mean, scale in [(0, 1e-4), (500, 1), (8, 0)]]
    return (
        cases + [_layer_norm((5, 72), dtype, "ragged", in_place=True) for dtype in DTYPES] + [_layer_norm((0, 8), torch.float32, "dense")]
    )


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
    return cases + _gemma_and_layer_cases()


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


def _gated(op: str, shape: tuple[int, ...], dtype: torch.dtype, layout: str, scale: float, *options: float) -> Case:
    """The gates with a tolerance of 2 ulp + 2^-22 |gate * factor|."""

    def build(inputs: Inputs) -> Call:
        x = inputs.normal(*shape, dtype=dtype, layout=layout, scale=scale)
        if x.numel():
            x.flatten()[-1] = float("nan")
        expected, magnitude = map(torch.from_numpy, getattr(oracle, op)(_np(x), *options))
        out = inputs.blank((*shape[:-1], shape[-1] // 2), dtype, layout)
        return Call((out, x, *options), [Output(out, expected.to(dtype), inner(expected, magnitude, dtype, eps=2.0**-22))])

    label = f"{'x'.join(map(str, shape))}-{short(dtype)}-{layout}-scale{scale:g}{''.join(f'-{option:g}' for option in options)}"
    return _rounded_case(op, label, dtype, build)


def activation_cases() -> list[Case]:
    shapes = [(1, 2), (3, 14), (2, 3072), (4, 3, 66), (0, 8), (7, 1000)]
    cases = [_silu_and_mul(shape, dtype, layout, 2.0) for shape in shapes for dtype, layout in zip(DTYPES, LAYOUTS)]
    cases += [_silu_and_mul((3, 50), dtype, "ragged", scale) for dtype in DTYPES for scale in (1e-3, 60.0)]
    for op, options in (("gelu_and_mul", ()), ("gelu_tanh_and_mul", ()), ("swiglu_oai", (1.702, 7.0))):
        cases += [_gated(op, shape, dtype, layout, 2.0, *options) for shape in shapes for dtype, layout in zip(DTYPES, LAYOUTS)]
        cases += [_gated(op, (3, 50), dtype, "ragged", scale, *options) for dtype in DTYPES for scale in (1e-3, 6.0, 60.0)]
    return cases + [_gated("swiglu_oai", (3, 50), dtype, "padded", 3.0, 0.5, limit) for dtype in DTYPES for limit in (2.5, float("inf"))]


def all_cases() -> list[Case]:
    return norm_cases() + rope_cases() + activation_cases()
