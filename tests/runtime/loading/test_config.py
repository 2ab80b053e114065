"""Model configurations: what is read from where, and what is refused with which sentence."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from gristmill.errors import ModelError
from gristmill.loading.config import load_config
from tests.support.tiny_model import make_tiny_gguf, make_tiny_model


def edit(folder, **changes) -> None:
    config = json.loads((folder / "config.json").read_text())
    for key, value in changes.items():
        if value is ...:
            config.pop(key, None)
        else:
            config[key] = value
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_gguf_says_the_same_as_the_directory(architecture, tmp_path):
    folder = make_tiny_model(tmp_path / "m", architecture, pad_vocab=8)
    file = make_tiny_gguf(tmp_path / "m.gguf", folder)
    one, other = load_config(folder), load_config(file)
    assert one.vocab_size == 608
    for name in one.__dataclass_fields__:
        if name == "rms_eps":
            assert other.rms_eps == pytest.approx(one.rms_eps, rel=1e-6)  # GGUF stores it as float32
        elif name != "raw":
            assert getattr(one, name) == getattr(other, name), name


def test_eos_ids_are_the_union_of_config_and_generation_config(tmp_path):
    assert load_config(make_tiny_model(tmp_path / "a", eos=2, generation_eos=[2, 7])).eos_ids == (2, 7)
    assert load_config(make_tiny_model(tmp_path / "b", eos=[5, 3])).eos_ids == (3, 5)
    assert load_config(make_tiny_model(tmp_path / "c", eos=None)).eos_ids == ()


def test_defaults_of_absent_and_null_values(model_dir):
    edit(model_dir, num_key_value_heads=None, head_dim=..., rms_norm_eps=..., torch_dtype="bfloat16")
    config = load_config(model_dir)
    assert (config.num_kv_heads, config.head_dim, config.rms_eps, config.dtype) == (4, 16, 1e-6, "bfloat16")


def test_sliding_window_layers(tmp_path):
    extra = {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1}
    config = load_config(make_tiny_model(tmp_path / "m", "qwen2", extra_config=extra))
    assert [config.window_of_layer(i) for i in range(2)] == [None, 32]
    config = load_config(make_tiny_model(tmp_path / "n", "qwen2", extra_config=extra | {"use_sliding_window": False}))
    assert [config.window_of_layer(i) for i in range(2)] == [None, None]


FAULTS = {
    "unknown model type": ({"model_type": "mamba9"}, ["'mamba9'", "llama (LlamaForCausalLM)", "qwen3"]),
    "no model type": ({"model_type": ..., "architectures": ["FooModel"]}, ["FooModel", "known: llama"]),
    "another head": ({"architectures": ["LlamaForSequenceClassification"]}, ["LlamaForSequenceClassification", "known: llama"]),
    "missing size": ({"hidden_size": ...}, ["does not say hidden_size"]),
    "negative size": ({"num_hidden_layers": -1}, ["num_hidden_layers", "-1"]),
    "boolean size": ({"vocab_size": True}, ["vocab_size", "True"]),
    "heads that do not divide": ({"num_attention_heads": 6, "num_key_value_heads": 4}, ["6 attention heads", "4 key-value heads"]),
    "odd head size": ({"head_dim": 15}, ["head_dim", "15"]),
    "another activation": ({"hidden_act": "gelu"}, ["hidden_act", "'gelu'"]),
    "partial rotary": ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
    "eps that is text": ({"rms_norm_eps": "small"}, ["rms_norm_eps", "'small'"]),
    "EOS outside the vocabulary": ({"eos_token_id": 600}, ["EOS id 600", "600"]),
    "EOS that is text": ({"eos_token_id": "</s>"}, ["eos_token_id", "</s>"]),
    "rope that is no object": ({"rope_scaling": 3}, ["rope_parameters", "3"]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_one_sentence_that_names_it(fault, model_dir):
    changes, words = FAULTS[fault]
    edit(model_dir, **changes)
    with pytest.raises(ModelError) as caught:
        load_config(model_dir)
    text = str(caught.value)
    assert "\n" not in text and all(word in text for word in words), text


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "config.json is missing"), (b"{ not json", "not valid JSON"), (b"[1]", "a JSON list"), (b"\xff\xfe", "not valid JSON")],
)
def test_config_that_cannot_be_read(content, words, model_dir):
    path = model_dir / "config.json"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ModelError, match=words):
        load_config(model_dir)


def test_paths_that_are_no_model(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ModelError, match=r"neither a model directory nor a .gguf"):
        load_config(tmp_path / "notes.txt")
    with pytest.raises(ModelError, match="does not exist"):
        load_config(tmp_path / "gone")
    (tmp_path / "no.gguf").write_bytes(b"GGML" + bytes(60))
    with pytest.raises(ModelError, match="not a readable GGUF file"):
        load_config(tmp_path / "no.gguf")
    (tmp_path / "empty.gguf").write_bytes(b"")
    with pytest.raises(ModelError, match=r"empty\.gguf"):
        load_config(tmp_path / "empty.gguf")


def test_reading_a_configuration_needs_no_torch(pristine):
    code = (
        "import sys; from gristmill.loading.config import load_config\n"
        "for path in sys.argv[1:]: load_config(path)\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, pristine, pristine.parent / "m.gguf"], check=True, timeout=60)
