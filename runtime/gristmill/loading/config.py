"""The configuration of a model, read without torch from a Hugging Face directory or from GGUF metadata.

Only facts of the checkpoint are here; what the engine does with them (context limit, dtype, backend) is decided elsewhere.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gristmill.errors import ModelError
from gristmill.loading.gguf_file import GgufFile

# config.json's model_type (and GGUF's general.architecture) -> the class name that "architectures" must hold, when it is given
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

# Far above any real model; they keep a damaged file from asking for absurd allocations.
_MOST, _MOST_LAYERS, _MOST_HEAD_DIM = 1 << 24, 1 << 12, 1 << 12

_DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class ModelConfig:
    """What defines the computation of one decoder-only model.

    `vocab_size` is the number of embedding rows (it may exceed the tokenizer's length). `rope_scaling` is None or a dict with
    "rope_type" and that type's own parameters. `tie_word_embeddings` is None where the checkpoint does not say.
    `sliding_window` tokens (the query's own included) are visible to the layers from `first_window_layer` on.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    rms_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None = None
    tie_word_embeddings: bool | None = None
    attention_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    first_window_layer: int = 0
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    dtype: str = "float32"
    raw: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def window_of_layer(self, layer: int) -> int | None:
        return self.sliding_window if layer >= self.first_window_layer else None


def load_config(path: str | Path) -> ModelConfig:
    """The configuration of the model at `path`, a directory with config.json or a .gguf file.

    Raises ModelError, one sentence: missing or unreadable file, unknown architecture, missing or impossible value.
    """
    path = Path(path)
    if path.is_dir():
        config = _from_hf(path)
    elif path.suffix == ".gguf":
        config = config_from_gguf(GgufFile(path))
    elif path.exists():
        raise ModelError(f"{path} is neither a model directory nor a .gguf file")
    else:
        raise ModelError(f"{path} does not exist")
    _check(config, path)
    return config


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises ModelError when it cannot be read or is no object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{path} is missing") from error
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a JSON {type(value).__name__}, not an object")
    return value


def architecture_error(name: object, where: str | Path) -> ModelError:
    """`name` is what the configuration holds in place of a known architecture, of whatever JSON type."""
    known = ", ".join(f"{key} ({cls})" for key, cls in ARCHITECTURES.items())
    return ModelError(f"{where} is a model of architecture {_shown(name)}, which is not supported; known: {known}")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


class _Fields:
    """Typed look-ups in one or more mappings, first match wins; a null counts as absent."""

    def __init__(self, where: Path, *maps: dict[str, Any]) -> None:
        self.where, self.maps = where, maps

    def get(self, key: str, default: Any = None) -> Any:
        for values in self.maps:
            if values.get(key) is not None:
                return values[key]
        return default

    def integer(self, key: str, default: int | None = None, most: int = _MOST, least: int = 1) -> int:
        value = self.get(key, default)
        if value is None:
            raise ModelError(f"{self.where} does not say {key}")
        if type(value) is not int or not least <= value <= most:
            raise ModelError(f"{self.where}: {key} must be an integer from {least} to {most}, not {_shown(value)}")
        return value

    def text(self, key: str, default: str | None = None) -> str | None:
        value = self.get(key, default)
        if value is not None and not isinstance(value, str):
            raise ModelError(f"{self.where}: {key} must be a string, not {_shown(value)}")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.get(key, default)
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            raise ModelError(f"{self.where}: {key} must be a positive number, not {_shown(value)}")
        return float(value)

    def boolean(self, key: str, default: bool = False) -> bool:
        value = self.get(key, default)
        if type(value) is not bool:
            raise ModelError(f"{self.where}: {key} must be true or false, not {_shown(value)}")
        return value

    def ids(self, key: str) -> tuple[int, ...]:
        value = self.get(key, [])
        values = value if isinstance(value, list) else [value]
        if any(type(v) is not int or v < 0 for v in values):
            raise ModelError(f"{self.where}: {key} must be a token id or a list of them, not {_shown(value)}")
        return tuple(values)


def _from_hf(folder: Path) -> ModelConfig:
    where = folder / "config.json"
    raw = read_json(where)
    text = raw.get("text_config")
    nested = text if isinstance(text, dict) else {}
    # A composite config describes its language model in text_config; what is missing there may still stand at the top.
    get = _Fields(where, nested, raw) if "hidden_size" not in raw else _Fields(where, raw, nested)

    architecture = get.text("model_type")
    declared = raw.get("architectures")
    if architecture is None or architecture not in ARCHITECTURES:
        raise architecture_error(declared if architecture is None else architecture, where)
    if not nested and declared is not None and not (isinstance(declared, list) and ARCHITECTURES[architecture] in declared):
        raise architecture_error(declared, where)
    activation = get.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelError(f"{where}: hidden_act {activation!r} is not supported (silu is)")

    heads = get.integer("num_attention_heads")
    hidden = get.integer("hidden_size")
    default_head_dim = 128 if architecture == "qwen3" else hidden // heads
    context = get.integer("max_position_embeddings")
    theta, scaling = _hf_rope(get, where, context)
    bias = get.boolean("attention_bias") if architecture != "qwen2" else True
    window = get.integer("sliding_window", 4096) if architecture != "llama" and get.boolean("use_sliding_window") else None
    tie = get.get("tie_word_embeddings")
    generation = _Fields(folder / "generation_config.json", _optional_json(folder / "generation_config.json"))
    dtype = str(get.get("dtype", get.get("torch_dtype", "float32")))
    return ModelConfig(
        architecture=architecture,
        vocab_size=get.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=get.integer("intermediate_size"),
        num_layers=get.integer("num_hidden_layers", most=_MOST_LAYERS),
        num_heads=heads,
        num_kv_heads=get.integer("num_key_value_heads", heads),
        head_dim=get.integer("head_dim", default_head_dim, _MOST_HEAD_DIM),
        context_length=context,
        rms_eps=get.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=None if tie is None else bool(tie),
        attention_bias=bias,
        attention_out_bias=bias and architecture != "qwen2",
        mlp_bias=get.boolean("mlp_bias") if architecture == "llama" else False,
        qk_norm=architecture == "qwen3",
        sliding_window=window,
        first_window_layer=get.integer("max_window_layers", 0, least=0) if window else 0,
        eos_ids=tuple(sorted({*get.ids("eos_token_id"), *generation.ids("eos_token_id")})),
        bos_id=next(iter(get.ids("bos_token_id")), None),
        dtype=dtype if dtype in _DTYPES else "float32",
        raw=raw,
    )


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _hf_rope(get: _Fields, where: Path, context: int) -> tuple[float, dict[str, Any] | None]:
    """Theta and scaling from rope_parameters (transformers 5) or from rope_theta + rope_scaling (before)."""
    parameters = get.get("rope_parameters", get.get("rope_scaling"))
    if parameters is not None and not isinstance(parameters, dict):
        raise ModelError(f"{where}: rope_parameters must be an object, not {parameters!r}")
    rope = dict(parameters or {})
    theta = _Fields(where, rope, {"rope_theta": get.get("rope_theta", 10000.0)}).number("rope_theta", 10000.0)
    partial = rope.pop("partial_rotary_factor", get.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise ModelError(f"{where}: partial_rotary_factor {partial!r} is not supported (1.0 is)")
    rope.pop("rope_theta", None)
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    rope.pop("type", None)
    if kind == "default":
        return theta, None
    rope.setdefault("original_max_position_embeddings", context)
    return theta, {"rope_type": kind, **rope}


def config_from_gguf(file: GgufFile) -> ModelConfig:
    """The configuration in the metadata of `file`. Raises ModelError like `load_config`, which also checks the values."""
    where, meta = file.path, file.metadata
    architecture = meta.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise architecture_error(architecture, where)
    prefix = f"{architecture}."
    get = _Fields(where, {key[len(prefix) :]: value for key, value in meta.items() if key.startswith(prefix)})
    tokenizer = _Fields(where, {key: value for key, value in meta.items() if key.startswith("tokenizer.ggml.")})

    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{where} has no tensor 'token_embd.weight'")
    heads, hidden = get.integer("attention.head_count"), get.integer("embedding_length")
    head_dim = get.integer("attention.key_length", hidden // heads, _MOST_HEAD_DIM)
    rotary = get.integer("rope.dimension_count", head_dim)
    if rotary != head_dim or get.integer("attention.value_length", head_dim) != head_dim:
        raise ModelError(f"{where}: rope.dimension_count {rotary} and attention.value_length must equal the head dimension {head_dim}")
    context = get.integer("context_length")
    scaling: dict[str, Any] | None = None
    if "rope_freqs.weight" in file.tensors:  # llama.cpp stores llama3 scaling as one divisor per frequency
        scaling = {"rope_type": "freq_factors"}
    elif (kind := get.get("rope.scaling.type", "none")) != "none":
        scaling = {"rope_type": kind, "factor": get.get("rope.scaling.factor", 1.0)}
        scaling["original_max_position_embeddings"] = get.integer("rope.scaling.original_context_length", context)
    eos = {key: tokenizer.ids(f"tokenizer.ggml.{key}") for key in ("eos_token_id", "eot_token_id")}
    return ModelConfig(
        architecture=architecture,
        vocab_size=embedding.shape[0],
        hidden_size=hidden,
        intermediate_size=get.integer("feed_forward_length"),
        num_layers=get.integer("block_count", most=_MOST_LAYERS),
        num_heads=heads,
        num_kv_heads=get.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        context_length=context,
        rms_eps=get.number("attention.layer_norm_rms_epsilon", 1e-6),
        rope_theta=get.number("rope.freq_base", 10000.0),
        rope_scaling=scaling,
        tie_word_embeddings="output.weight" not in file.tensors,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        attention_out_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_down.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        eos_ids=tuple(sorted({i for ids in eos.values() for i in ids})),
        bos_id=next(iter(tokenizer.ids("tokenizer.ggml.bos_token_id")), None),
        dtype="float32",
        raw={key: value for key, value in meta.items() if not isinstance(value, list)},
    )


def _check(config: ModelConfig, where: Path) -> None:
    """Values that are fine alone and impossible together."""
    if config.num_heads % config.num_kv_heads:
        raise ModelError(f"{where}: {config.num_heads} attention heads are not a multiple of {config.num_kv_heads} key-value heads")
    if config.head_dim % 2:
        raise ModelError(f"{where}: head_dim must be even, not {config.head_dim}")
    bad = [i for i in config.eos_ids if i >= config.vocab_size]
    if bad:
        raise ModelError(f"{where}: EOS id {bad[0]} is outside the vocabulary of {config.vocab_size}")
