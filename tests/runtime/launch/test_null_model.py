"""`null:<ms>` as MODEL: every process of the engine without a model, and without torch."""

import psutil
import pytest

from gristmill.catalogue import resolve_model
from gristmill.engine import Engine
from gristmill.errors import ModelError
from gristmill.worker.null import token_at
from tests.support.served import served


def test_a_null_model_resolves_to_itself():
    assert resolve_model("null:5:300").path == "null:5:300"


def test_a_malformed_null_model_is_one_sentence():
    with pytest.raises(ModelError, match="null:<milliseconds per step>"):
        Engine("null:fast")


def test_an_engine_with_a_null_model_answers_with_its_tokens():
    with Engine("null:0", pool_tokens=1000, max_running=4) as engine:
        outputs = engine.generate([[10, 11, 12], [20] * 7], max_tokens=5, seed=0)
        vocab = engine.model_config.vocab_size
    assert [output.ids for output in outputs] == [[token_at(n + i, 0, vocab) for i in range(5)] for n in (3, 7)]


@pytest.mark.e2e
def test_a_null_model_is_served_without_torch_in_any_process():
    with served("null:1", "--pool-tokens=1000") as server:
        body = {"model": "null:1", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "seed": 1}
        status, answer = server.request("POST", "/v1/chat/completions", body)
        assert status == 200
        assert answer["usage"]["completion_tokens"] == 8
        assert answer["choices"][0]["finish_reason"] == "length"
        processes = [psutil.Process(server.process.pid), *server.children().values()]
        assert len(processes) == 4
        assert not [process for process in processes if any("libtorch" in part.path for part in process.memory_maps())]
