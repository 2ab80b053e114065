"""A worker without a model, selected by the model path "null:<ms>[:<vocab>]": sleeps so long per step and answers deterministic tokens.

For tests of loop timing and for measuring everything around the forward pass. Needs no torch.
"""

from __future__ import annotations

import time

import numpy as np

from gristmill.errors import ModelError
from gristmill.loading.config import ModelConfig
from gristmill.messages import EMIT_SAMPLE, NO_TOKEN, Mask, Pool, Ready, Result, Step
from gristmill.options import Options
from gristmill.trace import NULL_TRACER, NullTracer
from gristmill.worker.work import work_of

PREFIX = "null:"
_DEFAULT_VOCAB = 600
_DEFAULT_CONTEXT = 8192
_DEFAULT_POOL = 65536


def is_null(model_path: str) -> bool:
    return model_path.startswith(PREFIX)


def parse(model_path: str) -> tuple[float, int]:
    """(seconds per step, vocabulary) of a "null:<ms>[:<vocab>]" path."""
    try:
        ms, _, vocab = model_path.removeprefix(PREFIX).partition(":")
        seconds, size = float(ms) / 1000, int(vocab or _DEFAULT_VOCAB)
    except ValueError:
        seconds, size = -1.0, 0
    if not 0 <= seconds < 3600 or size < 1:
        raise ModelError(f"a null model is written null:<milliseconds per step>[:<vocabulary>], not {model_path!r}")
    return seconds, size


def null_config(model_path: str) -> ModelConfig:
    """A ModelConfig for the other processes."""
    _, vocab = parse(model_path)
    return ModelConfig(
        architecture="null",
        vocab_size=vocab,
        hidden_size=8,
        intermediate_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        context_length=_DEFAULT_CONTEXT,
        rms_eps=1e-6,
        rope_theta=10000.0,
    )


def token_at(position: int, seed: int, vocab: int) -> int:
    """The token that a null model produces at `position`; never one of the first three ids, which tend to be special."""
    low = min(3, vocab - 1)
    return low + (position * 7919 + seed) % (vocab - low)


class _Finished:
    """A result that is there already."""

    def __init__(self, result: Result) -> None:
        self._result = result

    def wait(self) -> Result:
        return self._result


class NullRunner:
    """The interface of ModelRunner (ready, forward, sample) without tensors."""

    launches = False

    def __init__(self, model_path: str, options: Options, *, tracer: NullTracer = NULL_TRACER) -> None:
        self.seconds, self.vocab = parse(model_path)
        self.tracer = tracer
        self.max_reqs = options.max_running
        self.max_context = options.context_length or _DEFAULT_CONTEXT
        slots = options.pool_tokens or _DEFAULT_POOL
        self.pool = Pool("full", slots // options.page_size * options.page_size, options.page_size)
        self.low = min(3, self.vocab - 1)  # as in token_at
        self.seeds = np.zeros(self.max_reqs, np.int64)  # by request slot, modulo the ids in use

    def ready(self, rank: int) -> Ready:
        caps = {"architecture": "null", "vocab_size": self.vocab}
        return Ready(rank=rank, pools=[self.pool], max_reqs=self.max_reqs, max_context=self.max_context, caps=caps)

    def forward(self, step: Step) -> tuple[Step, float]:
        start = time.monotonic()
        work = work_of(step)._asdict() if self.tracer.enabled else {}
        with self.tracer.span("forward", step=step.step, rows=step.req_slot.size, **work):
            for new in step.new:
                self.seeds[new.req_slot] = new.sampling.seed % (self.vocab - self.low)
            if self.seconds:
                time.sleep(self.seconds)
        return step, start

    def sample(self, done: tuple[Step, float], mask: Mask | None = None) -> _Finished:
        step, start = done
        with self.tracer.span("sample", step=step.step, rows=step.req_slot.size):
            ids = np.full(step.req_slot.size, NO_TOKEN, np.int32)
            rows = np.flatnonzero(step.emit == EMIT_SAMPLE)
            positions = step.kv_len[rows].astype(np.int64)
            ids[rows] = self.low + (positions * 7919 + self.seeds[step.req_slot[rows]]) % (self.vocab - self.low)
        return _Finished(Result(step=step.step, ids=ids, t_start=start, t_end=time.monotonic()))
