"""The quantising functions as callers use them: what they allocate, rows that stand alone, tracing, and what comes back."""

from __future__ import annotations

import pytest
import torch

import gristmill_kernels as gk
from gristmill_kernels import dispatch
from gristmill_kernels.checks import FLOAT8_DTYPES

FAMILIES = [
    family
    for family in dispatch.families_of("quant_fp8")
    if dispatch.why_not("quant_fp8", family, ("cpu", torch.bfloat16, torch.float8_e4m3fn)) is None
]
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.float8_e4m3fnuz: 240.0}


@pytest.fixture(params=FAMILIES, autouse=True)
def family(request: pytest.FixtureRequest) -> str:
    with dispatch.using(request.param):
        yield request.param


def rows(seed: int, tokens: int = 37, width: int = 512) -> torch.Tensor:
    return torch.randn(tokens, width, generator=torch.Generator().manual_seed(seed)).bfloat16()


def test_the_dtype_is_that_of_out_or_the_given_one() -> None:
    x = torch.ones(2, 64)
    assert gk.per_token_quant_fp8(x)[0].dtype is gk.per_group_quant_fp8(x, 32)[0].dtype is torch.float8_e4m3fn
    for dtype in FLOAT8_DTYPES:
        out = torch.empty(2, 64, dtype=dtype)
        assert gk.per_token_quant_fp8(x, dtype)[0].dtype is dtype
        assert gk.per_token_quant_fp8(x, out=out)[0] is out
        assert gk.quant_fp8(x, torch.ones(()), dtype, out=out) is out
        assert (out.float() == 1).all()


def test_column_major_scales_begin_on_16_bytes_and_equal_the_others(seed: int) -> None:
    x = rows(seed)
    codes, scales = gk.per_group_quant_fp8(x)
    other_codes, columns = gk.per_group_quant_fp8(x, column_major_scales=True)
    assert scales.is_contiguous() and columns.stride() == (1, 40) and columns.data_ptr() % 16 == 0
    assert torch.equal(scales, columns) and torch.equal(codes.view(torch.uint8), other_codes.view(torch.uint8))


@pytest.mark.parametrize("dtype", sorted(FLOAT8_DTYPES, key=str), ids=str)
def test_values_come_back_within_half_a_step(dtype: torch.dtype, seed: int) -> None:
    x = rows(seed).float()
    step = 2.0 ** -(2 if dtype is torch.float8_e5m2 else 3)
    codes, scales = gk.per_group_quant_fp8(x, 64, dtype)
    back = codes.float() * scales.repeat_interleave(64, 1)
    assert ((back - x).abs() <= step / 2 * x.abs() * 1.001 + scales.repeat_interleave(64, 1) * 2.0**-7).all()
    integers, scales = gk.per_token_quant_int8(x)
    assert ((integers * scales - x).abs() <= scales * 0.5001).all()
    assert (codes.float().abs().amax(1) == LARGEST[dtype]).all() and (integers.abs().amax(1) == 127).all()


def test_a_row_stands_alone(seed: int) -> None:
    x = rows(seed)
    x[3, 5], x[7] = float("inf"), float("nan")
    for function in (gk.per_token_quant_fp8, gk.per_token_quant_int8, gk.per_group_quant_fp8):
        codes, scales = function(x)
        for row in range(0, 37, 5):
            own, scale = function(x[row : row + 1].clone())
            assert torch.equal(own.view(torch.uint8)[0], codes.view(torch.uint8)[row]) and torch.equal(scale[0], scales[row])


def test_compile_traces_them_in_one_graph(seed: int) -> None:
    def step(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
        codes, scales = gk.per_group_quant_fp8(x * 2, column_major_scales=True)
        integers, own = gk.per_token_quant_int8(x)
        return codes.float() * 2, scales + 1, integers + 1, own, gk.quant_fp8(x, scale).float(), *gk.per_token_quant_fp8(x)[1:]

    args = rows(seed), torch.tensor(0.02)
    for got, want in zip(torch.compile(step, fullgraph=True, backend="aot_eager")(*args), step(*args)):
        assert torch.equal(got, want)
