"""What a generation request may ask for: the one place where ranges, token ids and lengths are checked, for HTTP and offline use alike."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gristmill.errors import GristmillError
from gristmill.messages import DetokSpec, SamplingParams, Submit, ints

MAX_CHOICES = 128  # n
MAX_PROMPTS = 256  # prompts of one completions request
MAX_TOTAL_CHOICES = 512  # n * prompts
MAX_STOPS = 32
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS = 20
MAX_PRIORITY = 1000
MAX_SALT_CHARS = 256
PROMPT_TAIL = 8

_SEED_MASK = (1 << 63) - 1


class RequestError(GristmillError):
    """A request that is refused before it reaches the engine. `param` names the field, `status` is the HTTP status; after
    `retry_after_s` seconds the same request may be taken (0: nobody knows, or never)."""

    def __init__(
        self, message: str, param: str | None = None, *, code: str | None = None, status: int = 400, retry_after_s: int = 0
    ) -> None:
        super().__init__(message)
        self.param, self.code, self.status, self.retry_after_s = param, code, status, retry_after_s


@dataclass(frozen=True)
class Limits:
    """`vocab_size`: ids that both tokenizer and model have; `context_length`: most tokens of prompt and output together;
    `pool_tokens`: longest prompt for which there are token slots (0: not known); `model_context`: the context before the worker
    cut it to its pool (0: the same)."""

    vocab_size: int
    context_length: int
    pool_tokens: int = 0
    model_context: int = 0

    @property
    def context_sentence(self) -> str:
        if self.model_context > self.context_length:
            return f"this model's context of {self.model_context} tokens is cut to {self.context_length} by the size of the KV pool"
        return f"this model's context is {self.context_length} tokens"


def check_range(name: str, value: float, low: float, high: float, *, above: bool = False) -> float:
    """`value` as a float when low <= value <= high (low < value with `above`); otherwise RequestError naming `name`."""
    if not math.isfinite(value) or value > high or value < low or (above and value == low):
        bounds = f"greater than {low:g} and at most {high:g}" if above else f"from {low:g} to {high:g}"
        raise RequestError(f"{name} must be {bounds}, not {value!r}"[:300], name)
    return float(value)


def check_int(name: str, value: int, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise RequestError(f"{name} must be an integer from {low} to {high}, not {_short(value)}", name)
    return value


def check_ids(name: str, values: Sequence[int], limits: Limits) -> None:
    """Every id of `values` must be one that the model can produce."""
    for value in values:
        if type(value) is not int or not 0 <= value < limits.vocab_size:
            raise RequestError(f"{name} holds token id {_short(value)}; ids go from 0 to {limits.vocab_size - 1}", name)


def check_text(name: str, text: str) -> None:
    """`text` must be encodable: a Python string may hold lone surrogates, which no tokenizer takes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(f"{name} is not valid text: character {error.start} is a lone surrogate", name) from None


def check_stops(stops: Sequence[str]) -> tuple[str, ...]:
    if len(stops) > MAX_STOPS:
        raise RequestError(f"stop has {len(stops)} strings; {MAX_STOPS} is the most", "stop")
    for stop in stops:
        if not isinstance(stop, str):
            raise RequestError(f"stop holds {_short(stop)}, which is no text", "stop")
        if not stop:
            raise RequestError("stop holds an empty string", "stop")
        check_text("stop", stop)
        if len(stop) > MAX_STOP_CHARS:
            raise RequestError(f"a stop string has {len(stop)} characters; {MAX_STOP_CHARS} is the most", "stop")
    return tuple(dict.fromkeys(stops))


def check_logit_bias(bias: Mapping[str, float] | Mapping[int, float], limits: Limits) -> dict[int, float]:
    """JSON's string keys become ids."""
    if len(bias) > MAX_LOGIT_BIAS:
        raise RequestError(f"logit_bias has {len(bias)} entries; {MAX_LOGIT_BIAS} is the most", "logit_bias")
    checked = {}
    for key, value in bias.items():
        text = str(key)
        token = int(text) if text.isascii() and text.isdecimal() and len(text) < 12 else -1
        if not 0 <= token < limits.vocab_size:
            raise RequestError(f"logit_bias holds token id {_short(key)}; ids go from 0 to {limits.vocab_size - 1}", "logit_bias")
        checked[token] = check_range("logit_bias", value, -100, 100)
    return checked


def too_long(at_least: int, limits: Limits, prompt_name: str = "prompt") -> RequestError:
    """For a prompt that was not even encoded."""
    return RequestError(
        f"{limits.context_sentence}; the prompt has at least {at_least}",
        prompt_name,
        code="context_length_exceeded",
    )


def check_length(
    n_prompt: int, max_tokens: int | None, limits: Limits, max_tokens_name: str = "max_tokens", prompt_name: str = "prompt"
) -> int:
    """The number of tokens that may be generated: `max_tokens`, or what the context leaves."""
    context = limits.context_length
    if n_prompt == 0:
        raise RequestError("the prompt is empty: it must have at least one token", prompt_name)
    if max_tokens is not None and max_tokens < 0:
        raise RequestError(f"{max_tokens_name} must not be negative, and is {_short(max_tokens)}", max_tokens_name)
    if n_prompt + (1 if max_tokens is None else max_tokens) > context:
        wanted = "no token is left to generate" if max_tokens is None else f"{max_tokens_name} asks for {_short(max_tokens)} more"
        raise RequestError(
            f"{limits.context_sentence}; the prompt has {n_prompt} tokens and {wanted}",
            prompt_name if n_prompt >= context else max_tokens_name,
            code="context_length_exceeded",
        )
    if limits.pool_tokens and n_prompt > limits.pool_tokens:
        raise RequestError(
            f"the KV pool holds {limits.pool_tokens} tokens and the prompt has {n_prompt}; shorten it or start with a larger --pool-tokens",
            prompt_name,
            code="pool_exceeded",
        )
    return context - n_prompt if max_tokens is None else max_tokens


def check_sampling(
    limits: Limits,
    n_prompt: int,
    *,
    max_tokens: int | None = None,
    max_tokens_name: str = "max_tokens",
    prompt_name: str = "prompt",
    min_tokens: int = 0,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    repetition_penalty: float = 1.0,
    seed: int | None = None,
    ignore_eos: bool = False,
    stop_token_ids: Sequence[int] = (),
    logit_bias: Mapping[str, float] | Mapping[int, float] | None = None,
) -> SamplingParams:
    """The checked parameters of one choice. top_k -1 means off, as 0 does. Without a seed a random one is drawn.

    Raises RequestError naming the field that cannot be used.
    """
    room = check_length(n_prompt, max_tokens, limits, max_tokens_name, prompt_name)
    if len(stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise RequestError(f"stop_token_ids has {len(stop_token_ids)} ids; {MAX_STOP_TOKEN_IDS} is the most", "stop_token_ids")
    check_ids("stop_token_ids", stop_token_ids, limits)
    if seed is not None:
        check_int("seed", seed, -(1 << 63), (1 << 63) - 1)
    if min_tokens > room:
        raise RequestError(f"min_tokens is {_short(min_tokens)}, more than the {room} tokens that may be generated", "min_tokens")
    return SamplingParams(
        temperature=check_range("temperature", temperature, 0, 100),
        top_k=max(0, check_int("top_k", top_k, -1, (1 << 31) - 1)),
        top_p=check_range("top_p", top_p, 0, 1),
        min_p=check_range("min_p", min_p, 0, 1),
        seed=secrets.randbits(63) if seed is None else seed & _SEED_MASK,
        max_tokens=room,
        min_tokens=check_int("min_tokens", min_tokens, 0, room),
        ignore_eos=ignore_eos,
        stop_token_ids=tuple(dict.fromkeys(stop_token_ids)),
        logit_bias=check_logit_bias(logit_bias, limits) if logit_bias else {},
        presence_penalty=check_range("presence_penalty", presence_penalty, -2, 2),
        frequency_penalty=check_range("frequency_penalty", frequency_penalty, -2, 2),
        repetition_penalty=check_range("repetition_penalty", repetition_penalty, 0.01, 10),
    )


def choice_seed(seed: int, choice: int) -> int:
    """The seed of choice number `choice` of a request with `seed`: the first uses it as it is (splitmix64 for the others)."""
    if choice == 0:
        return seed
    z = (seed + choice * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (z ^ (z >> 31)) & _SEED_MASK


def make_submit(
    prompt: Sequence[int] | np.ndarray,
    sampling: SamplingParams,
    *,
    stop: Sequence[str] = (),
    include_stop: bool = False,
    skip_special: bool = True,
    logprobs: int = -1,
    prompt_logprobs: bool = False,
    priority: int = 0,
    cache_salt: str = "",
) -> Submit:
    """One choice for `TokenizerManager.submit`, which fills in the rid.

    Raises RequestError when `priority` or `cache_salt` cannot be used; all else is checked by the other functions here.
    """
    check_int("priority", priority, -MAX_PRIORITY, MAX_PRIORITY)
    if not isinstance(cache_salt, str) or len(cache_salt) > MAX_SALT_CHARS:
        raise RequestError(f"cache_salt must be a text of at most {MAX_SALT_CHARS} characters", "cache_salt")
    check_text("cache_salt", cache_salt)
    prompt_ids = ints(prompt)
    detok = DetokSpec(
        stop=tuple(stop),
        include_stop=include_stop,
        skip_special=skip_special,
        prompt_tail=tuple(prompt_ids[-PROMPT_TAIL:].tolist()),
        stop_token_ids=sampling.stop_token_ids,
        n_prompt=len(prompt_ids),
    )
    score_from = 1 if prompt_logprobs and len(prompt_ids) > 1 else -1
    return Submit(
        "",
        prompt_ids,
        sampling,
        priority=priority,
        extra_key=cache_salt,
        logprobs=logprobs,
        prompt_logprobs_from=score_from,
        detok=detok,
    )


def _short(value: object) -> str:
    """`value` for an error message, cut: a client may send a number with a million digits."""
    if isinstance(value, int) and abs(value) >= 10**20:
        return f"an integer of {value.bit_length()} bits"
    return repr(value)[:40]
