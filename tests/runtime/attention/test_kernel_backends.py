"""The backends over gristmill_kernels: latent attention against its definition, and Triton's kernels in the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from gristmill.attention.base import LatentLayer
from gristmill.attention.registry import backends
from gristmill.errors import OptionError
from gristmill.loading.config import ModelConfig, load_config
from gristmill.worker.batch import ForwardBatch
from gristmill.worker.kv_pool import LatentPool
from gristmill_kernels import triton as triton_family
from tests.support.tiny_model import make_tiny_model

ROOT = Path(__file__).parents[3]
HEADS, LATENT, ROPE = 4, 64, 16


def batch_of(table: torch.Tensor, slots: list[int], q_lens: list[int], kv_lens: list[int]) -> ForwardBatch:
    host_q, host_kv = np.array(q_lens, np.int32), np.array(kv_lens, np.int32)
    positions = [p for q, kv in zip(q_lens, kv_lens) for p in range(kv - q, kv)]
    owners = [slot for slot, q in zip(slots, q_lens) for _ in range(q)]
    return ForwardBatch(
        step=0,
        num_tokens=len(positions),
        is_decode=max(q_lens) == 1,
        input_ids=torch.zeros(len(positions), dtype=torch.int32),
        positions=torch.tensor(positions, dtype=torch.int32),
        out_slots=table[torch.tensor(owners), torch.tensor(positions)],
        req_slots=torch.tensor(slots, dtype=torch.int32),
        q_lens=torch.from_numpy(host_q),
        kv_lens=torch.from_numpy(host_kv),
        req_to_token=table,
        host_req_slots=np.array(slots, np.int32),
        host_q_lens=host_q,
        host_kv_lens=host_kv,
    )


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return load_config(make_tiny_model(tmp_path_factory.mktemp("attention") / "m"))


def check_latent(name: str, config: ModelConfig) -> None:
    """Two requests through a chunk of each, then two decode steps, against softmax in float64 over what was stored so far."""
    config = replace(config, num_heads=HEADS)
    pool = LatentPool(2, 60, 1, LATENT, ROPE, torch.float32)
    backend = backends()[name](config, pool)
    g = torch.Generator().manual_seed(3)
    table = torch.randperm(60, generator=g, dtype=torch.int32).reshape(3, 20)
    layer = LatentLayer(1, HEADS, 0.2)
    stored: dict[int, list[torch.Tensor]] = {2: [], 0: []}
    done = {2: 0, 0: 0}
    for q_lens in ([7, 11], [3, 1], [1, 1], [1, 1]):
        slots = [2, 0]
        kv_lens = [done[slot] + q for slot, q in zip(slots, q_lens)]
        n = sum(q_lens)
        q, kv = torch.randn(n, HEADS, LATENT + ROPE, generator=g), torch.randn(n, LATENT + ROPE, generator=g)
        out = torch.full((n, HEADS, LATENT), float("nan"))
        batch = batch_of(table, slots, q_lens, kv_lens)
        backend.prepare(batch)
        backend.forward_latent(q[..., :LATENT], q[..., LATENT:], kv[:, :LATENT], kv[:, LATENT:], layer, batch, out)
        row = 0
        for slot, q_len in zip(slots, q_lens):
            for _ in range(q_len):
                stored[slot].append(kv[row].double())
                keys = torch.stack(stored[slot])
                weights = torch.softmax(0.2 * q[row].double() @ keys.t(), dim=-1)
                assert (out[row].double() - weights @ keys[:, :LATENT]).abs().max() < 1e-5
                row += 1
            done[slot] += q_len


def test_latent_attention_is_its_definition_in_chunks_and_decode(config: ModelConfig) -> None:
    check_latent("cpu", config)


def test_a_backend_without_latent_attention_says_so(config: ModelConfig) -> None:
    backend = backends()["torch_native"](config, LatentPool(1, 4, 1, 8, 8, torch.float32))
    empty = torch.zeros(0)
    with pytest.raises(NotImplementedError, match="torch_native has no latent attention"):
        backend.forward_latent(empty, empty, empty, empty, LatentLayer(0, 1, 1.0), None, empty)  # type: ignore[arg-type]


def test_triton_on_a_cpu_is_declined_with_the_reason(config: ModelConfig) -> None:
    reason = backends()["triton"].supports(config, "cpu", torch.float32)
    assert reason is not None and ("TRITON_INTERPRET=1" in reason or "cannot be imported" in reason)
    with pytest.raises(OptionError, match="the triton kernels cannot run"):
        backends()["triton"](config, LatentPool(1, 4, 1, 8, 8, torch.float32))


@pytest.mark.slow
@pytest.mark.skipif(triton_family.missing() is not None, reason=str(triton_family.missing()))
def test_triton_in_the_interpreter_agrees_with_the_cpu(tmp_path: Path) -> None:
    """In a process of its own: TRITON_INTERPRET is read when a kernel is decorated."""
    command = [sys.executable, "-m", "tests.runtime.attention.triton_in_the_interpreter", str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout + run.stderr[-3000:]
