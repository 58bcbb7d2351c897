"""The main loop of an environment program: lines in, lines out, one task per episode."""
import asyncio
import inspect
import json
import os
import signal
import sys
import threading
import traceback

from .episode import Context, Refused


def _take_streams():
    """Private copies of the standard streams; the public ones become /dev/null and stderr."""
    lines_in, lines_out = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return lines_in, lines_out


_LINES_IN, _LINES_OUT = _take_streams()


def run(episode, train=None, eval=None, score_group=None):
    """Serves episodes until the input ends or SIGTERM comes.

    `episode` is an `async def episode(ctx)`; a number that it returns is its reward. `train` and
    `eval` are the numbers of examples of both splits; None is unlimited. `score_group(members)`,
    plain or async, gives the rewards of a whole group: members are dicts with `id`, `index` and
    `info`, and the result has for each, in this order, a number or a dict of parts, each a number
    or {"value": .., "weight": ..}. Episodes may then end without a reward. It may instead
    return two lists: the rewards, and a dict of metrics for each member."""
    if not inspect.iscoroutinefunction(episode):
        raise TypeError("leeway_env.run: episode must be an `async def` function")
    greeting = {"type": "hello", "protocol": 2, "train": train, "eval": eval,
                "scores_groups": score_group is not None}
    server = _Server(episode, score_group, greeting)
    try:
        asyncio.run(server.serve())
    except BrokenPipeError:
        pass  # leeway is gone


class _Server:
    def __init__(self, episode, score_group, greeting):
        self._episode, self._score_group, self._greeting = episode, score_group, greeting
        self._tasks = {}  # by episode
        self._calls = {}  # futures by episode and call
        self._other = set()

    async def serve(self):
        loop = asyncio.get_running_loop()
        lines = asyncio.Queue()

        def read():
            rest = b""
            while data := os.read(_LINES_IN, 1 << 20):
                *whole, rest = (rest + data).split(b"\n")
                for line in whole:
                    loop.call_soon_threadsafe(lines.put_nowait, line)
            loop.call_soon_threadsafe(lines.put_nowait, None)

        for name in ("SIGTERM", "SIGINT"):
            loop.add_signal_handler(getattr(signal, name), lines.put_nowait, None)
        threading.Thread(target=read, daemon=True).start()
        while True:
            line = await lines.get()
            if line is None:
                break
            self._hear(json.loads(line))
        tasks = [*self._tasks.values(), *self._other]
        for task in tasks:
            task.cancel()
        # Blocking code of an episode, which nothing can cancel, would keep the program alive.
        end = threading.Timer(2.0, os._exit, [0])
        end.daemon = True
        end.start()
        if tasks:
            await asyncio.wait(tasks, timeout=1.0)

    def _say(self, line):
        text = json.dumps(line, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
        # Half a surrogate pair, as Python reads bytes that are no text, becomes a question mark.
        data = memoryview(text.encode(errors="replace") + b"\n")
        while data:
            data = data[os.write(_LINES_OUT, data):]

    def _hear(self, line):
        kind = line.get("type")
        if kind == "hello":
            if 2 not in line.get("protocols", []):
                sys.exit("leeway_env speaks protocol 2, which this leeway does not offer")
            self._say(self._greeting)
        elif kind == "episode":
            self._tasks[line["id"]] = asyncio.create_task(self._run_episode(line))
        elif kind == "sampled":
            future = self._calls.get((line["episode"], line["id"]))
            if future is not None and not future.done():
                future.set_result(line)
        elif kind == "cancel":
            if line["episode"] in self._tasks:
                self._tasks[line["episode"]].cancel()
        elif kind == "score_group":
            task = asyncio.create_task(self._run_score_group(line))
            self._other.add(task)
            task.add_done_callback(self._other.discard)

    async def _call(self, request):
        key = request["episode"], request["id"]
        self._calls[key] = asyncio.get_running_loop().create_future()
        try:
            self._say(request)
            return await self._calls[key]
        finally:
            del self._calls[key]

    async def _run_episode(self, request):
        ctx = Context(request, self._call)
        try:
            try:
                value = await self._episode(ctx)
                if value is not None:
                    if not hasattr(value, "__float__"):
                        raise TypeError(f"the episode returned {str(value)[:60]!r}, which is no "
                                        "number: give rewards by ctx.reward(name, value)")
                    ctx.reward("reward", value)
            except Refused:
                ctx.truncated = True
                if not ctx.rewards:
                    ctx.reward("reward", 0.0)
            if not ctx.rewards and self._score_group is None:
                raise ValueError("the episode ended without ctx.reward(name, value)")
            self._say(ctx.done())
        except (Exception, SystemExit) as error:
            self._say({"type": "error", "episode": ctx.id, "error": _words(error)})
        finally:
            self._tasks.pop(ctx.id, None)

    async def _run_score_group(self, request):
        answer = {"type": "scores", "id": request["id"]}
        try:
            rewards = self._score_group(request["episodes"])
            if inspect.isawaitable(rewards):
                rewards = await rewards
            if isinstance(rewards, tuple):
                rewards, answer["metrics"] = rewards
            answer["rewards"] = list(rewards)
            self._say(answer)
        except (Exception, SystemExit) as error:
            self._say({"type": "scores", "id": request["id"], "error": _words(error)})


def _words(error):
    """The whole traceback to stderr, its last lines for the message of the failure."""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    sys.stderr.write(text)
    sys.stderr.flush()
    return "\n".join(text.rstrip().splitlines()[-6:])
