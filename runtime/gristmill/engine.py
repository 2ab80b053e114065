"""The whole engine inside your own process, for offline use and tests: the parts of a server as threads over inproc:// sockets."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import importlib
import logging
import os
import queue
import tempfile
import threading
import uuid
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import msgspec
import numpy as np
import zmq

from gristmill import watchdog
from gristmill.errors import GristmillError
from gristmill.launch import merged_trace, prepare
from gristmill.launch_child import NAMES, ROLES, describe_failure
from gristmill.messages import SamplingParams, Stats, Submit, Text, TokenLogprob, Usage
from gristmill.options import Options, make_options
from gristmill.tokenizer.manager import EngineUnavailable, Generation, TokenizerManager
from gristmill.tokenizer.validate import (
    MAX_CHOICES,
    RequestError,
    check_ids,
    check_int,
    check_sampling,
    check_stops,
    check_text,
    choice_seed,
    make_submit,
)

log = logging.getLogger(__name__)

T = TypeVar("T")
Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]  # text, token ids, or the messages of a chat

_JOIN_S = 10.0
_JOIN_HUNG_S = 0.5  # threads cannot be killed: one that hangs is left behind


@dataclass
class Output:
    """One finished choice. `prompt_index` counts the prompts of the call, `index` the choices of one prompt."""

    prompt_index: int
    index: int
    text: str = ""
    ids: list[int] = field(default_factory=list)
    finish_reason: str = ""  # stop | length | abort
    stop_reason: str | int | None = None  # the stop string or stop token id that ended it
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)

    def add(self, delta: Text) -> None:
        self.text += delta.text
        self.ids.extend(delta.ids.tolist())
        self.logprobs.extend(delta.logprobs)
        self.prompt_logprobs.extend(delta.prompt_logprobs)
        self.usage = delta.usage or self.usage
        if delta.finish is not None:
            self.finish_reason, self.stop_reason = delta.finish, delta.stop_reason


class Engine:
    """A model and everything that serves it, in this process.

    Args:
        model: directory, .gguf file, catalogue name or hub id.
        **options: fields of `gristmill.options.Options`, such as page_size=16 or overlap=False.

    Raises:
        GristmillError: one sentence about what cannot be loaded or used.

    Example:
        >>> with Engine("smollm2-135m") as engine:
        ...     print(engine.generate("Once upon a time", max_tokens=16, temperature=0)[0].text)
    """

    def __init__(self, model: str, **options: Any) -> None:
        self._start(make_options(str(model), options))

    @classmethod
    def from_options(cls, options: Options) -> Engine:
        """An engine from Options that were made already, as the command line does."""
        engine = cls.__new__(cls)
        engine._start(options)
        return engine

    def _start(self, options: Options) -> None:
        prepared = prepare(options)
        self.options, self.tokenizer, self.model_config = prepared.options, prepared.tokenizer, prepared.model_config
        self._cleanup = contextlib.ExitStack()
        self._stop = threading.Event()
        self._pid = os.getpid()
        self._failure: GristmillError | None = None
        self._hung = False
        self._watching: asyncio.Task[None] | None = None
        self._failure_lock = threading.Lock()
        self._closed = False
        trace_dir = ""
        if self.options.trace:
            folder = self._cleanup.enter_context(tempfile.TemporaryDirectory(prefix="gristmill-trace-"))
            trace_dir = self._cleanup.enter_context(merged_trace(self.options, Path(folder)))
        config = prepared.launch_config(f"inproc://gristmill-{uuid.uuid4().hex}", trace_dir)
        self._context = zmq.Context()
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(self._loop_failed)
        self._loop_thread = threading.Thread(target=self._loop.run_forever, name="engine-loop", daemon=True)
        self._loop_thread.start()
        self._manager = TokenizerManager(config, self._context, self.tokenizer, self.model_config)
        self._threads = [
            threading.Thread(target=self._run_part, args=(role, config), name=f"gristmill-{role}", daemon=True) for role in ROLES
        ]
        try:
            self._call(self._manager.start())
            for thread in self._threads:
                thread.start()
            self._call(self._manager.wait_ready())
            asyncio.run_coroutine_threadsafe(self._watch(), self._loop)
            # threads must not be torn down under the engine when the interpreter ends. Last of all, since exit hooks run in reverse
            # order: torch's own, which takes the ops away, was registered while the worker loaded
            atexit.register(self.close)
        except BaseException:
            self.close()
            raise

    # --- generating

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
        *,
        n: int = 1,
        stop: str | Sequence[str] = (),
        logprobs: int | None = None,
        prompt_logprobs: bool = False,
        include_stop: bool = False,
        skip_special: bool = True,
        priority: int = 0,
        cache_salt: str = "",
        **sampling: Any,
    ) -> list[Output]:
        """Complete one or several prompts at once and wait for all of them.

        Args:
            prompts: one text, one list of token ids, or a list of either.
            n: choices per prompt.
            stop: strings that end a choice; they are cut off unless `include_stop`.
            logprobs: alternatives per generated token (0: the token itself only; None: no log probabilities).
            prompt_logprobs: score the prompt's tokens too (with max_tokens=0: only them).
            skip_special: leave special tokens out of the text (never out of the ids).
            priority: higher is admitted first, and may put running requests back (option preempt_threshold).
            cache_salt: prefixes are shared only between requests of the same salt.
            **sampling: temperature, top_k, top_p, min_p, seed, max_tokens, min_tokens, ignore_eos, stop_token_ids, logit_bias,
                presence_penalty, frequency_penalty, repetition_penalty.

        Returns:
            All choices of the first prompt, then all of the second, and so on.

        Raises:
            GristmillError: an argument that cannot be used, or a request or engine that failed.
        """
        jobs = [
            self._choices(prompt, n, stop, logprobs, prompt_logprobs, include_stop, skip_special, priority, cache_salt, sampling)
            for prompt in _as_list(prompts)
        ]
        return self._call(self._finish_all(jobs))

    def stream(
        self,
        prompt: Prompt,
        *,
        n: int = 1,
        stop: str | Sequence[str] = (),
        logprobs: int | None = None,
        include_stop: bool = False,
        skip_special: bool = True,
        priority: int = 0,
        cache_salt: str = "",
        **sampling: Any,
    ) -> Generator[tuple[int, Text], None, None]:
        """Complete one prompt piece by piece: (choice index, new text), the last piece of a choice with `finish` and `usage`.

        Ending the iteration early aborts the request. Arguments as for `generate`; messages of a chat are a prompt too.
        """
        # not a generator itself: a wrong argument is to be raised here, not at the first iteration
        return self._pieces(self._choices(prompt, n, stop, logprobs, False, include_stop, skip_special, priority, cache_salt, sampling))

    def _pieces(self, choices: list[Submit]) -> Generator[tuple[int, Text], None, None]:
        pieces: queue.SimpleQueue[tuple[int, Text] | BaseException | None] = queue.SimpleQueue()
        future = asyncio.run_coroutine_threadsafe(self._forward(choices, pieces), self._loop)
        try:
            while (piece := pieces.get()) is not None:
                if isinstance(piece, BaseException):
                    raise self._explain(piece)
                yield piece
        finally:
            future.cancel()

    def chat(self, messages: Sequence[Mapping[str, Any]], **arguments: Any) -> Output:
        """The model's answer to a conversation ({"role", "content"} mappings, oldest first); arguments as for `generate`."""
        choices = self._choices(messages, 1, **self._chat_arguments(arguments))
        return self._call(self._finish_all([choices]))[0]

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """Token ids of a text, of the messages of a chat (with the chat template), or the given ids themselves."""
        if isinstance(prompt, str):
            check_text("prompt", prompt)
            return self.tokenizer.encode(prompt)
        if len(prompt) and isinstance(prompt[0], Mapping):
            for message in prompt:
                if isinstance(text := message.get("content"), str):  # type: ignore[union-attr]
                    check_text("messages", text)
            try:
                return self.tokenizer.apply_chat_template([dict(message) for message in prompt])  # type: ignore[arg-type]
            except ValueError as error:
                raise RequestError(str(error), "messages") from error
        if isinstance(prompt, (bytes, Mapping)) or not isinstance(prompt, (Sequence, np.ndarray)):
            raise RequestError(f"a prompt is a text, token ids or the messages of a chat, not {type(prompt).__name__}", "prompt")
        # what is no integer is left as it is, for the check of ids to name it
        return [int(token) if isinstance(token, np.integer) else token for token in prompt]  # type: ignore[misc]

    # --- the engine itself

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and output together: what the model, the options and the KV pool allow."""
        return self._manager.limits.context_length

    @property
    def stats(self) -> Stats:
        """The scheduler's counters of this moment."""
        self.control("stats")
        return self._manager.stats

    def control(self, op: str, **args: Any) -> dict[str, Any]:
        """Run a control operation of the scheduler, such as "flush", and wait for its result."""
        return self._call(self._manager.control(op, args))

    def run_on_manager(self, use: Callable[[TokenizerManager], Coroutine[Any, Any, T]]) -> T:
        """Run `use(manager)` on the engine's loop and wait for it: for what `generate` and `stream` cannot do, such as a timed replay."""
        return self._call(use(self._manager))

    def flush(self) -> None:
        """Empty the prefix cache; waits until nothing is in flight."""
        self.control("flush")

    def close(self) -> None:
        """End all threads and free the model. Idempotent; does nothing in a forked child, which has none of the threads."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        atexit.unregister(self.close)
        if self._failure is None and self._manager.ready:
            with contextlib.suppress(GristmillError, TimeoutError, asyncio.TimeoutError):
                self._call(asyncio.wait_for(self._manager.shutdown(), _JOIN_S))
        self._stop.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(_JOIN_HUNG_S if self._hung else _JOIN_S)
        asyncio.run_coroutine_threadsafe(self._close_manager(), self._loop).result(_JOIN_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._loop_thread.join(_JOIN_S)
        if not self._loop_thread.is_alive():
            self._loop.close()
        if not any(thread.is_alive() for thread in self._threads):
            self._context.destroy(linger=0)  # while a thread still uses a socket this would crash it
        self._cleanup.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # --- inside

    def _choices(
        self,
        prompt: Prompt,
        n: int,
        stop: str | Sequence[str] = (),
        logprobs: int | None = None,
        prompt_logprobs: bool = False,
        include_stop: bool = False,
        skip_special: bool = True,
        priority: int = 0,
        cache_salt: str = "",
        sampling: Mapping[str, Any] = {},
    ) -> list[Submit]:
        self._check_usable()
        ids = self.prompt_ids(prompt)
        limits = self._manager.limits
        check_ids("prompt", ids, limits)
        for name in sampling:
            if name not in SamplingParams.__struct_fields__:
                raise RequestError(f"{name!r} is not a sampling parameter; they are {', '.join(SamplingParams.__struct_fields__)}", name)
        first = check_sampling(limits, len(ids), **sampling)
        if not isinstance(stop, (str, Sequence, type(None))):
            raise RequestError(f"stop must be a text or a list of texts, not {type(stop).__name__}", "stop")
        stops = check_stops([stop] if isinstance(stop, str) else list(stop or ()))
        return [
            make_submit(
                ids,
                _with_seed(first, index),
                stop=stops,
                include_stop=include_stop,
                skip_special=skip_special,
                logprobs=-1 if logprobs is None else logprobs,
                prompt_logprobs=prompt_logprobs,
                priority=priority,
                cache_salt=cache_salt,
            )
            for index in range(check_int("n", n, 1, MAX_CHOICES))
        ]

    def _chat_arguments(self, arguments: dict[str, Any]) -> dict[str, Any]:
        own = {"stop", "logprobs", "prompt_logprobs", "include_stop", "skip_special", "priority", "cache_salt"}
        return {
            **{name: value for name, value in arguments.items() if name in own},
            "sampling": {name: value for name, value in arguments.items() if name not in own},
        }

    async def _finish_all(self, jobs: Sequence[list[Submit]]) -> list[Output]:
        """All outputs in order; at most max_queued choices are with the scheduler at a time, which refuses more."""
        places = asyncio.Semaphore(max(1, self.options.max_queued // max((len(job) for job in jobs), default=1)))

        async def finish(prompt_index: int, choices: list[Submit]) -> list[Output]:
            outputs = [Output(prompt_index, index) for index in range(len(choices))]
            async with places:
                generation = self._manager.submit(choices)
                try:
                    async for batch in generation.batches():
                        for index, delta in batch:
                            _raise_error(delta)
                            outputs[index].add(delta)
                finally:
                    generation.abort()
            return outputs

        tasks = [asyncio.ensure_future(finish(index, choices)) for index, choices in enumerate(jobs)]
        try:
            return [output for outputs in await asyncio.gather(*tasks) for output in outputs]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _forward(self, choices: list[Submit], pieces: queue.SimpleQueue[Any]) -> None:
        generation: Generation | None = None
        try:
            generation = self._manager.submit(choices)
            async for batch in generation.batches():
                for index, delta in batch:
                    _raise_error(delta)
                    pieces.put((index, delta))
            pieces.put(None)
        except BaseException as error:
            pieces.put(error)
        finally:
            if generation is not None:
                generation.abort()

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run `coroutine` on the engine's loop and wait for it; an interrupt cancels it there."""
        try:
            self._check_process()
            if self._closed and not self._loop_thread.is_alive():
                raise GristmillError("this Engine is closed")
        except GristmillError:
            coroutine.close()
            raise
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except EngineUnavailable as error:
            raise self._explain(error) from error
        except BaseException:
            future.cancel()
            raise

    def _check_usable(self) -> None:
        self._check_process()
        if self._closed:
            raise GristmillError("this Engine is closed")

    def _check_process(self) -> None:
        """Threads do not survive a fork: a child would wait for an answer for ever."""
        if os.getpid() != self._pid:
            raise GristmillError(
                f"this Engine belongs to process {self._pid} and cannot be used in its forked child {os.getpid()}: "
                "make the Engine in the child, or use the spawn start method of multiprocessing"
            )

    async def _watch(self) -> None:
        """End the engine when one of its threads hangs."""
        watched = asyncio.current_task()
        assert watched is not None
        self._watching = watched
        hang = await watchdog.watch(lambda: self._manager.seen, self.options.watchdog_s)
        for line in watchdog.own_stacks():
            log.error("stack: %s", line)
        self._hung = True
        self._fail(GristmillError(f"{hang} (watchdog_s={self.options.watchdog_s:g}); the stacks of all threads are in the log"))

    async def _close_manager(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
        await self._manager.close()

    def _explain(self, error: BaseException) -> BaseException:
        """The failure of the engine itself, when that is what lies behind `error`."""
        return self._failure if isinstance(error, EngineUnavailable) and self._failure is not None else error

    def _run_part(self, role: str, config: Any) -> None:
        try:
            importlib.import_module(ROLES[role]).run(config, self._context, self._stop)
            if not self._closed:
                self._fail(GristmillError(f"the {NAMES[role]} ended unexpectedly"))
        except GristmillError as error:
            self._fail(error)
        except BaseException as error:
            failure = GristmillError(describe_failure(f"the {NAMES[role]}", error))
            failure.__cause__ = error
            self._fail(failure)

    def _fail(self, failure: GristmillError) -> None:
        """The first failure ends the engine: every waiting caller gets it."""
        with self._failure_lock:
            if self._failure is not None:
                return
            if not self._closed:  # a part that fails while closing only ends the wait for it
                self._failure = failure
        self._stop.set()
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            self._loop.call_soon_threadsafe(self._manager.fail_all, str(failure))

    def _loop_failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        loop.default_exception_handler(context)
        if error is not None:
            self._fail(GristmillError(describe_failure("the tokenizer manager", error)))


def _as_list(prompts: Any) -> list[Any]:
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, np.ndarray):
        prompts = prompts.tolist()
    if isinstance(prompts, (bytes, Mapping)) or not isinstance(prompts, Sequence):
        raise RequestError(f"prompts are texts or lists of token ids, not {type(prompts).__name__}", "prompt")
    prompts = list(prompts)
    return [prompts] if prompts and not isinstance(prompts[0], (str, Sequence, np.ndarray)) else prompts


def _with_seed(sampling: SamplingParams, index: int) -> SamplingParams:
    return msgspec.structs.replace(sampling, seed=choice_seed(sampling.seed, index))


def _raise_error(delta: Text) -> None:
    if delta.finish == "error":
        raise (EngineUnavailable if delta.code == "engine_unavailable" else GristmillError)(delta.error or "the request failed")
