"""leeway_env against a stand-in for leeway: no network, no package, no model."""
import subprocess
import sys
import unittest

from fake_parent import ROOT, Parent

ECHO = """
import leeway_env
async def episode(ctx):
    reply = await ctx.sample([{"role": "user", "content": str(ctx.index)}])
    ctx.reward("length", len(reply.content))
leeway_env.run(episode, train=10, eval=None)
"""


def program(body, more="train=10, eval=5"):
    lines = "\n".join("    " + line for line in body.strip().splitlines())
    return f"import asyncio, leeway_env\nasync def episode(ctx):\n{lines}\n" \
           f"leeway_env.run(episode, {more})\n"


class Protocol(unittest.TestCase):
    def test_the_greeting_says_both_splits(self):
        with Parent(ECHO) as parent:
            self.assertEqual(parent.hello, {"type": "hello", "protocol": 2, "train": 10,
                                            "eval": None, "scores_groups": False})

    def test_a_leeway_without_protocol_2_is_told(self):
        with Parent(ECHO, greet=False) as parent:
            parent.say({"type": "hello", "protocol": 1})
            self.assertIsNone(parent.hear())
            self.assertEqual(parent.process.wait(60), 1)
            self.assertIn("protocol 2", parent.said())

    def test_an_episode_samples_and_ends_with_its_rewards(self):
        code = program("""
assert ctx.split == "eval" and ctx.index == 3 and ctx.seed == 7 and ctx.example == {"a": 1}
reply = await ctx.sample([{"role": "user", "content": "hi"}], tools=[], max_new_tokens=9,
                         temperature=0.0, enable_thinking=False, train=False)
assert (reply.text, reply.content, reply.truncated) == ("yes", "yes", True)
assert reply.tool_calls[0]["arguments"] == {"x": 1} and (reply.tokens, reply.prompt_tokens) == (3, 5)
again = await ctx.sample([{"role": "user", "content": "sure?"}], after=reply)
ctx.reward("exact", 1)
ctx.reward("style", 0.5, weight=0.1)
ctx.metric("turns", 2)
ctx.info["answer"] = reply.message["content"]
ctx.turn_reward(reply, 0.25)
ctx.advantage(again, [1.0, 2.0, 3.0])
""")
        with Parent(code) as parent:
            calls, last = parent.play(
                [{"content": "yes", "tool_calls": [("f", {"x": 1})], "truncated": True}, "no"],
                index=3, split="eval", example={"a": 1})
            self.assertEqual(calls[0], {
                "type": "sample", "episode": 1, "id": "1",
                "messages": [{"role": "user", "content": "hi"}], "tools": [], "max_new_tokens": 9,
                "temperature": 0.0, "enable_thinking": False, "train": False})
            self.assertEqual(calls[1], {
                "type": "sample", "episode": 1, "id": "2", "continue": "1",
                "messages": [{"role": "user", "content": "sure?"}]})
            self.assertEqual(last, {
                "type": "done", "episode": 1, "info": {"answer": "yes"},
                "rewards": {"exact": {"value": 1.0, "weight": 1.0},
                            "style": {"value": 0.5, "weight": 0.1}},
                "metrics": {"turns": 2.0}, "turn_rewards": {"1": 0.25},
                "advantages": {"2": [1.0, 2.0, 3.0]}})

    def test_a_number_that_an_episode_returns_is_its_reward(self):
        with Parent(program("return len((await ctx.sample([{}])).content)")) as parent:
            _, last = parent.play(["four"])
            self.assertEqual(last["rewards"], {"reward": {"value": 4.0, "weight": 1.0}})

    def test_many_episodes_run_at_once_and_are_answered_in_any_order(self):
        with Parent(ECHO) as parent:
            for number in range(200):
                parent.episode(number, index=number)
            calls = [parent.hear() for _ in range(200)]
            self.assertEqual({call["episode"] for call in calls}, set(range(200)))
            for call in reversed(calls):
                self.assertEqual(call["messages"][0]["content"], str(call["episode"]))
                parent.answer(call, "x" * call["episode"])
            rewards = {}
            for _ in range(200):
                line = parent.hear()
                rewards[line["episode"]] = line["rewards"]["length"]["value"]
            self.assertEqual(rewards, {number: float(number) for number in range(200)})

    def test_several_calls_of_an_episode_are_open_at_once(self):
        code = program("""
replies = await asyncio.gather(*(ctx.sample([{"n": i}]) for i in range(3)))
ctx.reward("order", [reply.content for reply in replies] == ["0", "1", "2"])
""")
        with Parent(code) as parent:
            parent.episode(1)
            calls = [parent.hear() for _ in range(3)]
            for call in reversed(calls):
                parent.answer(call, str(call["messages"][0]["n"]))
            self.assertEqual(parent.hear()["rewards"]["order"]["value"], 1.0)

    def test_a_refused_call_raises_and_an_episode_may_end_with_what_it_has(self):
        code = program("""
try:
    await ctx.sample([{}])
except leeway_env.Refused as refused:
    ctx.reward("kind", {"max_turns": 1, "context_length": 2}[refused.kind])
""")
        for kind, value in (("max_turns", 1.0), ("context_length", 2.0)):
            with Parent(code) as parent:
                parent.episode(1)
                parent.refuse(parent.hear(), kind)
                self.assertEqual(parent.hear()["rewards"]["kind"]["value"], value)

    def test_a_refused_call_that_passes_ends_the_episode_as_truncated(self):
        for body, parts in (("await ctx.sample([{}])", {"reward": 0.0}),
                            ("ctx.reward('a', 3)\nawait ctx.sample([{}])", {"a": 3.0})):
            with Parent(program(body)) as parent:
                parent.episode(1)
                parent.refuse(parent.hear(), "max_turns")
                last = parent.hear()
                self.assertTrue(last["truncated"])
                self.assertEqual({k: v["value"] for k, v in last["rewards"].items()}, parts)

    def test_exceptions_are_errors_of_their_episode_alone(self):
        for body, words in (
                ("raise KeyError('lost')", "KeyError: 'lost'"),
                ("exit('no')", "SystemExit: no"),
                ("ctx.reward('a', float('nan'))", "reward a is nan: it must be finite"),
                ("ctx.info['a'] = {1, 2}\nctx.reward('a', 1)", "not JSON serializable"),
                ("pass", "ended without ctx.reward"),
                ("await ctx.sample([{1, 2}])", "not JSON serializable")):
            with Parent(program("if ctx.index == 1: return 1.0\n" + body)) as parent:
                parent.episode(1)
                parent.episode(2, index=1)
                lines = {line["episode"]: line for line in (parent.hear(), parent.hear())}
                self.assertEqual(lines[1]["type"], "error")
                self.assertIn(words, lines[1]["error"])
                self.assertEqual(lines[2]["rewards"]["reward"]["value"], 1.0)
                self.assertIn("Traceback", parent.end()[1])

    def test_what_the_environment_prints_goes_to_stderr(self):
        code = """
import leeway_env, os, subprocess, sys
print("printed")
os.write(1, b"written")
subprocess.run(["sh", "-c", "echo shell; cat"])
""" + ECHO
        with Parent(code) as parent:
            self.assertEqual(parent.hello["protocol"], 2)
            parent.play(["x"])
            code, said = parent.end()
            self.assertEqual(code, 0)
            for word in ("printed", "written", "shell"):
                self.assertIn(word, said)

    def test_cancel_ends_the_task_and_nothing_is_said(self):
        code = program("""
if ctx.index == 1: return 1.0
try:
    await ctx.sample([{}])
except asyncio.CancelledError:
    print("cancelled")
    raise
""")
        with Parent(code) as parent:
            parent.episode(1)
            parent.hear()
            parent.say({"type": "cancel", "episode": 1})
            parent.say({"type": "cancel", "episode": 99})
            parent.episode(2, index=1)
            self.assertEqual(parent.hear()["episode"], 2)
            self.assertIn("cancelled", parent.end()[1])

    def test_it_ends_with_its_input_and_at_sigterm_even_in_blocking_code(self):
        for body in ("await ctx.sample([{}])",
                     "import time\nawait ctx.sample([{}])\nawait asyncio.to_thread(time.sleep, 900)"):
            for how in ("eof", "sigterm"):
                with Parent(program(body)) as parent:
                    parent.episode(1)
                    call = parent.hear()
                    if "sleep" in body:
                        parent.answer(call, "")
                    self.assertEqual(parent.end(how)[0], 0, (body, how))

    def test_blocking_code_in_threads_holds_up_nothing(self):
        code = "import threading\ngate = threading.Event()\n" + program("""
if ctx.index == 1:
    gate.set()
else:
    await asyncio.to_thread(gate.wait)
return 1.0
""")
        with Parent(code) as parent:
            parent.episode(1)
            parent.episode(2, index=1)
            self.assertEqual({parent.hear()["episode"] for _ in range(2)}, {1, 2})

    def test_groups_are_scored_plainly_or_async_with_parts_and_metrics(self):
        for head, result, wanted in (
                ("def", "[m['info']['x'] for m in members]", {"rewards": [3, 4]}),
                ("async def", "[{'best': {'value': m['info']['x'], 'weight': 2}} for m in members]",
                 {"rewards": [{"best": {"value": 3, "weight": 2}},
                              {"best": {"value": 4, "weight": 2}}]}),
                ("def", "([1, 2], [{'rank': 0}, {'rank': 1}])",
                 {"rewards": [1, 2], "metrics": [{"rank": 0}, {"rank": 1}]})):
            code = f"{head} score(members): return {result}\n" + program(
                "ctx.info['x'] = len((await ctx.sample([{}])).content)",
                "train=1, eval=1, score_group=score")
            with Parent(code) as parent:
                self.assertTrue(parent.hello["scores_groups"])
                infos = []
                for number, text in ((1, "abc"), (2, "abcd")):
                    _, last = parent.play([text], number=number)
                    self.assertNotIn("rewards", last)
                    infos.append({"id": number, "index": 0, "info": last["info"]})
                parent.say({"type": "score_group", "id": 5, "group": 1, "episodes": infos})
                self.assertEqual(parent.hear(), {"type": "scores", "id": 5, **wanted})

    def test_a_group_that_cannot_be_scored_is_an_error(self):
        code = "def score(members): raise ValueError('no judge')\n" + program(
            "pass", "train=1, eval=1, score_group=score")
        with Parent(code) as parent:
            parent.say({"type": "score_group", "id": 5, "group": 1, "episodes": []})
            line = parent.hear()
            self.assertEqual((line["type"], line["id"]), ("scores", 5))
            self.assertIn("no judge", line["error"])

    def test_numbers_of_other_packages_are_numbers(self):
        code = program("""
from fractions import Fraction
reply = await ctx.sample([])
ctx.advantage(reply, [Fraction(1, 2), Fraction(1, 4)])
return Fraction(1, 2)
""")
        with Parent(code) as parent:
            last = parent.play(["x"])[1]
            self.assertEqual(last["rewards"], {"reward": {"value": 0.5, "weight": 1.0}})
            self.assertEqual(last["advantages"], {"1": [0.5, 0.25]})

    def test_what_is_no_reward_is_named(self):
        for body, words in [("ctx.reward('exact', float('nan'))", "reward exact is nan"),
                            ("ctx.metric('size', float('inf'))", "metric size is inf"),
                            ("return 'good'", "returned 'good', which is no number")]:
            with Parent(program(body)) as parent:
                last = parent.play([])[1]
                self.assertEqual(last["type"], "error")
                self.assertIn(words, last["error"])

    def test_halves_of_surrogate_pairs_become_question_marks(self):
        code = program("""
await ctx.sample([{"role": "user", "content": "a\\udcff\\ud800b \\u00e9"}])
return 1
""")
        with Parent(code) as parent:
            calls, last = parent.play(["x"])
            self.assertEqual(calls[0]["messages"][0]["content"], "a??b \u00e9")
            self.assertEqual(last["type"], "done")

    def test_long_lines_pass_whole(self):
        with Parent(ECHO) as parent:
            parent.episode(1, example={"long": "x" * 3_000_000})
            parent.answer(parent.hear(), "y" * 3_000_000)
            self.assertEqual(parent.hear()["rewards"]["length"]["value"], 3_000_000.0)

    def test_an_episode_that_is_no_coroutine_is_refused(self):
        result = subprocess.run(
            [sys.executable, "-c", "import leeway_env; leeway_env.run(print, train=1, eval=1)"],
            capture_output=True, text=True, env={"PYTHONPATH": str(ROOT / "python")})
        self.assertNotEqual(result.returncode, 0)
        self.assertIn("async def", result.stderr)


if __name__ == "__main__":
    unittest.main()
