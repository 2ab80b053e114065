"""Ranges, ids and lengths are checked in one place, by name."""

from __future__ import annotations

import math
from typing import Any

import pytest

from gristmill.tokenizer.validate import (
    Limits,
    RequestError,
    check_sampling,
    check_stops,
    choice_seed,
    make_submit,
)

LIMITS = Limits(vocab_size=600, context_length=512, pool_tokens=256)


def refused(param: str, n_prompt: int = 5, **fields: Any) -> RequestError:
    with pytest.raises(RequestError) as error:
        check_sampling(LIMITS, n_prompt, **fields)
    assert (error.value.param == param and param.split("[")[0] in str(error.value)) or error.value.code
    assert "\n" not in str(error.value) and len(str(error.value)) < 400
    return error.value


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -0.01, 101, 10.0**300])
def test_temperature_range(value: float) -> None:
    refused("temperature", temperature=value)


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("top_p", [0, 0.5, 1], [-0.1, 1.01]),
        ("min_p", [0, 1], [-1, 1.5]),
        ("top_k", [-1, 0, 2**31 - 1], [-2, 2**31]),
        ("presence_penalty", [-2, 2], [-2.1, 2.1]),
        ("frequency_penalty", [-2, 2], [-2.1, 2.1]),
        ("repetition_penalty", [0.01, 10], [0, -1, 10.1]),
        ("seed", [-(2**63), 2**63 - 1], [-(2**63) - 1, 2**63]),
        ("stop_token_ids", [[], [0, 599]], [[600], [-1], [True], [1.0], [5] * 257]),
        ("logit_bias", [{}, {"0": -100, "599": 100}, {5: 1}], [{"600": 1}, {"5": 101}, {"٣": 1}, {" 5": 1}, {"+5": 1}, {"5" * 50: 1}]),
        ("min_tokens", [0, 507], [-1, 508]),
        ("max_tokens", [0, 507], [-1, 508, 10**40]),
    ],
)
def test_ranges(name: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        check_sampling(LIMITS, 5, **{name: value})
    for value in bad:
        refused(name, **{name: value})


def test_what_is_left_out_means_off() -> None:
    sampling = check_sampling(LIMITS, 500 - 250)
    assert sampling.max_tokens == 262
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.repetition_penalty) == (1, 0, 1, 0, 1)
    assert 0 <= sampling.seed < 2**63 and sampling.seed != check_sampling(LIMITS, 5).seed
    assert check_sampling(LIMITS, 5, top_k=-1).top_k == 0


def test_lengths() -> None:
    assert refused("prompt", n_prompt=0).code is None
    assert refused("max_tokens", n_prompt=250, max_tokens=263).code == "context_length_exceeded"
    assert refused("prompt", n_prompt=512).code == "context_length_exceeded"
    assert refused("max_tokens", n_prompt=511, max_tokens=2).code == "context_length_exceeded"
    assert refused("prompt", n_prompt=257).code == "pool_exceeded"
    assert check_sampling(LIMITS, 256, max_tokens=0).max_tokens == 0


def test_a_context_that_the_pool_cuts_names_both() -> None:
    with pytest.raises(RequestError) as error:
        check_sampling(Limits(600, 256, 256, 512), 300, max_tokens=1)
    assert error.value.code == "context_length_exceeded"
    assert all(word in str(error.value) for word in ("300", "256", "512", "pool"))


@pytest.mark.parametrize("stops", [[""], ["a", ""], ["x" * 1025], ["a"] * 33])
def test_stops_are_limited(stops: list[str]) -> None:
    with pytest.raises(RequestError) as error:
        check_stops(stops)
    assert error.value.param == "stop"


def test_seeds_of_choices_differ_and_the_first_is_the_requests_own() -> None:
    seeds = [choice_seed(seed, i) for seed in (0, 7, 2**63 - 1) for i in range(128)]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**63 for seed in seeds)
    assert choice_seed(7, 0) == 7


def test_a_submit_carries_what_the_detokenizer_needs() -> None:
    sampling = check_sampling(LIMITS, 20, stop_token_ids=[3, 3, 4])
    submit = make_submit(range(20), sampling, stop=["a"], include_stop=True, logprobs=2, prompt_logprobs=True)
    assert submit.detok.prompt_tail == tuple(range(12, 20)) and submit.detok.n_prompt == 20
    assert submit.detok.stop_token_ids == (3, 4) == submit.sampling.stop_token_ids
    assert submit.prompt_logprobs_from == 1 and submit.logprobs == 2
    assert make_submit([5], sampling, prompt_logprobs=True).prompt_logprobs_from == -1  # nothing to score
