"""A stand-in for leeway in tests: starts an environment program and answers its calls."""
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]


class Parent:
    """Runs `command` (a list) or `code` (a Python script) and greets it."""

    def __init__(self, code=None, command=None, paths=(), greet=True):
        self.stderr = tempfile.TemporaryFile("w+")
        search = os.pathsep.join([str(ROOT / "python"), *map(str, paths)])
        self.process = subprocess.Popen(
            command or [sys.executable, "-c", code], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=self.stderr,
            env={**os.environ, "PYTHONPATH": search})
        self.hello = None
        if greet:
            self.say({"type": "hello", "protocol": 1, "protocols": [1, 2]})
            self.hello = self.hear()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()
        self.stderr.close()

    def say(self, line):
        self.process.stdin.write(json.dumps(line).encode() + b"\n")
        self.process.stdin.flush()

    def hear(self):
        """The next line, an object; None at the end of the output."""
        line = self.process.stdout.readline()
        return json.loads(line) if line else None

    def episode(self, number, index=0, split="train", example=None, **more):
        self.say({"type": "episode", "id": number, "split": split, "index": index,
                  "example": example, "group": 1, "member": 0, "members": 2, "seed": 7, **more})

    def answer(self, call, content, tool_calls=(), truncated=False, reasoning=None):
        """Answers a sample line with `content` and calls, a list of (name, arguments)."""
        message = {"role": "assistant", "content": content}
        if reasoning is not None:
            message["reasoning_content"] = reasoning
        if tool_calls:
            message["tool_calls"] = [
                {"id": f"call_{i}", "type": "function",
                 "function": {"name": name, "arguments": json.dumps(arguments)}}
                for i, (name, arguments) in enumerate(tool_calls)]
        self.say({"type": "sampled", "episode": call["episode"], "id": call["id"],
                  "message": message, "tokens": 3, "prompt_tokens": 5,
                  "reply": {"text": content, "content": content, "truncated": truncated,
                            "tool_calls": [{"status": "ok", "name": name, "arguments": arguments,
                                            "raw": ""} for name, arguments in tool_calls]}})

    def refuse(self, call, kind):
        self.say({"type": "sampled", "episode": call["episode"], "id": call["id"], "error": kind,
                  "message": "no more"})

    def play(self, replies, number=1, **episode):
        """Runs an episode whose calls get `replies` in turn: text, or arguments of answer().

        Returns its calls and its last line."""
        self.episode(number, **episode)
        calls, replies = [], iter(replies)
        while True:
            line = self.hear()
            if line is None or line["type"] != "sample":
                return calls, line
            calls.append(line)
            reply = next(replies)
            if isinstance(reply, str):
                reply = {"content": reply}
            self.answer(line, **reply)

    def end(self, how="eof"):
        """Closes the input, or sends SIGTERM; returns the exit code and all of stderr."""
        if how == "eof":
            self.process.stdin.close()
        else:
            self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(120)
        return code, self.said()

    def said(self):
        self.stderr.seek(0)
        return self.stderr.read()
