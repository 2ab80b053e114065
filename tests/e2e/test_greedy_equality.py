"""SmolLM2-135M through the whole engine: greedy ids equal transformers' solo run on the same float32 weights, whatever is switched on.

Each run also asserts that what it is about really happened: cached tokens, chunks, retractions, preemptions, evictions.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from gristmill import Engine
from gristmill.catalogue import resolve_model
from tests.support.idle import idle_stats
from tests.support.oracle import GreedyRun, check_same, greedy, load_gguf_oracle
from tests.support.prompts import PROMPTS

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

N_TOKENS = 64


@pytest.fixture(scope="module")
def model_path() -> Path:
    return Path(resolve_model("smollm2-135m").path)


@pytest.fixture(scope="module")
def oracle(model_path: Path) -> Any:
    return load_gguf_oracle(model_path)


@pytest.fixture(scope="module")
def runs(model_path: Path, oracle: Any) -> list[GreedyRun]:
    from gristmill.tokenizer.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(model_path)
    return [greedy(oracle, tokenizer.encode(prompt), N_TOKENS) for prompt in PROMPTS]


def make_engine(model_path: Path, **options) -> Engine:
    return Engine(str(model_path), **{"dtype": "float32", "pool_tokens": 8192, "max_running": 32, "chunk_tokens": 0, **options})


def generate(engine: Engine, runs: list[GreedyRun], **options):
    prompts = [list(run.prompt) for run in runs]
    return engine.generate(prompts, temperature=0, max_tokens=N_TOKENS, ignore_eos=True, logprobs=2, **options)


def check_all(runs: list[GreedyRun], outputs) -> int:
    assert len(outputs) == len(runs)
    compared = 0
    for number, (run, output) in enumerate(zip(runs, outputs)):
        assert len(output.ids) == N_TOKENS and output.finish_reason == "length"
        alternatives = [{top.id: top.logprob for top in entry.top} for entry in output.logprobs]
        try:
            compared += check_same(run, output.ids, alternatives)
        except AssertionError as error:
            raise AssertionError(f"prompt {number}: {error}") from error
    assert compared > 0.9 * len(runs) * N_TOKENS, f"only {compared} tokens before near ties"
    return compared


CONFIGS = {
    "all on, 24 at once": {},
    "no overlap": {"overlap": False},
    "page size 16": {"page_size": 16},
    "chunks of 16": {"chunk_tokens": 16},
    "chunks of 16, decode apart": {"chunk_tokens": 16, "mixed_chunks": False},
    "pages, chunks, no overlap": {"page_size": 16, "chunk_tokens": 32, "overlap": False},
    "torch_native": {"attention_backend": "torch_native"},
}


@pytest.mark.parametrize("options", CONFIGS.values(), ids=CONFIGS.keys())
def test_ids_equal_the_solo_run_and_again_from_the_cache(options, model_path, runs):
    with make_engine(model_path, **options) as engine:
        check_all(runs, generate(engine, runs))
        before = idle_stats(engine)
        assert before.running == before.waiting == before.pool_locked == 0
        if options.get("chunk_tokens"):
            assert before.chunks >= 5
        again = generate(engine, runs)
        check_all(runs, again)
        assert engine.stats.cached_tokens > before.cached_tokens
        page = options.get("page_size", 1)
        for run, output in zip(runs, again):
            assert output.usage.cached_tokens == (len(run.prompt) - 1) // page * page


def test_ids_equal_the_solo_run_without_a_prefix_cache(model_path, runs):
    with make_engine(model_path, radix_cache=False) as engine:
        check_all(runs, generate(engine, runs))
        check_all(runs[:4], generate(engine, runs[:4]))
        stats = idle_stats(engine)
        assert stats.cached_tokens == 0 and stats.pool_free == stats.pool_total


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "normal"])
def test_ids_equal_the_solo_run_when_requests_are_retracted(overlap, model_path, runs):
    longest = max(len(run.prompt) for run in runs) + N_TOKENS
    with make_engine(model_path, pool_tokens=4 * longest, overlap=overlap, chunk_tokens=32) as engine:
        check_all(runs, generate(engine, runs))
        stats = idle_stats(engine)
        assert stats.retractions > 0, stats
        assert stats.pool_free + stats.pool_evictable == stats.pool_total and stats.pool_locked == 0


PENALTIES = {
    "repetition": {"repetition": 1.3},
    "frequency": {"frequency": 0.8},
    "presence and repetition": {"presence": 1.0, "repetition": 1.1},
}


@pytest.mark.parametrize("penalties", PENALTIES.values(), ids=PENALTIES.keys())
def test_ids_equal_the_solo_run_with_penalties_over_retractions(penalties, oracle, model_path, runs):
    some = [greedy(oracle, run.prompt, 40, **penalties) for run in runs[:8]]
    assert sum(run.ids != plain.ids[:40] for run, plain in zip(some, runs)) >= 5, "the penalties change hardly any output"
    longest = max(len(run.prompt) for run in some) + 40
    with make_engine(model_path, pool_tokens=3 * longest, chunk_tokens=32) as engine:
        sampling = {f"{name}_penalty": value for name, value in penalties.items()}
        outputs = engine.generate([list(run.prompt) for run in some], temperature=0, max_tokens=40, ignore_eos=True, **sampling)
        compared = sum(check_same(run, output.ids) for run, output in zip(some, outputs))
        assert compared > 0.8 * 40 * len(some)
        assert engine.stats.retractions > 0, "counts were never rebuilt"


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "normal"])
def test_ids_equal_the_solo_run_when_priorities_preempt(overlap, model_path, runs):
    with make_engine(model_path, max_running=4, overlap=overlap, chunk_tokens=32, preempt_threshold=10) as engine:
        low: list = []
        thread = threading.Thread(target=lambda: low.extend(generate(engine, runs[:12])))
        thread.start()
        high = []
        for run in runs[12:16]:  # each finds four others running
            while engine.stats.running < 4 and thread.is_alive():
                time.sleep(0.01)
            high += generate(engine, [run], priority=10)
        thread.join()
        check_all(runs[:12], low)
        check_all(runs[12:16], high)
        stats = idle_stats(engine)
        assert stats.preemptions > 0, stats
        assert stats.pool_locked == 0


POLICIES = [("lpm", "lfu"), ("dfs-weight", "slru"), ("shortest-prefill", "priority"), ("hrrn", "fifo")]


@pytest.mark.parametrize("policy, eviction", POLICIES, ids=[f"{policy}, {eviction}" for policy, eviction in POLICIES])
def test_ids_equal_the_solo_run_under_every_policy_while_prefixes_are_evicted(policy, eviction, model_path, runs):
    some = runs[:12]
    longest = max(len(run.prompt) for run in some) + N_TOKENS
    options = {"policy": policy, "eviction_policy": eviction, "pool_tokens": 5 * longest, "max_running": 3, "page_size": 4}
    with make_engine(model_path, chunk_tokens=32, **options) as engine:
        check_all(some, generate(engine, some))
        again = generate(engine, some)
        check_all(some, again)
        cached = [output.usage.cached_tokens for output in again]
        assert sum(cached) > 0, "nothing was kept"
        assert any(n < (len(run.prompt) - 1) // 4 * 4 for run, n in zip(some, cached)), "nothing was evicted"


def test_ids_equal_the_solo_run_one_request_at_a_time(model_path, runs):
    with make_engine(model_path) as engine:
        outputs = [generate(engine, [run])[0] for run in runs[:6]]
        check_all(runs[:6], outputs)
        assert outputs[3].usage.cached_tokens > 30  # the instruction that prompts 0 and 3 share


def test_batch_neighbours_never_change_a_bit_of_the_logprobs(model_path, runs):
    with make_engine(model_path, chunk_tokens=16) as engine:
        together = generate(engine, runs[:12])
        engine.flush()
        for run, output in zip(runs[:3], together):
            alone = generate(engine, [run])[0]
            assert [entry.logprob for entry in alone.logprobs] == [entry.logprob for entry in output.logprobs]
