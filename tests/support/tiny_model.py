"""Model M of the tests: a tiny random checkpoint with a byte-level BPE tokenizer, made on the spot, the same for the same arguments.

`make_tiny_model` writes a Hugging Face directory, `make_tiny_gguf` turns such a directory into one GGUF file. Neither needs torch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2
EOS_ID = 2
VOCAB = 600
CONTEXT = 512
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TIE_SPELLINGS = ("untied", "tied", "tied_equal", "tied_different", "text_config", "missing")

_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_SENTENCES = (
    "Once there was a lamp that would not go out, and seven small stones lay beside the river.",
    "Name two rivers. The capital of France is Paris; water boils at one hundred degrees.",
    "def main(): return [x for x in range(10) if x % 2 == 0]  # numbers 0123456789",
    "Grüße aus Köln, c'est déjà l'été, 水は冷たい 🙂.",
)


def train_tokenizer(vocab_size: int = VOCAB) -> Tokenizer:
    """Byte-level BPE of exactly `vocab_size` tokens: SPECIALS first, then the 256 bytes, then merges learnt from a fixed text."""
    rng = np.random.default_rng(20)
    syllables = [a + b for a in "bcdfghklmnprstvw" for b in "aeiou"]
    words = ["".join(rng.choice(syllables, size=rng.integers(1, 4))) for _ in range(400)]
    text = [*_SENTENCES * 8, *(" ".join(rng.choice(words, size=12)) for _ in range(200))]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text, trainer)
    assert tokenizer.get_vocab_size() == vocab_size, tokenizer.get_vocab_size()
    return tokenizer


def make_tiny_model(
    folder: str | Path,
    architecture: str = "llama",
    *,
    seed: int = 1,
    layers: int = 2,
    hidden: int = 64,
    intermediate: int = 128,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    vocab_size: int = VOCAB,
    pad_vocab: int = 0,
    context: int = CONTEXT,
    tie: str = "untied",
    shards: int = 2,
    dtype: str = "float32",
    eos: int | Sequence[int] | None = EOS_ID,
    generation_eos: int | Sequence[int] | None = None,
    tokenizer_eos: int = EOS_ID,
    rope_scaling: dict[str, Any] | None = None,
    chat_template: str | None = CHAT_TEMPLATE,
    extra_config: dict[str, Any] | None = None,
) -> Path:
    """Write model M (or a variant of it) to `folder` and return the folder.

    Args:
        pad_vocab: embedding rows beyond the tokenizer's length.
        tie: one of TIE_SPELLINGS; "tied_different" ties by its flag and yet holds another lm_head; "missing" has no flag.
        eos, generation_eos, tokenizer_eos: the EOS ids that config.json, generation_config.json and the tokenizer name.
        extra_config: entries that replace those of config.json; None removes one.
    """
    assert tie in TIE_SPELLINGS, tie
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(vocab_size)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer_config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": tokenizer.id_to_token(tokenizer_eos),
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
    }
    if chat_template is not None:
        tokenizer_config["chat_template"] = chat_template
    _write_json(folder / "tokenizer_config.json", tokenizer_config)
    if generation_eos is not None:
        _write_json(folder / "generation_config.json", {"eos_token_id": _plain(generation_eos)})

    config: dict[str, Any] = {
        "architectures": [_CLASSES[architecture]],
        "model_type": architecture,
        "vocab_size": vocab_size + pad_vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim or hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "torch_dtype": dtype,
        "eos_token_id": _plain(eos),
        "bos_token_id": None,
    }
    if rope_scaling:
        config["rope_scaling"] = rope_scaling
    if tie == "text_config":
        config["text_config"] = {"tie_word_embeddings": True}
    elif tie != "missing":
        config["tie_word_embeddings"] = tie != "untied"
    for key, value in (extra_config or {}).items():
        config[key] = value
        if value is None:
            del config[key]
    _write_json(folder / "config.json", config)
    _write_shards(folder, _weights(config, architecture, tie, seed), shards, dtype)
    return folder


def _plain(ids: int | Sequence[int] | None) -> int | list[int] | None:
    return ids if ids is None or isinstance(ids, int) else list(ids)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")


def _weights(config: dict[str, Any], architecture: str, tie: str, seed: int) -> dict[str, np.ndarray]:
    """Random weights with unit gain per layer and wide logits, so that greedy output does not settle on one token."""
    rng = np.random.default_rng(seed)
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q, kv = config["num_attention_heads"] * config["head_dim"], config["num_key_value_heads"] * config["head_dim"]

    def normal(*shape: int, std: float) -> np.ndarray:
        return rng.normal(0.0, std, shape).astype(np.float32)

    def linear(rows: int, columns: int) -> np.ndarray:
        return normal(rows, columns, std=1.5 / columns**0.5)

    def norm(width: int) -> np.ndarray:
        return 1.0 + normal(width, std=0.1)

    weights = {"model.embed_tokens.weight": normal(vocab, hidden, std=1.0)}
    for i in range(config["num_hidden_layers"]):
        layer = {
            "input_layernorm.weight": norm(hidden),
            "self_attn.q_proj.weight": linear(q, hidden),
            "self_attn.k_proj.weight": linear(kv, hidden),
            "self_attn.v_proj.weight": linear(kv, hidden),
            "self_attn.o_proj.weight": linear(hidden, q),
            "post_attention_layernorm.weight": norm(hidden),
            "mlp.gate_proj.weight": linear(inner, hidden),
            "mlp.up_proj.weight": linear(inner, hidden),
            "mlp.down_proj.weight": linear(hidden, inner),
        }
        if architecture == "qwen2" or config.get("attention_bias"):
            layer |= {f"self_attn.{n}_proj.bias": normal(q if n == "q" else kv, std=0.3) for n in "qkv"}
        if architecture != "qwen2" and config.get("attention_bias"):
            layer["self_attn.o_proj.bias"] = normal(hidden, std=0.3)
        if config.get("mlp_bias"):
            layer |= {f"mlp.{n}_proj.bias": normal(hidden if n == "down" else inner, std=0.3) for n in ("gate", "up", "down")}
        if architecture == "qwen3":
            layer |= {"self_attn.q_norm.weight": norm(config["head_dim"]), "self_attn.k_norm.weight": norm(config["head_dim"])}
        weights |= {f"model.layers.{i}.{name}": value for name, value in layer.items()}
    weights["model.norm.weight"] = norm(hidden)
    if tie == "tied_equal":
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].copy()
    elif tie in ("untied", "tied_different", "missing"):
        weights["lm_head.weight"] = normal(vocab, hidden, std=0.5)
    return weights


def _write_shards(folder: Path, weights: dict[str, np.ndarray], shards: int, dtype: str) -> None:
    def save(part: dict[str, np.ndarray], path: Path) -> None:
        if dtype == "float32":
            save_file(part, path, metadata={"format": "pt"})
            return
        import torch
        from safetensors.torch import save_file as save_torch

        save_torch({k: torch.from_numpy(v).to(getattr(torch, dtype)) for k, v in part.items()}, path, metadata={"format": "pt"})

    if shards == 1:
        save(weights, folder / "model.safetensors")
        return
    names, weight_map = list(weights), {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = names[i * len(names) // shards : (i + 1) * len(names) // shards]
        save({name: weights[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    total = sum(w.size for w in weights.values()) * (4 if dtype == "float32" else 2)
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def load_weights(folder: str | Path) -> dict[str, np.ndarray]:
    """All float32 tensors of a directory made by `make_tiny_model`."""
    return {name: value for file in sorted(Path(folder).glob("*.safetensors")) for name, value in load_file(file).items()}


_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def make_tiny_gguf(
    path: str | Path,
    folder: str | Path,
    quantization: str = "F32",
    *,
    with_tokenizer: bool = True,
    rope_freqs: Sequence[float] | None = None,
) -> Path:
    """Convert the directory `folder` (float32) to the GGUF file `path` as llama.cpp's converter does, and return the path.

    `quantization` names a gguf type (F32, F16, Q8_0, Q4_0, Q4_1, ...) for matrices; vectors stay float32. `rope_freqs` are the
    per-frequency divisors that llama.cpp stores for llama3 rope scaling.
    """
    import gguf
    from gguf.quants import quantize

    path, folder = Path(path), Path(folder)
    config = json.loads((folder / "config.json").read_text())
    architecture = config["model_type"]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    if with_tokenizer:
        _write_gguf_tokenizer(writer, folder, config)
    kind = gguf.GGMLQuantizationType[quantization]
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", np.asarray(rope_freqs, dtype=np.float32))
    for name, value in load_weights(folder).items():
        stem, _, suffix = name.rpartition(".")
        layer = ""
        if stem.startswith("model.layers."):
            _, _, index, stem = stem.split(".", 3)
            layer = f"blk.{index}."
        if architecture == "llama" and stem in ("self_attn.q_proj", "self_attn.k_proj"):
            value = _permute(value, config["num_attention_heads" if "q_proj" in stem else "num_key_value_heads"])
        target = f"{layer}{_GGUF_NAMES[stem]}.{suffix}"
        if value.ndim == 1 or quantization == "F32":
            writer.add_tensor(target, value)
        else:
            writer.add_tensor(target, quantize(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _permute(weight: np.ndarray, n_heads: int) -> np.ndarray:
    """Rotate-half rows to llama.cpp's interleaved order (convert_hf_to_gguf.py, LlamaModel.permute)."""
    return weight.reshape(n_heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def _write_gguf_tokenizer(writer: Any, folder: Path, config: dict[str, Any]) -> None:
    import gguf

    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    vocab: dict[str, int] = tokenizer["model"]["vocab"]
    tokens = [token for token, _ in sorted(vocab.items(), key=lambda item: item[1])]
    tokens += [f"[PAD{i}]" for i in range(len(tokens), config["vocab_size"])]
    control, normal, unused = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL, gguf.TokenType.UNUSED
    kinds = [control if t in SPECIALS else unused if i >= len(vocab) else normal for i, t in enumerate(tokens)]
    merges = [m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_eos_token_id(vocab[settings["eos_token"]])
    writer.add_add_bos_token(False)
    if "chat_template" in settings:
        writer.add_chat_template(settings["chat_template"])
