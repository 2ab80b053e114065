"""The language of the simulator: the fixed parameters of a schedule, and the token that follows a sequence, as pure functions of both."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from gristmill.errors import GristmillError
from gristmill.memory.window import Reservations, WindowSpec
from gristmill.messages import INVALID_TOKEN, SamplingParams, Submit, ints
from gristmill.scheduler.scheduler import SchedulerConfig

VOCAB = 8
EOS = 0
ALL_TOKENS = (1 << VOCAB) - 1
_HASH = 0x9E3779B97F4A7C15


def mix(*values: int) -> int:
    """A 62-bit hash, the same in every process."""
    h = 0
    for value in values:
        h = ((h ^ (value + 0x7F4A7C15)) * _HASH + 0x632BE59BD9B4E019) & (2**64 - 1)
        h ^= h >> 29
    return h >> 2


def extend_hash(h: int, token: int) -> int:
    """The hash of a sequence from that of the sequence before its last token: what the KV of that token depends on."""
    return mix(h, token)


def make_config(**settings: Any) -> SchedulerConfig:
    """A SchedulerConfig for the alphabet of the simulator."""
    defaults = {"eos_ids": (EOS,), "vocab_size": VOCAB, "check": True}
    return SchedulerConfig(**{**defaults, **settings})


def with_window(config: SchedulerConfig, window: int, spare: int) -> SchedulerConfig:
    """`config` for a model with sliding-window layers, in a pool that just does for one request, and `spare` tokens."""
    lookahead = -(-config.lookahead_tokens // config.page_size) * config.page_size
    slots = window
    while True:
        try:
            Reservations(WindowSpec(slots, window), config.page_size, lookahead, config.chunk_tokens or config.max_prefill_tokens)
            return replace(config, window=WindowSpec(slots + spare, window))
        except GristmillError:
            slots += 1


@dataclass(frozen=True)
class Case:
    """The fixed parameters of one schedule. `forced` says the token of the request with a given sampling seed at a given output
    position; every other token is drawn."""

    seed: int
    depth: int
    config: SchedulerConfig
    n_requests: int = 0
    eos_permille: int = 0
    invalid_permille: int = 0
    p_arrival: float = 0.0
    p_abort: float = 0.0
    p_control: float = 0.0
    p_penalty: float = 0.0
    p_mask: float = 0.0
    priorities: tuple[int, ...] = (0,)
    min_shared_tokens: int = 4  # what a request must gain to wait for another's prefix; prompts are short here
    forced: Mapping[tuple[int, int], int] = field(default_factory=dict)

    @staticmethod
    def draw(seed: int) -> Case:
        g = random.Random(seed)
        page = g.choice([1, 1, 2, 3, 4, 8])
        pool = g.choice([24, 40, 60, 200])
        config = make_config(
            pool_tokens=pool + g.randrange(page),
            max_reqs=g.choice([2, 5, 12]),
            max_context=g.choice([24, 33, 64, 300]),
            page_size=page,
            max_queued=g.choice([6, 100, 100, 100]),
            chunk_tokens=g.choice([0, 1, 3, 7, 100]),
            mixed_chunks=g.random() < 0.7,
            radix_cache=g.random() < 0.85,
            policy=g.choice(["fcfs", "lpm", "dfs-weight", "shortest-prefill", "hrrn"]),
            preempt_threshold=g.choice([0, 1, 10]),
            eviction_policy=g.choice(["lru", "lfu", "fifo", "priority", "slru"]),
            max_prefill_tokens=g.choice([5, 20, 1000]),
            kv_events=g.random() < 0.5,
            check=g.random() < 0.3,  # the referee looks anyway
            lookahead_tokens=g.choice([1, 1, 4, 16]),
            new_token_ratio=g.choice([0.0, 0.0, 0.4]),
        )
        if g.random() < 0.35:
            config = with_window(config, g.choice([1, 3, 8, 20]), spare=g.choice([0, 7, 60]))
        return Case(
            seed=seed,
            depth=g.choice([1, 2, 2, 3]),
            config=config,
            n_requests=g.randrange(6, 20),
            eos_permille=g.choice([0, 30, 150]),
            invalid_permille=g.choice([0, 0, 10]),
            p_arrival=g.choice([0.15, 0.5, 1.0]),
            p_abort=g.choice([0.0, 0.003, 0.02]),
            p_control=g.choice([0.0, 0.0, 0.01]),
            p_penalty=g.choice([0.1, 0.5]),
            p_mask=g.choice([0.0, 0.15, 0.5]),
            priorities=g.choice([(0,), (0, 0, 0, 1), (0, 1, 20)]),
            min_shared_tokens=g.choice([2, 4, 8]),
        )


def allowed(h: int) -> int:
    """The mask (bit set = allowed) of a grammar request after the sequence of hash `h`; never empty."""
    return mix(h, 77) & ALL_TOKENS or ALL_TOKENS


class Counts:
    """What penalties depend on: which tokens the prompt has, and how often each was generated."""

    def __init__(self, prompt: Sequence[int] = (), output: Sequence[int] = ()) -> None:
        self.seen, self.generated = [False] * VOCAB, [0] * VOCAB
        for token in prompt:
            self.seen[token] = True
        for token in output:
            self.generated[token] += 1


def is_penalized(sampling: SamplingParams) -> bool:
    return bool(sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1)


def draw_token(h: int, sampling: SamplingParams, n_out: int, mask: int, counts: Counts, case: Case) -> int:
    """The next token after a sequence of hash `h`: a function of nothing else but the request's own parameters and its counts."""
    forced = case.forced.get((sampling.seed, n_out))
    if forced is not None:
        return forced
    x = mix(h, sampling.seed)
    if (x >> 20) % 1000 < case.invalid_permille:
        return INVALID_TOKEN
    if (x >> 8) % 1000 < case.eos_permille:
        token = EOS
    elif is_penalized(sampling):
        token = max(range(1, VOCAB), key=lambda v: ((x >> 7 * v) % 128 - _penalty(v, sampling, counts), v))
    else:
        token = 1 + x % (VOCAB - 1)
    banned = {EOS, *sampling.stop_token_ids} if n_out < sampling.min_tokens else set()
    for offset in range(VOCAB):
        candidate = (token + offset) % VOCAB
        if mask >> candidate & 1 and candidate not in banned:
            return candidate
    return token  # nothing is left; the ban gives way


def _penalty(token: int, sampling: SamplingParams, counts: Counts) -> float:
    n = counts.generated[token]
    repeated = n > 0 or counts.seen[token]
    return (
        40 * sampling.presence_penalty * (n > 0) + 25 * sampling.frequency_penalty * n + 60 * (sampling.repetition_penalty - 1) * repeated
    )


def is_masked(rid: str) -> bool:
    return rid.endswith("g")


class FakeMasks:
    """Grammars of the requests whose id ends in "g": the mask depends on the whole sequence, so one token too few gives another."""

    def wants(self, rid: str) -> bool:
        return is_masked(rid)

    def bits(self, rid: str, ids: np.ndarray) -> np.ndarray:
        h = 0
        for token in ids.tolist():
            h = extend_hash(h, token)
        return ints([allowed(h)])


def solo(submit: Submit, case: Case) -> tuple[list[int], str]:
    """(tokens, close reason) of the request alone in an endless pool."""
    sampling, out, h = submit.sampling, [], 0
    prompt = submit.ids.tolist()
    for token in prompt:
        h = extend_hash(h, token)
    limit = min(len(prompt) + sampling.max_tokens, case.config.max_context)
    while len(prompt) + len(out) < limit:
        token = draw_token(h, sampling, len(out), allowed(h) if is_masked(submit.rid) else ALL_TOKENS, Counts(prompt, out), case)
        if token == INVALID_TOKEN:
            return out, "error"
        out.append(token)
        h = extend_hash(h, token)
        ends = (token == EOS and not sampling.ignore_eos) or token in sampling.stop_token_ids
        if ends and len(out) > sampling.min_tokens:
            return out, "stop"
    return out, "length"
