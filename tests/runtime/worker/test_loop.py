"""The worker process over inproc:// sockets, driven with hand-made messages."""

from __future__ import annotations

import threading
import uuid
from itertools import pairwise

import numpy as np
import pytest
import zmq

from gristmill.errors import GristmillError, ModelError, ProtocolError
from gristmill.launch_config import LaunchConfig
from gristmill.messages import NO_TOKEN, Control, Done, Mask, NewReq, Ready, Result, SamplingParams, Step, Write, ints
from gristmill.options import Options
from gristmill.transport import Endpoints, Pull, Push
from gristmill.worker import null, process
from tests.support.devices import DEVICE, KERNELS
from tests.support.direct_runner import DirectRunner

WAIT_MS = 60_000


class Worker:
    """A worker in a thread and this side's ends of its two edges."""

    def __init__(self, model_path: str, **options) -> None:
        self.context = zmq.Context()
        endpoints = Endpoints(f"inproc://{uuid.uuid4().hex}")
        settings = {"dtype": "float32", "pool_tokens": 512, "max_running": 8, "threads": 1, **options}
        self.config = LaunchConfig(Options(**settings), str(model_path), (), endpoints.prefix)
        self.results, self.stop, self.error = Pull(self.context, endpoints.d_to_b(0)), threading.Event(), None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        self.steps = Push(self.context, endpoints.b_to_d(0), "scheduler")

    def _run(self) -> None:
        try:
            process.run(self.config, self.context, self.stop)
        except GristmillError as error:
            self.error = error

    def recv(self, kind):
        message = self.results.recv(WAIT_MS)
        assert isinstance(message, kind), (message, self.error)
        return message

    def join(self) -> None:
        self.thread.join(WAIT_MS / 1000)
        assert not self.thread.is_alive()

    def close(self) -> None:
        self.stop.set()
        self.join()
        self.steps.close()
        self.results.close()
        self.context.term()


@pytest.fixture
def start():
    workers = []

    def make(path, **options) -> Worker:
        workers.append(Worker(path, **options))
        return workers[-1]

    yield make
    for worker in workers:
        worker.close()


def prefill(step: int, ids, slot: int = 0, first_kv_slot: int = 0, **fields) -> Step:
    n = len(ids)
    new = NewReq(slot, n, ints(ids), SamplingParams(temperature=0.0))
    kv_slots = ints(range(first_kv_slot, first_kv_slot + n))
    return Step(step, ints([slot]), ints([n]), ints([n]), ints([1]), [new], [Write(0, slot, 0, n)], kv_slots, **fields)


def decode(step: int, kv_len: int, kv_slot: int, slot: int = 0) -> Step:
    return Step(step, ints([slot]), ints([1]), ints([kv_len]), ints([1]), [], [Write(0, slot, kv_len - 1, 1)], ints([kv_slot]))


def test_ready_tells_pools_and_capabilities(model_dir, start):
    ready = start(model_dir, page_size=16, pool_tokens=500).recv(Ready)
    assert (ready.rank, ready.max_reqs, ready.max_context) == (0, 8, 512)
    assert [(p.kind, p.slots, p.page_size) for p in ready.pools] == [("full", 496, 16)]
    assert ready.caps["vocab_size"] == 600 and ready.caps["dtype"] == "float32"
    assert ready.caps["attention_backend"] == KERNELS and ready.caps["attention_backend_reason"]
    linear = "packed_linear" if DEVICE == "cpu" else "skinny_linear"
    assert set(ready.caps["implementations"]) >= {"rms_norm", "decode_attention", "extend_attention", linear}


def test_steps_sent_ahead_are_answered_in_order(model_dir, start):
    """Depth 3: the worker itself carries the newest token from step to step."""
    driver = DirectRunner(model_dir)
    want = driver.add(range(50, 70))
    driver.generate([want], 4)
    worker = start(model_dir)
    worker.recv(Ready)
    worker.steps.send(prefill(7, range(50, 70)))
    for i in range(3):
        worker.steps.send(decode(8 + i, 21 + i, 100 + i))
    results = [worker.recv(Result) for _ in range(4)]
    assert [r.step for r in results] == [7, 8, 9, 10]
    assert [int(r.ids[0]) for r in results] == want.ids[20:]
    assert all(r.t_end >= r.t_start > 0 for r in results)
    if DEVICE == "cpu":  # a GPU's steps are launched ahead
        assert all(later.t_start >= earlier.t_end for earlier, later in pairwise(results))


def test_a_step_without_rows_is_answered(model_dir, start):
    worker = start(model_dir)
    worker.recv(Ready)
    worker.steps.send(Step(0, ints(), ints(), ints(), ints()))
    assert worker.recv(Result).ids.size == 0
    # and one whose only row does not emit
    step = prefill(1, range(10))
    step.emit = ints([0])
    worker.steps.send(step)
    assert worker.recv(Result).ids.tolist() == [NO_TOKEN]


def test_result_before_the_wait_for_a_mask(model_dir, start):
    worker = start(model_dir)
    worker.recv(Ready)
    worker.steps.send(prefill(0, range(10)))
    worker.steps.send(prefill(1, range(10), slot=1, first_kv_slot=20, needs_mask=True))
    worker.recv(Result)  # the mask of step 1 is made from this
    bits = np.zeros(-(-600 // 32), np.int32)
    bits[3] = 1 << 4
    worker.steps.send(Mask(1, ints([0]), ints(bits)))
    assert worker.recv(Result).ids.tolist() == [3 * 32 + 4]


def test_control(model_dir, start):
    worker = start(model_dir)
    worker.recv(Ready)
    worker.steps.send(prefill(0, range(10)))
    for seq, op in enumerate(("flush", "pause", "continue", "dance")):
        worker.steps.send(Control(seq, op))
    worker.recv(Result)
    done = [worker.recv(Done) for _ in range(4)]
    assert [d.seq for d in done] == [0, 1, 2, 3]
    assert [d.error for d in done[:3]] == [None] * 3 and "dance" in done[3].error
    worker.steps.send(Control(9, "shutdown"))
    assert worker.recv(Done).seq == 9
    worker.join()
    assert worker.error is None


def test_stop_ends_an_idle_worker(model_dir, start):
    worker = start(model_dir)
    worker.recv(Ready)
    worker.stop.set()
    worker.join()
    assert worker.error is None


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([prefill(0, range(9)), decode(2, 10, 9)], "step 2 came after step 0"),
        ([decode(0, 1, 0)], "never admitted among [0]"),
        ([prefill(0, range(9), needs_mask=True), decode(1, 10, 9)], "needs a mask, was a Step"),
        ([Mask(0, ints(), ints())], "received a Mask"),
        ([prefill(0, range(600))], "does not fit 8 x 512"),
        ([Step(0, ints([0]), ints([0]), ints([1]), ints([1]))], "outside its request"),
        ([Step(0, ints([0]), ints([1]), ints([1]), ints([1]), [], [Write(0, 0, 0, 2)], ints([1, 2, 3]))], "holds 3 slots for 2"),
    ],
)
def test_a_message_out_of_order_ends_the_worker_with_a_sentence(messages, words, model_dir, start):
    worker = start(model_dir)
    worker.recv(Ready)
    for message in messages:
        worker.steps.send(message)
    worker.join()
    assert isinstance(worker.error, ProtocolError) and words in str(worker.error)


def test_a_model_that_cannot_be_loaded(tmp_path, start):
    worker = start(tmp_path / "gone")
    worker.join()
    assert isinstance(worker.error, ModelError) and "does not exist" in str(worker.error)


# --- the null worker


def test_null_worker_answers_deterministic_tokens(start):
    worker = start("null:0:50")
    ready = worker.recv(Ready)
    assert ready.caps["vocab_size"] == 50
    worker.steps.send(prefill(0, range(10)))
    worker.steps.send(decode(1, 11, 10))
    assert [int(worker.recv(Result).ids[0]) for _ in range(2)] == [null.token_at(10, 0, 50), null.token_at(11, 0, 50)]


def test_null_worker_sleeps(start):
    worker = start("null:30")
    worker.recv(Ready)
    worker.steps.send(prefill(0, range(10)))
    result = worker.recv(Result)
    assert 0.03 <= result.t_end - result.t_start < 5


@pytest.mark.parametrize("path", ["null:", "null:x", "null:-1", "null:5:0", "null:nan", "null:1:2:3"])
def test_malformed_null_paths(path):
    with pytest.raises(ModelError, match="null:<milliseconds"):
        null.parse(path)


def test_null_worker_needs_no_torch():
    import subprocess
    import sys

    code = "import sys, gristmill.worker.process, gristmill.worker.null; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
