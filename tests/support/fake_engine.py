"""A stand-in for scheduler and worker, with the real detokenizer: everything behind process A in threads over inproc://.

Tokens are a fixed function of (seed, position), or of the prompt when greedy; forced by a logit_bias of 100. What ends a request is
decided as the scheduler decides it. Tests of the server run on it without a model.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import zmq

from gristmill.detokenizer import process as detokenizer_process
from gristmill.launch_config import LaunchConfig
from gristmill.loading.config import load_config
from gristmill.messages import Abort, Close, Control, LogprobBlock, Message, Open, Out, Reply, Stats, Submit, floats, ints
from gristmill.options import Options
from gristmill.tokenizer.manager import TokenizerManager
from gristmill.tokenizer.tokenizer import load_tokenizer
from gristmill.transport import Endpoints, Pull, Push

_names = itertools.count()


def draw(*key: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little")


@dataclass
class _Running:
    idx: int
    submit: Submit
    n_out: int = 0
    scored: bool = False


@dataclass
class FakeEngine:
    """`with FakeEngine(model) as engine:` then use `engine.manager` after `await engine.manager.start()`.

    Args:
        step_s: pause before each step.
        pool_tokens: size of the pool in the statistics.
        refused_token: prompts that hold this id are refused with a 503.
        max_running: choices that run at a time; of the others max_queued (an option) wait, all of a request or none.
        ready: whether the first statistics say ready; `say_ready()` does it later.
    """

    model: Path
    step_s: float = 0.0
    pool_tokens: int = 1 << 20
    refused_token: int = -1
    max_running: int = 2048
    ready: bool = True
    option_overrides: dict[str, object] = field(default_factory=dict)
    aborts: list[Abort] = field(default_factory=list)
    submits: list[Submit] = field(default_factory=list)

    def __enter__(self) -> FakeEngine:
        self.model_config = load_config(self.model)
        self.tokenizer = load_tokenizer(self.model)
        eos = tuple(sorted({*self.model_config.eos_ids, *self.tokenizer.eos_ids}))
        self.options = dataclasses.replace(Options(model=str(self.model), served_model_name="m"), **self.option_overrides)
        self.config = LaunchConfig(self.options, str(self.model), eos, f"inproc://fake-{next(_names)}")
        self.context = zmq.Context()
        self.manager = TokenizerManager(self.config, self.context, self.tokenizer, self.model_config)
        self.vocab = self.manager.limits.vocab_size
        self._stop = threading.Event()
        self._say_ready = threading.Event()
        self.failures: list[BaseException] = []
        self._running: dict[str, _Running] = {}
        self._waiting: dict[str, _Running] = {}
        self._group_refused = False
        self._free = list(range(4096))[::-1]
        self._threads = [threading.Thread(target=self._guard, args=(target,), daemon=True) for target in (self._schedule, self._detokenize)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(10)
        self.context.destroy(linger=0)
        assert not self.failures, self.failures

    def say_ready(self) -> None:
        self._say_ready.set()

    def wait_for(self, condition: Callable[[], object], timeout_s: float = 2.0) -> None:
        """Until `condition` holds; AssertionError when it does not within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "the condition did not come true in time"
            time.sleep(0.002)

    @property
    def n_running(self) -> int:
        return len(self._running)

    def _guard(self, target: Callable[[], None]) -> None:
        try:
            target()
        except BaseException as error:
            self.failures.append(error)

    def _detokenize(self) -> None:
        detokenizer_process.run(self.config, self.context, self._stop)

    def _schedule(self) -> None:
        ends = Endpoints(self.config.endpoint_prefix)
        inbox, outbox = Pull(self.context, ends.a_to_b), Push(self.context, ends.b_to_c, "scheduler")
        if self.ready:
            self._say_ready.set()
        told = None
        try:
            while not self._stop.is_set():
                message = inbox.recv(0 if self._running and not self.step_s else int(max(5, self.step_s * 1000)))
                while message is not None:
                    self._handle(message, outbox)
                    message = inbox.recv(0)
                while self._waiting and len(self._running) < self.max_running:
                    rid = next(iter(self._waiting))
                    self._running[rid] = self._waiting.pop(rid)
                out = self._step()
                if out is not None:
                    outbox.send(out)
                state = (self._say_ready.is_set(), len(self._running), len(self._waiting))
                if state != told:
                    told = state
                    outbox.send(self._stats())
        finally:
            inbox.close()
            outbox.close()

    def _handle(self, message: Message, outbox: Push) -> None:
        if isinstance(message, Submit):
            self.submits.append(message)
            idx = self._free.pop()
            opened = Open(idx, message.rid, message.detok)
            if message.queue_places:
                free = self.max_running - len(self._running) + self.options.max_queued - len(self._waiting)
                self._group_refused = message.queue_places > free
            refused = "queue_full" if self._group_refused else "refused_token" if self.refused_token in message.ids else ""
            if refused:
                close = Close(idx, "error", len(message.ids), error="5 of at most 5 requests are waiting", status=503, code=refused)
                outbox.send(Out(open=[opened], close=[close]))
                self._free.append(idx)
                return
            self._waiting[message.rid] = _Running(idx, message)
            outbox.send(Out(open=[opened]))
        elif isinstance(message, Abort):
            self.aborts.append(message)
            running = self._running.pop(message.rid, None) or self._waiting.pop(message.rid, None)
            if running is not None:
                outbox.send(Out(close=[self._close(running, "stop" if message.reason == "stop" else "abort")]))
        elif isinstance(message, Control) and message.op == "stats":
            outbox.send(self._stats())
            outbox.send(Reply(message.seq, result={}))
        elif isinstance(message, Control):
            error = "busy" if message.op == "flush" and self._running else None
            outbox.send(Reply(message.seq, result={"shutdown": True} if message.op == "shutdown" else {"freed_tokens": 0}, error=error))

    def _stats(self) -> Stats:
        return Stats(
            ready=self._say_ready.is_set(),
            running=len(self._running),
            waiting=len(self._waiting),
            pool_total=self.pool_tokens,
            max_reqs=self.max_running,
        )

    def _close(self, running: _Running, reason: str) -> Close:
        self._free.append(running.idx)
        return Close(running.idx, reason, len(running.submit.ids), 0)

    def _step(self) -> Out | None:
        """One token for every running request."""
        out = Out()
        idx, tok = [], []
        for rid, running in list(self._running.items()):
            submit, sampling = running.submit, running.submit.sampling
            if not running.scored and submit.prompt_logprobs_from > 0:
                out.logprobs.append(self._block(running, submit.prompt_logprobs_from, submit.ids[submit.prompt_logprobs_from :].tolist()))
            running.scored = True
            reason = "length"
            if sampling.max_tokens:
                token = self.token(submit, running.n_out)
                if submit.logprobs >= 0:
                    out.logprobs.append(self._block(running, len(submit.ids) + running.n_out, [token]))
                running.n_out += 1
                idx.append(running.idx)
                tok.append(token)
                ends = token in sampling.stop_token_ids or (token in self.config.eos_ids and not sampling.ignore_eos)
                reason = (
                    "stop" if ends and running.n_out > sampling.min_tokens else "length" if running.n_out == sampling.max_tokens else ""
                )
            if reason:
                del self._running[rid]
                out.close.append(self._close(running, reason))
        out.idx, out.tok = ints(idx), ints(tok)
        return out if idx or out.close or out.logprobs else None

    def token(self, submit: Submit, n: int) -> int:
        sampling = submit.sampling
        banned = {*self.config.eos_ids, *sampling.stop_token_ids} if n < sampling.min_tokens else set()
        forced = [token for token, bias in sampling.logit_bias.items() if bias == 100 and token not in banned]
        if forced:
            return forced[0]
        key = sampling.seed if sampling.temperature else tuple(submit.ids.tolist())
        favoured = [token for token, bias in sampling.logit_bias.items() if bias > 0 and token not in banned]
        for i in itertools.count():
            value = draw(key, len(submit.ids) + n, i)
            if favoured and value % 8 == 0:
                return favoured[0]
            token = 3 + (value >> 8) % (self.vocab - 3)
            if token not in banned and token not in self.config.eos_ids:
                return token
        raise AssertionError

    def logprob(self, ids: list[int], position: int) -> float:
        return -(draw("logprob", position, *ids) % 1000) / 100

    def _block(self, running: _Running, start: int, ids: list[int]) -> LogprobBlock:
        k = max(0, running.submit.logprobs)
        values = [self.logprob([token], start + i) for i, token in enumerate(ids)]
        top = [(token + j) % self.vocab for token in ids for j in range(k)]
        top_values = [value - j for value in values for j in range(k)]
        return LogprobBlock(running.idx, start, ints(ids), floats(values), k, ints(top), floats(top_values))


def greedy_ids(engine: FakeEngine, prompt: list[int], n: int) -> list[int]:
    """What the fake engine answers greedily to `prompt` when nothing ends it."""
    from gristmill.messages import SamplingParams

    submit = Submit("", np.asarray(prompt, dtype=np.int32), SamplingParams(temperature=0, max_tokens=n))
    return [engine.token(submit, i) for i in range(n)]
