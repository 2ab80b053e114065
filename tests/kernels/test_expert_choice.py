"""The choice of experts over the whole grid of odd rows: the bias picks, the raw score weighs; tiny and broken scores."""

from __future__ import annotations

import itertools

import pytest
import torch

import gristmill_kernels as gk
from gristmill_kernels import dispatch
from tests.kernels.conformance.oracle_moe import Row

NAN, INF = float("nan"), float("inf")
EXPERTS, GROUPS, SCALING = 8, 2, 2.5
ROWS = {
    "ordinary": [0.3, -1.0, 2.0, 0.5, -0.25, 1.5, -3.0, 0.0],
    "tiny": [-120.0] * EXPERTS,
    "tiny and different": [-120.0 - e for e in range(EXPERTS)],
    "one NaN": [0.3, -1.0, NAN, 0.5, -0.25, 1.5, -3.0, 0.0],
    "the favoured one NaN": [NAN, -1.0, 2.0, 0.5, -0.25, 1.5, -3.0, 0.0],
    "one +inf": [0.3, -1.0, 2.0, 0.5, -0.25, INF, -3.0, 0.0],
    "NaN and +inf": [NAN, -1.0, 2.0, 0.5, INF, 1.5, INF, 0.0],
    "all equal": [0.75] * EXPERTS,
    "all NaN": [NAN] * EXPERTS,
}
BIASES = {"no bias": None, "one favoured": [9.0] + [0.0] * (EXPERTS - 1), "one NaN": [0.0, NAN] + [0.1] * (EXPERTS - 2)}
FAMILIES = dispatch.families_of("grouped_topk")


def choose(family: str, logits: torch.Tensor, bias: torch.Tensor | None, top_k: int, kept: int, scoring: str, renormalize: bool):
    with dispatch.using(family):
        return gk.grouped_topk(
            logits, top_k, num_groups=GROUPS, topk_groups=kept, scoring=scoring, renormalize=renormalize, bias=bias, scaling=SCALING
        )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("scoring", "bias_name"), [*itertools.product(("softmax", "sigmoid"), BIASES)])
def test_the_bias_picks_and_the_raw_score_weighs(family: str, bias_dtype: torch.dtype, scoring: str, bias_name: str) -> None:
    logits, values = torch.tensor(list(ROWS.values())), BIASES[bias_name]
    bias = None if values is None else torch.tensor(values, dtype=bias_dtype)
    wide = None if bias is None else bias.double().tolist()
    for top_k, kept, renormalize in itertools.product((2, EXPERTS), (1, 2), (True, False)):
        weights, ids = choose(family, logits, bias, top_k, kept, scoring, renormalize)
        for name, row, row_ids, row_weights in zip(ROWS, logits.double().tolist(), ids.tolist(), weights.tolist()):
            what = f"{name}, {bias_name}, top {top_k}, {kept} groups, renormalize={renormalize}"
            right = Row(row, wide, scoring == "sigmoid", GROUPS, kept)
            assert right.allows(row_ids), f"{what}: chose {row_ids}"
            assert all(e < 0 or row[e] == row[e] for e in row_ids), f"{what}: a NaN was chosen"
            for got, (want, slack) in zip(row_weights, right.weights(row_ids, renormalize, SCALING)):
                assert abs(got - want) <= slack, f"{what}: {row_weights}"
            if renormalize:
                want = SCALING if max(row_ids) >= 0 else 0.0
                assert sum(row_weights) == pytest.approx(want, rel=1e-6), f"{what}: the weights sum to {sum(row_weights)}"


@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_scores_weigh_alike_when_they_are(family: str) -> None:
    weights, ids = choose(family, torch.tensor([ROWS["tiny"]]), None, 2, 1, "sigmoid", True)
    assert ids.tolist() == [[0, 1]] and weights.tolist() == [[SCALING / 2, SCALING / 2]]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_a_row_stands_alone(family: str, scoring: str) -> None:
    logits, bias = torch.tensor(list(ROWS.values())), torch.tensor(BIASES["one favoured"])
    weights, ids = choose(family, logits, bias, 3, 2, scoring, False)
    for t in range(len(logits)):
        alone = choose(family, logits[t : t + 1], bias, 3, 2, scoring, False)
        assert torch.equal(alone[0], weights[t : t + 1]) and torch.equal(alone[1], ids[t : t + 1])
