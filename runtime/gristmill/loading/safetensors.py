"""Weights from a directory of safetensors files, memory-mapped one shard at a time. Other weight formats are refused."""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from gristmill.errors import ModelError
from gristmill.loading.config import read_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_MAX_HEADER_BYTES = 100 << 20  # the limit of the safetensors format itself

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class _Entry(NamedTuple):
    """One tensor of a shard; `start` is absolute in the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    n_bytes: int


class SafetensorsSource:
    """All tensors of a model directory. Headers are read and checked at once, data only while iterating.

    Raises ModelError: no weights, a shard missing, cut or malformed, an index that leads out of the directory.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._shards = {path: _read_header(path) for path in _shard_paths(folder)}
        self.shapes: dict[str, tuple[int, ...]] = {}
        owner: dict[str, Path] = {}
        for path, entries in self._shards.items():
            for name, entry in entries.items():
                if name in owner:
                    raise ModelError(f"tensor {name!r} is in two shards: {owner[name].name} and {path.name} in {folder}")
                self.shapes[name], owner[name] = entry.shape, path
        self.total_bytes = sum(entry.n_bytes for entries in self._shards.values() for entry in entries.values())
        self._check_index()

    def _check_index(self) -> None:
        """The index promises tensors; a shard of an older download may lack them."""
        if (self.folder / INDEX).exists():
            for name, file in read_json(self.folder / INDEX)["weight_map"].items():
                if name not in self._shards[self.folder / file]:
                    raise ModelError(f"{self.folder / file} lacks tensor {name!r}, which {INDEX} places there")

    def tensors(self) -> Iterator[tuple[str, torch.Tensor, int]]:
        """(name, tensor, size in bytes), shard by shard. A tensor is a view of the mapped file, valid until the next one is asked for."""
        for path, entries in self._shards.items():
            with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as data:
                for name, entry in sorted(entries.items(), key=lambda item: item[1].start):
                    tensor = torch.empty(entry.shape, dtype=entry.dtype)
                    if entry.n_bytes:
                        tensor = torch.frombuffer(data, dtype=torch.uint8, offset=entry.start, count=entry.n_bytes)
                        tensor = (
                            tensor.view(entry.dtype).view(entry.shape)
                            if entry.start % entry.dtype.itemsize == 0
                            else (tensor.clone().view(entry.dtype).view(entry.shape))
                        )
                    yield name, tensor, entry.n_bytes
                    del tensor  # an exported buffer would keep the map from closing


def _shard_paths(folder: Path) -> list[Path]:
    if (folder / INDEX).exists():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise ModelError(f"{folder / INDEX}: weight_map must map tensor names to file names")
        files = sorted(set(weight_map.values()))
        for file in files:
            if Path(file).name != file or file in ("", ".", "..") or "\\" in file:
                raise ModelError(f"{folder / INDEX} names shard {file!r}; a shard must be a plain file name inside the model directory")
            if not (folder / file).is_file():
                raise ModelError(f"shard {file} of {folder} is missing; {INDEX} lists it")
        return [folder / file for file in files]
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    if shards:
        raise ModelError(f"{folder} holds {', '.join(shards[:3])} but neither {SINGLE} nor {INDEX}")
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth"))
    if pickles:
        raise ModelError(
            f"{folder} holds only {', '.join(pickles[:3])}: such files can run code when they are read and are not loaded; "
            "convert them to safetensors"
        )
    raise ModelError(f"{folder} holds no weights: neither {SINGLE} nor {INDEX} is there")


def _read_header(path: Path) -> dict[str, _Entry]:
    """Format: u64 header length, JSON header, data (https://huggingface.co/docs/safetensors)."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
                raise ModelError(f"{path} is cut or is no safetensors file: it has {size} bytes and announces a header of {length}")
            header = json.loads(file.read(length).decode("utf-8"))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not a safetensors file: its header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise ModelError(f"{path} is not a safetensors file: its header is a JSON {type(header).__name__}")
    header.pop("__metadata__", None)
    return {name: _entry(path, name, value, 8 + length, size) for name, value in header.items()}


def _entry(path: Path, name: str, value: object, data_start: int, size: int) -> _Entry:
    try:
        dtype_name, shape, (start, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]  # type: ignore[index]
        valid = all(type(number) is int and number >= 0 for number in (*shape, start, end)) and start <= end
    except (TypeError, KeyError, ValueError):
        valid = False
    if not valid:
        raise ModelError(f"{path}: tensor {name!r} has a malformed header entry: {str(value)[:100]}")
    if not isinstance(dtype_name, str) or dtype_name not in _DTYPES:
        raise ModelError(f"{path}: tensor {name!r} is of dtype {dtype_name!r}, which is not supported ({', '.join(_DTYPES)} are)")
    dtype = _DTYPES[dtype_name]
    if math.prod(shape) * dtype.itemsize != end - start:
        raise ModelError(f"{path}: tensor {name!r} of shape {shape} and dtype {dtype_name} does not fill its {end - start} bytes")
    if data_start + end > size:
        raise ModelError(f"{path} is cut: tensor {name!r} ends at byte {data_start + end}, the file at {size}")
    return _Entry(dtype, shape, data_start + start, end - start)
