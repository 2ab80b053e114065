"""A model with sliding-window layers through the whole engine: with a window pool of its own, greedy ids equal transformers' solo run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from gristmill import Engine
from tests.support.idle import idle_stats
from tests.support.oracle import GreedyRun, check_same, greedy
from tests.support.tiny_model import make_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

N_TOKENS = 40
WINDOW = 24


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    extra = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1, "max_position_embeddings": 2048}
    return make_tiny_model(tmp_path_factory.mktemp("window") / "M", "qwen2", extra_config=extra)


@pytest.fixture(scope="module")
def runs(model: Path) -> list[GreedyRun]:
    from transformers import AutoModelForCausalLM

    oracle = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    rng = np.random.default_rng(11)
    shared = rng.integers(3, 600, 90).tolist()
    prompts = [shared[: 10 + 7 * i] + rng.integers(3, 600, 1 + 3 * i).tolist() for i in range(12)]
    prompts += [rng.integers(3, 600, n).tolist() for n in (1, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, 700, 1100)]
    return [greedy(oracle, prompt, N_TOKENS) for prompt in prompts]


def check_all(engine: Engine, runs: list[GreedyRun]) -> list[int]:
    """All prompts at once; returns how many tokens of each were cached."""
    prompts = [list(run.prompt) for run in runs]
    outputs = engine.generate(prompts, temperature=0, max_tokens=N_TOKENS, ignore_eos=True, logprobs=2)
    compared = 0
    for run, output in zip(runs, outputs):
        compared += check_same(run, output.ids, [{top.id: top.logprob for top in entry.top} for entry in output.logprobs])
    assert compared > 0.9 * len(runs) * N_TOKENS
    return [output.usage.cached_tokens for output in outputs]


CONFIGS = {
    "all on": {},
    "chunks and pages": {"page_size": 16, "chunk_tokens": 32},
    "no overlap, decode apart": {"overlap": False, "chunk_tokens": 48, "mixed_chunks": False},
    "torch_native": {"attention_backend": "torch_native", "chunk_tokens": 64},
    "no prefix cache": {"radix_cache": False},
}


@pytest.mark.parametrize("options", CONFIGS.values(), ids=CONFIGS.keys())
def test_ids_equal_the_solo_run_and_again_from_the_cache(model: Path, runs: list[GreedyRun], options: dict[str, object]) -> None:
    with Engine(str(model), **{"dtype": "float32", "pool_tokens": 8192, "max_running": 16, "threads": 2, **options}) as engine:
        check_all(engine, runs)
        again = check_all(engine, runs)
        stats = idle_stats(engine)
        assert 0 < stats.window_total < stats.pool_total, "the window pool is smaller: it holds windows, not prompts"
        assert stats.pool_locked == stats.window_locked == 0
        page = int(options.get("page_size", 1))  # type: ignore[call-overload]
        if options.get("radix_cache", True):
            assert again == [(len(run.prompt) - 1) // page * page for run in runs]
        else:
            assert not any(again) and stats.window_free == stats.window_total


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "normal"])
def test_ids_equal_the_solo_run_when_both_pools_are_scarce(model: Path, runs: list[GreedyRun], overlap: bool) -> None:
    short = runs[:17]
    options = {"pool_tokens": 400, "max_running": 12, "chunk_tokens": 32, "overlap": overlap}
    with Engine(str(model), dtype="float32", threads=2, **options) as engine:
        check_all(engine, short)
        check_all(engine, short)
        stats = engine.stats
        assert stats.retractions > 0
        assert stats.pool_locked == stats.window_locked == 0
