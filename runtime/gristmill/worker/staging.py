"""The two ways between host and device: a step's small arrays go there in one copy, and its results come back without a wait.

On the CPU both sides are the same memory, and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

_ALIGN = 16  # bytes; any dtype may follow any other


def to_device(arrays: Sequence[np.ndarray], device: str) -> list[torch.Tensor]:
    """Tensors with the contents of `arrays` on `device`.

    On a GPU all of them travel in one asynchronous copy from pinned memory, which torch's allocator hands out again only after the copy.
    """
    if device == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    starts, total = [], 0
    for array in arrays:
        starts.append(total)
        total += -(-array.nbytes // _ALIGN) * _ALIGN
    pinned = torch.empty(total, dtype=torch.uint8, pin_memory=True)
    host = pinned.numpy()
    for array, start in zip(arrays, starts, strict=True):
        host[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    there = pinned.to(device, non_blocking=True)
    return [
        there[start : start + array.nbytes].view(torch_dtype(array.dtype)).view(array.shape)
        for array, start in zip(arrays, starts, strict=True)
    ]


def torch_dtype(dtype: np.dtype) -> torch.dtype:
    return _DTYPES[dtype.str[1:]]


_DTYPES = {"i4": torch.int32, "i8": torch.int64, "f4": torch.float32}


class Fetch:
    """Tensors on their way to the host. On a GPU a stream of its own copies them, so that the next step's work does not wait for it."""

    def __init__(self, tensors: Sequence[torch.Tensor], stream: torch.cuda.Stream | None) -> None:
        self._event: torch.cuda.Event | None = None
        if stream is None:
            self._host = list(tensors)
            return
        stream.wait_stream(torch.cuda.current_stream())
        self._host = []
        with torch.cuda.stream(stream):
            for tensor in tensors:
                host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                host.copy_(tensor, non_blocking=True)
                tensor.record_stream(stream)
                self._host.append(host)
            self._event = torch.cuda.Event()
            self._event.record(stream)

    def wait(self) -> list[np.ndarray]:
        """The arrays, once they are there. Raises what the device reports of the work before them."""
        if self._event is not None:
            self._event.synchronize()
        return [tensor.numpy() for tensor in self._host]
