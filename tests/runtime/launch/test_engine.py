"""gristmill.Engine with model M: what it returns, how it fails, and that planning really overlaps the forward pass."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gristmill import Engine
from gristmill.errors import GristmillError, ModelError, OptionError
from tests.support.idle import idle_stats
from tests.support.tiny_model import make_tiny_model
from tests.support.traces import process_names, spans

LAMP = "Once there was a lamp"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("engine") / "M")


def start(model: Path, **options: object) -> Engine:
    return Engine(str(model), **{"dtype": "float32", "pool_tokens": 2048, "threads": 1, **options})


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    with start(model) as running:
        yield running


def test_a_text_ids_and_a_list_of_either_are_prompts(engine: Engine) -> None:
    ids = engine.tokenizer.encode(LAMP)
    text = engine.generate(LAMP, max_tokens=8, temperature=0)
    assert len(text) == 1 and len(text[0].ids) == 8 and text[0].finish_reason == "length"
    assert text[0].usage.prompt_tokens == len(ids) and text[0].usage.completion_tokens == 8
    for prompts in (ids, [ids], [LAMP], (LAMP,)):
        assert [output.ids for output in engine.generate(prompts, max_tokens=8, temperature=0)] == [text[0].ids]
    several = engine.generate([LAMP, ids, "Name"], max_tokens=8, temperature=0)
    assert [output.prompt_index for output in several] == [0, 1, 2] and several[1].ids == several[0].ids == text[0].ids
    assert engine.generate([], max_tokens=8) == []


def test_choices_differ_and_a_seed_repeats_them(engine: Engine) -> None:
    first, again = (engine.generate([LAMP, "Name"], n=3, seed=7, max_tokens=8) for _ in range(2))
    assert [(output.prompt_index, output.index) for output in first] == [(p, i) for p in (0, 1) for i in range(3)]
    assert [output.ids for output in first] == [output.ids for output in again]
    assert len({tuple(output.ids) for output in first[:3]}) == 3


def test_a_stream_joins_to_the_whole(engine: Engine) -> None:
    whole = engine.generate(LAMP, max_tokens=24, temperature=0)[0]
    pieces = [delta for _, delta in engine.stream(LAMP, max_tokens=24, temperature=0)]
    assert "".join(piece.text for piece in pieces) == whole.text and len(pieces) > 3
    assert [token for piece in pieces for token in piece.ids.tolist()] == whole.ids
    assert [piece.finish for piece in pieces if piece.finish] == ["length"] and pieces[-1].usage is not None


def test_leaving_a_stream_ends_its_request(engine: Engine) -> None:
    before = engine.stats.aborts
    for _ in engine.stream(LAMP, max_tokens=400, ignore_eos=True):
        break
    while engine.stats.aborts == before:
        pass
    assert idle_stats(engine).pool_locked == 0


def test_stop_logprobs_and_prompt_scoring_come_through(engine: Engine) -> None:
    whole = engine.generate(LAMP, max_tokens=16, temperature=0)[0].text
    cut = engine.generate(LAMP, max_tokens=16, temperature=0, stop=whole[4:6])[0]
    assert cut.text == whole[: whole.index(whole[4:6])] and (cut.finish_reason, cut.stop_reason) == ("stop", whole[4:6])
    scored = engine.generate(LAMP, max_tokens=0, prompt_logprobs=True)[0]
    assert scored.ids == [] and len(scored.prompt_logprobs) >= len(engine.tokenizer.encode(LAMP)) - 1
    best = engine.generate(LAMP, max_tokens=4, temperature=0, logprobs=2)[0]
    assert [entry.id for entry in best.logprobs] == best.ids == [entry.top[0].id for entry in best.logprobs]


def test_a_chat_uses_the_template(engine: Engine) -> None:
    messages = [{"role": "user", "content": "Name two rivers."}]
    answer = engine.chat(messages, max_tokens=6, temperature=0)
    rendered = engine.tokenizer.apply_chat_template(messages)
    assert answer.ids == engine.generate(rendered, max_tokens=6, temperature=0)[0].ids
    assert "".join(delta.text for _, delta in engine.stream(messages, max_tokens=6, temperature=0)) == answer.text


def test_a_second_prompt_uses_the_cache_until_it_is_flushed(engine: Engine) -> None:
    prompt = LAMP * 4
    engine.generate(prompt, max_tokens=1)
    assert engine.generate(prompt, max_tokens=1)[0].usage.cached_tokens > 0
    engine.flush()
    assert engine.stats.pool_free == engine.stats.pool_total
    assert engine.generate(prompt, max_tokens=1)[0].usage.cached_tokens == 0


def test_more_prompts_than_the_queue_takes_are_all_answered(model: Path) -> None:
    with start(model, max_queued=3, max_running=2) as small:
        outputs = small.generate([f"prompt {number}" for number in range(20)], n=2, max_tokens=3, temperature=0)
        assert len(outputs) == 40 and all(len(output.ids) <= 3 for output in outputs)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"prompts": [[1, 99999]]}, "99999"),
        ({"prompts": [[-1]]}, "-1"),
        ({"prompts": ""}, "empty"),
        ({"prompts": LAMP, "temperature": -1}, "temperature"),
        ({"prompts": LAMP, "n": 0}, "n must be"),
        ({"prompts": LAMP, "max_tokens": 10**6}, "512"),
        ({"prompts": LAMP, "stop": [""]}, "stop"),
    ],
)
def test_an_argument_that_cannot_be_used_is_named(arguments: dict, words: str, engine: Engine) -> None:
    with pytest.raises(GristmillError, match=words):
        engine.generate(**arguments)
    assert engine.generate(LAMP, max_tokens=1)  # alive


def test_an_option_that_cannot_be_used_is_named(model: Path) -> None:
    with pytest.raises(OptionError, match="page_size"):
        Engine(str(model), pagesize=3)
    with pytest.raises(OptionError, match="--context-length 513 is more than"):
        Engine(str(model), context_length=513)


def test_a_model_that_cannot_be_loaded_raises_and_leaves_no_thread(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "M")
    next(iter(sorted(folder.glob("*.safetensors")))).unlink()
    before = threading.active_count()
    with pytest.raises(ModelError, match="safetensors"):
        start(folder)
    assert threading.active_count() == before


@pytest.mark.parametrize("part", ["worker", "scheduler", "detokenizer"])
def test_a_failing_thread_raises_in_every_caller(part: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gristmill.detokenizer.process import Detokenizer
    from gristmill.scheduler.scheduler import Scheduler
    from gristmill.worker.runner import ModelRunner

    owner, name = {"worker": (ModelRunner, "forward"), "scheduler": (Scheduler, "apply"), "detokenizer": (Detokenizer, "_out")}[part]
    original, calls = getattr(owner, name), []

    def breaks(*args: object, **kwargs: object) -> object:
        calls.append(1)
        if len(calls) > 5:
            raise RuntimeError("planted fault")
        return original(*args, **kwargs)

    with start(model) as engine:
        monkeypatch.setattr(owner, name, breaks)
        raised: list[BaseException] = []

        def call() -> None:
            try:
                engine.generate(LAMP, max_tokens=100, ignore_eos=True)
            except GristmillError as error:
                raised.append(error)

        callers = [threading.Thread(target=call) for _ in range(2)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join(30)
            assert not caller.is_alive(), "a caller hangs"
        who = "model worker" if part == "worker" else part
        assert [str(error).split(" (")[0] for error in raised] == [f"the {who} failed: RuntimeError: planted fault"] * 2
        with pytest.raises(GristmillError, match="planted fault"):
            list(engine.stream(LAMP))


def test_a_closed_engine_says_so(model: Path) -> None:
    engine = start(model)
    engine.close()
    engine.close()
    with pytest.raises(GristmillError, match="closed"):
        engine.generate(LAMP)
    with pytest.raises(GristmillError, match="closed"):
        engine.stream(LAMP)


@pytest.mark.parametrize(
    ("prompt", "arguments", "message"),
    [
        (b"abc", {}, "not bytes"),
        ({"a": 1}, {}, "not dict"),
        (None, {}, "not NoneType"),
        (5, {}, "not int"),
        ([1.5], {}, "token id 1.5"),
        ([True], {}, "token id True"),
        ("\ud800", {}, "lone surrogate"),
        ("a", {"stop": 5}, "stop"),
        ("a", {"stop": ["a", 5]}, "stop holds"),
        ("a", {"n": "3"}, "n must be an integer"),
        ("a", {"maxtokens": 3}, "'maxtokens' is not a sampling parameter"),
    ],
    ids=repr,
)
def test_an_argument_of_a_wrong_kind_is_one_sentence(engine: Engine, prompt: object, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(GristmillError, match=message):
        engine.generate(prompt, **arguments)  # type: ignore[arg-type]


def test_a_script_that_ends_in_the_middle_of_a_stream_ends_at_once(model: Path) -> None:
    script = (
        "from gristmill import Engine\n"
        f"engine = Engine({str(model)!r}, dtype='float32', pool_tokens=2048, threads=1)\n"
        "next(engine.stream('a', max_tokens=400, ignore_eos=True))\n"
        "import time; print(time.monotonic())\n"
    )
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 and not done.stderr, done.stderr
        assert time.monotonic() - float(done.stdout) < 8  # joining a thread that never ends takes 10


def test_the_trace_holds_all_parts_and_a_plan_follows_its_forward_without_overlap(model: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    with start(model, overlap=False, trace=str(trace)) as engine:
        engine.generate(LAMP, max_tokens=20, temperature=0, ignore_eos=True)
    names = {name.split(" (")[0] for name in process_names(trace)}
    assert names == {"server", "scheduler", "worker0", "detokenizer"}
    forward, plan = spans(trace, "forward"), spans(trace, "plan")
    steps = [step for step in forward if step + 1 in plan]
    assert len(steps) > 15 and all(plan[step + 1][0] >= forward[step][1] for step in steps)


def test_a_forked_child_is_told_that_the_engine_is_not_its_own() -> None:
    script = """
import os, sys
from gristmill import Engine
from gristmill.errors import GristmillError
engine = Engine("null:1:300", pool_tokens=512)
pid = os.fork()
if pid == 0:
    for call in (lambda: engine.generate("x"), lambda: engine.stream("x"), lambda: engine.stats, engine.flush):
        try:
            call()
        except GristmillError as error:
            assert "cannot be used in its forked child" in str(error) and str(os.getppid()) in str(error), error
        else:
            os._exit(3)
    engine.close()
    sys.exit(0)  # with the exit hooks of the parent
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert engine.generate("x", max_tokens=3, ignore_eos=True)[0].finish_reason == "length"
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0 and not done.stderr, done.stderr


def test_a_cache_salt_keeps_prefixes_apart(engine: Engine) -> None:
    prompt = list(range(40, 80))

    def cached(**arguments: object) -> int:
        return engine.generate(prompt, max_tokens=2, temperature=0, **arguments)[0].usage.cached_tokens

    assert [cached(cache_salt="a"), cached(cache_salt="a"), cached(cache_salt="b"), cached()] == [0, 39, 0, 0]
    with pytest.raises(GristmillError, match="cache_salt must be a text of at most 256 characters"):
        cached(cache_salt="s" * 257)
    with pytest.raises(GristmillError, match="priority must be an integer from -1000 to 1000"):
        cached(priority=2000)
