"""The client that OpenAI publishes, against `leeway serve`: URL and key are the arguments.

The model thinks "A", calls add with 1 and 2, and ends, whatever it is asked.
"""
import json
import math
import sys

import openai

client = openai.OpenAI(base_url=sys.argv[1], api_key=sys.argv[2], max_retries=0, timeout=60)
TOOLS = [{"type": "function", "function": {
    "name": "add", "description": "Adds two numbers",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"},
                                                    "b": {"type": "integer"}}}}}]
MESSAGES = [{"role": "system", "content": "You calculate."}, {"role": "user", "content": "1 + 2?"}]


def check_call(call):
    assert call.type == "function" and call.id, call
    assert call.function.name == "add", call
    assert json.loads(call.function.arguments) == {"a": 1, "b": 2}, call


def models():
    listed = client.models.list().data
    assert [model.id for model in listed] == ["chain"], listed
    assert listed[0].owned_by == "leeway"


def completes():
    answer = client.completions.create(model="chain", prompt="A", max_tokens=3, temperature=0)
    assert answer.object == "text_completion"
    assert answer.usage.prompt_tokens == 1 and answer.usage.completion_tokens == 3, answer
    assert answer.choices[0].text == "</think><tool_call>" + \
        '{"name": "add", "arguments": {"a": 1, "b": 2}}', answer
    assert answer.choices[0].finish_reason == "length"
    several = client.completions.create(model="chain", prompt=["A", "x"], n=2, max_tokens=4, seed=1)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert several.choices[3].text == "" and several.choices[3].finish_reason == "stop", several
    stopped = client.completions.create(model="chain", prompt="A", max_tokens=9, stop=["name"])
    assert stopped.choices[0].text == '</think><tool_call>{"', stopped


def streams():
    stream = client.completions.create(model="chain", prompt="A", max_tokens=9, stream=True,
                                       stream_options={"include_usage": True})
    text, usage, reasons = "", None, []
    for event in stream:
        usage = event.usage or usage
        for choice in event.choices:
            text += choice.text
            reasons.append(choice.finish_reason)
    assert text.startswith("</think><tool_call>{") and text.endswith("</tool_call>"), text
    assert reasons[-1] == "stop" and not any(reasons[:-1]), reasons
    assert usage.completion_tokens == 5, usage  # the end token is one of them


def calls_tools():
    answer = client.chat.completions.create(model="chain", messages=MESSAGES, tools=TOOLS)
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls", answer
    assert choice.message.role == "assistant"
    assert choice.message.reasoning_content == "A", answer
    check_call(choice.message.tool_calls[0])
    # And on with the tool's answer, as an agent does it.
    more = MESSAGES + [choice.message.model_dump(exclude_none=True),
                       {"role": "tool", "tool_call_id": choice.message.tool_calls[0].id,
                        "content": "3"}]
    again = client.chat.completions.create(model="chain", messages=more, tools=TOOLS, max_tokens=50)
    assert again.usage.prompt_tokens > answer.usage.prompt_tokens

    stream = client.chat.completions.create(model="chain", messages=MESSAGES, tools=TOOLS,
                                            stream=True)
    calls, reasoning, finish = [], "", None
    for event in stream:
        delta = event.choices[0].delta
        reasoning += getattr(delta, "reasoning_content", None) or ""
        calls += delta.tool_calls or []
        finish = event.choices[0].finish_reason or finish
    assert finish == "tool_calls" and reasoning == "A", (finish, reasoning)
    assert len(calls) == 1 and calls[0].index == 0
    check_call(calls[0])

    with client.chat.completions.stream(model="chain", messages=MESSAGES, tools=TOOLS) as helper:
        final = helper.get_final_completion()
    check_call(final.choices[0].message.tool_calls[0])


def reads_log_probabilities():
    answer = client.chat.completions.create(model="chain", messages=MESSAGES, logprobs=True,
                                            max_tokens=4)
    content = answer.choices[0].logprobs.content
    assert [entry.token for entry in content] == ["<think>", "A", "</think>", "<tool_call>"], content
    assert all(-1e-3 < entry.logprob <= 0 for entry in content), content
    assert bytes(content[1].bytes) == b"A"
    chosen = client.chat.completions.create(model="chain", messages=MESSAGES, logprobs=True,
                                            top_logprobs=3, max_tokens=4)
    for entry, alone in zip(chosen.choices[0].logprobs.content, content, strict=True):
        assert (entry.token, entry.logprob) == (alone.token, alone.logprob), (entry, alone)
        values = [top.logprob for top in entry.top_logprobs]
        assert len(values) == 3 and values == sorted(values, reverse=True), entry
        assert entry.top_logprobs[0].token == entry.token, entry  # all but certain
        assert math.fsum(math.exp(value) for value in values) <= 1.0 + 1e-6, entry
    likely = client.completions.create(model="chain", prompt="A", max_tokens=2, logprobs=2)
    for token, value, top in zip(likely.choices[0].logprobs.tokens,
                                 likely.choices[0].logprobs.token_logprobs,
                                 likely.choices[0].logprobs.top_logprobs, strict=True):
        assert top[token] == value and max(top.values()) == value, (token, value, top)
    scored = client.completions.create(model="chain", prompt="A?", max_tokens=0, echo=True,
                                       logprobs=0)
    values = scored.choices[0].logprobs.token_logprobs
    assert values[0] is None and math.isfinite(values[1]) and values[1] < -5, values


def errors_have_their_classes():
    for change, kind in [({"model": "other"}, openai.NotFoundError),
                         ({"max_tokens": 100000}, openai.BadRequestError),
                         ({"temperature": -1}, openai.BadRequestError)]:
        try:
            client.completions.create(**{"model": "chain", "prompt": "A", **change})
        except kind as error:
            assert error.body["message"], error
        else:
            raise AssertionError(change)
    try:
        openai.OpenAI(base_url=sys.argv[1], api_key="wrong", max_retries=0).models.list()
    except openai.AuthenticationError:
        return
    raise AssertionError("the wrong key is taken")


for test in (models, completes, streams, calls_tools, reads_log_probabilities,
             errors_have_their_classes):
    test()
    print(f"{test.__name__}: passed")
