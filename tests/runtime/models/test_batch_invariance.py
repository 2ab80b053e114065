"""On the kernels a row's logits are the same bit for bit whatever runs beside it and however its prompt was cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gristmill_kernels import capabilities
from tests.support.devices import DEVICE
from tests.support.direct_runner import DirectRunner
from tests.support.tiny_model import make_tiny_model

N_TOKENS = 6


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def folder(request, tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("invariance") / "m", request.param, hidden=128, heads=8)


@pytest.mark.skipif(DEVICE != "cpu", reason="a product of many rows comes from a library there, which chooses by their number")
@pytest.mark.skipif(capabilities()["native"]["isa"] is None, reason="the reference implementations do not promise it")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_do_not_depend_on_neighbours_or_chunks(folder, dtype, seed):
    rng = np.random.default_rng(seed)
    prompt = rng.integers(3, 600, 300).tolist()

    def run(n_neighbours: int, chunk: int, threads: int) -> list[torch.Tensor]:
        torch.set_num_threads(threads)
        driver = DirectRunner(folder, dtype=dtype, pool_tokens=4096, threads=threads)
        row = driver.add(prompt)
        others = [driver.add(rng.integers(3, 600, 5 + 60 * i)) for i in range(n_neighbours)]
        driver.generate([*others[:2], row, *others[2:]], N_TOKENS, chunk)
        return row.logits[:N_TOKENS]

    want = run(0, 0, 1)
    for arguments in ((0, 0, 2), (5, 0, 2), (0, 64, 1), (3, 37, 2), (0, 1, 1)):
        for position, (one, other) in enumerate(zip(want, run(*arguments), strict=True)):
            assert torch.equal(one, other), f"{arguments}, token {position}: {(one - other).abs().max()} apart (seed {seed})"
