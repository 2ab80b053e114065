"""What is decided before the first step: pool size, context, dtype, attention backend."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from gristmill.attention import registry
from gristmill.attention.torch_native import TorchNativeBackend
from gristmill.errors import ModelError, OptionError
from gristmill.loading.config import load_config
from gristmill.options import Options
from gristmill.worker.kv_pool import KVPool, PoolSizes, bytes_per_token, pool_sizes
from gristmill.worker.runner import context_limit, resolve_dtype
from tests.support.devices import BACKENDS
from tests.support.direct_runner import DirectRunner


def sizes(config, **changes) -> PoolSizes:
    settings = {
        "pool_tokens": 0,
        "memory_fraction": 0.5,
        "page_size": 1,
        "max_reqs": 10**6,
        "max_context": 512,
        "chunk_tokens": 64,
        "available_bytes": 10**6,
        **changes,
    }
    return pool_sizes(config, torch.float32, **settings)


def slots(config, **changes) -> int:
    full, window = sizes(config, **changes)
    assert window == 0
    return full


def test_pool_size(model_dir):
    config = load_config(model_dir)
    assert bytes_per_token(config, torch.float32) == 2 * 2 * 2 * 16 * 4
    assert slots(config) == 500_000 // 512
    assert slots(config, page_size=16) == 500_000 // 512 // 16 * 16
    assert slots(config, max_reqs=2, max_context=50) == 100
    assert slots(config, max_reqs=2, max_context=50, page_size=16) == 112, "whole pages that hold all that can be used"
    assert slots(config, pool_tokens=77) == 77
    assert slots(config, pool_tokens=77, page_size=16) == 64


def test_pool_that_does_not_fit(model_dir):
    config = load_config(model_dir)
    with pytest.raises(ModelError, match=r"--pool-tokens 5000 needs 2 MiB .* 1 MiB are free"):
        slots(config, pool_tokens=5000)
    with pytest.raises(ModelError, match="--pool-tokens 8 is less than one page of 16"):
        slots(config, pool_tokens=8, page_size=16)
    with pytest.raises(ModelError, match="no memory is left for keys and values"):
        slots(config, available_bytes=100)


def test_a_window_pool_is_as_large_as_the_windows_of_all_requests(model_dir):
    config = replace(load_config(model_dir), num_layers=4, sliding_window=32, first_window_layer=1)
    layer = 2 * 2 * 16 * 4
    full, window = sizes(config, max_reqs=4, available_bytes=10**7)
    assert window == (4 * (32 + 192 + 4) + 2 * 64) * 5 // 4
    assert full == (5 * 10**6 - window * 3 * layer) // layer if full < 4 * 512 else full == 4 * 512
    assert KVPool(config, PoolSizes(full, window), 1, torch.float32).nbytes == (full + 3 * window) * layer
    scarce = sizes(config, max_reqs=4, available_bytes=10**6)
    assert 0 < scarce.window <= max(scarce.full, 32 + 192 + 6)
    assert (scarce.full + 3 * scarce.window) * layer <= 5 * 10**5
    given = sizes(config, max_reqs=4, pool_tokens=600, available_bytes=10**7, page_size=8)
    assert given == PoolSizes(600, 600)
    assert sizes(replace(config, first_window_layer=4)).window == 0, "no layer has a window"
    assert sizes(config, max_context=32).window == 0, "a window that nobody outgrows"
    assert sizes(replace(config, first_window_layer=0), max_reqs=4, available_bytes=10**7).full == 4 * 512, (
        "without a full layer it costs nothing"
    )


def test_context_limit(model_dir):
    config = load_config(model_dir)
    assert context_limit(config, Options()) == 512
    assert context_limit(config, Options(context_length=100)) == 100
    with pytest.raises(OptionError, match="--context-length 513 exceeds the 512"):
        context_limit(config, Options(context_length=513))


def test_dtype_of_auto_comes_with_a_reason():
    assert resolve_dtype("float32") == (torch.float32, "asked for")
    dtype, reason = resolve_dtype("auto")
    assert dtype in (torch.float32, torch.bfloat16) and "bfloat16" in reason


@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16_follows_float32(backend, model_dir):
    rows = {}
    for dtype in ("float32", "bfloat16"):
        driver = DirectRunner(model_dir, dtype=dtype, attention_backend=backend)
        assert driver.runner.pool.layer(0)[0].dtype == getattr(torch, dtype)
        rows[dtype] = driver.add(range(10, 60))
        driver.step([rows[dtype]])
    want, got = rows["float32"].logits[0], rows["bfloat16"].logits[0]
    assert got.dtype == torch.float32
    assert (got - want).norm() / want.norm() < 0.05


# --- the registry of attention backends


@pytest.fixture
def fresh_registry(monkeypatch):
    registry.backends()
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    monkeypatch.setattr(registry, "_failed", {})
    return monkeypatch


def test_auto_prefers_the_kernels_and_says_why_not(model_dir, fresh_registry):
    config = load_config(model_dir)
    backend, reason = registry.choose("auto", config, "cpu", torch.float32)
    assert backend.registered_name == "cpu" and "first choice" in reason
    odd = replace(config, head_dim=12)
    backend, reason = registry.choose("auto", odd, "cpu", torch.float32)
    assert backend.registered_name == "torch_native" and "head_dim 12 is not a multiple of 8" in reason
    with pytest.raises(OptionError, match="--attention-backend cpu cannot run this model: head_dim 12"):
        registry.choose("cpu", odd, "cpu", torch.float32)
    with pytest.raises(OptionError, match="must be auto or one of cpu, cuda, flash_attn, flashinfer, torch_native, triton, not 'fast'"):
        registry.choose("fast", config, "cpu", torch.float32)


def test_a_backend_of_another_package(model_dir, fresh_registry):
    """An entry point is enough; one that breaks is reported only when it is asked for."""

    def load_good() -> None:
        registry.register("plugged")(type("Plugged", (TorchNativeBackend,), {}))

    def load_bad() -> None:
        raise ImportError("libfast.so is missing")

    entries = [SimpleNamespace(name="plugged", value="x:y", load=load_good), SimpleNamespace(name="broken", value="x:z", load=load_bad)]
    fresh_registry.setattr(registry.metadata, "entry_points", lambda group: entries if group == registry.GROUP else [])
    fresh_registry.setattr(registry, "_loaded", False)
    driver = DirectRunner(model_dir, attention_backend="plugged")
    assert driver.runner.caps["attention_backend"] == "plugged"
    row, want = driver.add(range(9, 30)), DirectRunner(model_dir)
    other = want.add(range(9, 30))
    driver.generate([row], 5)
    want.generate([other], 5)
    assert row.ids == other.ids
    config = load_config(model_dir)
    assert registry.choose("auto", config, "cpu", torch.float32)[0].registered_name == "cpu"
    with pytest.raises(OptionError, match=r"'broken'; loading it failed with ImportError: libfast\.so is missing"):
        registry.choose("broken", config, "cpu", torch.float32)
