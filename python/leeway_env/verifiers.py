"""v0 environments of the package verifiers, by the name that its load_environment takes:

    python3 -m leeway_env.verifiers tool-test --arg num_train_examples=500

The environment runs its own rollout: turns, tools, stop conditions and rubric are its code. Its
model is an OpenAI client whose requests are answered here, by Context.sample, instead of by a
server. The names and weights of the rubric's functions become parts of the reward; functions of
weight 0 become metrics. Rubrics that score whole groups do so by score_group.

Where the environment has no data for evaluation, the last eighth of its training data is that.
"""
import argparse
import collections
import contextlib
import contextvars
import inspect
import json
import re
import sys

import leeway_env

# The episode that the running task belongs to, and the messages it has been given by their text.
_EPISODE = contextvars.ContextVar("episode")


def _text_of(message):
    calls = [(call["function"]["name"], call["function"]["arguments"])
             for call in message.get("tool_calls") or []]
    return json.dumps([message.get("content") or "", calls])


def _response(sampled):
    """What an OpenAI server would have said."""
    message, tokens = sampled.message, sampled.tokens or 0
    reason = "length" if sampled.truncated else \
        "tool_calls" if message.get("tool_calls") else "stop"
    usage = {"prompt_tokens": sampled.prompt_tokens or 0, "completion_tokens": tokens,
             "total_tokens": (sampled.prompt_tokens or 0) + tokens}
    if not message.get("content") and not message.get("tool_calls"):
        # A reply without content is a reply. The package takes it for a server's fault unless
        # its tokens are accounted for.
        usage["completion_tokens_details"] = {"reasoning_tokens": max(tokens, 1)}
    return {"id": "leeway", "object": "chat.completion", "created": 0, "model": "leeway",
            "choices": [{"index": 0, "finish_reason": reason, "logprobs": None,
                         "message": {"content": None, **message}}], "usage": usage}


async def complete(body):
    """Answers the body of a chat completion request: an HTTP status and an object."""
    ctx, given = _EPISODE.get()
    messages = []
    for message in body["messages"]:
        message = {key: value for key, value in message.items() if value is not None}
        message.setdefault("content", "")
        if message["role"] == "assistant":
            # As it was sampled, so that the context is recognised and continued.
            message = given.get(_text_of(message), message)
        messages.append(message)
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    try:
        sampled = await ctx.sample(messages, tools=body.get("tools") or [], max_new_tokens=limit,
                                   temperature=body.get("temperature"))
    except leeway_env.Refused as refused:
        # The words are those by which the package ends a rollout as truncated.
        words = f"{refused.kind}: the prompt exceeds the model's context length ({refused})"
        return 400, {"error": {"message": words, "type": "invalid_request_error"}}
    given[_text_of(sampled.message)] = sampled.message
    return 200, _response(sampled)


def make_client():
    """One client for all episodes; the task that asks says which."""
    import httpx
    from openai import AsyncOpenAI

    class Transport(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request):
            if request.url.path.endswith("/chat/completions"):
                status, answer = await complete(json.loads(await request.aread()))
            else:
                status, answer = 404, {"error": {"message": f"{request.url.path}: only chat "
                                                 "completions are answered"}}
            return httpx.Response(status, json=answer, request=request)

    client = AsyncOpenAI(
        api_key="leeway", base_url="http://leeway.invalid/v1", max_retries=0, timeout=None,
        http_client=httpx.AsyncClient(transport=Transport(), trust_env=False, timeout=None))
    try:
        from verifiers.clients import OpenAIChatCompletionsClient
    except ImportError:  # before 0.1.11 environments take the OpenAI client itself
        return client
    return OpenAIChatCompletionsClient(client)


def rubrics_of(env):
    """Every rubric of an environment, those in groups and of environments in groups included."""
    found, todo = [], [env.rubric, *(child.rubric for child in getattr(env, "envs", []))]
    while todo:
        rubric = todo.pop()
        found.append(rubric)
        todo += getattr(rubric, "rubrics", [])
    return found


def scores_groups(env):
    return any(rubric._is_group_func(function)
               for rubric in rubrics_of(env) for function in rubric.funcs)


async def _score(function, states):
    """Calls a rubric's scoring, which in older versions wants a semaphore."""
    extra = {"score_sem": contextlib.nullcontext()} \
        if "score_sem" in inspect.signature(function).parameters else {}
    await function(states, **extra)


def _name(text):
    """A function's name as metrics may have it; it may be "<lambda>"."""
    name = re.sub("[^A-Za-z0-9_.-]", "_", text)
    return name + "_" if name in ("mean", "min", "max") else name


def parts_of(env, state):
    """A scored state as parts of a reward and metrics."""
    weights, reward = {}, float(state.get("reward") or 0.0)
    for rubric in rubrics_of(env):
        weights.update((_name(function.__name__), weight)
                       for function, weight in zip(rubric.funcs, rubric.weights))
    metrics = {_name(name): float(value) for name, value in (state.get("metrics") or {}).items()}
    parts = {name: {"value": value, "weight": weights[name]} for name, value in metrics.items()
             if weights.get(name)}
    total = sum(part["value"] * part["weight"] for part in parts.values())
    if not parts or abs(total - reward) > 1e-6 * (1.0 + abs(reward)):
        # Rubrics may weigh in other ways; their sum is what counts.
        return {"reward": {"value": reward, "weight": 1.0}}, metrics
    return parts, {name: value for name, value in metrics.items() if name not in parts}


class Adapter:
    """The examples of both splits of an environment, its rollouts and its scores."""

    def __init__(self, env):
        self._env, self._client = env, make_client()
        rows, why = {}, None
        for split, get in (("train", env.get_dataset), ("eval", env.get_eval_dataset)):
            try:
                rows[split] = get()
            except ValueError as error:
                why = error
        if not rows:
            raise ValueError(f"it has no examples: {why}")
        if len(rows) < 2 or env.eval_dataset is None:
            both = next(iter(rows.values()))
            held_out = max(1, len(both) // 8)
            if len(both) < 2:
                raise ValueError("it has one example, and evaluation needs one of its own")
            rows["train"] = both.select(range(len(both) - held_out))
            rows["eval"] = both.select(range(len(both) - held_out, len(both)))
        self._rows, self.train, self.eval = rows, len(rows["train"]), len(rows["eval"])
        self.groups = scores_groups(env)
        self._states = collections.OrderedDict()  # of episodes whose group is not scored yet

    async def episode(self, ctx):
        from verifiers import errors
        _EPISODE.set((ctx, {}))
        row = self._rows[ctx.split][ctx.index]
        row.setdefault("example_id", ctx.index)
        state = await self._env.rollout(row, self._client, "leeway", {"n": 1, "extra_body": {}})
        error = state.get("error")
        if error is not None and not isinstance(error, errors.EmptyModelResponseError):
            raise error if isinstance(error, BaseException) else RuntimeError(str(error))
        ctx.truncated = bool(state.get("is_truncated"))
        if self.groups:
            self._states[ctx.id] = state
            if len(self._states) > 65536:  # groups that were given up are never scored
                self._states.popitem(last=False)
            ctx.info["state"] = _plain(state)
            return
        await _score(self._env.rubric.score_rollout, state)
        await self._clean(state)
        ctx.rewards, metrics = parts_of(self._env, state)
        for name, value in metrics.items():
            ctx.metric(name, value)

    async def score_group(self, members):
        from verifiers.types import State
        states = []
        for member in members:
            state = self._states.pop(member["id"], None)
            if state is None:  # another process ran it
                state = State(member["info"]["state"])
            states.append(state)
        await _score(self._env.rubric.score_group, states)
        for state in states:
            await self._clean(state)
        scores = [parts_of(self._env, state) for state in states]
        return [parts for parts, _ in scores], [metrics for _, metrics in scores]

    async def _clean(self, state):
        cleanup = getattr(self._env.rubric, "cleanup", None)
        if cleanup is not None:
            await cleanup(state)


def _plain(value):
    """What of a state can be written as JSON, for a process that has not run the episode."""
    if hasattr(value, "model_dump"):
        value = value.model_dump(exclude_none=True)
    if isinstance(value, dict):
        items = ((key, [] if key == "trajectory" else _plain(item)) for key, item in value.items()
                 if isinstance(key, str))
        return {key: item for key, item in items if item is not None}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if isinstance(value, (str, int, float, bool)) else None


def fail(words):
    print(f"leeway_env.verifiers: {words}", file=sys.stderr)
    sys.exit(2)


def load(name, arguments):
    try:
        import verifiers
    except ImportError as error:
        fail(f"{error}: pip install 'verifiers<0.4'")
    if not hasattr(verifiers, "load_environment"):
        fail(f"verifiers {getattr(verifiers, '__version__', '')} has no v0 environments; "
             "0.3.1 is the last version that has: pip install 'verifiers<0.4'")
    try:
        return verifiers.load_environment(name, **arguments)
    except Exception as error:  # whatever the environment's own code raises
        fail(f"{name}: {error}" + (f" ({error.__cause__})" if error.__cause__ else ""))


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="leeway_env.verifiers",
                                     description="A v0 environment of verifiers.")
    parser.add_argument("environment")
    parser.add_argument("--arg", nargs="+", action="extend", default=[], metavar="KEY=VALUE",
                        help="arguments of its load_environment; values as JSON, or else text")
    options = parser.parse_args(arguments)
    values = {}
    for item in options.arg:
        key, equals, value = item.partition("=")
        if not equals:
            fail(f"--arg {item}: KEY=VALUE is expected")
        try:
            values[key] = json.loads(value)
        except ValueError:
            values[key] = value
    try:
        adapter = Adapter(load(options.environment, values))
    except ValueError as error:
        fail(f"{options.environment}: {error}")
    leeway_env.run(adapter.episode, train=adapter.train, eval=adapter.eval,
                   score_group=adapter.score_group if adapter.groups else None)


if __name__ == "__main__":
    main()
