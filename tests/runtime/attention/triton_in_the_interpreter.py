"""Run under TRITON_INTERPRET=1 by test_kernel_backends.py: the Triton backend against the CPU backend, in this process."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from gristmill.loading.config import load_config
from tests.runtime.attention.test_kernel_backends import check_latent
from tests.support.direct_runner import DirectRunner
from tests.support.tiny_model import make_tiny_model


def main(folder: Path) -> None:
    window = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    model = make_tiny_model(folder / "m", "qwen2", extra_config=window)
    logits = {}
    for backend in ("cpu", "triton"):
        driver = DirectRunner(model, attention_backend=backend)
        rows = [driver.add(range(10, 10 + n)) for n in (1, 17, 40)]
        driver.generate(rows, 4, chunk=16)
        logits[backend] = torch.cat([torch.stack(row.logits) for row in rows])
        families = set(driver.runner.backend.families().values())
        assert families == {"native" if backend == "cpu" else "triton"}, families
    assert (logits["cpu"] - logits["triton"]).abs().max() < 1e-4
    check_latent("triton", load_config(model))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
