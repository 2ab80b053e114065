"""The header of a GGUF file: metadata and tensor table, without torch and without copying tensor data.

The `gguf` package's own reader makes a numpy view per token string (4 s for a 49k vocabulary) and trusts every length it reads;
this one takes 0.1 s and reports a malformed file as one sentence. Block layouts and dequantisation stay with the package.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from gristmill.errors import ModelError

# Spec: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_MAX_ARRAY_DEPTH = 4


@dataclass(frozen=True)
class GgufTensor:
    """One entry of the tensor table. `shape` is in row-major order (outermost first), `type_id` a ggml type, `offset` absolute."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int


class _Cursor:
    """Reads little-endian values from `data`, never past its end."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at, self.end = data, 0, len(data)

    def take(self, n_bytes: int) -> bytes:
        if n_bytes > self.end - self.at:
            raise ValueError(f"{n_bytes} bytes are announced at offset {self.at}, where {self.end - self.at} are left")
        chunk = self.data[self.at : self.at + n_bytes]
        self.at += n_bytes
        return chunk

    def scalar(self, fmt: str) -> Any:
        return struct.unpack(fmt, self.take(struct.calcsize(fmt)))[0]

    def string(self) -> str:
        return self.take(self.scalar("<Q")).decode("utf-8", errors="replace")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY or depth >= _MAX_ARRAY_DEPTH:
            raise ValueError(f"metadata value type {kind} at offset {self.at} is unknown")
        item, count = self.scalar("<I"), self.scalar("<Q")
        if item in _SCALARS:
            fmt = _SCALARS[item]
            return np.frombuffer(self.take(count * struct.calcsize(fmt)), dtype=fmt).tolist()
        if count > self.end - self.at:  # every string or array costs at least eight bytes; refuse before allocating
            raise ValueError(f"an array of {count} values is announced at offset {self.at}, where {self.end - self.at} bytes are left")
        return [self.value(item, depth + 1) for _ in range(count)]


class GgufFile:
    """`metadata` (name -> int | float | bool | str | list) and `tensors` (name -> GgufTensor) of one GGUF file.

    Raises ModelError when the file is missing, is no GGUF, is cut inside its header or names a tensor outside itself.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        try:
            with open(self.path, "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._parse(_Cursor(self._map))
        except OSError as error:
            raise ModelError(f"cannot read {self.path}: {error.strerror or error}") from error
        except (ValueError, struct.error, MemoryError) as error:
            raise ModelError(f"{self.path} is not a readable GGUF file: {error}") from error

    def _parse(self, cursor: _Cursor) -> None:
        magic = cursor.take(4)
        if magic != b"GGUF":
            raise ValueError(f"it starts with {magic!r}, not b'GGUF'")
        version = cursor.scalar("<I")
        if version not in (2, 3):
            raise ValueError(f"version {version} is not supported (2 and 3 are; big-endian files are not)")
        n_tensors, n_metadata = cursor.scalar("<Q"), cursor.scalar("<Q")
        for _ in range(n_metadata):
            key = cursor.string()
            self.metadata[key] = cursor.value(cursor.scalar("<I"))
        raw = []
        for _ in range(n_tensors):
            name = cursor.string()
            n_dims = cursor.scalar("<I")
            if n_dims > 4:
                raise ValueError(f"tensor {name!r} has {n_dims} dimensions (4 is the most)")
            shape = tuple(cursor.scalar("<Q") for _ in range(n_dims))[::-1]
            raw.append((name, shape, cursor.scalar("<I"), cursor.scalar("<Q")))
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0:
            raise ValueError(f"general.alignment is {alignment!r}")
        data_start = -(-cursor.at // alignment) * alignment
        for name, shape, type_id, offset in raw:
            if name in self.tensors:
                raise ValueError(f"tensor {name!r} appears twice")
            self.tensors[name] = GgufTensor(name, shape, type_id, data_start + offset)

    @cached_property
    def n_bytes(self) -> int:
        return len(self._map)

    def data(self, tensor: GgufTensor) -> tuple[np.ndarray, Any]:
        """Raw blocks of `tensor` as a uint8 view [rows, bytes per row] of the mapped file, and its gguf.GGMLQuantizationType.

        Raises ModelError when the ggml type is unknown or the file ends before the tensor does.
        """
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            kind = GGMLQuantizationType(tensor.type_id)
            block, block_bytes = GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError) as error:
            raise ModelError(f"{self.path}: tensor {tensor.name!r} has ggml type {tensor.type_id}, which is unknown") from error
        width = tensor.shape[-1] if tensor.shape else 1
        if width % block:
            raise ModelError(f"{self.path}: rows of tensor {tensor.name!r} hold {width} values, no multiple of {kind.name}'s {block}")
        rows, row_bytes = math.prod(tensor.shape[:-1]), width // block * block_bytes
        end = tensor.offset + rows * row_bytes
        if end > self.n_bytes:
            raise ModelError(f"{self.path} is cut: tensor {tensor.name!r} ends at byte {end}, the file at {self.n_bytes}")
        blocks = np.frombuffer(self._map, dtype=np.uint8, count=rows * row_bytes, offset=tensor.offset)
        return blocks.reshape(rows, row_bytes), kind
