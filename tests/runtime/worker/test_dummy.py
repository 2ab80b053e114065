"""Runs without weights, KV pools of 8-bit floats, and the loop of a runner that answers later."""

from __future__ import annotations

import json
import threading
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gristmill import Engine
from gristmill.errors import OptionError, ProtocolError
from gristmill.messages import Control, Done, Result, Step, ints
from gristmill.worker.graphs import graph_sizes
from gristmill.worker.loop import run_loop
from tests.support.direct_runner import DirectRunner


@pytest.fixture
def bare(model_dir: Path, tmp_path: Path) -> Path:
    """A model of which only config.json is there."""
    folder = tmp_path / "bare"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(json.loads((model_dir / "config.json").read_text())))
    return folder


def test_a_config_alone_is_enough_to_measure_with(bare: Path) -> None:
    with Engine(str(bare), load_format="dummy", dtype="float32", pool_tokens=512, max_running=4) as engine:
        (output,) = engine.generate([[5, 6, 7]], max_tokens=9, temperature=0, ignore_eos=True)
        assert len(output.ids) == 9 and all(0 <= i < 600 for i in output.ids)
    first, second = (DirectRunner(bare, load_format="dummy") for _ in range(2))
    for driver in (first, second):
        assert driver.runner.model.layers[0].mlp.down.packed.float().std() > 0
    rows = [driver.add(range(10, 40)) for driver in (first, second)]
    for driver, row in zip((first, second), rows):
        driver.generate([row], 5)
    assert rows[0].ids == rows[1].ids, "the weights depend on the run"


@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_a_pool_of_8_bit_floats_is_keys_and_values_rounded_once(kv_dtype: str, model_dir: Path) -> None:
    """The oracle stores the same keys and values in float32 after a round trip through the 8-bit type."""
    rounded, small = DirectRunner(model_dir), DirectRunner(model_dir, kv_dtype=kv_dtype)
    assert small.runner.pool.nbytes * 4 == rounded.runner.pool.nbytes
    assert small.runner.caps["kv_bytes_per_token"] * 4 == rounded.runner.caps["kv_bytes_per_token"]
    float8 = small.runner.pool.dtype
    store = rounded.runner.backend._store
    rounded.runner.backend._rotate_and_store = None  # on a GPU it would store without passing here
    rounded.runner.backend._store = lambda k_cache, v_cache, k, v, slots: store(
        k_cache, v_cache, k.to(float8).float(), v.to(float8).float(), slots
    )
    logits = []
    for driver in (rounded, small):
        row = driver.add(range(20, 90))
        driver.generate([row], 4, chunk=33)
        logits.append(torch.stack(row.logits))
    assert (logits[0] - logits[1]).abs().max() < 1e-3


def test_a_backend_without_8_bit_floats_refuses_them(model_dir: Path) -> None:
    with pytest.raises(OptionError, match="--kv-dtype fp8_e4m3 cannot be used: attention backend torch_native"):
        DirectRunner(model_dir, kv_dtype="fp8_e4m3", attention_backend="torch_native")


def test_graph_sizes() -> None:
    assert graph_sizes(1) == [1]
    assert graph_sizes(5) == [1, 2, 4, 5]
    assert graph_sizes(64)[-3:] == [48, 56, 64]
    for most in (1, 2, 3, 31, 33, 64, 65, 100, 256, 257, 300, 1000):
        sizes = graph_sizes(most)
        assert sizes == sorted(set(sizes)) and sizes[-1] == most
        assert all(later - size <= max(4, 0.34 * size) for size, later in pairwise(sizes))


# --- a runner whose results come later


class LateRunner:
    """Answers step t when `gates[t]` is set; notes the order of what the loop asks of it."""

    launches = True

    def __init__(self, steps: int) -> None:
        self.gates = [threading.Event() for _ in range(steps)]
        self.calls: list[tuple[str, int]] = []

    def forward(self, step: Step) -> Step:
        self.calls.append(("forward", step.step))
        return step

    def sample(self, done: Step, mask: object = None) -> SimpleNamespace:
        self.calls.append(("sample", done.step))
        return SimpleNamespace(wait=lambda: self._wait(done.step))

    def _wait(self, step: int) -> Result:
        assert self.gates[step].wait(20)
        if step == 7:
            raise ProtocolError("the device is gone")
        return Result(step, ints([step]))


class Script:
    """A source that gives out messages and a sink that keeps what is sent."""

    def __init__(self, messages: list) -> None:
        self.messages, self.sent = list(messages), []

    def recv(self, timeout_ms: int | None = 0):
        if self.messages:
            return self.messages.pop(0)
        time.sleep(0.01)
        return None

    def send(self, message) -> None:
        self.sent.append(message)


def empty(step: int) -> Step:
    return Step(step, ints(), ints(), ints(), ints())


def wait_for(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_the_loop_launches_ahead_and_answers_in_order() -> None:
    runner, script = LateRunner(3), Script([empty(0), empty(1), Control(5, "flush"), empty(2), Control(6, "shutdown")])
    thread = threading.Thread(target=run_loop, args=(runner, script, script, threading.Event()))
    thread.start()
    wait_for(lambda: ("sample", 2) in runner.calls)
    assert script.sent == [], "a result was sent before the device had it"
    for gate in (2, 1, 0):
        runner.gates[gate].set()
    thread.join(20)
    assert not thread.is_alive()
    assert [message.step if isinstance(message, Result) else message.seq for message in script.sent] == [0, 1, 5, 2, 6]
    assert isinstance(script.sent[2], Done)


def test_a_failure_of_the_device_ends_a_loop_that_waits_for_steps() -> None:
    runner, script = LateRunner(8), Script([empty(step) for step in range(8)])
    for gate in runner.gates:
        gate.set()
    with pytest.raises(ProtocolError, match="the device is gone"):
        run_loop(runner, script, script, threading.Event())
    assert [message.step for message in script.sent] == list(range(7))
    assert np.all([message.ids[0] == message.step for message in script.sent])


def test_device_errors_become_sentences() -> None:
    from gristmill.errors import GristmillError
    from gristmill.worker import gpu_failures

    with (
        pytest.raises(GristmillError, match="ran out of memory while running the model: lower --mem-fraction"),
        gpu_failures.named("running"),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.\nmore")
    with (
        pytest.raises(GristmillError, match="the GPU failed while loading the model: CUDA error: an illegal"),
        gpu_failures.named("loading"),
    ):
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be reported later")
    with pytest.raises(RuntimeError, match="shapes"), gpu_failures.named("running"):
        raise RuntimeError("shapes do not fit")
