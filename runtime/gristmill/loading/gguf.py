"""Weights from a GGUF file under their Hugging Face names, dequantised to float32 tensor by tensor."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import numpy as np
import torch

from gristmill.errors import ModelError
from gristmill.loading.config import ModelConfig
from gristmill.loading.gguf_file import GgufFile, GgufTensor

_ROWS_JOINED = 32  # 3 times faster than single rows on a 576-wide model; more gains nothing

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GgufSource:
    """All tensors of a GGUF file. An output matrix that is absent means tied embeddings, as llama.cpp has it."""

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        self.file, self.config = file, config
        self._names = {_hf_name(name): tensor for name, tensor in file.tensors.items()}
        self.shapes = {name: tensor.shape for name, tensor in self._names.items()}
        self._raw_bytes = {name: self.file.data(tensor)[0].size for name, tensor in self._names.items()}  # also: cut files fail here
        self.total_bytes = sum(self._raw_bytes.values())

    def tensors(self) -> Iterator[tuple[str, torch.Tensor, int]]:
        """(name, float32 tensor, size in the file in bytes)."""
        for name, tensor in sorted(self._names.items(), key=lambda item: item[1].offset):
            values = self._dequantise(tensor)
            if self.config.architecture == "llama" and ".self_attn." in name:
                if ".q_proj." in name:
                    values = unpermute(values, self.config.num_heads)
                elif ".k_proj." in name:
                    values = unpermute(values, self.config.num_kv_heads)
            yield name, torch.from_numpy(values), self._raw_bytes[name]

    def _dequantise(self, tensor: GgufTensor) -> np.ndarray:
        from gguf.quants import dequantize

        blocks, kind = self.file.data(tensor)
        try:
            if kind.name in ("F32", "F16", "F64"):
                dtype = {"F32": np.float32, "F16": np.float16, "F64": np.float64}[kind.name]
                values = np.frombuffer(blocks.tobytes(), dtype=dtype).astype(np.float32)
            else:
                # blocks know nothing of rows, and the package works on 16 rows at a time: wider rows mean fewer, larger numpy calls
                wide = math.gcd(blocks.shape[0], _ROWS_JOINED)
                values = dequantize(blocks.reshape(blocks.shape[0] // wide, -1), kind)
        except (NotImplementedError, KeyError) as error:
            raise ModelError(
                f"{self.file.path}: tensor {tensor.name!r} is quantised as {kind.name}, which cannot be dequantised"
            ) from error
        return np.ascontiguousarray(values, dtype=np.float32).reshape(tensor.shape)


def _hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; a name of no known pattern is kept, so that errors show it."""
    stem, _, suffix = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{suffix}"
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if match and match[2] in _LAYER:
        return f"model.layers.{match[1]}.{_LAYER[match[2]]}.{suffix}"
    return name


def unpermute(rows: np.ndarray, n_heads: int) -> np.ndarray:
    """Undo the row order of llama.cpp's q and k for Llama: it interleaves the two rotary halves of every head (LlamaModel.permute)."""
    if n_heads <= 0 or rows.shape[0] % (2 * n_heads):
        return rows  # the shape check of the loader reports it
    return np.ascontiguousarray(rows.reshape(n_heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2)).reshape(rows.shape)
