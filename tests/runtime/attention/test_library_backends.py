"""The backends over libraries and hybrids give the logits of torch_native, with doubles that check every argument of the library."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gristmill.attention import libraries
from gristmill.attention.flash_attn.backend import FlashAttnBackend
from gristmill.attention.flash_attn.library import FlashAttention2
from gristmill.attention.flashinfer.backend import FlashInferBackend
from gristmill.attention.registry import backends, choose
from gristmill.errors import OptionError
from gristmill.loading.config import ModelConfig, load_config
from gristmill.worker import rehearsal
from tests.support import fake_flash_attn, fake_flashinfer
from tests.support.direct_runner import DirectRunner
from tests.support.eager_graphs import EagerGraphs
from tests.support.tiny_model import make_tiny_model

MODELS = {
    "two heads per KV head": ("llama", {}),
    "one head per KV head": ("llama", {"kv_heads": 4}),
    "four heads per KV head": ("llama", {"kv_heads": 1}),
    "five heads per KV head": ("llama", {"heads": 5, "kv_heads": 1, "head_dim": 16}),
    "a window in one layer": ("qwen2", {"extra_config": {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}}),
    "a window in all layers": ("qwen2", {"extra_config": {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 0}}),
    "a window longer than the context": (
        "qwen3",
        {"extra_config": {"use_sliding_window": True, "sliding_window": 600, "max_window_layers": 1}},
    ),
}
# backend, page size, whether decode steps run as captured ones
RUNS = {
    "flashinfer": ("fake_flashinfer", 1, False),
    "flashinfer, captured": ("fake_flashinfer", 1, True),
    "flashinfer over pages": ("fake_flashinfer", 16, True),
    "flash-attn 2": ("fake_flash_attn_2", 256, False),
    "flash-attn 2, captured": ("fake_flash_attn_2", 256, True),
    "flash-attn 3": ("fake_flash_attn_3", 1, False),
    "flash-attn 3, captured": ("fake_flash_attn_3", 1, True),
    "flash-attn 3 over pages": ("fake_flash_attn_3", 4, True),
    "kernels, captured": ("cpu", 1, True),
    "hybrid": ("fake_flashinfer+cpu", 1, True),
    "the other hybrid": ("cpu+fake_flashinfer", 1, True),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    architecture, options = MODELS[request.param]
    return make_tiny_model(tmp_path_factory.mktemp("library") / "m", architecture, **options)


def logits_of(folder: Path, backend: str, page_size: int = 1, captured: bool = False, dtype: str = "float32") -> torch.Tensor:
    """Prompts in chunks beside decode rows, then decode steps of fewer and fewer rows. All memory that was never written is NaN."""
    settings = {"page_size": page_size, "pool_tokens": 8192, "max_running": 8, "dtype": dtype, "device": "cpu"}
    driver = DirectRunner(folder, attention_backend=backend, **settings)
    runner = driver.runner
    with torch.inference_mode():
        for layer in range(runner.config.num_layers):
            for cache in runner.pool.layer(layer):
                cache[1:] = float("nan")
    if captured:
        runner.graphs = EagerGraphs(runner, [2, 5])
    first = [driver.add(range(9, 9 + n)) for n in (1, 40)]
    driver.generate(first, 2, chunk=16)
    rest = [driver.add(range(30, 30 + n)) for n in (3, 290, 70)]
    for at, count in enumerate((4, 5, 7)):
        driver.generate([*first, *rest[at:]], count, chunk=64)
    assert not captured or runner.graphs.runs > 5
    return torch.cat([torch.stack(row.logits) for row in [*first, *rest]])


@pytest.fixture(scope="module")
def wanted(model: Path) -> torch.Tensor:
    return logits_of(model, "torch_native")


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.usefixtures("doubles")
def test_logits_are_those_of_plain_pytorch(run: str, model: Path, wanted: torch.Tensor) -> None:
    assert wanted.std() > 0.5
    assert (logits_of(model, *RUNS[run]) - wanted).abs().max() < 1e-4


@pytest.mark.parametrize("backend", ["fake_flashinfer", "fake_flash_attn_3"])
@pytest.mark.usefixtures("doubles")
def test_bfloat16_follows_float32(backend: str, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "m")
    got, want = logits_of(folder, backend, dtype="bfloat16")[:1], logits_of(folder, "torch_native")[:1]
    assert (got - want).norm() / want.norm() < 0.05


@pytest.mark.usefixtures("doubles")
def test_a_hybrid_plans_only_what_a_step_needs(tmp_path: Path) -> None:
    driver = DirectRunner(make_tiny_model(tmp_path / "m"), attention_backend="fake_flashinfer+cpu", device="cpu")
    assert driver.runner.caps["attention_backend"] == "fake_flashinfer+cpu"
    assert driver.runner.caps["implementations"]["extend_attention"] == "flashinfer / native"
    fake_flashinfer.plans.clear()
    driver.generate([driver.add(range(20))], 5)
    assert fake_flashinfer.plans == ["prefill"]


# --- what is refused


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return replace(load_config(make_tiny_model(tmp_path_factory.mktemp("config") / "m")), head_dim=64)


@pytest.mark.parametrize("name", ["flashinfer", "flash_attn"])
def test_reasons_to_decline(name: str, config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = backends()[name]
    assert backend.supports(config, "cpu", torch.bfloat16) == "it runs on NVIDIA GPUs, not on cpu"
    want = "it computes in float16 or bfloat16, not in float32 (see --dtype)"
    assert backend.supports(config, "cuda", torch.float32) == want
    assert "head_dim 68 is not" in str(backend.supports(replace(config, head_dim=68), "cuda", torch.bfloat16))
    odd = replace(config, num_heads=5, num_kv_heads=2)
    assert backend.supports(odd, "cuda", torch.bfloat16) == "5 query heads are not a multiple of 2 KV heads"
    monkeypatch.setattr(libraries.importlib, "import_module", lambda name: (_ for _ in ()).throw(ModuleNotFoundError("No module")))
    package = {"flashinfer": "flashinfer-python", "flash_attn": "flash-attn"}[name]
    reason = backend.supports(config, "cuda", torch.bfloat16)
    assert reason == f"{name} cannot be imported (ModuleNotFoundError: No module); pip install {package} brings it"
    with pytest.raises(OptionError, match=rf"--attention-backend {name} cannot run this model: {name} cannot be imported"):
        choose(f"{name}+cuda", config, "cuda", torch.bfloat16)


def test_an_old_library_is_declined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_flashinfer, "__version__", "0.2.11")
    monkeypatch.setattr(libraries.importlib, "import_module", lambda name: fake_flashinfer)
    with pytest.raises(ImportError, match=r"flashinfer 0\.2\.11 is older than 0\.5; pip install -U flashinfer-python brings a newer one"):
        FlashInferBackend.library()


def test_pages_that_flash_attn_2_cannot_read(config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    library = classmethod(lambda cls: FlashAttention2(fake_flash_attn.VERSION_2))
    monkeypatch.setattr(FlashAttnBackend, "library", library)
    with pytest.raises(OptionError, match="reads pages of a multiple of 256 tokens, not of 16 \\(use --page-size 256\\)"):
        choose("flash_attn", config, "cuda", torch.bfloat16, 16)
    assert choose("flash_attn", config, "cuda", torch.bfloat16, 256)[0] is FlashAttnBackend


@pytest.mark.parametrize("name", ["cpu+", "+cpu", "cpu+cpu+cpu"])
def test_names_that_are_no_pair(name: str, config: ModelConfig) -> None:
    with pytest.raises(OptionError, match="must be one name, or two as PREFILL"):
        choose(name, config, "cpu", torch.float32)


def test_a_pair_of_the_same_is_that_one(config: ModelConfig) -> None:
    assert choose("cpu+auto", config, "cpu", torch.float32)[0] is backends()["cpu"]
    with pytest.raises(OptionError, match="must be auto or one of"):
        choose("cpu+fast", config, "cpu", torch.float32)


@pytest.mark.usefixtures("doubles")
def test_the_example_of_the_docs_registers_and_declines(config: ModelConfig) -> None:
    page = (Path(__file__).parents[3] / "docs" / "backends.md").read_text()
    exec(page.split("```python\n")[1].split("```")[0], {})
    mine = backends()["mine"]
    assert mine.supports(replace(config, head_dim=128), "cuda", torch.bfloat16) == "No module named 'my_library'"
    assert mine.supports(config, "cuda", torch.bfloat16) == "head_dim 64 is not 128"


# --- the doubles


@pytest.mark.parametrize("wrapper", ["BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"])
def test_the_double_of_flashinfer_has_its_signatures(wrapper: str) -> None:
    """Where the library is installed: what we pass, it takes; defaults and order are those of the version that the double was made for."""
    real = getattr(pytest.importorskip("flashinfer"), wrapper)
    for method in ("__init__", "plan", "run"):
        ours, theirs = (list(inspect.signature(getattr(cls, method)).parameters) for cls in (getattr(fake_flashinfer, wrapper), real))
        assert set(ours) <= set(theirs) and theirs[:8] == ours[:8]


@pytest.mark.parametrize(("backend", "page_size"), [("cpu", 1), ("fake_flash_attn_2", 256), ("fake_flashinfer", 1)])
@pytest.mark.usefixtures("doubles")
def test_the_largest_steps_of_a_rehearsal(backend: str, page_size: int, tmp_path: Path) -> None:
    """A pool of just the tokens of one step, in whole pages, is room enough for both steps."""
    settings = {"page_size": page_size, "pool_tokens": 1024, "max_running": 8, "device": "cpu"}
    driver = DirectRunner(make_tiny_model(tmp_path / "m"), attention_backend=backend, **settings)
    with torch.inference_mode():
        rehearsal.run(driver.runner, 1020)
