"""The detokenizer's state machine: texts, ids, logprobs and usage per choice, whatever arrives together."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import zmq

from gristmill.detokenizer.process import Detokenizer, run
from gristmill.errors import ProtocolError
from gristmill.launch_config import LaunchConfig
from gristmill.messages import HEARTBEAT, Close, DetokSpec, LogprobBlock, Message, Open, Out, Reply, Stats, Text, floats, ints
from gristmill.options import Options
from gristmill.tokenizer.tokenizer import Tokenizer, load_tokenizer
from gristmill.transport import Endpoints, Pull, Push

END = 2  # <|im_end|> of the null model's tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer("null:0")


class Harness:
    def __init__(self, tokenizer: Tokenizer, spec: DetokSpec | None = None) -> None:
        self.tokenizer = tokenizer
        self.sent: list[Message] = []
        self.detokenizer = Detokenizer(tokenizer, self.sent.append)
        self.say(Out(open=[Open(0, "r", spec or DetokSpec())]))

    def say(self, *messages: Message) -> None:
        for message in messages:
            self.detokenizer.handle(message)
        self.detokenizer.flush()

    def tokens(self, ids: list[int], close: str = "") -> None:
        closes = [Close(0, close, prompt_tokens=5, cached_tokens=3)] if close else []
        self.say(Out(idx=ints([0] * len(ids)), tok=ints(ids), close=closes))

    def texts(self) -> list[Text]:
        return [message for message in self.sent if isinstance(message, Text)]

    def joined(self) -> Text:
        texts = self.texts()
        last = texts[-1]
        last.text = "".join(t.text for t in texts)
        last.ids = ints(list(itertools.chain.from_iterable(t.ids.tolist() for t in texts)))
        last.logprobs = [entry for t in texts for entry in t.logprobs]
        return last


def test_text_and_usage_of_a_plain_run(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("é🙂字x")
    harness = Harness(tokenizer)
    for token in ids:
        harness.tokens([token])
    harness.say(Out(close=[Close(0, "length", prompt_tokens=5, cached_tokens=3)]))
    texts = harness.texts()
    assert [t.text for t in texts] == ["é", "🙂", "字", "x", ""]
    assert [len(t.ids) for t in texts] == [2, 4, 3, 1, 0]  # ids come with the character that they make
    last = harness.joined()
    assert last.text == "é🙂字x" and last.ids.tolist() == ids and last.finish == "length"
    assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.cached_tokens) == (5, len(ids), 3)
    assert harness.detokenizer.n_open == 0


@pytest.mark.parametrize("n", range(1, 10))
def test_an_incomplete_tail_becomes_one_replacement_character(tokenizer: Tokenizer, n: int) -> None:
    raw = "é🙂字".encode()[:n]
    harness = Harness(tokenizer)
    for token in tokenizer.encode("é🙂字")[:n]:
        harness.tokens([token])
    harness.say(Out(close=[Close(0, "length")]))
    assert harness.joined().text == raw.decode("utf-8", "replace")
    assert all("\N{REPLACEMENT CHARACTER}" not in t.text for t in harness.texts()[:-1])


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_ends_the_choice_and_what_follows_is_ignored(tokenizer: Tokenizer, include: bool, together: bool) -> None:
    harness = Harness(tokenizer, DetokSpec(stop=("lo w",), include_stop=include))
    ids = tokenizer.encode("hello world")
    for part in [ids] if together else [[token] for token in ids]:
        harness.tokens(part)
    last = harness.joined()
    assert last.text == ("hello w" if include else "hel")
    assert last.finish == "stop" and last.stop_reason == "lo w"
    assert last.ids.tolist() == ids[:7] and last.usage.completion_tokens == 7
    count = len(harness.sent)
    harness.say(Out(close=[Close(0, "stop", prompt_tokens=5)]))  # the answer to our abort only frees it
    assert len(harness.sent) == count and harness.detokenizer.n_open == 0


def test_usage_at_a_stop_string_knows_what_was_cached(tokenizer: Tokenizer) -> None:
    harness = Harness(tokenizer, DetokSpec(stop=("lo",), n_prompt=5))
    harness.say(Out(cached=ints([0, 3])))
    harness.tokens(tokenizer.encode("hello"))
    usage = harness.joined().usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (5, 5, 3)


def test_a_stop_string_completed_by_the_last_token_ends_with_stop(tokenizer: Tokenizer) -> None:
    harness = Harness(tokenizer, DetokSpec(stop=("lo",)))
    harness.tokens(tokenizer.encode("hello"), close="length")
    assert harness.joined().text == "hel" and harness.joined().finish == "stop"


def test_a_held_stop_prefix_is_shown_when_the_text_ends(tokenizer: Tokenizer) -> None:
    harness = Harness(tokenizer, DetokSpec(stop=("lox",)))
    harness.tokens(tokenizer.encode("hello"))
    assert harness.texts()[-1].text == "hel"
    harness.say(Out(close=[Close(0, "length")]))
    assert harness.joined().text == "hello" and harness.joined().finish == "length"


@pytest.mark.parametrize(
    ("spec", "text", "reason"),
    [
        (DetokSpec(), "a", None),
        (DetokSpec(skip_special=False), "a<|im_end|>", None),
        (DetokSpec(stop_token_ids=(END,)), "a", END),
        (DetokSpec(stop_token_ids=(END,), include_stop=True), "a<|im_end|>", END),
    ],
)
def test_the_token_that_ends_a_choice_is_counted_and_hidden(tokenizer: Tokenizer, spec: DetokSpec, text: str, reason: int | None) -> None:
    harness = Harness(tokenizer, spec)
    harness.tokens([*tokenizer.encode("a"), END], close="stop")
    last = harness.joined()
    assert (last.text, last.stop_reason, last.finish, last.usage.completion_tokens) == (text, reason, "stop", 2)


def test_an_ordinary_token_that_is_an_eos_or_a_stop_token_is_hidden_too(tokenizer: Tokenizer) -> None:
    b = tokenizer.encode("b")[0]
    for spec in (DetokSpec(), DetokSpec(stop_token_ids=(b,))):
        harness = Harness(tokenizer, spec)
        harness.tokens([b, *tokenizer.encode("a"), b], close="stop")
        assert harness.joined().text == "ba"


def test_control_tokens_inside_the_text_are_hidden_unless_asked_for(tokenizer: Tokenizer) -> None:
    for skip, text in ((True, "ab"), (False, "a<|im_start|>b")):
        harness = Harness(tokenizer, DetokSpec(skip_special=skip))
        harness.tokens([*tokenizer.encode("a"), 1, *tokenizer.encode("b")], close="length")
        assert harness.joined().text == text


def test_logprobs_go_with_their_tokens_and_stop_with_them(tokenizer: Tokenizer) -> None:
    harness = Harness(tokenizer, DetokSpec(stop=("lo",), n_prompt=3))
    ids = tokenizer.encode("hello w")
    prompt_block = LogprobBlock(0, 1, ints([70, 71]), floats([-1, -2]), 1, ints([80, 81]), floats([-0.5, -0.25]))
    blocks = [LogprobBlock(0, 3 + i, ints([token]), floats([-i])) for i, token in enumerate(ids)]
    harness.say(Out(logprobs=[prompt_block]))
    harness.say(Out(idx=ints([0] * len(ids)), tok=ints(ids), logprobs=blocks))
    last = harness.joined()
    assert [entry.id for entry in last.logprobs] == ids[:5]
    assert [entry.logprob for entry in last.logprobs] == [0, -1, -2, -3, -4]
    prompt = [entry for t in harness.texts() for entry in t.prompt_logprobs]
    assert [(e.id, e.logprob, [t.id for t in e.top]) for e in prompt] == [(70, -1, [80]), (71, -2, [81])]


def test_logprob_entries_hold_the_raw_bytes(tokenizer: Tokenizer) -> None:
    harness = Harness(tokenizer)
    token = tokenizer.encode("é")[0]
    harness.say(
        Out(idx=ints([0]), tok=ints([token]), logprobs=[LogprobBlock(0, 0, ints([token]), floats([-1]))], close=[Close(0, "length")])
    )
    (entry,) = harness.joined().logprobs
    assert entry.raw == b"\xc3" and entry.text == "\N{REPLACEMENT CHARACTER}"


def test_a_refusal_is_an_open_and_a_close_and_its_index_can_be_used_again_at_once(tokenizer: Tokenizer) -> None:
    harness = Harness(tokenizer)
    refused = Out(open=[Open(1, "x")], close=[Close(1, "error", error="too long", status=400, code="c")])
    harness.detokenizer.handle(refused)
    harness.detokenizer.handle(Out(open=[Open(1, "y")], idx=ints([1]), tok=ints(tokenizer.encode("a"))))
    harness.detokenizer.flush()
    first, second = harness.texts()
    assert (first.rid, first.finish, first.error, first.status, first.code) == ("x", "error", "too long", 400, "c")
    assert (second.rid, second.text) == ("y", "a")


def test_an_abort_gives_what_there_was(tokenizer: Tokenizer) -> None:
    harness = Harness(tokenizer, DetokSpec(stop=("abc",)))
    harness.tokens(tokenizer.encode("xab"))
    harness.say(Out(close=[Close(0, "abort")]))
    assert harness.joined().text == "xab" and harness.joined().finish == "abort"


def test_tokens_that_arrive_together_leave_together(tokenizer: Tokenizer) -> None:
    harness = Harness(tokenizer)
    outs = [Out(idx=ints([0]), tok=ints([token])) for token in tokenizer.encode("hello")]
    harness.say(*outs)
    assert [t.text for t in harness.texts()] == ["hello"]


def test_replies_come_after_the_text_before_them(tokenizer: Tokenizer) -> None:
    harness = Harness(tokenizer)
    harness.say(Out(idx=ints([0]), tok=ints(tokenizer.encode("a"))), Reply(1), Stats(ready=True))
    assert [type(m) for m in harness.sent] == [Text, Reply, Stats]


def test_an_index_that_is_not_open_is_a_fault_of_the_protocol(tokenizer: Tokenizer) -> None:
    harness = Harness(tokenizer)
    with pytest.raises(ProtocolError, match="choice 7 is not open"):
        harness.detokenizer.handle(Out(idx=ints([7]), tok=ints([3])))
    with pytest.raises(ProtocolError, match="opened twice"):
        harness.detokenizer.handle(Out(open=[Open(0, "again")]))


def test_an_id_without_a_token_adds_no_text(tokenizer: Tokenizer) -> None:
    harness = Harness(tokenizer)
    harness.tokens([tokenizer.vocab_size + 5], close="length")  # a padding row of the embedding
    assert harness.joined().text == "" and harness.joined().usage.completion_tokens == 1


def test_the_process_runs_until_the_shutdown_reply_has_passed() -> None:
    context = zmq.Context()
    config = LaunchConfig(Options(model="null:0"), "null:0", (), "inproc://detok-test")
    ends = Endpoints(config.endpoint_prefix)
    inbox, stop = Pull(context, ends.c_to_a), threading.Event()
    outbox = Push(context, ends.b_to_c, "scheduler")
    thread = threading.Thread(target=run, args=(config, context, stop))
    thread.start()
    try:
        outbox.send(Out(open=[Open(0, "r")], idx=ints([0]), tok=ints([3 + ord("a") - 33]), close=[Close(0, "length")]))
        outbox.send(Reply(9, result={"shutdown": True}))
        beat, text, reply = inbox.recv(10_000), inbox.recv(10_000), inbox.recv(10_000)
        assert isinstance(beat, Reply) and beat.seq == HEARTBEAT
        assert isinstance(text, Text) and text.text == "a" and text.finish == "length"
        assert isinstance(reply, Reply) and reply.seq == 9
        thread.join(10)
        assert not thread.is_alive()
    finally:
        stop.set()
        thread.join(10)
        inbox.close()
        outbox.close()
        context.destroy(linger=0)


def test_processes_a_and_c_import_neither_torch_nor_transformers(tmp_path: Path) -> None:
    code = (
        "import sys, gristmill.detokenizer.process, gristmill.serving, gristmill.server.app, gristmill.tokenizer.manager\n"
        "from gristmill.tokenizer.tokenizer import load_tokenizer; load_tokenizer('null:0').apply_chat_template([])\n"
        "bad = {'torch', 'transformers'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=60, cwd=tmp_path, env={"PYTHONPATH": ":".join(p for p in sys.path if p)}
    )
