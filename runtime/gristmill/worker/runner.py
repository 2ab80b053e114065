"""ModelRunner: weights, KV tensors and request state of one rank; runs the forward pass of a Step and samples its rows."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gristmill import resources
from gristmill.attention.registry import choose
from gristmill.errors import OptionError
from gristmill.layers.ops import KernelOps, LayerOps, TorchOps
from gristmill.loading.config import ModelConfig, load_config
from gristmill.loading.weights import Progress, load_weights
from gristmill.messages import EMIT_SAMPLE, NO_TOKEN, LogprobBlock, Mask, Pool, Ready, Result, Step
from gristmill.models.registry import build_model
from gristmill.options import Options
from gristmill.sampling import pipeline
from gristmill.sampling.state import SamplingState
from gristmill.trace import NULL_TRACER, NullTracer
from gristmill.worker.kv_pool import KVPool, bytes_per_token, pool_sizes
from gristmill.worker.logprobs import RawLogprobs, prompt_block, prompt_positions
from gristmill.worker.tables import RequestTables
from gristmill.worker.work import work_of

log = logging.getLogger(__name__)


class Forwarded:
    """A step between its forward pass and its sampling."""

    __slots__ = ("blocks", "logits", "positions", "rows", "slots", "step", "t_start")

    def __init__(self, step: Step, t_start: float) -> None:
        self.step, self.t_start = step, t_start
        self.rows = np.flatnonzero(step.emit == EMIT_SAMPLE)  # rows of the step that emit, in the order of the logits
        self.slots = np.asarray(step.req_slot, np.int32)[self.rows]
        self.positions = np.asarray(step.kv_len, np.int32)[self.rows]  # of the new token
        self.logits: torch.Tensor | None = None
        self.blocks: list[LogprobBlock] = []


class ModelRunner:
    """Runs Steps in order. All methods must be called from one thread, under torch.inference_mode()."""

    def __init__(
        self, model_path: str | Path, options: Options, *, progress: Progress | None = None, tracer: NullTracer = NULL_TRACER
    ) -> None:
        """Load the weights and make the pools. Raises ModelError or OptionError, one sentence each."""
        started = time.monotonic()
        torch.set_num_threads(options.threads or resources.cpu_count())
        self.tracer = tracer
        self.config = load_config(model_path)
        self.dtype, dtype_reason = resolve_dtype(options.dtype)
        self.max_context = context_limit(self.config, options)
        self.max_reqs = options.max_running
        backend_class, backend_reason = choose(options.attention_backend, self.config, options.device, self.dtype)
        ops: LayerOps = TorchOps() if backend_class.layer_ops == "torch" else KernelOps(self.config, self.dtype, options.device)
        self.model = build_model(self.config, ops, self.dtype, self.max_context)
        load_weights(self.model, model_path, progress)
        loaded = time.monotonic()
        sizes = pool_sizes(
            self.config,
            self.dtype,
            pool_tokens=options.pool_tokens,
            memory_fraction=options.kv_memory_fraction,
            page_size=options.page_size,
            max_reqs=self.max_reqs,
            max_context=self.max_context,
            chunk_tokens=options.chunk_tokens or options.max_prefill_tokens,
        )
        self.pool = KVPool(self.config, sizes, options.page_size, self.dtype)
        self.backend = backend_class(self.config, self.pool)
        self.tables = RequestTables(self.max_reqs, self.max_context, n_pools=2 if sizes.window else 1)
        self.sampling = SamplingState(self.max_reqs, self.config.vocab_size)
        self.caps: dict[str, Any] = {
            "architecture": self.config.architecture,
            "vocab_size": self.config.vocab_size,
            "dtype": str(self.dtype).removeprefix("torch."),
            "dtype_reason": dtype_reason,
            "attention_backend": self.backend.describe()["name"],
            "attention_backend_reason": backend_reason,
            "implementations": ops.families | self.backend.families(),
            "threads": torch.get_num_threads(),
            "kv_bytes_per_token": bytes_per_token(self.config, self.dtype),
            "load_s": round(loaded - started, 3),
        }
        log.info(
            "loaded %s in %.1f s: %s, %s, attention %s, %d threads, %d token slots%s (%.0f MiB)",
            Path(model_path).name,
            loaded - started,
            self.config.architecture,
            self.caps["dtype"],
            self.caps["attention_backend"],
            self.caps["threads"],
            sizes.full,
            f" and {sizes.window} of sliding-window layers" if sizes.window else "",
            self.pool.nbytes / 2**20,
        )

    def ready(self, rank: int) -> Ready:
        pools = [Pool("full", self.pool.slots, self.pool.page_size)]
        if self.pool.window_slots:
            assert self.config.sliding_window is not None
            pools.append(Pool("window", self.pool.window_slots, self.pool.page_size, self.config.sliding_window))
        return Ready(rank=rank, pools=pools, max_reqs=self.max_reqs, max_context=self.max_context, caps=self.caps)

    def forward(self, step: Step) -> Forwarded:
        """Apply the step's new requests and writes and run the model; what is left is `sample`."""
        done = Forwarded(step, time.monotonic())
        work = work_of(step)._asdict() if self.tracer.enabled else {}
        with self.tracer.span("forward", step=step.step, rows=step.req_slot.size, **work):
            for new in step.new:
                self.tables.admit(new)
                self.sampling.admit(new)
            self.tables.apply_writes(step)
            if step.req_slot.size:
                self._run(done)
        return done

    def _run(self, done: Forwarded) -> None:
        step = done.step
        batch = self.tables.batch(step)
        self.backend.prepare(batch)
        hidden = self.model(batch, self.backend)
        emitting = len(done.rows)
        if batch.is_decode and emitting == batch.num_tokens:  # every row makes a token: none scores its prompt
            done.logits = self.model.logits(hidden)
            return
        last = batch.host_q_lens.cumsum() - 1  # index of each row's last token in the batch
        for row, slot in enumerate(step.req_slot.tolist()):
            state = self.sampling.of(slot)
            if state.prompt_logprobs_from < 0:
                continue
            kv_len, q_len = int(step.kv_len[row]), int(step.q_len[row])
            positions = prompt_positions(state, kv_len - q_len, kv_len)
            if positions:
                start = int(last[row]) - q_len + 1 + positions.start - (kv_len - q_len)
                part = hidden[start : start + len(positions)]
                done.blocks.append(prompt_block(row, state, positions, part, self.model.logits))
        if emitting:  # last, because these logits live until the next call
            done.logits = self.model.logits(hidden[torch.from_numpy(last[done.rows])])

    def sample(self, done: Forwarded, mask: Mask | None = None) -> Result:
        """Draw the next token of every emitting row and remember it."""
        step = done.step
        ids = np.full(step.req_slot.size, NO_TOKEN, np.int32)
        blocks = done.blocks
        if done.logits is not None:
            with self.tracer.span("sample", step=step.step, rows=len(done.rows)):
                row_of = {int(row): i for i, row in enumerate(done.rows)}
                allowed = pipeline.allowed_rows(mask, row_of, self.config.vocab_size) if mask is not None else None
                asking = np.flatnonzero(self.sampling.wants_logprobs[done.slots])
                raw = None
                if asking.size:
                    rows = [(int(i), int(done.rows[i]), self.sampling.of(int(done.slots[i]))) for i in asking]
                    raw = RawLogprobs(done.logits, rows)
                tokens = pipeline.sample(done.logits, done.slots, done.positions, self.sampling, allowed)
                ids[done.rows] = tokens
                self.tables.tokens[done.slots, done.positions] = np.maximum(tokens, 0)  # an invalid row goes on with token 0
                if raw is not None:
                    blocks = blocks + raw.blocks(tokens, done.positions)
        return Result(step=step.step, ids=ids, logprobs=blocks, t_start=done.t_start, t_end=time.monotonic())


def resolve_dtype(name: str) -> tuple[torch.dtype, str]:
    """The dtype of weights and activations, and why."""
    if name != "auto":
        return getattr(torch, name), "asked for"
    try:
        from gristmill_kernels import _host

        features = _host.cpu_features()
    except ImportError as error:
        return torch.float32, f"gristmill_kernels._host cannot be imported ({error})"
    if features.get("avx512bf16") or features.get("amx_bf16"):
        return torch.bfloat16, "the CPU has bfloat16 instructions"
    return torch.float32, "the CPU has no bfloat16 instructions"


def context_limit(config: ModelConfig, options: Options) -> int:
    """Longest prompt + output. Raises OptionError when more is asked for than the model was trained for."""
    if options.context_length > config.context_length:
        raise OptionError(
            f"--context-length {options.context_length} exceeds the {config.context_length} tokens that the model was trained for"
        )
    return options.context_length or config.context_length
