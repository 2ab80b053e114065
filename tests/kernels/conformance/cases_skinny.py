"""Cases of skinny_linear: few rows over a plain weight, at every number of rows, widths that end within a vector, and poisoned gaps."""

from __future__ import annotations

import torch

from tests.kernels.conformance.harness import DTYPES, Call, Case, Inputs, Output, inner, short

NAN = float("nan")


def _skinny_linear(
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    layout: str = "dense",
    weight_layout: str = "dense",
    bias: bool = False,
    nan_row: int | None = None,
    nan_column: int | None = None,
) -> Case:
    """A NaN in one row of x or of the weight spoils that row (that column) of the result and nothing else."""

    def build(inputs: Inputs) -> Call:
        x = inputs.normal(m, k, dtype=dtype, layout=layout)
        weight = inputs.normal(n, k, dtype=dtype, layout=weight_layout)
        if nan_row is not None:
            x[nan_row, k - 1] = NAN
        if nan_column is not None:
            weight[nan_column, 0] = NAN
        b = inputs.normal(n, dtype=dtype) if bias else None
        expected = torch.einsum("mk,nk->mn", x.double(), weight.double()) + (0 if b is None else b.double())
        magnitude = torch.einsum("mk,nk->mn", x.double().abs(), weight.double().abs()) + (0 if b is None else b.double().abs())
        out = inputs.blank((m, n), dtype, layout)
        return Call((out, x, weight, b), [Output(out, expected, inner(expected.nan_to_num(), magnitude.nan_to_num(), dtype))])

    marks = f"{'-bias' * bias}{'-nanrow' * (nan_row is not None)}{'-nancolumn' * (nan_column is not None)}"
    return Case("skinny_linear", f"{m}x{n}x{k}-{short(dtype)}-{layout}-{weight_layout}{marks}", build, ("cpu", dtype))


def all_cases() -> list[Case]:
    cases = []
    for dtype in DTYPES:
        # every number of rows, at widths with and without a tail
        cases += [_skinny_linear(m, 9 + m, (64, 72, 200, 33)[m % 4], dtype, bias=m % 2 == 0) for m in range(1, 17)]
        cases += [_skinny_linear(m, 24, 520, dtype, layout, weights) for m, layout, weights in (
            (1, "padded", "padded"), (16, "padded", "padded"), (1, "ragged", "dense"), (5, "dense", "ragged"), (16, "ragged", "ragged")
        )]  # fmt: skip
        # widths around what a lane, a warp and a block take in one step, and long sums
        cases += [_skinny_linear(2, 17, k, dtype) for k in (1, 7, 8, 9, 31, 32, 40, 63, 64, 65, 129, 511, 512, 513, 1000)]
        cases += [
            _skinny_linear(m, n, k, dtype, bias=True) for m, n, k in ((1, 1, 8), (3, 131, 96), (1, 5, 16384), (9, 3, 14336), (2, 1, 4099))
        ]
        cases += [_skinny_linear(0, 8, 8, dtype), _skinny_linear(3, 0, 8, dtype), _skinny_linear(2, 5, 0, dtype, bias=True)]
        for m in (2, 7, 16):
            cases += [_skinny_linear(m, 19, 136, dtype, "padded", bias=True, nan_row=row) for row in (m // 2,)]
        cases += [_skinny_linear(16, 21, 77, dtype, "ragged", "ragged", nan_row=15), _skinny_linear(4, 21, 136, dtype, nan_column=8)]
    return cases
