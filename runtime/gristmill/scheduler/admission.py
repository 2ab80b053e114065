"""How much may start, not in which order: token budgets, chunk sizes, what running requests will still need, and refusals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gristmill.messages import Submit

REMAINING_CLIP_TOKENS = 1024  # most future tokens that one request is expected to need: max_tokens is often far from what comes
INITIAL_RATIO, MIN_RATIO, MAX_RATIO = 0.4, 0.1, 1.0
RATIO_DECAY_PER_STEP = 0.002
RATIO_RAISE = 0.2


class Refusal(NamedTuple):
    """Why a request is not taken: an HTTP status, a machine-readable code and one sentence with the numbers."""

    status: int
    code: str
    error: str


@dataclass(frozen=True)
class Limits:
    """What bounds a single request and the queue, known once the workers are ready. All but max_queued and vocab_size in tokens."""

    max_context: int
    pool_tokens: int
    page_size: int
    max_queued: int
    vocab_size: int = 0  # 0: not known here


def refuse(submit: Submit, n_waiting: int, limits: Limits) -> Refusal | None:
    """A refusal for a submit that cannot be taken, or None.

    The server validated all of this already; whatever reaches the scheduler must still not be able to end it.
    """
    n, sampling = len(submit.ids), submit.sampling
    if submit.queue_places and n_waiting + submit.queue_places > limits.max_queued:
        return Refusal(
            503, "queue_full", f"{n_waiting} of at most {limits.max_queued} requests (--max-queued) are waiting; try again later"
        )
    if submit.ids.dtype != np.int32:
        return Refusal(400, "invalid_token_id", f"prompt token ids must be int32, not {submit.ids.dtype}")
    if n == 0:
        return Refusal(400, "empty_prompt", "the prompt has no tokens")
    if submit.ids.min() < 0 or (limits.vocab_size and submit.ids.max() >= limits.vocab_size):
        return Refusal(400, "invalid_token_id", f"prompt token ids must be in [0, {limits.vocab_size or 2**31})")
    if sampling.max_tokens < 0 or sampling.min_tokens < 0:
        return Refusal(400, "invalid_length", f"max_tokens {sampling.max_tokens} and min_tokens {sampling.min_tokens} must not be negative")
    if submit.prompt_logprobs_from != -1 and not 1 <= submit.prompt_logprobs_from <= n:
        return Refusal(400, "invalid_logprobs", f"prompt_logprobs_from is {submit.prompt_logprobs_from}; it must be -1 or 1 to {n}")
    return refuse_size(n, sampling.max_tokens, limits)


def refuse_size(n_prompt: int, max_tokens: int, limits: Limits) -> Refusal | None:
    """A refusal for a prompt that can never run here, or None. The output may still outgrow the pool: many end long before max_tokens."""
    needed = n_prompt + min(max_tokens, 1)
    if needed > limits.max_context:
        wanted = f"{n_prompt} prompt tokens" + (" plus at least one to generate" if max_tokens else "")
        return Refusal(400, "context_length_exceeded", f"the context length is {limits.max_context} tokens and the request has {wanted}")
    if -(-n_prompt // limits.page_size) * limits.page_size > limits.pool_tokens:
        return Refusal(
            400,
            "pool_exceeded",
            f"the KV pool holds {limits.pool_tokens} tokens and the prompt has {n_prompt}; shorten it or start with a larger --pool-tokens",
        )
    return None


class Admission:
    """Decides how much one step computes and whether one more request fits, with an estimate that learns: `ratio` is the share of
    their remaining tokens that running requests are expected to produce. It decays while all goes well and jumps up at each retraction.

    Args:
        chunk_tokens: Prompt tokens of one step; a longer prompt is computed over several. 0: prompts are computed whole.
        max_prefill_tokens: Without chunks: whole prompts are added to a step up to this many tokens, the first one in any case.
        initial_ratio: Where `ratio` starts, and what it returns to when nothing runs.
    """

    def __init__(self, chunk_tokens: int, max_prefill_tokens: int = 16384, *, initial_ratio: float = INITIAL_RATIO) -> None:
        self.chunk_tokens, self.max_prefill_tokens = chunk_tokens, max_prefill_tokens
        self._initial, self._least = initial_ratio, min(initial_ratio, MIN_RATIO)
        self.ratio = initial_ratio

    def prefill_budget(self) -> int:
        """Prompt tokens that one step may compute."""
        return self.chunk_tokens or self.max_prefill_tokens

    def chunk(self, n_left: int, budget: int, first: bool) -> int:
        """How many of `n_left` prompt tokens go into a step with `budget` left; 0 = none. `first`: the step has no prompt tokens yet."""
        if self.chunk_tokens:
            return min(n_left, budget)
        return n_left if first or n_left <= budget else 0

    def expected(self, remaining: int) -> int:
        """How many of `remaining` tokens are expected to be generated."""
        return int(self.ratio * remaining)

    def missing(self, needed: int, remaining: int, available: int, running_remaining: int, alone: bool) -> int:
        """How many slots are missing for a request to start; 0 or less: it fits.

        Args:
            needed: Slots it takes at once, in tokens.
            remaining: Tokens it may generate, clipped.
            available: Slots that are free or evictable.
            running_remaining: Sum of the clipped remaining tokens of what runs.
            alone: Nothing else holds slots: then only `needed` counts, or nothing would ever start.
        """
        return needed + (0 if alone else self.expected(remaining + running_remaining)) - available

    def on_step(self) -> None:
        self.ratio = max(self._least, self.ratio - RATIO_DECAY_PER_STEP)

    def on_retraction(self) -> None:
        self.ratio = min(MAX_RATIO, self.ratio + RATIO_RAISE)

    def on_idle(self) -> None:
        self.ratio = self._initial
