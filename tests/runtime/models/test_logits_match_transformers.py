"""Logits of tiny random checkpoints equal those of transformers in float32, however the tokens are computed, on both backends."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.devices import BACKENDS, KERNELS
from tests.support.direct_runner import DirectRunner
from tests.support.tiny_model import make_tiny_model

TOLERANCE = 1e-4
N_PROMPT, N_DECODE = 45, 12

VARIANTS = {
    "llama": ("llama", {}),
    "llama with biases": ("llama", {"extra_config": {"attention_bias": True, "mlp_bias": True}}),
    "llama without grouped heads": ("llama", {"kv_heads": 4}),
    "llama with one kv head and wide heads": ("llama", {"kv_heads": 1, "head_dim": 40}),
    "qwen2": ("qwen2", {}),
    "qwen2 with a window": ("qwen2", {"extra_config": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}}),
    "qwen3": ("qwen3", {}),
    "qwen3 with wide heads and biases": ("qwen3", {"head_dim": 32, "extra_config": {"attention_bias": True}}),
}


@pytest.fixture(scope="module", params=VARIANTS)
def case(request, tmp_path_factory):
    """(directory, ids, transformers' logits of every position)."""
    architecture, options = VARIANTS[request.param]
    folder = make_tiny_model(tmp_path_factory.mktemp("model") / "m", architecture, **options)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = np.random.default_rng(5).integers(3, 600, N_PROMPT + N_DECODE).tolist()
    with torch.inference_mode():
        return folder, ids, model(torch.tensor([ids])).logits[0]


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.std() > 0.5, "the logits are too flat to tell models apart"
    assert (got - want).abs().max() < TOLERANCE


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("chunk", [0, 16, 1], ids=["whole", "chunked", "one by one"])
def test_prefill(case, backend, chunk):
    folder, ids, want = case
    driver = DirectRunner(folder, attention_backend=backend)
    row = driver.add(ids[:N_PROMPT])
    driver.generate([row], 1, chunk)
    assert driver.steps == (1 if not chunk else -(-N_PROMPT // chunk))
    assert_close(row.logits[0], want[N_PROMPT - 1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_decode_with_neighbours(case, backend):
    """Forced continuation: the row is fed the reference ids; neighbours of other lengths join in between, mixed chunks included."""
    folder, ids, want = case
    driver = DirectRunner(folder, attention_backend=backend)
    row, others = driver.add(ids[:N_PROMPT]), [driver.add(ids[i : 2 * i + 9]) for i in range(3)]
    rows = [row]
    for at in range(N_DECODE):
        driver.step(rows, chunk=0 if at == 0 else 4)
        assert_close(row.logits[at], want[N_PROMPT - 1 + at])
        row.ids[-1] = ids[N_PROMPT + at]
        with torch.inference_mode():
            driver.runner.tables.tokens[row.req_slot, N_PROMPT + at] = row.ids[-1]
        if at % 3 == 1 and others:
            rows = [others.pop(), *rows]


def test_both_backends_really_differ(case):
    folder, _, _ = case
    native, torch_only = (DirectRunner(folder, attention_backend=name).runner for name in (KERNELS, "torch_native"))
    assert native.model.ops.name == "kernels" and torch_only.model.ops.name == "torch"
    assert set(torch_only.caps["implementations"].values()) == {"torch"}
