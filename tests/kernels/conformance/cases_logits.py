"""Cases of the ops on logits and of packed linear layers."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from torch import Tensor

from gristmill_kernels import dispatch
from tests.kernels.conformance import oracle
from tests.kernels.conformance.harness import DTYPES, Call, Case, Inputs, Output, anything, assert_matches, inner, packed, short

NAN, INF = float("nan"), float("inf")


def broken_rows(vocab_size: int) -> Tensor:
    """One row per way in which a distribution can be broken or degenerate."""
    rows = torch.zeros(8, vocab_size)
    rows[0] = NAN
    rows[1, vocab_size // 2] = NAN
    rows[3] = -INF
    rows[3, vocab_size - 1] = 2.0  # one-hot
    rows[4] = -INF
    rows[5, vocab_size // 3] = INF
    rows[6] = -5.0
    rows[6, [0, vocab_size - 1]] = 3.0  # two equal
    rows[7, vocab_size // 4] = -INF
    return rows


def _greedy(name: str, rows: Tensor | None, vocab_size: int, dtype: torch.dtype, layout: str) -> Case:
    def build(inputs: Inputs) -> Call:
        logits = inputs.normal(6, vocab_size, dtype=dtype, layout=layout) if rows is None else inputs.of(rows, layout, dtype)
        out = inputs.blank((logits.shape[0],), torch.int32)
        expected = torch.tensor([oracle.greedy(row) for row in logits.double().numpy()], dtype=torch.int64)
        return Call((out, logits), [Output(out, expected, None)])

    return Case("greedy", f"{name}-{vocab_size}-{short(dtype)}-{layout}", build, ("cpu", dtype))


def lonely_rows() -> list[Tensor]:
    """One row per call, which an implementation may cut into pieces: the best and its equal late, a NaN late, nothing but -inf."""
    rows = [torch.linspace(-1, 1, size).sin()[None] for size in (4096, 5001, 70_001)]
    rows[1][0, [4200, 4990]] = 7.0
    rows += [rows[1].clone(), torch.full((1, 4500), -INF)]
    rows[3][0, 4999] = NAN
    return rows


def greedy_cases() -> list[Case]:
    cases = [
        _greedy("random", None, size, dtype, layout)
        for size in (1, 7, 33, 600, 5003)
        for dtype, layout in zip(DTYPES, ("dense", "padded", "ragged"))
    ]
    cases += [_greedy("broken", broken_rows(size), size, dtype, "padded") for size in (1, 67, 1000) for dtype in DTYPES]
    ties = torch.zeros(5, 300).scatter(1, torch.tensor([[299, 298], [17, 16], [0, 299], [8, 200], [31, 32]]), 1.0)
    return (
        cases
        + [_greedy("ties", ties, 300, dtype, "dense") for dtype in DTYPES]
        + [_greedy(f"alone-{number}", row, row.shape[1], dtype, "ragged") for dtype in DTYPES for number, row in enumerate(lonely_rows())]
        + [_greedy("none", torch.zeros(0, 9), 9, torch.float32, "dense")]
    )


def _sample(name: str, logits_of, vocab_size: int, dtype: torch.dtype, parameters: dict[str, float], layout: str = "dense") -> Case:
    """`parameters` overrides the random choice of each sampling parameter by one value for all rows."""

    def build(inputs: Inputs) -> Call:
        logits = inputs.of(logits_of(inputs), layout, dtype)
        batch = logits.shape[0]
        temperature = inputs.of(inputs.uniform(batch, low=0.2, high=2.0))
        top_k, positions = inputs.ints(0, vocab_size + 2, batch), inputs.ints(0, 2**31 - 1, batch)
        top_p, min_p = inputs.of(inputs.uniform(batch, low=0.3, high=1.2)), inputs.of(inputs.uniform(batch, low=-0.05, high=0.3))
        seeds = inputs.ints(-(2**62), 2**62, batch, dtype=torch.int64)
        named = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "positions": positions}
        for parameter, value in parameters.items():
            named[parameter].fill_(value)
        out = inputs.blank((batch,), torch.int32)
        rows = zip(logits.double().numpy(), *(x.tolist() for x in (temperature, top_k, top_p, min_p, seeds, positions)))
        acceptable = [oracle.acceptable_draws(*row) for row in rows]

        def verify() -> None:
            for row, (got, right) in enumerate(zip(out.tolist(), acceptable)):
                assert got in right, f"sample: row {row} gave {got}, but only {sorted(right)[:8]} is right"

        args = (out, logits, temperature, top_k, top_p, min_p, seeds, positions)
        return Call(args, [anything(out)], verify)

    label = "-".join([name, str(vocab_size), short(dtype), layout, *(f"{key}{value:g}" for key, value in parameters.items())])
    return Case("sample", label, build, ("cpu", dtype))


def sample_cases() -> list[Case]:
    def random_rows(size: int, batch: int = 12):
        return lambda inputs: torch.randn(batch, size, generator=inputs.generator) * 3

    cases = [
        _sample("random", random_rows(size), size, dtype, {}, layout)
        for size in (1, 5, 67, 1001)
        for dtype, layout in zip(DTYPES, ("dense", "padded", "ragged"))
    ]
    off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    single = [
        {},
        {"top_k": 1},
        {"top_k": 5},
        {"top_k": 2**30},
        {"top_p": 0.0},
        {"top_p": 1e-9},
        {"top_p": 0.6},
        {"min_p": 0.2},
        {"min_p": 1.0},
        {"min_p": 3.0},
    ]
    single += [
        {"top_p": NAN},
        {"min_p": NAN},
        {"temperature": 0.0},
        {"temperature": -1.0},
        {"temperature": NAN},
        {"temperature": INF},
        {"temperature": 1e-30},
    ]
    single += [{"positions": 0}, {"top_k": -1}, {"temperature": 1.0, "top_k": 20, "top_p": 0.8, "min_p": 0.05}]
    for parameters, dtype in itertools.product(single, DTYPES[:2]):
        cases.append(_sample("one", random_rows(203), 203, dtype, {**off, **parameters}))
    for parameters in single:
        cases.append(_sample("broken", lambda inputs: broken_rows(67), 67, torch.float32, {**off, **parameters}))
        cases.append(_sample("equal", lambda inputs: torch.zeros(4, 50), 50, torch.float32, {**off, **parameters}))
    cases.append(_sample("broken", lambda inputs: broken_rows(1), 1, torch.float32, off))
    cases.append(_sample("large", random_rows(50_257, 3), 50_257, torch.float32, {"temperature": 1.0, "top_p": 0.9}))
    cases.append(_sample("large", random_rows(50_257, 2), 50_257, torch.bfloat16, {"temperature": 1.0, "top_k": 40}))
    # One row per call, which an implementation may cut into pieces. In `steps` equals cross their borders and that of top-p.
    steps = torch.arange(6001).remainder(7).float()[None]
    lonely = [
        {},
        {"top_p": 0.7},
        {"top_p": 0.0},
        {"min_p": 0.1},
        {"top_p": 0.9, "min_p": 0.01},
        {"top_k": 30},
        {"temperature": 0.0},
        {"temperature": INF, "top_p": 0.5},
    ]
    for parameters, dtype in itertools.product(lonely, DTYPES):
        cases.append(_sample("alone", random_rows(5003, 1), 5003, dtype, {**off, **parameters}))
        cases.append(_sample("steps", lambda inputs: steps, 6001, dtype, {**off, "temperature": 1.5, **parameters}))
    # Nearly as likely one as the other: who stays decides who is drawn.
    for share in (0.2, 0.35, 0.5, 0.65, 0.8, 0.95):
        cases.append(_sample("flat", lambda inputs: steps * 0.05, 6001, torch.float32, {**off, "temperature": 1.0, "top_p": share}))
    cases.append(_sample("alone-broken", lambda inputs: lonely_rows()[3], 5001, torch.float32, {**off, "top_p": 0.5}))
    cases.append(_sample("alone-empty", lambda inputs: lonely_rows()[4], 4500, torch.float32, {**off, "top_p": 0.5}))
    # More equals than a short list of the best can hold: an infinite temperature makes all alike.
    for parameters in ({"top_k": 9}, {"top_k": 700}, {"top_p": 0.5}, {"top_k": 300, "top_p": 0.5}, {"min_p": 0.9}):
        cases.append(_sample("alike", random_rows(5003, 3), 5003, torch.float32, {**off, "temperature": INF, **parameters}))
    # Scores are equal where the difference from a large logit rounds; 0 and -0 are equal as they are.
    near_zero = torch.full((2, 90), -3.0)
    near_zero[0, [40, 41, 42, 43]], near_zero[1, [7, 8]] = torch.tensor([-0.0, 0.0, 1e-30, 1e-25]), torch.tensor([-0.0, 0.0])
    near_zero[0, 80] = 1.0
    for k in (1, 2, 3, 4):
        cases.append(_sample(f"near-zero-{k}", lambda inputs: near_zero, 90, torch.float32, {**off, "temperature": 1.0, "top_k": k}))
    # Coarse bfloat16 logits tie often: the k-th place is then shared, and the lowest ids win it.
    cases.append(
        _sample(
            "tied",
            lambda inputs: torch.randint(0, 4, (12, 90), generator=inputs.generator).float(),
            90,
            torch.bfloat16,
            {**off, "top_k": 12},
        )
    )
    return [*cases, _sample("none", lambda inputs: torch.zeros(0, 9), 9, torch.float32, off)]


def _apply_logit_bias(dtype: torch.dtype, layout: str, ids: list[list[int]], special: bool = False) -> Case:
    vocab_size = 70

    def build(inputs: Inputs) -> Call:
        logits = inputs.normal(len(ids), vocab_size, dtype=dtype, layout=layout)
        if special:
            logits[0, 3] = -INF
        flat = [token for row in ids for token in row]
        values = inputs.normal(len(flat), scale=20.0)
        if special:
            values[1] = -INF
        expected, magnitude = logits.double().clone(), torch.zeros(logits.shape, dtype=torch.float64)
        taken = 0
        for row, tokens in enumerate(ids):
            for token in tokens:
                if 0 <= token < vocab_size:
                    expected[row, token] += values[taken].double()
                    magnitude[row, token] += values[taken].double().abs() if values[taken].isfinite() else 0.0
                taken += 1
        finite = expected.masked_fill(expected.isinf(), 0.0)
        # Only an id named twice is rounded more than once.
        tolerance = torch.where(magnitude > 0, inner(finite, magnitude, dtype, eps=2.0**-23 if dtype is torch.float32 else 2.0**-9), 0.0)
        indptr = inputs.int_list(np.cumsum([0, *map(len, ids)]).tolist())
        return Call((logits, indptr, inputs.int_list(flat), values), [Output(logits, expected, tolerance)])

    return Case("apply_logit_bias", f"{len(ids)}rows-{short(dtype)}-{layout}{'-special' * special}", build, ("cpu", dtype))


def _apply_penalties(dtype: torch.dtype, layout: str, neutral: bool, vocab_size: int) -> Case:
    def build(inputs: Inputs) -> Call:
        batch = 5
        logits = inputs.normal(batch, vocab_size, dtype=dtype, layout=layout, scale=4.0)
        prompt_mask = inputs.of(inputs.uniform(batch, vocab_size) < 0.3, layout)
        counts = inputs.of((inputs.uniform(batch, vocab_size, low=-4, high=4).clamp(min=0)).int(), layout)
        presence, frequency = inputs.normal(batch), inputs.normal(batch)
        repetition = inputs.of(inputs.uniform(batch, low=0.5, high=2.0))
        if neutral:
            presence.zero_(), frequency.zero_(), repetition.fill_(1.0)
        wide, count = logits.double(), counts.double()
        expected = wide.clone()
        for row, token in itertools.product(range(batch), range(vocab_size)):
            if prompt_mask[row, token] or counts[row, token] > 0:
                factor = repetition[row].double()
                expected[row, token] = wide[row, token] / factor if wide[row, token] > 0 else wide[row, token] * factor
        magnitude = expected.abs() + frequency.double().abs()[:, None] * count + presence.double().abs()[:, None] * (count > 0)
        expected = expected - frequency.double()[:, None] * count - presence.double()[:, None] * (count > 0)
        tolerance = None if neutral else inner(expected, magnitude, dtype, eps=2.0**-22)
        args = (logits, prompt_mask, counts, presence, frequency, repetition)
        return Call(args, [Output(logits, expected, tolerance)])

    return Case("apply_penalties", f"{vocab_size}-{short(dtype)}-{layout}{'-neutral' * neutral}", build, ("cpu", dtype))


def _apply_token_bitmask(vocab_size: int, dtype: torch.dtype, layout: str, kind: str) -> Case:
    def build(inputs: Inputs) -> Call:
        batch, words = 4, -(-vocab_size // 32)
        logits = inputs.normal(batch, vocab_size, dtype=dtype, layout=layout)
        logits[1, 0] = NAN  # masked or kept like any other
        bitmask = inputs.of(inputs.ints(-(2**31), 2**31 - 1, batch, words), layout)
        if kind != "random":
            bitmask.fill_(-1 if kind == "all" else 0)
        expected = logits.double().clone()
        for row, token in itertools.product(range(batch), range(vocab_size)):
            if not int(bitmask[row, token // 32]) & 0xFFFFFFFF & 1 << token % 32:
                expected[row, token] = -INF
        return Call((logits, bitmask), [Output(logits, expected, None)])

    return Case("apply_token_bitmask", f"{vocab_size}-{short(dtype)}-{layout}-{kind}", build, ("cpu", dtype))


def logit_change_cases() -> list[Case]:
    ids = [[3, 69, 0], [], [5, 70, -1, 5, 700_000], [1]]
    cases = [_apply_logit_bias(dtype, layout, ids) for dtype, layout in zip(DTYPES, ("dense", "padded", "ragged"))]
    cases += [
        _apply_logit_bias(torch.float32, "dense", ids, special=True),
        # a token that is named by distant entries of a long list, and lists of one length with different tokens
        _apply_logit_bias(torch.float32, "dense", [[5, *[-1] * 254, 5, 5, 7], [*range(70), *[-1] * 250, *range(0, 70, 2)], [9] * 3]),
        _apply_logit_bias(torch.float32, "dense", []),
        _apply_logit_bias(torch.float32, "dense", [[], []]),
    ]
    cases += [_apply_penalties(dtype, layout, False, 67) for dtype, layout in zip(DTYPES, ("dense", "padded", "ragged"))]
    cases += [
        _apply_token_bitmask(size, dtype, layout, "random")
        for size in (1, 64, 99, 1003)
        for dtype, layout in zip(DTYPES, ("dense", "padded", "ragged"))
    ]
    cases += [_apply_token_bitmask(70, torch.bfloat16, "dense", kind) for kind in ("all", "none")]
    return cases + [_apply_penalties(torch.bfloat16, "dense", True, 40), _apply_penalties(torch.float32, "ragged", False, 1)]


def _packed_linear(m: int, n: int, k: int, dtype: torch.dtype, bias: bool, layout: str, nan_row: bool = False) -> Case:
    def build(inputs: Inputs) -> Call:
        weight = inputs.normal(n, k, dtype=dtype)
        data = inputs.of(packed(weight, inputs.family))
        x = inputs.normal(m, k, dtype=dtype, layout=layout)
        if nan_row:
            x[m // 2] = NAN
        b = inputs.normal(n, dtype=dtype) if bias else None
        expected = x.double() @ weight.double().T + (0 if b is None else b.double())
        magnitude = x.double().abs() @ weight.double().abs().T + (0 if b is None else b.double().abs())
        out = inputs.blank((m, n), dtype, layout)
        tolerance = inner(expected.nan_to_num(), magnitude.nan_to_num(), dtype)
        return Call((out, x, data, b, n, k), [Output(out, expected, tolerance)])

    return Case("packed_linear", f"{m}x{n}x{k}-{short(dtype)}-{layout}{'-bias' * bias}{'-nanrow' * nan_row}", build, ("cpu", dtype))


def _pack_weight(n: int, k: int, dtype: torch.dtype, layout: str) -> Case:
    """The layout is the family's own: it is read back through the family's packed_linear on the unit matrix."""

    def build(inputs: Inputs) -> Call:
        weight = inputs.normal(n, k, dtype=dtype, layout=layout)
        out = inputs.blank((packed(weight, inputs.family).numel(),), dtype)
        result = torch.empty(k, n, dtype=dtype)

        def verify() -> None:
            dispatch.overload("packed_linear", inputs.family)(result, torch.eye(k, dtype=dtype), out, None, n, k)
            assert_matches(result.T, weight, None, "pack_weight")

        return Call((out, weight), [anything(out)], verify)

    return Case("pack_weight", f"{n}x{k}-{short(dtype)}-{layout}", build, ("cpu", dtype))


def linear_cases() -> list[Case]:
    dtypes = (torch.float32, torch.bfloat16)
    shapes = [(1, 64, 64), (1, 1, 1), (3, 17, 33), (16, 96, 576), (17, 48, 129), (2, 600, 64), (65, 40, 200), (0, 8, 8), (5, 9, 1536)]
    cases = [
        _packed_linear(*shape, dtype, number % 2 == 1, layout)
        for number, shape in enumerate(shapes)
        for dtype, layout in itertools.product(dtypes, ("dense", "ragged"))
    ]
    cases += [_packed_linear(6, 50, 70, dtype, True, "padded", nan_row=True) for dtype in dtypes]
    cases += [_packed_linear(4, 20, 30, torch.float16, True, "dense")]
    return cases + [
        _pack_weight(n, k, dtype, layout)
        for (n, k), dtype, layout in itertools.product([(1, 1), (17, 33), (64, 64), (100, 6)], dtypes, ("dense", "padded"))
    ]


def all_cases() -> list[Case]:
    return greedy_cases() + sample_cases() + logit_change_cases() + linear_cases()
