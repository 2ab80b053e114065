"""Attention and routing problems drawn by hypothesis beside the fixed grids: every option combined with every other, small sizes, the
same examples on every run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill_kernels import dispatch
from tests.kernels.conformance.cases_attention import FLOAT8, Setting, attention_case
from tests.kernels.conformance.cases_mla import MlaSetting, mla_decode_case
from tests.kernels.conformance.cases_moe import align_case, topk_case
from tests.kernels.conformance.harness import DTYPES, Case, run_case

OPS = ("decode_attention", "extend_attention", "ragged_attention", "mla_decode")
LENGTHS = st.sampled_from([0, 1, 2, 15, 16, 17, 33, 64, 255, 256, 257, 290])
WIDTHS = st.sampled_from([8, 16, 24, 64, 72, 80, 96, 112, 128, 192])
BOUNDED = settings(derandomize=True, deadline=None, max_examples=40)


def hold_to_the_definition(case: Case, seed: int) -> None:
    """Every family that takes the case's key."""
    for family in dispatch.families_of(case.op):
        if dispatch.why_not(case.op, family, case.key) is None:
            run_case(case, dispatch.overload(case.op, family), seed, family)


@st.composite
def requests(draw: Any, several_rows: bool) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """KV lengths and query lengths; now and then more rows than keys."""
    kv_lens = tuple(draw(st.lists(LENGTHS, max_size=4)))
    if not several_rows:
        return kv_lens, None
    return kv_lens, tuple(draw(st.integers(0, min(length, 20) + 1)) for length in kv_lens)


@st.composite
def attention(draw: Any, op: str) -> Setting:
    kv_lens, q_lens = draw(requests(op != "decode_attention"))
    num_kv_heads, ratio = draw(st.sampled_from([(1, 1), (1, 3), (2, 2), (2, 5), (3, 1), (1, 7), (1, 16), (1, 24)]))
    options: dict[str, Any] = {
        "layout": draw(st.sampled_from(["dense", "packed", "ragged"])),
        "logit_cap": draw(st.sampled_from([0.0, 0.0, 5.0, 30.0])),
        "window_left": draw(st.sampled_from([-1, -1, 0, 1, 16, 200, 256])),
        "sinks": draw(st.booleans()),
        "with_lse": draw(st.booleans()),
        "q_scale": draw(st.sampled_from([1.0, 3.0])),
    }
    if op == "ragged_attention":
        options["ragged"] = True
    else:
        options["holes"] = draw(st.booleans())
        options["k_scale"], options["v_scale"] = draw(st.sampled_from([(1.0, 1.0), (0.37, 2.5)]))
        options["cache_dtype"] = draw(st.sampled_from([None, None, *FLOAT8]))
    if op == "decode_attention":
        options["plan_workers"] = draw(st.sampled_from([0, 1, 3]))
        options["plan_room"] = draw(st.sampled_from([0, 2])) if options["plan_workers"] else 0
        options["plan_window"] = options["plan_workers"] > 0 and draw(st.booleans())
    else:
        options["causal"] = draw(st.booleans())
        options["mask"] = draw(st.sampled_from(["", "", "mask", "maskrows"])) if kv_lens else ""
    dims = (draw(WIDTHS), draw(WIDTHS))
    return Setting(kv_lens, q_lens, (num_kv_heads * ratio, num_kv_heads), dims, draw(st.sampled_from(DTYPES)), **options)


@st.composite
def latent(draw: Any) -> MlaSetting:
    kv_lens, q_lens = draw(requests(draw(st.booleans())))
    workers = draw(st.sampled_from([0, 1, 3]))
    return MlaSetting(
        kv_lens,
        q_lens,
        draw(st.sampled_from([1, 3, 16, 40])),
        draw(st.sampled_from([(512, 64), (64, 16), (128, 24)])),
        draw(st.sampled_from(DTYPES)),
        draw(st.sampled_from([None, None, *FLOAT8])),
        draw(st.sampled_from(["dense", "packed", "ragged"])),
        kv_scale=draw(st.sampled_from([1.0, 0.37])),
        holes=draw(st.booleans()),
        plan_workers=workers,
        plan_room=draw(st.sampled_from([0, 2])) if workers else 0,
        with_lse=draw(st.booleans()),
    )


@pytest.mark.parametrize("op", OPS)
def test_drawn_problems_agree_with_the_definition(op: str) -> None:
    problems = latent() if op == "mla_decode" else attention(op)

    @BOUNDED
    @given(setting=problems, seed=st.integers(0, 2**31 - 1))
    def hold(setting: Any, seed: int) -> None:
        hold_to_the_definition(mla_decode_case(setting) if op == "mla_decode" else attention_case(setting), seed)

    hold()


@st.composite
def partial_states(draw: Any) -> torch.Tensor:
    """LSEs [N, T, H] with empty states, ties and far ones."""
    shape = (draw(st.integers(0, 6)), draw(st.integers(0, 4)), draw(st.integers(1, 3)))
    values = st.sampled_from([float("-inf"), float("-inf"), 0.0, 1.5, -20.0, 88.0, 700.0, -1e30])
    count = shape[0] * shape[1] * shape[2]
    return torch.tensor(draw(st.lists(values, min_size=count, max_size=count)), dtype=torch.float32).view(shape)


def test_drawn_states_merge_as_defined() -> None:
    from tests.kernels.conformance.cases_attention import _merge_states

    @BOUNDED
    @given(
        partial_states(), st.sampled_from([8, 13, 64]), st.sampled_from(DTYPES), st.sampled_from(["dense", "ragged"]), st.integers(0, 99)
    )
    def hold(lse: torch.Tensor, width: int, dtype: torch.dtype, layout: str, seed: int) -> None:
        hold_to_the_definition(_merge_states("drawn", lse, width, dtype, layout), seed)

    hold()


LOGITS = st.sampled_from([0.0, -0.0, 0.5, 0.75, 1.0, -1.0, 3.0, -20.0, -120.0, 3e38, -3e38, float("inf"), float("-inf"), float("nan")])
BIASES = st.sampled_from([0.0, 0.25, -0.5, 9.0, float("inf"), float("-inf"), float("nan")])


@st.composite
def routing(draw: Any) -> Case:
    """Few different values, so that ties, infinities and NaN meet in every way."""
    op = draw(st.sampled_from(["topk_softmax", "topk_sigmoid", "grouped_topk"]))
    groups, size, tokens = draw(st.integers(1, 6)), draw(st.integers(1, 7)), draw(st.integers(1, 6))
    experts = groups * size
    logits = torch.tensor(draw(st.lists(LOGITS, min_size=tokens * experts, max_size=tokens * experts))).view(tokens, experts)
    biased = op != "topk_softmax" and draw(st.booleans())
    bias = torch.tensor(draw(st.lists(BIASES, min_size=experts, max_size=experts))) if biased else None
    return topk_case(
        op,
        "drawn",
        lambda inputs: logits,
        draw(st.integers(1, min(experts, 32))),
        draw(st.sampled_from(DTYPES)),
        draw(st.sampled_from(["dense", "padded", "ragged"])),
        bias_of=None if bias is None else lambda inputs: bias,
        groups=(groups, draw(st.integers(1, groups))) if op == "grouped_topk" else (1, 1),
        scaling=draw(st.sampled_from([1.0, 2.5])) if op == "grouped_topk" else 1.0,
        sigmoid=op == "topk_sigmoid" or (op == "grouped_topk" and draw(st.booleans())),
        renormalize=draw(st.booleans()),
    )


def test_drawn_routing_agrees_with_the_definition() -> None:
    @settings(BOUNDED, max_examples=300)
    @given(routing(), st.integers(0, 99))
    def hold(case: Case, seed: int) -> None:
        hold_to_the_definition(case, seed)

    hold()


@st.composite
def alignment(draw: Any) -> Case:
    tokens, top_k, experts = draw(st.integers(0, 40)), draw(st.integers(0, 4)), draw(st.integers(1, 9))
    numbers = st.sampled_from([-(2**31), -1, 0, 0, 1, 2, 3, 5, 8, 9, 100, 2**31 - 1])
    ids = torch.tensor(draw(st.lists(numbers, min_size=tokens * top_k, max_size=tokens * top_k)), dtype=torch.int64).view(tokens, top_k)
    table = draw(st.none() | st.lists(numbers, max_size=10))
    return align_case(
        "drawn",
        (tokens, top_k),
        experts,
        draw(st.integers(1, 17)),
        lambda inputs: ids,
        layout=draw(st.sampled_from(["dense", "padded", "ragged"])),
        map_of=None if table is None else lambda inputs: torch.tensor(table, dtype=torch.int64),
        spare=draw(st.integers(0, 2)),
    )


def test_drawn_ids_are_sorted_as_defined() -> None:
    @settings(BOUNDED, max_examples=150)
    @given(alignment(), st.integers(0, 99))
    def hold(case: Case, seed: int) -> None:
        hold_to_the_definition(case, seed)

    hold()
