"""Tied embeddings in every spelling that checkpoints use give the logits of transformers."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from gristmill.errors import ModelError
from tests.support.devices import BACKENDS
from tests.support.direct_runner import DirectRunner
from tests.support.tiny_model import TIE_SPELLINGS, load_weights, make_tiny_model

IDS = list(range(40, 60))


def logits_of(folder, **options) -> torch.Tensor:
    driver = DirectRunner(folder, **options)
    row = driver.add(IDS)
    driver.step([row])
    return row.logits[0]


def reference(folder) -> torch.Tensor:
    with torch.inference_mode():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(torch.tensor([IDS])).logits[0, -1]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tie", TIE_SPELLINGS)
def test_spelling(tie, backend, tmp_path):
    folder = make_tiny_model(tmp_path / "m", tie=tie)
    # transformers cannot read a Llama config with a text_config; what it means is the tied model
    oracle = make_tiny_model(tmp_path / "oracle", tie="tied") if tie == "text_config" else folder
    assert ("lm_head.weight" in load_weights(folder)) == (tie not in ("tied", "text_config"))
    assert (logits_of(folder, attention_backend=backend) - reference(oracle)).abs().max() < 1e-4


def test_whole_configuration_in_text_config(tmp_path):
    folder = make_tiny_model(tmp_path / "m", tie="tied")
    want = reference(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model_type": "some_vision_model", "text_config": config}))
    assert (logits_of(folder) - want).abs().max() < 1e-4


def test_a_tied_checkpoint_may_hold_the_head_alone(tmp_path):
    from safetensors.numpy import save_file

    folder = make_tiny_model(tmp_path / "m", tie="tied", shards=1)
    want = reference(folder)
    weights = load_weights(folder)
    weights["lm_head.weight"] = weights.pop("model.embed_tokens.weight")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert (reference(folder) - want).abs().max() < 1e-6
    assert (logits_of(folder) - want).abs().max() < 1e-4


def test_no_flag_and_no_head_means_tied(tmp_path):
    folder = make_tiny_model(tmp_path / "m", tie="tied")
    want = reference(folder)
    config = json.loads((folder / "config.json").read_text())
    del config["tie_word_embeddings"]
    (folder / "config.json").write_text(json.dumps(config))
    assert (logits_of(folder) - want).abs().max() < 1e-4


def test_flag_false_without_a_head_is_refused(tmp_path):
    folder = make_tiny_model(tmp_path / "m", tie="tied", extra_config={"tie_word_embeddings": False})
    with pytest.raises(ModelError, match=r"no tensor 'lm_head.weight' although tie_word_embeddings is false"):
        logits_of(folder)
