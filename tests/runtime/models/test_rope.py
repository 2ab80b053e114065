"""Rotary scaling: frequencies and logits equal those of transformers; rules that are not implemented are refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from gristmill.errors import ModelError
from gristmill.layers import rope
from gristmill.layers.ops import TorchOps
from gristmill.loading.config import load_config
from gristmill_kernels import rope as kernel_rope
from tests.support.direct_runner import DirectRunner
from tests.support.tiny_model import make_tiny_model

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
SCALINGS = {
    "llama3": LLAMA3,
    "linear": {"rope_type": "linear", "factor": 3.0},
    "old spelling": {"type": "linear", "factor": 2.0},
    "yarn": YARN,
    "yarn with its options": YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.3, "truncate": False},
    "yarn with mscale": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5},
}


@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies(name, tmp_path):
    folder = make_tiny_model(tmp_path, rope_scaling=SCALINGS[name])
    reference = LlamaConfig.from_pretrained(folder)
    want, scale = ROPE_INIT_FUNCTIONS[reference.rope_parameters["rope_type"]](reference, "cpu")
    got, got_scale = rope.inverse_frequencies(load_config(folder))
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
    assert got_scale == pytest.approx(scale, rel=1e-12)


@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("name", ["llama3", "yarn"])
def test_logits_with_scaling(name, spelling, tmp_path):
    folder = make_tiny_model(tmp_path, rope_scaling=SCALINGS[name])
    if spelling == "rope_parameters":  # as transformers 5 saves it
        config = json.loads((folder / "config.json").read_text())
        config["rope_parameters"] = config.pop("rope_scaling") | {"rope_theta": 5000.0}
        del config["rope_theta"]
        (folder / "config.json").write_text(json.dumps(config))
        assert load_config(folder).rope_theta == 5000.0
    ids = np.random.default_rng(2).integers(3, 600, 200).tolist()
    with torch.inference_mode():
        want = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(torch.tensor([ids])).logits[0, -1]
    driver = DirectRunner(folder)
    row = driver.add(ids)
    driver.step([row])
    assert (row.logits[0] - want).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, ("dynamic", "linear, llama3, yarn")),
        ({"rope_type": "longrope", "factor": 2.0}, ("longrope",)),
        ({"rope_type": "llama3", "factor": 8.0}, ("low_freq_factor", "None")),
        ({"rope_type": "linear", "factor": "two"}, ("factor", "'two'")),
    ],
)
def test_other_rules_are_refused_in_a_sentence(scaling, words, tmp_path):
    folder = make_tiny_model(tmp_path, rope_scaling=scaling)
    with pytest.raises(ModelError) as caught:
        DirectRunner(folder)
    assert all(word in str(caught.value) for word in words)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "interleaved"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_op_sets_rotate_alike(is_neox: bool, dtype: torch.dtype) -> None:
    q, k = torch.randn(5, 3, 16).to(dtype), torch.randn(5, 1, 16).to(dtype)
    cos_sin, positions = torch.randn(9, 12), torch.tensor([0, 3, 8, 2, 1], dtype=torch.int32)
    want_q, want_k = q.clone(), k.clone()
    kernel_rope.apply_rope(want_q, want_k, positions, cos_sin, is_neox=is_neox)
    TorchOps.apply_rope(q, k, positions, cos_sin, is_neox)
    torch.testing.assert_close(q, want_q)
    torch.testing.assert_close(k, want_k)
