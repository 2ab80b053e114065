"""The attention backend `flashinfer`: FlashInfer's kernels over our pools, which stay as they are; keys and values are stored by ours."""

from __future__ import annotations

from types import ModuleType
from typing import ClassVar, NamedTuple

import torch

from gristmill.attention.base import AttentionLayer
from gristmill.attention.flashinfer.updaters import plan_arrays, workspace_bytes
from gristmill.attention.flashinfer.wrappers import Decode, Planned, Prefill, Shape
from gristmill.attention.libraries import LibraryBackend, find
from gristmill.attention.registry import register
from gristmill.loading.config import ModelConfig
from gristmill.worker.batch import ForwardBatch
from gristmill.worker.kv_pool import KVPool, LatentPool

_OLDEST = (0, 5)


class _Metadata(NamedTuple):
    out_slots: torch.Tensor
    planned: Planned


@register("flashinfer")
class FlashInferBackend(LibraryBackend):
    """Layers with and without a window have a plan each: a plan holds the window, and the two may have pools of their own.

    Decode rows need no window in their plan, because their lists hold nothing else.
    """

    head_dims: ClassVar[tuple[int, ...]] = (64, 128, 256)

    @classmethod
    def library(cls) -> ModuleType:
        return find("flashinfer", "flashinfer-python", _OLDEST)

    @classmethod
    def why_not_head_dim(cls, head_dim: int) -> str | None:
        return None if head_dim in cls.head_dims else f"head_dim {head_dim} is not one of {', '.join(map(str, cls.head_dims))}"

    def __init__(self, config: ModelConfig, pool: KVPool | LatentPool, dtype: torch.dtype | None = None) -> None:
        super().__init__(config, pool, dtype)
        if isinstance(pool, LatentPool):
            return
        self._library = self.library()
        scale = AttentionLayer.of(config, 0).sm_scale  # the same in all layers
        self._shape = Shape(config.num_heads, config.num_kv_heads, config.head_dim, scale, self.dtype, pool.dtype)
        self._workspace = torch.empty(0, dtype=torch.uint8)
        self._room = {kind: torch.empty(0, dtype=torch.int32) for kind in self.kinds}
        self._prefill: dict[bool, Planned] = {}
        self._decode: dict[bool, Planned] = {}
        self._captured: dict[int, dict[bool, Planned]] = {}  # by rows
        self._families |= {"decode_attention": "flashinfer", "extend_attention": "flashinfer"}

    # --- metadata

    def prepare(self, batch: ForwardBatch, *, in_graph: bool = False) -> None:
        if in_graph:
            planned = self._captured[batch.num_tokens]  # plan_graph has filled what these read
        else:
            planned = self._eager(batch.is_decode)
            self._plan(batch, planned)
        batch.attention = {kind: _Metadata(self.out_slots_of(batch, kind), planned[kind]) for kind in planned}

    def plan_graph(self, batch: ForwardBatch) -> None:
        rows = batch.num_tokens
        if rows not in self._captured:
            workspace = self._floats(rows)
            self._captured[rows] = {
                kind: Decode(self._library, workspace, self._shape, self.device, rows, self._list_room(kind, rows)) for kind in self.kinds
            }
        self._plan(batch, self._captured[rows])

    def _eager(self, is_decode: bool) -> dict[bool, Planned]:
        kept = self._decode if is_decode else self._prefill
        if not kept:
            wrapper: type[Decode] | type[Prefill] = Decode if is_decode else Prefill
            kept |= {kind: wrapper(self._library, self._floats(), self._shape, self.device) for kind in self.kinds}
        return kept

    def _plan(self, batch: ForwardBatch, planned: dict[bool, Planned]) -> None:
        for kind, one in planned.items():
            before = self.before(kind)
            arrays = plan_arrays(batch.host_q_lens, batch.host_kv_lens, before)
            slots = self._slots(batch, kind, int(arrays.kv_indptr[-1]), one.room if isinstance(one, Decode) else None)
            one.plan(arrays, slots, -1 if batch.is_decode or before is None else before)

    def _slots(self, batch: ForwardBatch, kind: bool, count: int, room: torch.Tensor | None) -> torch.Tensor:
        """The `count` slots that plan_arrays counted, row by row; written to the start of `room`, if given."""
        before = self.before(kind)
        starts = None if before is None else (batch.kv_lens - batch.q_lens - before).clamp_(min=0)
        slots = torch.empty(count, dtype=torch.int32, device=self.device) if room is None else room[:count]
        indptr = torch.empty(len(batch.host_kv_lens) + 1, dtype=torch.int32, device=self.device)
        self._kv_indices(indptr, slots, self.table_of(batch, kind), batch.req_slots, batch.kv_lens.clamp(min=1), starts)
        if not batch.host_kv_lens.all():
            slots.clamp_(min=0)  # the one key of a padding row is slot -1
        return slots

    # --- memory

    def _floats(self, graph_rows: int = 0) -> torch.Tensor:
        """The memory for partial results, one for all plans since one step runs at a time; what is captured keeps the one it got."""
        processors = 1 if self.device == "cpu" else torch.cuda.get_device_properties(self.device).multi_processor_count
        needed = workspace_bytes(self.config.num_heads, self.config.num_kv_heads, self.config.head_dim, processors, graph_rows)
        if self._workspace.numel() < needed:
            self._workspace = torch.zeros(needed, dtype=torch.uint8, device=self.device)
        return self._workspace

    def _list_room(self, kind: bool, rows: int) -> torch.Tensor:
        """Memory for the longest list of a captured step of `rows` rows, shared like the workspace."""
        needed = self.graph_kv_tokens + rows
        if self._room[kind].numel() < needed:
            self._room[kind] = torch.zeros(needed, dtype=torch.int32, device=self.device)
        return self._room[kind]

    # --- layers

    def forward_extend(
        self, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, layer: AttentionLayer, batch: ForwardBatch, out: torch.Tensor
    ) -> None:
        meta, caches = self._store_own(k, v, layer, batch)
        meta.planned.run(q, caches, out)

    forward_decode = forward_extend
