"""Sampling applies its stages in the documented order, and a row's token depends on nothing but its logits, seed and position."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gristmill.messages import INVALID_TOKEN, NO_TOKEN, NewReq, SamplingParams, ints
from gristmill.sampling import pipeline
from gristmill.sampling.state import SamplingState
from gristmill_kernels import sampling as kernels

VOCAB = 70


def admit(state: SamplingState, slot: int, prompt=(1, 2, 3), generated=(), eos_ids=(), **params) -> None:
    state.admit(NewReq(slot, len(prompt), ints([*prompt, *generated]), SamplingParams(**params), tuple(eos_ids)))


def plain_logits(
    logits: np.ndarray, position: int, prompt, generated, eos_ids=(), allowed: np.ndarray | None = None, **params
) -> np.ndarray:
    """The oracle: one row through logit_bias, penalties, mask and min_tokens ban, in float64, a loop per stage."""
    out = logits.astype(np.float64).copy()
    for token, bias in params.get("logit_bias", {}).items():
        out[token] += bias
    repetition = params.get("repetition_penalty", 1.0)
    for token in {*prompt, *generated}:
        out[token] = out[token] / repetition if out[token] > 0 else out[token] * repetition
    for token in set(generated):
        out[token] -= params.get("frequency_penalty", 0.0) * list(generated).count(token) + params.get("presence_penalty", 0.0)
    if allowed is not None:
        out[~allowed] = -np.inf
    if position - len(prompt) < params.get("min_tokens", 0):
        out[list(eos_ids)] = -np.inf
    return out


def bitmask(allowed: np.ndarray) -> np.ndarray:
    return np.packbits(np.pad(allowed, (0, -len(allowed) % 32)), bitorder="little").view("<i4")


def random_request(rng: np.random.Generator) -> dict:
    prompt, generated = rng.integers(0, VOCAB, rng.integers(1, 12)).tolist(), rng.integers(0, VOCAB, rng.integers(0, 9)).tolist()
    request = {"prompt": prompt, "generated": generated, "eos_ids": [2, 7]}
    if rng.random() < 0.5:
        request["logit_bias"] = {int(t): float(rng.normal() * 5) for t in rng.integers(0, VOCAB, 4)}
    if rng.random() < 0.5:
        request["repetition_penalty"] = float(rng.uniform(0.5, 2))
    if rng.random() < 0.5:
        request |= {"presence_penalty": float(rng.normal()), "frequency_penalty": float(rng.normal())}
    if rng.random() < 0.5:
        request["min_tokens"] = int(rng.integers(0, 12))
    return request


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_stages_follow_the_oracle(temperature, seed):
    rng = np.random.default_rng(seed)
    state = SamplingState(16, VOCAB)
    for _ in range(15):
        n = int(rng.integers(1, 7))
        slots = rng.permutation(16)[:n].astype(np.int32)
        requests = [random_request(rng) for _ in range(n)]
        extra = {"temperature": temperature, "top_k": 11, "top_p": 0.9, "min_p": 0.01}
        for slot, request in zip(slots, requests, strict=True):
            admit(state, int(slot), seed=int(slot) + 5, **extra, **request)
        logits = torch.from_numpy(rng.normal(0, 3, (n, VOCAB)).astype(np.float32))
        positions = np.array([len(r["prompt"]) + len(r["generated"]) for r in requests], np.int32)
        allowed = {row: rng.random(VOCAB) < 0.6 for row in range(n) if rng.random() < 0.4}
        got_logits = logits.clone()
        bits = {row: bitmask(mask) for row, mask in allowed.items()}
        tokens = pipeline.sample(got_logits, slots, positions, state, bits)
        for row, request in enumerate(requests):
            want = plain_logits(logits[row].numpy(), int(positions[row]), allowed=allowed.get(row), **request)
            np.testing.assert_allclose(got_logits[row].numpy(), want, rtol=1e-5, atol=1e-5, err_msg=f"seed {seed}")
            alone = kernels.sample(
                got_logits[row : row + 1],
                *(torch.tensor([v], dtype=torch.float32 if isinstance(v, float) else torch.int32) for v in extra.values()),
                torch.tensor([int(slots[row]) + 5]),
                torch.tensor([int(positions[row])], dtype=torch.int32),
            )
            assert tokens[row] == alone[0], f"seed {seed}"
            if temperature == 0:
                assert tokens[row] == got_logits[row].argmax()


def test_counts_follow_what_is_generated():
    state = SamplingState(2, VOCAB)
    admit(state, 0, prompt=[1, 1, 4], generated=[5, 5], temperature=0.0, frequency_penalty=1.0)
    admit(state, 1, prompt=[1], temperature=0.0)
    flat = torch.zeros(2, VOCAB)
    flat[:, 9] = 100.0
    for i in range(3):
        pipeline.sample(flat.clone(), np.array([1, 0], np.int32), np.array([1 + i, 5 + i], np.int32), state)
    counts = state.of(0).output_counts
    assert counts is not None and state.of(1).output_counts is None
    assert counts[0, [5, 9, 1]].tolist() == [2, 3, 0]
    assert state.of(0).prompt_mask[0].nonzero().flatten().tolist() == [1, 4]


def test_a_new_request_resets_the_slot():
    state = SamplingState(1, VOCAB)
    admit(state, 0, temperature=0.0, frequency_penalty=5.0, logit_bias={3: 100.0}, min_tokens=50, eos_ids=[4])
    admit(state, 0, temperature=0.0)
    logits = torch.zeros(1, VOCAB)
    logits[0, 4] = 1.0
    assert pipeline.sample(logits, np.zeros(1, np.int32), np.array([3], np.int32), state)[0] == 4


def test_ids_outside_the_vocabulary_are_ignored():
    state = SamplingState(1, VOCAB)
    bias = {700_000: 50.0, -1: 50.0, 2**40: 50.0, 6: 1.0}
    admit(state, 0, temperature=0.5, top_k=2**40, logit_bias=bias, min_tokens=9, eos_ids=[2**40, -7])
    logits = torch.zeros(1, VOCAB)
    pipeline.sample(logits, np.zeros(1, np.int32), np.array([3], np.int32), state)
    assert logits[0].nonzero().flatten().tolist() == [6]


def test_min_tokens_holds_off_exactly_that_many():
    state = SamplingState(1, VOCAB)
    admit(state, 0, prompt=[1, 2, 3], eos_ids=[8, 700_000, -4], temperature=0.0, min_tokens=2, logit_bias={8: 100.0})
    produced = [int(pipeline.sample(torch.zeros(1, VOCAB), np.zeros(1, np.int32), np.array([p], np.int32), state)[0]) for p in (3, 4, 5)]
    assert produced == [0, 0, 8]


def test_invalid_rows_leave_the_others_alone():
    state = SamplingState(4, VOCAB)
    for slot in range(4):
        admit(state, slot, temperature=0.7, seed=slot, frequency_penalty=0.5)
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(3))
    slots, positions = np.arange(4, dtype=np.int32), np.full(4, 3, np.int32)
    want = pipeline.sample(logits.clone(), slots, positions, state)
    for slot in range(4):
        admit(state, slot, temperature=0.7, seed=slot, frequency_penalty=0.5)
    logits[1, 5], logits[2] = float("nan"), float("-inf")
    got = pipeline.sample(logits, slots, positions, state)
    assert got[1] == got[2] == INVALID_TOKEN
    assert got[[0, 3]].tolist() == want[[0, 3]].tolist()
    assert state.of(1).output_counts.sum() == 0


def test_forced_tokens_through_the_runner(driver):
    """Bias towards any id, the last of the vocabulary included, wins over every logit; zero-emit rows report NO_TOKEN."""
    rows = [driver.add(range(10, 30), SamplingParams(temperature=1.0, seed=1, logit_bias={t: 100.0})) for t in (2, 7, 599)]
    driver.generate(rows, 2)
    assert [row.ids[-2:] for row in rows] == [[2, 2], [7, 7], [599, 599]]
    chunked = driver.add(range(40, 60))
    assert driver.step([chunked, rows[0]], chunk=8).ids.tolist() == [NO_TOKEN, 2]


def test_a_mask_limits_the_row_it_names(driver):
    rows = [driver.add(range(10, 20)), driver.add(range(30, 50)), driver.add(range(60, 70))]
    free = [driver.add(row.ids) for row in rows]
    driver.step(free, chunk=10)
    allowed = np.zeros(600, bool)
    allowed[[11, 598, 599]] = True
    # row 1 is an inner chunk: its mask has no row of logits to act on
    result = driver.step(rows, chunk=10, mask={1: allowed, 2: allowed})
    assert result.ids[0] == free[0].ids[-1] and result.ids[1] == NO_TOKEN
    assert result.ids[2] in (11, 598, 599)
    assert result.ids[2] == [11, 598, 599][int(free[2].logits[0][[11, 598, 599]].argmax())]


def test_sampled_tokens_do_not_depend_on_the_batch(driver):
    params = [SamplingParams(temperature=1.0, top_p=0.9, seed=9 + i, presence_penalty=0.3 * i) for i in range(5)]
    prompts = [range(5 + i, 25 + 2 * i) for i in range(5)]
    together = [driver.add(p, s) for p, s in zip(prompts, params, strict=True)]
    driver.generate(together, 12)
    for prompt, sampling, row in zip(prompts, params, together, strict=True):
        alone = driver.add(prompt, sampling)
        driver.generate([alone], 12, chunk=7)
        assert alone.ids == row.ids


def test_a_retracted_request_resumes_with_its_penalties(driver):
    sampling = SamplingParams(temperature=0.8, seed=4, frequency_penalty=0.7, repetition_penalty=1.2, min_tokens=12)
    whole = driver.add(range(20, 40), sampling, eos_ids=(2, 300))
    driver.generate([whole], 16)
    first = driver.add(range(20, 40), sampling, eos_ids=(2, 300))
    driver.generate([first], 7)
    resumed = driver.add(first.ids, sampling, eos_ids=(2, 300))
    resumed.n_prompt = 20
    driver.generate([resumed], 16)
    assert resumed.ids == whole.ids
