"""Filling a model with weights: every tensor is checked by name and shape before the first byte of data is read."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch

from gristmill.errors import ModelError
from gristmill.layers.targets import Targets
from gristmill.loading.config import ModelConfig
from gristmill.loading.gguf import GgufSource
from gristmill.loading.gguf_file import GgufFile
from gristmill.loading.safetensors import SafetensorsSource

Progress = Callable[[int, int], None]  # (bytes done, bytes in all)

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


class WeightSource(Protocol):
    """Tensors of a checkpoint under Hugging Face names."""

    shapes: dict[str, tuple[int, ...]]
    total_bytes: int

    def tensors(self) -> Iterator[tuple[str, torch.Tensor, int]]: ...


def open_weights(path: str | Path, config: ModelConfig) -> WeightSource:
    """The weights of a model directory or .gguf file. Raises ModelError when they are missing, cut or malformed."""
    path = Path(path)
    return SafetensorsSource(path) if path.is_dir() else GgufSource(GgufFile(path), config)


def load_weights(model: Any, path: str | Path, progress: Progress | None = None) -> None:
    """Fill `model` (see gristmill.models) from `path`. Memory peaks at the weights plus one shard, which is mapped and so reclaimable.

    Raises ModelError naming the tensor that is missing, misshapen or not part of the architecture.
    """
    source = open_weights(path, model.config)
    targets: Targets = dict(model.targets())
    wanted = _tie(targets, source.shapes, model.config, path)
    _check(wanted, source.shapes, model.ignored_tensors, path)
    done = 0
    for name, tensor, n_bytes in source.tensors():
        if name in wanted:
            wanted[name].take(tensor)
        del tensor
        done += n_bytes
        if progress is not None:
            progress(done, source.total_bytes)
    if _HEAD not in wanted:
        model.head.set_weight(model.embedding.weight)


def _tie(targets: Targets, shapes: dict[str, tuple[int, ...]], config: ModelConfig, path: str | Path) -> Targets:
    """What to read of embedding and head.

    A head in the file is used whatever the flag says, as transformers does: where the two are equal nothing changes, and where they
    differ tying would be wrong. Without one the flag must not say false. A tied file may also hold the head alone.
    """
    wanted = dict(targets)
    if _HEAD not in shapes:
        if config.tie_word_embeddings is False:
            raise ModelError(f"{path} has no tensor {_HEAD!r} although tie_word_embeddings is false")
        del wanted[_HEAD]
    elif _EMBEDDING not in shapes and config.tie_word_embeddings:
        head, embedding = wanted[_HEAD], wanted.pop(_EMBEDDING)

        def take_both(tensor: torch.Tensor) -> None:
            head.take(tensor)
            embedding.take(tensor)

        wanted[_HEAD] = head._replace(take=take_both)
    return wanted


def _check(wanted: Targets, shapes: dict[str, tuple[int, ...]], ignored: tuple[str, ...], path: str | Path) -> None:
    missing = [name for name in wanted if name not in shapes]
    extra = [name for name in shapes if name not in wanted and not name.endswith(ignored)]
    if missing:
        more = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
        near = difflib.get_close_matches(missing[0], extra, n=1)
        hint = f"; it does have {near[0]!r}" if near else ""
        raise ModelError(f"{path} has no tensor {missing[0]!r}{more}{hint}")
    if extra:
        more = f" and {len(extra) - 1} others" if len(extra) > 1 else ""
        raise ModelError(f"{path} has tensor {extra[0]!r}{more}, which this architecture does not use")
    for name, target in wanted.items():
        if shapes[name] != target.shape:
            raise ModelError(f"{path}: tensor {name!r} has shape {list(shapes[name])} where the configuration needs {list(target.shape)}")
