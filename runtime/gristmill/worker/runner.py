"""ModelRunner: weights, KV tensors and request state of one rank; runs the forward pass of a Step and samples its rows."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gristmill import resources
from gristmill.attention.base import AttentionBackend
from gristmill.attention.registry import choose
from gristmill.errors import OptionError
from gristmill.layers.ops import KernelOps, LayerOps, TorchOps
from gristmill.loading.config import ModelConfig, load_config
from gristmill.loading.dummy import load_dummy_weights
from gristmill.loading.weights import Progress, load_weights
from gristmill.messages import EMIT_SAMPLE, NO_TOKEN, Mask, Pool, Ready, Result, Step
from gristmill.models.registry import build_model
from gristmill.options import Options
from gristmill.sampling import pipeline
from gristmill.sampling.state import SamplingState
from gristmill.trace import NULL_TRACER, NullTracer
from gristmill.worker import gpu_memory, rehearsal
from gristmill.worker.batch import ForwardBatch
from gristmill.worker.graphs import DecodeGraphs
from gristmill.worker.kv_pool import KVPool, PoolSizes, bytes_per_token, pool_sizes
from gristmill.worker.logprobs import PromptScores, RawLogprobs, prompt_positions, prompt_scores
from gristmill.worker.staging import Fetch, to_device
from gristmill.worker.tables import RequestTables
from gristmill.worker.work import work_of

log = logging.getLogger(__name__)


_KV_DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


class Forwarded:
    """A step between its forward pass and its sampling."""

    __slots__ = ("logits", "positions", "rows", "scores", "slots", "step", "t_start")

    def __init__(self, step: Step, t_start: float) -> None:
        self.step, self.t_start = step, t_start
        self.rows = np.flatnonzero(step.emit == EMIT_SAMPLE)  # rows of the step that emit, in the order of the logits
        self.slots = np.asarray(step.req_slot, np.int32)[self.rows]
        self.positions = np.asarray(step.kv_len, np.int32)[self.rows]  # of the new token
        self.logits: torch.Tensor | None = None
        self.scores: list[PromptScores] = []


class Launched:
    """A step whose work was launched; on the CPU it is done by then."""

    def __init__(self, done: Forwarded, tokens: torch.Tensor | None, raw: RawLogprobs | None, stream: torch.cuda.Stream | None) -> None:
        self._done, self._raw, self._has_tokens = done, raw, tokens is not None
        tensors = [tensor for scores in done.scores for tensor in scores.tensors]
        if tokens is not None:
            tensors += [tokens, *(raw.tensors if raw is not None else ())]
        self._fetch = Fetch(tensors, stream)

    def wait(self) -> Result:
        """The step's Result, once the device has finished it."""
        done, arrays = self._done, iter(self._fetch.wait())
        ids = np.full(done.step.req_slot.size, NO_TOKEN, np.int32)
        blocks = [scores.block(arrays) for scores in done.scores]
        if self._has_tokens:
            tokens = next(arrays)
            ids[done.rows] = tokens
            if self._raw is not None:
                blocks += self._raw.blocks(tokens, done.positions, arrays)
        return Result(step=done.step.step, ids=ids, logprobs=blocks, t_start=done.t_start, t_end=time.monotonic())


class ModelRunner:
    """Runs Steps in order. All methods must be called from one thread, under torch.inference_mode().

    On a GPU nothing waits for the device: `sample` returns when all work is launched, and Launched.wait may be called from another thread.
    """

    def __init__(
        self, model_path: str | Path, options: Options, *, progress: Progress | None = None, tracer: NullTracer = NULL_TRACER
    ) -> None:
        """Load the weights and make the pools. Raises ModelError or OptionError, one sentence each."""
        started = time.monotonic()
        torch.set_num_threads(options.threads or resources.cpu_count())
        self.tracer, self.options = tracer, options
        self.config = load_config(model_path)
        self.device = options.device
        self.launches = self.device != "cpu"
        self.dtype, dtype_reason = resolve_dtype(options.dtype, self.device)
        self.kv_dtype = self.dtype if options.kv_dtype == "auto" else _KV_DTYPES[options.kv_dtype]
        self.max_context = context_limit(self.config, options)
        self.max_reqs = options.max_running
        self._backend_class, backend_reason = choose(options.attention_backend, self.config, self.device, self.dtype, options.page_size)
        if self.kv_dtype != self.dtype and not self._backend_class.float8_caches:
            name = getattr(self._backend_class, "registered_name", "this")
            raise OptionError(f"--kv-dtype {options.kv_dtype} cannot be used: attention backend {name} reads no 8-bit floats")
        torch_only = self._backend_class.layer_ops == "torch"
        ops: LayerOps = TorchOps(self.device) if torch_only else KernelOps(self.config, self.dtype, self.device)
        self.model = build_model(self.config, ops, self.dtype, self.max_context)
        if options.load_format == "dummy":
            load_dummy_weights(self.model)
        else:
            load_weights(self.model, model_path, progress)
        loaded = time.monotonic()
        self.sampling = SamplingState(self.max_reqs, self.config.vocab_size, self.device)
        self._copies = torch.cuda.Stream() if self.launches else None
        self.graphs: DecodeGraphs | None = None
        self._make_pools(self._pool_sizes())
        self.caps: dict[str, Any] = {
            "architecture": self.config.architecture,
            "vocab_size": self.config.vocab_size,
            "device": self._device_name(),
            "dtype": str(self.dtype).removeprefix("torch."),
            "dtype_reason": dtype_reason,
            "attention_backend": self.backend.describe()["name"],
            "attention_backend_reason": backend_reason,
            "implementations": ops.families | self.backend.families(),
            "threads": torch.get_num_threads(),
            "graphs": options.graphs if self.graphs is not None else "off",
            "kv_dtype": str(self.kv_dtype).removeprefix("torch."),
            "kv_bytes_per_token": bytes_per_token(self.config, self.kv_dtype),
            "load_s": round(loaded - started, 3),
        }
        self._log_loaded(Path(model_path).name, loaded - started)

    # --- setting up

    def _device_name(self) -> str:
        return torch.cuda.get_device_name() if self.launches else "cpu"

    def _log_loaded(self, name: str, seconds: float) -> None:
        window = f" and {self.pool.window_slots} of sliding-window layers" if self.pool.window_slots else ""
        log.info(
            "loaded %s in %.1f s: %s, %s on %s, attention %s, %d threads, %d token slots%s (%.0f MiB)",
            name, seconds, self.config.architecture, self.caps["dtype"], self.caps["device"], self.caps["attention_backend"],
            self.caps["threads"], self.pool.slots, window, self.pool.nbytes / 2**20,
        )  # fmt: skip

    def most_tokens(self) -> int:
        """Tokens of the largest step that the options let the scheduler plan."""
        return (self.options.chunk_tokens or max(self.options.max_prefill_tokens, self.max_context)) + self.max_reqs

    def _pool_sizes(self) -> PoolSizes:
        options = self.options
        fraction, available = options.mem_fraction, None
        if self.launches:
            available = gpu_memory.room_for_pool(self.device, fraction, self._rehearse)
            fraction = 1.0  # of the room that is left
        return pool_sizes(
            self.config,
            self.kv_dtype,
            pool_tokens=options.pool_tokens,
            memory_fraction=fraction,
            page_size=options.page_size,
            max_reqs=self.max_reqs,
            max_context=self.max_context,
            chunk_tokens=options.chunk_tokens or options.max_prefill_tokens,
            available_bytes=available,
        )

    def _rehearse(self) -> None:
        """Make the buffers of the largest steps and run them once over a pool that is just large enough."""
        rows = self.most_tokens()
        self.model.reserve(rows, self.max_reqs)
        slots = -(-rows // self.options.page_size) * self.options.page_size
        self._make_pools(PoolSizes(slots, slots if self.config.sliding_window else 0), for_rehearsal=True)
        rehearsal.run(self, rows)
        del self.pool, self.backend, self.tables

    def _make_pools(self, sizes: PoolSizes, *, for_rehearsal: bool = False) -> None:
        self.pool = KVPool(self.config, sizes, self.options.page_size, self.kv_dtype, self.device)
        self.backend: AttentionBackend = self._backend_class(self.config, self.pool, self.dtype)
        self.tables = RequestTables(self.max_reqs, self.max_context, 2 if sizes.window else 1, self.device)
        if self.launches and not for_rehearsal and self.options.graphs != "off" and self.backend.captures:
            self.graphs = DecodeGraphs(self.model, self.backend, self.tables, self.max_reqs, sizes.full)
            if self.options.graphs == "start":
                self.graphs.capture_all()

    def ready(self, rank: int) -> Ready:
        pools = [Pool("full", self.pool.slots, self.pool.page_size)]
        if self.pool.window_slots:
            assert self.config.sliding_window is not None
            pools.append(Pool("window", self.pool.window_slots, self.pool.page_size, self.config.sliding_window))
        return Ready(rank=rank, pools=pools, max_reqs=self.max_reqs, max_context=self.max_context, caps=self.caps)

    # --- steps

    def forward(self, step: Step) -> Forwarded:
        """Apply the step's new requests and writes and run the model; what is left is `sample`."""
        done = Forwarded(step, time.monotonic())
        work = work_of(step)._asdict() if self.tracer.enabled else {}
        with self.tracer.span("forward", step=step.step, rows=step.req_slot.size, **work):
            for new in step.new:
                self.sampling.admit(new)
            size = self._graph_size(done)
            batch = self.tables.load(step, size or 0)
            if batch is not None and size is not None:
                assert self.graphs is not None
                done.logits = self.graphs.run(batch)[: step.req_slot.size]
            elif batch is not None:
                self._run(done, batch)
        return done

    def _graph_size(self, done: Forwarded) -> int | None:
        """Rows of the captured graph to run, None for none: a graph takes steps whose every row computes one token and emits the next."""
        step = done.step
        if self.graphs is None or len(done.rows) != step.req_slot.size or not (step.q_len == 1).all():
            return None
        return self.graphs.size_for(step.req_slot.size, int(step.kv_len.sum()))

    def _run(self, done: Forwarded, batch: ForwardBatch) -> None:
        self.tables.look_up(batch)
        self.backend.prepare(batch)
        hidden = self.model(batch, self.backend)
        emitting = len(done.rows)
        if batch.is_decode and emitting == batch.num_tokens:  # every row makes a token: none scores its prompt
            done.logits = self.model.logits(hidden)
            return
        step = done.step
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
                done.scores.append(prompt_scores(row, state, positions, part, self.model.logits))
        if emitting:  # last, because these logits live until the next call
            chosen = to_device([last[done.rows].astype(np.int64)], self.device)[0]
            done.logits = self.model.logits(hidden.index_select(0, chosen))

    def sample(self, done: Forwarded, mask: Mask | None = None) -> Launched:
        """Draw the next token of every emitting row and remember it."""
        if done.logits is None:
            return Launched(done, None, None, self._copies)
        with self.tracer.span("sample", step=done.step.step, rows=len(done.rows)):
            allowed = None
            if mask is not None:
                row_of = {int(row): i for i, row in enumerate(done.rows)}
                allowed = pipeline.allowed_rows(mask, row_of, self.config.vocab_size)
            raw = self._raw_logprobs(done)
            tokens = pipeline.sample(done.logits, done.slots, done.positions, self.sampling, allowed)
            slots, positions = to_device([done.slots, done.positions], self.device)
            self.tables.remember(slots, positions, tokens)
            if raw is not None:
                raw.choose(tokens)
            return Launched(done, tokens, raw, self._copies)

    def _raw_logprobs(self, done: Forwarded) -> RawLogprobs | None:
        asking = np.flatnonzero(self.sampling.wants_logprobs[done.slots])
        if not asking.size:
            return None
        assert done.logits is not None
        return RawLogprobs(done.logits, [(int(i), int(done.rows[i]), self.sampling.of(int(done.slots[i]))) for i in asking])


def resolve_dtype(name: str, device: str = "cpu") -> tuple[torch.dtype, str]:
    """The dtype of weights and activations, and why."""
    if name != "auto":
        return getattr(torch, name), "asked for"
    if device == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return torch.bfloat16, "the GPU has bfloat16 instructions"
        return torch.float32, "the GPU has no bfloat16 instructions"
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
