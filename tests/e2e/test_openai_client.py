"""The official openai client against the real server on model M: chat, completions, streams, logprobs, n, errors."""

from __future__ import annotations

import math

import openai
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

MESSAGES = [{"role": "user", "content": "Name two rivers."}]


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


@pytest.fixture(scope="module")
def name(client):
    return client.models.list().data[0].id


def test_chat(client, name):
    answer = client.chat.completions.create(model=name, messages=MESSAGES, max_tokens=12, temperature=0, extra_body={"ignore_eos": True})
    choice = answer.choices[0]
    assert choice.message.role == "assistant" and choice.message.content and choice.finish_reason == "length"
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12
    assert answer.model == name and answer.object == "chat.completion"


def test_a_chat_stream_joins_to_the_plain_answer(client, name):
    request = {"model": name, "messages": MESSAGES, "max_tokens": 24, "temperature": 0}
    plain = client.chat.completions.create(**request)
    chunks = list(client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == plain.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == [plain.choices[0].finish_reason]
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == plain.usage.completion_tokens
    assert all(c.usage is None for c in chunks[:-1])


def test_two_choices_of_a_seed_differ_and_repeat(client, name):
    request = {"model": name, "messages": MESSAGES, "max_tokens": 16, "temperature": 1, "seed": 7, "n": 2}
    first, second = (client.chat.completions.create(**request) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1] and texts[0] != texts[1]
    assert texts == [choice.message.content for choice in second.choices]


def test_chat_logprobs(client, name):
    answer = client.chat.completions.create(model=name, messages=MESSAGES, max_tokens=6, temperature=0, logprobs=True, top_logprobs=3)
    entries = answer.choices[0].logprobs.content
    assert len(entries) == answer.usage.completion_tokens
    for entry in entries:
        assert len(entry.top_logprobs) == 3 and entry.logprob == entry.top_logprobs[0].logprob <= 0
        assert sum(math.exp(top.logprob) for top in entry.top_logprobs) <= 1 + 1e-5
        assert bytes(entry.bytes).decode("utf-8", "replace") == entry.token


def test_completions_with_echo_logprobs_and_several_prompts(client, name):
    answer = client.completions.create(
        model=name, prompt=["seven small stones", "Name two rivers."], max_tokens=4, n=2, echo=True, logprobs=1, seed=3
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    for choice, prompt in zip(answer.choices, ["seven small stones"] * 2 + ["Name two rivers."] * 2):
        assert choice.text.startswith(prompt)
        assert choice.logprobs.token_logprobs[0] is None and all(value <= 0 for value in choice.logprobs.token_logprobs[1:])
        assert "".join(choice.logprobs.tokens).startswith(prompt)


def test_a_completion_stream(client, name):
    request = {"model": name, "prompt": "Once there was a lamp", "max_tokens": 20, "temperature": 0}
    plain = client.completions.create(**request).choices[0].text
    assert "".join(chunk.choices[0].text for chunk in client.completions.create(**request, stream=True)) == plain


def test_errors_are_the_clients_exception_types(client, name):
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="no-such-model", messages=MESSAGES)
    assert missing.value.body["param"] == "model"
    for bad in ({"temperature": -0.5}, {"n": 0}, {"max_tokens": -3}, {"logit_bias": {"700000": 3}}, {"stop": 5}, {"top_p": 1.7}):
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model=name, messages=MESSAGES, **bad)
        assert refused.value.body["param"] == next(iter(bad)), bad
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=name, messages=MESSAGES, stream=True, temperature=-1)


def test_a_stream_that_is_closed_early_leaves_nothing_running(client, name, server):
    stream = client.completions.create(model=name, prompt="a", max_tokens=400, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    server.wait_idle(2.0)
