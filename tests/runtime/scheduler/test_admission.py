"""Budgets, chunks, the new-token ratio and refusals, without a scheduler."""

from __future__ import annotations

import pytest

from gristmill.messages import SamplingParams, Submit, floats, ints
from gristmill.scheduler.admission import INITIAL_RATIO, MAX_RATIO, MIN_RATIO, Admission, Limits, refuse, refuse_size

LIMITS = Limits(max_context=512, pool_tokens=256, page_size=1, max_queued=2, vocab_size=100)


def test_chunks_fill_the_budget_exactly() -> None:
    admission = Admission(chunk_tokens=32)
    assert admission.prefill_budget() == 32
    assert admission.chunk(300, 32, first=True) == 32
    assert admission.chunk(5, 32, first=True) == 5
    assert admission.chunk(300, 7, first=False) == 7


def test_without_chunking_a_prompt_goes_whole_or_waits() -> None:
    admission = Admission(chunk_tokens=0)
    budget = admission.prefill_budget()
    assert admission.chunk(budget + 1, budget, first=True) == budget + 1
    assert admission.chunk(budget + 1, budget, first=False) == 0
    assert admission.chunk(5, budget, first=False) == 5


def test_room_is_kept_for_what_runs() -> None:
    admission = Admission(0, initial_ratio=0.5)
    assert admission.missing(needed=10, remaining=20, available=40, running_remaining=40, alone=False) == 0
    assert admission.missing(needed=11, remaining=20, available=40, running_remaining=40, alone=False) == 1
    assert admission.missing(needed=40, remaining=1000, available=40, running_remaining=0, alone=True) == 0
    assert admission.missing(needed=41, remaining=0, available=40, running_remaining=0, alone=True) == 1


def test_the_ratio_decays_and_jumps_at_a_retraction() -> None:
    admission = Admission(0)
    admission.on_step()
    assert MIN_RATIO < admission.ratio < INITIAL_RATIO
    for _ in range(1000):
        admission.on_step()
    assert admission.ratio == MIN_RATIO
    admission.on_retraction()
    assert admission.ratio > MIN_RATIO
    for _ in range(100):
        admission.on_retraction()
    assert admission.ratio == MAX_RATIO
    admission.on_idle()
    assert admission.ratio == INITIAL_RATIO


@pytest.mark.parametrize(
    ("n_prompt", "max_tokens", "code"),
    [
        (256, 256, None),
        (257, 1, "pool_exceeded"),
        (300, 1, "pool_exceeded"),
        (511, 1, "pool_exceeded"),
        (512, 1, "context_length_exceeded"),
        (513, 0, "context_length_exceeded"),
        (5000, 10**12, "context_length_exceeded"),
        (200, 10**12, None),
    ],
)
def test_what_can_never_run_is_refused_with_the_numbers(n_prompt: int, max_tokens: int, code: str | None) -> None:
    refusal = refuse_size(n_prompt, max_tokens, LIMITS)
    assert (refusal.code if refusal else None) == code
    if refusal:
        assert refusal.status == 400
        assert str(n_prompt) in refusal.error
        assert str(512 if code == "context_length_exceeded" else 256) in refusal.error


def test_a_prompt_that_fills_the_context_can_be_scored_but_not_continued() -> None:
    roomy = Limits(max_context=512, pool_tokens=1000, page_size=1, max_queued=2)
    assert refuse_size(512, 0, roomy) is None
    assert refuse_size(511, 1, roomy) is None
    assert refuse_size(512, 1, roomy) is not None


def test_pages_count_as_a_whole() -> None:
    assert refuse_size(250, 1, Limits(512, 240, 16, 2)) is not None
    assert refuse_size(240, 1, Limits(512, 240, 16, 2)) is None


@pytest.mark.parametrize(
    ("submit", "status", "code"),
    [
        (Submit("r", ints(), SamplingParams()), 400, "empty_prompt"),
        (Submit("r", ints([5, -1]), SamplingParams()), 400, "invalid_token_id"),
        (Submit("r", ints([5, 100]), SamplingParams()), 400, "invalid_token_id"),
        (Submit("r", floats([5.0]), SamplingParams()), 400, "invalid_token_id"),
        (Submit("r", ints([5]), SamplingParams(max_tokens=-1)), 400, "invalid_length"),
        (Submit("r", ints([5]), SamplingParams(min_tokens=-1)), 400, "invalid_length"),
        (Submit("r", ints([5]), SamplingParams(), prompt_logprobs_from=2), 400, "invalid_logprobs"),
        (Submit("r", ints([5]), SamplingParams(), prompt_logprobs_from=0), 400, "invalid_logprobs"),
    ],
)
def test_hostile_submits_are_refused_with_a_sentence(submit: Submit, status: int, code: str) -> None:
    refusal = refuse(submit, 0, LIMITS)
    assert refusal is not None
    assert (refusal.status, refusal.code) == (status, code)
    assert len(refusal.error) > 20


def test_a_full_queue_refuses_with_503() -> None:
    submit = Submit("r", ints([5]), SamplingParams())
    assert refuse(submit, 1, LIMITS) is None
    refusal = refuse(submit, 2, LIMITS)
    assert refusal is not None
    assert (refusal.status, refusal.code) == (503, "queue_full")
