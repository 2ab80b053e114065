"""The wrapper objects of FlashInfer (flashinfer-python 0.5 and 0.6), planned from PlanArrays. Nothing else calls the library."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import numpy as np
import torch

from gristmill.attention.flashinfer.updaters import PlanArrays, wants_tensor_cores

_LAYOUT = "NHD"
_GRAPH_INTS_BYTES = 2 << 20  # a captured plan is a few numbers per block and row; the library's 8 MiB for every captured size add up


class Shape(NamedTuple):
    num_heads: int
    num_kv_heads: int
    head_dim: int
    sm_scale: float
    dtype: torch.dtype
    kv_dtype: torch.dtype


class Planned(ABC):
    """A wrapper of the library. `plan` works on the host and sends the plan to the device; `run` works on the device alone.

    The library writes every plan to the same pinned memory, and copies it from there without waiting. Before that memory is written again
    the copy must be over, and with it the step before the one that was planned: so the host is never more than one step ahead.
    """

    def __init__(self, wrapper: Any, shape: Shape, device: str) -> None:
        self._wrapper, self.shape, self._device = wrapper, shape, device
        self._copied = torch.cuda.Event() if device != "cpu" else None

    def plan(self, arrays: PlanArrays, kv_indices: torch.Tensor, window_left: int = -1) -> None:
        """`kv_indices` are KV slots on the device, as many as arrays.kv_indptr says."""
        if self._copied is not None:
            self._copied.synchronize()
        self._plan(arrays, kv_indices, window_left)
        if self._copied is not None:
            self._copied.record()

    @abstractmethod
    def _plan(self, arrays: PlanArrays, kv_indices: torch.Tensor, window_left: int) -> None: ...

    def run(self, q: torch.Tensor, caches: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor) -> None:
        """`caches` are [slots, num_kv_heads, head_dim]."""
        k, v = caches
        self._wrapper.run(q, (k.unsqueeze(1), v.unsqueeze(1)), out=out)

    def _host(self, array: np.ndarray) -> torch.Tensor:
        """On the host, where `plan` reads it; pinned if it is to be copied, so that the copy need not wait."""
        tensor = torch.from_numpy(array)
        return tensor if self._device == "cpu" else tensor.pin_memory()

    def _dtypes_and_scale(self) -> dict[str, Any]:
        return {"sm_scale": self.shape.sm_scale, "q_data_type": self.shape.dtype, "kv_data_type": self.shape.kv_dtype}


class Prefill(Planned):
    """Rows of any number of queries."""

    def __init__(self, library: Any, workspace: torch.Tensor, shape: Shape, device: str) -> None:
        super().__init__(library.BatchPrefillWithPagedKVCacheWrapper(workspace, _LAYOUT), shape, device)

    def _plan(self, arrays: PlanArrays, kv_indices: torch.Tensor, window_left: int) -> None:
        qo_indptr, kv_indptr, last_page_len = map(self._host, arrays)
        shape = self.shape
        self._wrapper.plan(
            qo_indptr,
            kv_indptr,
            kv_indices,
            last_page_len,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            1,
            causal=True,
            window_left=window_left,
            **self._dtypes_and_scale(),
        )


class Decode(Planned):
    """One query per row. With `graph_rows` it is for a captured graph of so many rows, whose list of KV slots is the start of `room`."""

    def __init__(
        self, library: Any, workspace: torch.Tensor, shape: Shape, device: str, graph_rows: int = 0, room: torch.Tensor | None = None
    ) -> None:
        tensor_cores = wants_tensor_cores(shape.num_heads, shape.num_kv_heads)
        if not graph_rows:
            wrapper = library.BatchDecodeWithPagedKVCacheWrapper(workspace, _LAYOUT, use_tensor_cores=tensor_cores)
        else:
            wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
                workspace,
                _LAYOUT,
                use_cuda_graph=True,
                use_tensor_cores=tensor_cores,
                paged_kv_indptr_buffer=torch.zeros(graph_rows + 1, dtype=torch.int32, device=device),
                paged_kv_indices_buffer=room,
                paged_kv_last_page_len_buffer=torch.ones(graph_rows, dtype=torch.int32, device=device),
            )
            wrapper.reset_workspace_buffer(workspace, torch.empty(_GRAPH_INTS_BYTES, dtype=torch.uint8, device=device))
        self.room = room
        super().__init__(wrapper, shape, device)

    def _plan(self, arrays: PlanArrays, kv_indices: torch.Tensor, window_left: int) -> None:
        shape = self.shape
        self._wrapper.plan(
            self._host(arrays.kv_indptr),
            kv_indices,
            self._host(arrays.last_page_len),
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            1,
            window_left=window_left,
            **self._dtypes_and_scale(),
        )
