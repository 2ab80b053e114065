"""Attention backends over installed libraries, on the GPU: what their doubles in tests/runtime/attention cannot show."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gristmill.attention.registry import backends
from gristmill.loading.config import load_config
from tests.support.devices import DEVICE
from tests.support.direct_runner import DirectRunner
from tests.support.tiny_model import make_tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(DEVICE == "cpu", reason="there is no GPU")]

WINDOW = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}
PAGE_SIZES = {"flashinfer": 1, "flash_attn": 256}


def logits_of(folder: Path, backend: str, dtype: str, graphs: str) -> torch.Tensor:
    """Logits of prompts in chunks and of decode steps of 3 and 2 rows, with the same tokens for all."""
    page_size = max(PAGE_SIZES.get(part, 1) for part in backend.split("+"))
    driver = DirectRunner(folder, attention_backend=backend, dtype=dtype, graphs=graphs, page_size=page_size, pool_tokens=4096)
    rows = [driver.add(range(10, 10 + n)) for n in (1, 90, 200)]
    for at in range(12):
        decoding = [row for row in rows if row.done >= row.n_prompt]
        chosen = rows[at % 2 :] if len(decoding) == len(rows) else rows
        driver.step(chosen, chunk=64)
        for row in chosen:
            if len(row.ids) > row.done:
                row.ids[-1] = 3 + row.done
                with torch.inference_mode():
                    driver.runner.tables.tokens[row.req_slot, row.done] = row.ids[-1]
    return torch.cat([torch.stack(row.logits) for row in rows])


@pytest.mark.parametrize("graphs", ["lazy", "off"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize("backend", ["flashinfer", "flashinfer+cuda", "cuda+flashinfer", "flash_attn"])
def test_logits_are_those_of_plain_pytorch(backend: str, architecture: str, graphs: str, tmp_path: Path) -> None:
    """bfloat16 through the library is as far from float32 as bfloat16 through plain PyTorch is."""
    extra = WINDOW if architecture == "qwen2" else None
    folder = make_tiny_model(tmp_path / "m", architecture, heads=8, kv_heads=2, head_dim=64, extra_config=extra)
    for part in backend.split("+"):
        if (reason := backends()[part].supports(load_config(folder), "cuda", torch.bfloat16)) is not None:
            pytest.skip(f"{part}: {reason}")
    want = logits_of(folder, "torch_native", "float32", "off")
    native, got = logits_of(folder, "torch_native", "bfloat16", "off"), logits_of(folder, backend, "bfloat16", graphs)
    assert got.isfinite().all() and (got - want).norm() / want.norm() < 1.5 * (native - want).norm() / want.norm() + 1e-3
