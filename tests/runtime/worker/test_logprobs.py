"""Prompt and generated logprobs equal the log-softmax of a whole-prompt forward pass, also across chunk borders."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from gristmill.messages import SamplingParams
from tests.support.direct_runner import DirectRunner

PROMPT = np.random.default_rng(7).integers(3, 600, 83).tolist()


@pytest.fixture(scope="module")
def oracle(model_dir):
    """float32 log-probabilities [positions, vocab] of a list of ids."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)

    def scores(ids):
        with torch.inference_mode():
            return model(torch.tensor([ids])).logits[0].double().log_softmax(-1)

    return scores


def prompt_entries(row) -> list[tuple[int, int, float, list[tuple[int, float]]]]:
    """(position, id, logprob, alternatives) of all prompt blocks, in order; asserts that blocks join without gap or overlap."""
    entries = []
    for block in row.blocks:
        if block.start >= row.n_prompt:
            continue
        assert not entries or block.start == entries[-1][0] + 1
        for i, (token, value) in enumerate(zip(block.ids, block.values, strict=True)):
            top = list(zip(block.top_ids[i * block.k : (i + 1) * block.k].tolist(), block.top_values[i * block.k :].tolist()))
            entries.append((block.start + i, int(token), float(value), top))
    return entries


@pytest.mark.parametrize("chunk", [0, 1, 16, 41])
@pytest.mark.parametrize("start", [1, 30, 82, 83])
def test_prompt_logprobs_across_chunks(chunk, start, driver, oracle):
    row = driver.add(PROMPT, logprobs=3, prompt_logprobs_from=start)
    driver.generate([row], 2, chunk)
    want = oracle(PROMPT)
    entries = prompt_entries(row)
    assert [(e[0], e[1]) for e in entries] == [(p, PROMPT[p]) for p in range(start, len(PROMPT))]
    for position, token, value, top in entries:
        assert value == pytest.approx(float(want[position - 1, token]), abs=1e-4)
        best = want[position - 1].topk(3)
        assert [t for t, _ in top] == best.indices.tolist()
        np.testing.assert_allclose([v for _, v in top], best.values.numpy(), atol=1e-4)


def test_scoring_needs_no_emitting_row(driver, oracle):
    """max_tokens 0: the prompt is scored though no row samples (the row is planned with emit 0)."""
    row = driver.add(PROMPT, logprobs=0, prompt_logprobs_from=1)
    driver.step([row], chunk=len(PROMPT) - 1)
    driver.step([row], chunk=1)
    want = oracle(PROMPT)
    assert [e[2] for e in prompt_entries(row)] == pytest.approx([float(want[p - 1, PROMPT[p]]) for p in range(1, len(PROMPT))], abs=1e-4)
    assert all(block.k == 0 and block.top_ids.size == 0 for block in row.blocks)


def test_generated_logprobs_are_raw(driver, oracle):
    """Bias, penalties and temperature change what is drawn, never the reported probability."""
    sampling = SamplingParams(temperature=1.5, seed=3, logit_bias={17: 4.0}, presence_penalty=1.0, top_k=50)
    rows = [driver.add(PROMPT[:20], sampling, logprobs=2), driver.add(PROMPT[:31], sampling), driver.add(PROMPT[5:40], logprobs=0)]
    driver.generate(rows, 6)
    assert rows[1].blocks == []
    for row in (rows[0], rows[2]):
        want = oracle(row.ids)
        assert [block.start for block in row.blocks] == list(range(row.n_prompt, len(row.ids)))
        for block in row.blocks:
            assert block.ids.tolist() == [row.ids[block.start]]
            assert float(block.values[0]) == pytest.approx(float(want[block.start - 1, row.ids[block.start]]), abs=1e-4)
            assert block.top_ids.tolist() == want[block.start - 1].topk(block.k).indices.tolist()


def test_more_alternatives_than_the_vocabulary(driver):
    row = driver.add(PROMPT[:5], logprobs=5000, prompt_logprobs_from=4)
    driver.step([row])
    assert [block.k for block in row.blocks] == [600, 600]
    assert all(block.top_ids.size == 600 for block in row.blocks)


def test_cached_prefix_then_scored_tail(model_dir, oracle):
    """Scoring may start beyond positions that an earlier request computed: their KV arrives as writes only."""
    driver = DirectRunner(model_dir)
    first = driver.add(PROMPT)
    driver.step([first])
    tail = driver.add(PROMPT, logprobs=0, prompt_logprobs_from=61)
    slots = driver.runner.tables.kv_slots[0]
    with torch.inference_mode():
        slots[tail.req_slot, :60] = slots[first.req_slot, :60]
    tail.done = 60
    driver.generate([tail], 1, chunk=9)
    want = oracle(PROMPT)
    assert [e[0] for e in prompt_entries(tail)] == list(range(61, 83))
    assert [e[2] for e in prompt_entries(tail)] == pytest.approx([float(want[p - 1, PROMPT[p]]) for p in range(61, 83)], abs=1e-4)
