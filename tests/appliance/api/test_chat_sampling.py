"""Sampling settings as clients send them: the OpenAI SDK against the real engine."""

import math
from typing import Any

from openai import OpenAI

from tests.appliance.api.serving import MODEL, Running, is_idle, wait_until
from tests.appliance.api.test_chat import HELLO, answer, streamed

HOT = {"temperature": 1.5, "max_tokens": 12, "extra_body": {"ignore_eos": True}}


def ask(client: OpenAI, **options: Any) -> Any:
    return client.chat.completions.create(model=MODEL, messages=HELLO, **(HOT | options))


def test_several_choices(client: OpenAI, server: Running) -> None:
    """Their prompt is counted once, their tokens together; choice i has seed + i."""
    reply = ask(client, n=3, seed=5)
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    texts = [choice.message.content for choice in reply.choices]
    assert texts == [ask(client, seed=5 + index).choices[0].message.content for index in range(3)]
    assert len(set(texts)) == 3
    one = ask(client, seed=5).usage
    assert reply.usage.prompt_tokens == one.prompt_tokens
    assert reply.usage.completion_tokens == 36
    assert reply.usage.total_tokens == one.prompt_tokens + 36
    wait_until(lambda: is_idle(server.engine), "an idle engine")


def test_several_choices_streamed(client: OpenAI) -> None:
    whole = ask(client, n=2, seed=5)
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = streamed(client, HELLO, n=2, seed=5, stream_options=options, **HOT)
    for index in range(2):
        mine = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert mine[0].delta.role == "assistant"
        assert "".join(each.delta.content or "" for each in mine) == whole.choices[index].message.content
        assert [each.finish_reason for each in mine].count("length") == 1
    assert last.choices == []
    assert last.usage == whole.usage or last.usage.completion_tokens == 24
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)


def test_logprobs(client: OpenAI) -> None:
    choice = ask(client, logprobs=True, top_logprobs=3, seed=2).choices[0]
    content = choice.logprobs.content
    assert len(content) == 12
    data = bytes(byte for token in content for byte in token.bytes)
    assert data.decode(errors="replace") == choice.message.content
    for token in content:
        assert bytes(token.bytes).decode(errors="replace") == token.token
        assert token.logprob <= 0
        assert len(token.top_logprobs) == 3
        assert math.fsum(math.exp(each.logprob) for each in token.top_logprobs) <= 1 + 1e-6
    assert ask(client, seed=2).choices[0].logprobs is None
    assert ask(client, logprobs=True, seed=2).choices[0].logprobs.content[0].top_logprobs == []


def test_logprobs_streamed(client: OpenAI) -> None:
    whole = ask(client, logprobs=True, top_logprobs=1, seed=2).choices[0].logprobs.content
    chunks = streamed(client, HELLO, logprobs=True, top_logprobs=1, seed=2, **HOT)
    parts = [chunk.choices[0].logprobs.content for chunk in chunks if chunk.choices[0].logprobs]
    tokens = [token for part in parts for token in part]
    assert [token.bytes for token in tokens] == [token.bytes for token in whole]


def test_bias_and_penalties(client: OpenAI) -> None:
    token = 66
    biased = answer(client, HELLO, logit_bias={str(token): 100}, extra_body={"ignore_eos": True})
    assert len(set(biased)) == 1
    greedy = answer(client, HELLO, max_tokens=24)
    for name in ("frequency_penalty", "presence_penalty"):
        assert answer(client, HELLO, max_tokens=24, **{name: 2.0}) != greedy
    for more in ({"repetition_penalty": 3.0}, {"min_tokens": 24}):
        answer(client, HELLO, max_tokens=24, extra_body=more)
    assert answer(client, HELLO, extra_body={"min_p": 1.0}, temperature=2.0) == answer(client, HELLO)


def test_end_tokens(client: OpenAI) -> None:
    token = 66
    settings = {"logit_bias": {str(token): 100}}
    choice = ask(client, **settings, extra_body={"stop_token_ids": [token]}).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("", "stop")
    more = {"stop_token_ids": [token], "min_tokens": 4, "ignore_eos": True}
    reply = ask(client, **settings, extra_body=more)
    assert (reply.choices[0].finish_reason, reply.usage.completion_tokens) == ("stop", 5)
