"""Cases of the quantising ops: codes and scales are exact, to the sign of a zero, around rounding borders and to the ends of the range."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from tests.kernels.conformance import oracle
from tests.kernels.conformance.harness import DTYPES, Call, Case, Inputs, Output, short

NAMES = {torch.float8_e4m3fn: "e4m3fn", torch.float8_e5m2: "e5m2", torch.float8_e4m3fnuz: "e4m3fnuz", torch.int8: "int8"}
FLOAT8 = tuple(dtype for dtype in NAMES if dtype is not torch.int8)
LAYOUTS = ("dense", "padded", "ragged")
# Widths around a pack, the lanes of a warp, the threads of a block and what these keep, for 2 and for 4 bytes.
WIDTHS = (1, 2, 7, 8, 16, 17, 33, 64, 72, 128, 130, 256, 264, 500, 512, 520, 1024, 2056)
LONG = (4096, 5120, 8200, 16384, 16392)
Fill = Callable[[Inputs, int, int], Tensor]


def _normal(inputs: Inputs, tokens: int, width: int) -> Tensor:
    return torch.randn(tokens, width, generator=inputs.generator, dtype=torch.float64)


def _spread(inputs: Inputs, tokens: int, width: int) -> Tensor:
    """Rows and elements of very different sizes, from what vanishes to the largest."""
    sizes = torch.randint(-150, 128, (tokens, 1), generator=inputs.generator) + torch.randint(
        -20, 1, (tokens, width), generator=inputs.generator
    )
    return torch.ldexp(_normal(inputs, tokens, width), sizes)


def _special(inputs: Inputs, tokens: int, width: int) -> Tensor:
    """Rows with infinities, NaN, nothing finite, only zeros of both signs, only subnormal numbers, the largest numbers."""
    x = _normal(inputs, tokens, width)
    last = width - 1
    kinds: list[Callable[[Tensor], object]] = [
        lambda row: row[last].fill_(float("inf")),
        lambda row: row[0].fill_(float("nan")),
        lambda row: (row.fill_(float("nan")), row[last].fill_(-float("inf"))),
        lambda row: (row.zero_(), row[last].fill_(-0.0)),
        lambda row: row.mul_(2.0**-130),
        lambda row: row.mul_(2.0**-148),
        lambda row: (row.mul_(1e37), row[last].fill_(torch.finfo(torch.float32).max)),
        lambda row: (row[0].fill_(-0.0), row[last].fill_(float("nan"))),
        lambda row: (row.zero_(), row[last].fill_(-(2.0**-20))),
        lambda row: (row.fill_(float("inf")), row[0].fill_(-1.0)),
    ]
    for token in range(tokens):
        kinds[token % len(kinds)](x[token])
    return x


def _every_bfloat16(inputs: Inputs, tokens: int, width: int) -> Tensor:
    """All of them in order, so that a row has numbers of one size."""
    codes = torch.arange(tokens * width, dtype=torch.int32) * (65536 // (tokens * width)) + int(inputs.permutation(8)[0])
    return codes.to(torch.int16).view(torch.bfloat16).view(tokens, width)


def _middles(name: str) -> np.ndarray:
    """Where rounding to a format changes, ascending, and the largest value."""
    grid = np.arange(0.0, 128.0) if name == "int8" else oracle.float8_values(name)
    return np.append((grid[1:] + grid[:-1]) / 2, grid[-1])


def _borders(name: str) -> Fill:
    """Rows whose quotients by their own scales are rounding borders and the float32 numbers beside these."""

    def fill(inputs: Inputs, tokens: int, width: int) -> Tensor:
        rng = np.random.default_rng(int(torch.randint(0, 2**31, (), generator=inputs.generator)))
        middles = _middles(name)
        scale = (rng.uniform(1, 2, (tokens, 1)) * 2.0 ** rng.integers(-126, 110, (tokens, 1))).astype(np.float32)
        x = (rng.choice(middles, (tokens, width)) * scale).astype(np.float32)
        x = (x.view(np.int32) + rng.integers(-2, 3, x.shape, dtype=np.int32)).view(np.float32)
        x[:, rng.integers(0, width)] = middles[-1] * scale[:, 0]
        return torch.from_numpy(x * rng.choice(np.array([1, -1], dtype=np.float32), x.shape))

    return fill


def _rows(inputs: Inputs, fill: Fill, shape: tuple[int, int], dtype: torch.dtype, layout: str) -> Tensor:
    largest = torch.finfo(dtype).max
    values = fill(inputs, *shape)
    bounded = torch.where(values.isfinite(), values.double().clamp(-largest, largest), values.double())
    return inputs.of(bounded, layout, dtype)


def _scales(inputs: Inputs, tokens: int, groups: int, layout: str) -> Tensor:
    """Row-major, column-major with columns on 16 bytes, or with neither stride 1."""
    if layout == "dense":
        return inputs.blank((tokens, groups), torch.float32)
    if layout == "padded":
        return inputs.blank((groups, -(-tokens // 4) * 4), torch.float32)[:, :tokens].T
    return inputs.blank((tokens, groups * 3), torch.float32)[:, ::3]


def _codes(out: Tensor, values: np.ndarray) -> tuple[Output, Callable[[], None]]:
    """The expected values, and a check that zeros have the right sign."""
    name = NAMES[out.dtype]

    def verify() -> None:
        if name != "int8" and out.numel():
            wrong = (out.contiguous().view(torch.uint8).numpy() != oracle.float8_codes(values, name)) & ~np.isnan(values)
            assert not wrong.any(), f"{wrong.sum()} codes are wrong, first at {np.argwhere(wrong)[0]}"

    return Output(out, torch.from_numpy(values), None), verify


def _quant(
    op: str, shape: tuple[int, int], dtype: torch.dtype, to: torch.dtype, layout: str, fill: Fill, label: str, group: int = 0
) -> Case:
    """A case of an op that finds scales; `group` 0 stands for whole rows."""

    def build(inputs: Inputs) -> Call:
        tokens, width = shape
        x = _rows(inputs, fill, shape, dtype, layout)
        groups = width // group if group else 1
        wide = x.float().numpy().reshape(tokens, groups, group or width)
        scale = oracle.quant_scale(wide, NAMES[to])
        out, scales = inputs.blank(shape, to, layout), _scales(inputs, tokens, groups, layout)
        codes, verify = _codes(out, oracle.quantised(wide, scale, NAMES[to]).reshape(shape))
        expected = torch.from_numpy(scale.reshape(tokens, groups))
        return Call((out, scales, x, *([group] if group else [])), [codes, Output(scales, expected, None)], verify)

    size = f"{shape[0]}x{shape[1]}{f'g{group}' if group else ''}"
    return Case(op, f"{size}-{short(dtype)}-{NAMES[to]}-{layout}-{label}", build, ("cpu", dtype, to))


def _given(shape: tuple[int, int], dtype: torch.dtype, to: torch.dtype, layout: str, fill: Fill, scale: float, label: str) -> Case:
    def build(inputs: Inputs) -> Call:
        x = _rows(inputs, fill, shape, dtype, layout)
        given = np.float32(scale)
        out = inputs.blank(shape, to, layout)
        codes, verify = _codes(out, oracle.quantised(x.float().numpy(), given, NAMES[to]))
        return Call((out, x, inputs.of(torch.tensor([given]))), [codes], verify)

    size = f"{shape[0]}x{shape[1]}"
    return Case("quant_fp8", f"{size}-{short(dtype)}-{NAMES[to]}-{layout}-{label}-scale{scale:g}", build, ("cpu", dtype, to))


def _token_cases(op: str, types: tuple[torch.dtype, ...]) -> list[Case]:
    cases = []
    for i, dtype in enumerate(DTYPES):
        for j, width in enumerate(WIDTHS):
            to, layout = types[(i + j) % len(types)], LAYOUTS[(i + j // 2) % 3]
            cases.append(_quant(op, (3, width), dtype, to, layout, _normal, "normal"))
        cases += [
            _quant(op, (2, width), dtype, types[(i + j) % len(types)], LAYOUTS[j % 2], _spread, "spread") for j, width in enumerate(LONG)
        ]
        for to in types:
            cases += [_quant(op, (20, width), dtype, to, layout, _special, "special") for width, layout in ((5, "ragged"), (96, "dense"))]
            cases += [
                _quant(op, (7, 520), dtype, to, "padded", _spread, "spread"),
                _quant(op, (3, 4104), dtype, to, "ragged", _spread, "spread"),
            ]
            cases.append(_quant(op, (5, 1040), dtype, to, "dense", _special, "special"))
        cases += [_quant(op, shape, dtype, types[0], "dense", _normal, "empty") for shape in ((0, 64), (3, 0), (0, 0))]
        cases.append(_quant(op, (70, 48), dtype, types[-1], "padded", _spread, "spread"))
        cases += [_quant(op, (1, width), dtype, types[i % len(types)], "dense", _spread, "spread") for width in (1040, 9000, 36000)]
    for to in types:
        cases += [_quant(op, (40, width), torch.float32, to, "dense", _borders(NAMES[to]), "borders") for width in (64, 600)]
        cases.append(_quant(op, (256, 64), torch.bfloat16, to, "dense", _every_bfloat16, "every"))
    return cases


def _group_cases() -> list[Case]:
    op, cases = "per_group_quant_fp8", []
    for i, dtype in enumerate(DTYPES):
        for j, group in enumerate((32, 64, 128, 256)):
            for layout in LAYOUTS:
                to = FLOAT8[(i + j) % 3]
                cases.append(_quant(op, (3, 3 * group), dtype, to, layout, _spread, "spread", group))
                cases.append(_quant(op, (1, group), dtype, to, layout, _normal, "normal", group))
            cases.append(_quant(op, (20, 2 * group), dtype, FLOAT8[j % 3], LAYOUTS[j % 2], _special, "special", group))
            cases.append(_quant(op, (9, 17 * group), dtype, FLOAT8[0], LAYOUTS[j % 2], _spread, "spread", group))
        cases += [_quant(op, shape, dtype, FLOAT8[0], "dense", _normal, "empty", 128) for shape in ((0, 256), (3, 0))]
    for to in FLOAT8:
        cases += [_quant(op, (30, 4 * group), torch.float32, to, "dense", _borders(NAMES[to]), "borders", group) for group in (32, 128)]
        cases += [_quant(op, (256, 64), torch.bfloat16, to, "dense", _every_bfloat16, "every", group) for group in (32, 64)]
    return cases


def _given_cases() -> list[Case]:
    cases = []
    for i, dtype in enumerate(DTYPES):
        for j, width in enumerate(WIDTHS):
            cases.append(_given((3, width), dtype, FLOAT8[(i + j) % 3], LAYOUTS[(i + j // 2) % 3], _normal, 0.013, "normal"))
        cases += [_given((2, width), dtype, FLOAT8[(i + j) % 3], LAYOUTS[j % 2], _spread, 1.7, "spread") for j, width in enumerate(LONG)]
        cases += [_given(shape, dtype, FLOAT8[0], "dense", _normal, 1.0, "empty") for shape in ((0, 64), (3, 0))]
        for to in FLOAT8:
            cases += [_given((20, width), dtype, to, "ragged", _special, scale, "special") for width, scale in ((33, 1.0), (96, 3e-39))]
    for to in FLOAT8:
        # the ends of where products stand for quotients, and beyond them
        for scale in (1.0, 0.3, 7e-5, 2.0**-80, 1.9 * 2.0**-81, 1.37 * 2.0**-118, 2.0**-126, 2.0**80, 1.1 * 2.0**80, 1e38):
            cases.append(_given((128, 64), torch.bfloat16, to, "dense", _every_bfloat16, scale, "every"))
            cases.append(_given((40, 40), torch.float32, to, "dense", _spread, scale, "spread"))
            cases.append(
                _given((40, 96), torch.float32, to, "dense", lambda *a, to=to, scale=scale: _around(NAMES[to], scale, *a), scale, "borders")
            )
    return cases


def _around(name: str, scale: float, inputs: Inputs, tokens: int, width: int) -> Tensor:
    """What a given scale divides to rounding borders and the float32 numbers beside these."""
    rng = np.random.default_rng(int(torch.randint(0, 2**31, (), generator=inputs.generator)))
    with np.errstate(over="ignore"):
        x = (rng.choice(_middles(name), (tokens, width)) * float(np.float32(scale))).astype(np.float32)
    x = (x.view(np.int32) + rng.integers(-2, 3, x.shape, dtype=np.int32)).view(np.float32)
    return torch.from_numpy(np.where(np.isnan(x), np.float32("inf"), x) * rng.choice(np.array([1, -1], dtype=np.float32), x.shape))


def all_cases() -> list[Case]:
    return (
        _given_cases() + _token_cases("per_token_quant_fp8", FLOAT8) + _token_cases("per_token_quant_int8", (torch.int8,)) + _group_cases()
    )
