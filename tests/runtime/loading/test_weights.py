"""Weights arrive unchanged from every supported spelling, and every fault is one sentence that names tensor or file."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from gristmill.errors import ModelError
from gristmill.loading.config import load_config
from gristmill.loading.gguf import GgufSource
from gristmill.loading.gguf_file import GgufFile
from gristmill.loading.safetensors import INDEX, SafetensorsSource
from tests.support.tiny_model import load_weights, make_tiny_gguf, make_tiny_model

SECOND = "model-00002-of-00002.safetensors"


def read(source) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor, _ in source.tensors()}


@pytest.mark.parametrize("shards", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_safetensors_round_trip(shards, dtype, tmp_path):
    folder = make_tiny_model(tmp_path / "m", shards=shards, dtype=dtype)
    want = load_weights(make_tiny_model(tmp_path / "f", shards=1))
    got = read(SafetensorsSource(folder))
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert got[name].dtype == getattr(torch, dtype)
        assert torch.equal(got[name], torch.from_numpy(value).to(getattr(torch, dtype))), name


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_gguf_f32_equals_the_directory_bit_for_bit(architecture, tmp_path):
    folder = make_tiny_model(tmp_path / "m", architecture)
    file = make_tiny_gguf(tmp_path / "m.gguf", folder)
    want, got = load_weights(folder), read(GgufSource(GgufFile(file), load_config(file)))
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(got[name], torch.from_numpy(value)), name


@pytest.mark.parametrize("quantization", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_gguf_is_dequantised_by_its_format(quantization, tmp_path):
    """Dequantised rows must be those of the quantised checkpoint in its own row order: catches a wrong permutation too."""
    import gguf

    folder = make_tiny_model(tmp_path / "m")
    file = make_tiny_gguf(tmp_path / "m.gguf", folder, quantization)
    got = read(GgufSource(GgufFile(file), load_config(file)))
    kind = gguf.GGMLQuantizationType[quantization]
    for name, value in load_weights(folder).items():
        if value.ndim == 2:
            value = gguf.quants.dequantize(gguf.quants.quantize(value, kind), kind).reshape(value.shape)
        assert torch.equal(got[name], torch.from_numpy(np.asarray(value, np.float32))), name


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # random bytes make NaN scales
@pytest.mark.parametrize("quantization", ["Q4_K", "Q6_K", "Q3_K", "IQ4_NL"])
def test_gguf_formats_that_the_package_can_only_read(quantization, tmp_path, seed):
    import gguf

    kind = gguf.GGMLQuantizationType[quantization]
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (33 * 2, 512 // block * block_bytes), dtype=np.uint8)
    folder = make_tiny_model(tmp_path / "m")
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "qwen2")
    writer.add_tensor("blk.0.ffn_down.weight", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (values,) = read(GgufSource(GgufFile(tmp_path / "x.gguf"), load_config(folder))).values()
    np.testing.assert_array_equal(values.numpy(), gguf.quants.dequantize(raw, kind))


def test_gguf_without_an_output_matrix_is_tied(tmp_path, load):
    file = make_tiny_gguf(tmp_path / "m.gguf", make_tiny_model(tmp_path / "m", tie="tied"))
    model = load(file)
    assert load_config(file).tie_word_embeddings is True
    assert model.head.packed is model.embedding.weight


def test_gguf_rope_factors_equal_llama3_scaling(tmp_path, load):
    from gristmill.layers import rope

    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    folder = make_tiny_model(tmp_path / "m", rope_scaling=scaling)
    scaled, _ = rope.inverse_frequencies(load_config(folder))
    plain, _ = rope.inverse_frequencies(load_config(make_tiny_model(tmp_path / "p")))
    file = make_tiny_gguf(tmp_path / "m.gguf", folder, rope_freqs=(plain / scaled).tolist())
    torch.testing.assert_close(load(file).cos_sin, load(folder).cos_sin, rtol=1e-5, atol=1e-5)


def test_progress_ends_at_the_total(pristine, load):
    for path in (pristine, pristine.parent / "m.gguf"):
        seen = []
        load(path, lambda done, total, seen=seen: seen.append((done, total)))
        done, totals = zip(*seen, strict=True)
        assert list(done) == sorted(done) and len(set(totals)) == 1 and done[-1] == totals[0]


def test_only_one_shard_is_open_at_a_time(pristine, load, monkeypatch):
    import mmap

    open_maps, most = set(), 0

    class Counted(mmap.mmap):
        def __enter__(self):
            nonlocal most
            open_maps.add(id(self))
            most = max(most, len(open_maps))
            return super().__enter__()

        def __exit__(self, *error):
            open_maps.discard(id(self))
            return super().__exit__(*error)

    monkeypatch.setattr("gristmill.loading.safetensors.mmap.mmap", Counted)
    load(pristine)
    assert most == 1 and not open_maps


# --- faults


def rewrite(folder, change, shard=SECOND) -> None:
    """Apply `change` to the tensors of one shard; the index follows."""
    weights = dict(load_file(folder / shard))
    change(weights)
    save_file(weights, folder / shard, metadata={"format": "pt"})
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if file != shard} | dict.fromkeys(weights, shard)
    (folder / INDEX).write_text(json.dumps(index))


def edit_index(folder, change) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index)
    (folder / INDEX).write_text(json.dumps(index))


def cut(folder, n_bytes) -> None:
    path = folder / SECOND
    path.write_bytes(path.read_bytes()[:n_bytes])


def only_pickle(folder) -> None:
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02}q\x00.")


def add(weights, name, shape) -> None:
    weights[name] = np.zeros(shape, np.float32)


FAULTS = {
    "missing shard": (lambda d: (d / SECOND).unlink(), [SECOND, "missing"]),
    "cut shard": (lambda d: cut(d, -1000), [SECOND, "is cut: tensor 'model.layers.1."]),
    "shard cut in its header": (lambda d: cut(d, 100), [SECOND, "cut"]),
    "empty shard": (lambda d: cut(d, 0), [SECOND, "cut", "0 bytes"]),
    "missing tensor": (lambda d: rewrite(d, lambda w: w.pop("model.norm.weight")), ["no tensor 'model.norm.weight'"]),
    "misnamed tensor": (
        lambda d: rewrite(d, lambda w: w.update({"model.norm.weigth": w.pop("model.norm.weight")})),
        ["no tensor 'model.norm.weight'", "does have 'model.norm.weigth'"],
    ),
    "extra tensor": (lambda d: rewrite(d, lambda w: add(w, "model.layers.9.mlp.bias", (3,))), ["'model.layers.9.mlp.bias'", "not use"]),
    "misshapen tensor": (lambda d: rewrite(d, lambda w: add(w, "lm_head.weight", (600, 63))), ["lm_head.weight", "[600, 63]", "[600, 64]"]),
    "integer tensor": (lambda d: rewrite(d, lambda w: w.update(x=np.zeros(3, np.int32))), ["'x'", "I32"]),
    "shard above the directory": (
        lambda d: edit_index(d, lambda i: i["weight_map"].update({"lm_head.weight": "../x.safetensors"})),
        ["'../x.safetensors'", "plain file name"],
    ),
    "absolute shard": (
        lambda d: edit_index(d, lambda i: i["weight_map"].update({"lm_head.weight": "/etc/passwd"})),
        ["'/etc/passwd'", "plain file name"],
    ),
    "index that is no map": (lambda d: edit_index(d, lambda i: i.update(weight_map=[1])), [INDEX, "weight_map"]),
    "index that promises more": (
        lambda d: edit_index(d, lambda i: i["weight_map"].update({"more.weight": SECOND})),
        ["'more.weight'", SECOND],
    ),
    "only pickles": (only_pickle, ["pytorch_model.bin", "run code", "safetensors"]),
    "no weights": (lambda d: [p.unlink() for p in d.glob("*.safetensors*")], ["no weights"]),
    "no index": (lambda d: (d / INDEX).unlink(), ["neither model.safetensors nor"]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_one_sentence_that_names_it(fault, model_dir, load):
    damage, words = FAULTS[fault]
    damage(model_dir)
    with pytest.raises(ModelError) as caught:
        load(model_dir)
    text = str(caught.value)
    assert "\n" not in text and all(word in text for word in words), text


def test_a_saved_rotary_buffer_is_ignored(model_dir, load):
    rewrite(model_dir, lambda w: add(w, "model.layers.0.self_attn.rotary_emb.inv_freq", (8,)))
    load(model_dir)


def test_nothing_is_read_before_all_shapes_are_checked(model_dir, load):
    rewrite(model_dir, lambda w: add(w, "lm_head.weight", (600, 63)))
    calls = []
    with pytest.raises(ModelError):
        load(model_dir, lambda done, total: calls.append(done))
    assert calls == []


def test_a_cut_gguf_is_refused(pristine, load, tmp_path):
    data = (pristine.parent / "m.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(data[:-500])
    with pytest.raises(ModelError, match=r"cut\.gguf is cut: tensor"):
        load(tmp_path / "cut.gguf")
