"""With a GPU, the conformance suite of every family on it, the rows of skinny_linear, and routing in a graph; without one, skipped."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gristmill_kernels import align_block_size, dispatch, topk_softmax
from tests.kernels import hostile_indices, skinny_rows

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("family", ["native", "triton"])
def test_conformance(family: str, seed: int, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "tests.gpu.conformance",
        "--family",
        family,
        "--seed",
        str(seed),
        "--json",
        str(tmp_path / "report.json"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_row_of_skinny_linear_stands_alone(seed: int) -> None:
    reason = dispatch.why_not("skinny_linear", "native", ("cuda", torch.bfloat16))
    if reason is not None:
        pytest.skip(reason)
    with dispatch.using("native"):
        assert skinny_rows.check(seed, "cuda")


@pytest.mark.parametrize("family", ["native", "triton"])
def test_index_ops_make_of_nonsense_what_the_model_says(family: str, seed: int) -> None:
    reason = dispatch.why_not("kv_indices", family, ("cuda",))
    if reason is not None:
        pytest.skip(reason)
    assert hostile_indices.check(lambda name, _: dispatch.overload(name, family), seed, 40, "cuda")


@pytest.mark.parametrize("tokens", [64, 700], ids=["one launch sorts", "two launches sort"])
def test_routing_is_captured_and_replayed_with_other_logits(tokens: int, seed: int) -> None:
    reason = dispatch.why_not("align_block_size", "native", ("cuda",))
    if reason is not None:
        pytest.skip(reason)
    source, logits = torch.Generator().manual_seed(seed), torch.zeros(tokens, 64, dtype=torch.bfloat16, device="cuda")

    def route(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weights, ids = topk_softmax(rows, 4, True)
        return weights, ids, *align_block_size(ids, 64, 16)

    with dispatch.using("native"):
        route(logits)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            weights, *lists = route(logits)
    for _ in range(3):
        rows = torch.randn(tokens, 64, generator=source).bfloat16()
        logits.copy_(rows)
        graph.replay()
        with dispatch.using("reference"):
            expected, *expected_lists = route(rows)
        torch.testing.assert_close(weights.cpu(), expected, rtol=1e-5, atol=0)
        assert all(torch.equal(one.cpu(), other) for one, other in zip(lists, expected_lists))
