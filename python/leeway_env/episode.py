"""What an episode's code sees: its context, the replies it gets, and a refused call."""
import math


class Refused(Exception):
    """A call was refused; `kind` is "max_turns" or "context_length". End with what there is.

    An episode that lets it pass ends as truncated, with the rewards that it has given so far."""

    def __init__(self, kind, message=""):
        super().__init__(message or kind)
        self.kind = kind


class Reply:
    """A sampled reply. `message` goes into the next call's messages as it is."""

    def __init__(self, answer):
        reply = answer.get("reply") or {}
        self.id = answer["id"]
        self.message = answer["message"]
        self.content = reply.get("content") or ""  # without thinking, calls and stop token
        self.text = reply.get("text") or ""  # as sampled
        self.tool_calls = reply.get("tool_calls") or []  # of status, name, arguments, raw
        self.truncated = bool(reply.get("truncated"))  # ended by a length limit
        self.tokens = answer.get("tokens")
        self.prompt_tokens = answer.get("prompt_tokens")


def _number(what, value):
    """A number of any package as a float; an error that names what it is for if it is not finite."""
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{what} is {number}: it must be finite")
    return number


class Context:
    """One episode. `info` goes to score_group, in this process or another: JSON values only."""

    def __init__(self, request, call):
        self.id = request["id"]
        self.split = request["split"]  # "train" or "eval"
        self.index = request["index"]  # of the example in its split
        self.example = request.get("example")  # the line of `data`, or None
        self.seed = request.get("seed")
        self.group, self.member = request.get("group"), request.get("member")
        self.members = request.get("members")
        self.info = {}
        self.truncated = None  # None: a refused call, or a last reply that was cut off
        self.rewards, self.metrics = {}, {}
        self.turn_rewards, self.advantages = {}, {}
        self._call, self._calls = call, 0

    async def sample(self, messages, *, after=None, tools=None, max_new_tokens=None,
                     temperature=None, enable_thinking=None, train=None):
        """The policy's reply to `messages`; raises Refused. None leaves a setting to the run.

        `after`, an earlier Reply: `messages` are only those that follow it. `train=False`, or a
        temperature other than the run's: the tokens are context and never trained."""
        self._calls += 1
        request = {"type": "sample", "episode": self.id, "id": str(self._calls),
                   "messages": list(messages)}
        options = {"continue": after and after.id, "tools": tools, "max_new_tokens": max_new_tokens,
                   "temperature": temperature, "enable_thinking": enable_thinking, "train": train}
        request.update((key, value) for key, value in options.items() if value is not None)
        answer = await self._call(request)
        if "error" in answer:
            raise Refused(answer["error"], answer.get("message", ""))
        return Reply(answer)

    def reward(self, name, value, weight=1.0):
        """A part of the reward, which is the sum of values times weights."""
        self.rewards[name] = {"value": _number(f"reward {name}", value),
                              "weight": _number(f"the weight of reward {name}", weight)}

    def metric(self, name, value):
        """A number that is logged and is no part of the reward."""
        self.metrics[name] = _number(f"metric {name}", value)

    def turn_reward(self, reply, value):
        """A reward of this reply alone."""
        self.turn_rewards[reply.id] = _number("turn_reward", value)

    def advantage(self, reply, value):
        """The advantage of a reply's tokens: one number, or a list of one per token."""
        one = not hasattr(value, "__iter__")
        self.advantages[reply.id] = _number("advantage", value) if one else [
            _number("advantage", each) for each in value]

    def done(self):
        """The line that ends the episode."""
        line = {"type": "done", "episode": self.id}
        if self.truncated is not None:
            line["truncated"] = self.truncated
        for key in ("rewards", "metrics", "info", "turn_rewards", "advantages"):
            if getattr(self, key):
                line[key] = getattr(self, key)
        return line
