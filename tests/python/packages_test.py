"""Environments of reasoning-gym and verifiers as leeway would run them.

Runs in a virtual environment that has both packages (tests/python_env_test.cpp makes it)."""
import json
import pathlib
import sys
import tempfile
import unittest

from fake_parent import Parent

# What v0 environments look like: one of each kind, without data from elsewhere.
ENVIRONMENTS = {
    "vf_single": '''
import verifiers as vf
from datasets import Dataset

def exact(completion, answer, **kwargs):
    return float(completion[-1]["content"] == answer)

def shortness(completion, **kwargs):
    return 1.0 / (1 + len(completion[-1]["content"]))

def load_environment(size=20):
    rows = Dataset.from_list([{"question": f"{i}+1", "answer": str(i + 1)} for i in range(size)])
    rubric = vf.Rubric(funcs=[exact, shortness], weights=[1.0, 0.5])
    rubric.add_reward_func(lambda completion, **kwargs: 0.25, weight=0.0)
    return vf.SingleTurnEnv(dataset=rows, eval_dataset=rows.select(range(3)), rubric=rubric,
                            system_prompt="Count.")
''',
    "vf_tools": '''
import verifiers as vf
from datasets import Dataset

def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b

def answered(completion, answer, **kwargs):
    return float(answer in completion[-1]["content"])

def load_environment():
    rows = Dataset.from_list([{"question": "6+7", "answer": "13"}] * 16)
    return vf.ToolEnv(dataset=rows, tools=[add], rubric=vf.Rubric(funcs=[answered]), max_turns=4)
''',
    "vf_turns": '''
import verifiers as vf
from datasets import Dataset

class Guess(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": "Again."}]

    @vf.stop
    async def enough(self, state, **kwargs):
        return len(state["trajectory"]) >= 3

def turns(state, **kwargs):
    return float(len(state["trajectory"]))

def load_environment():
    rows = Dataset.from_list([{"question": "Guess.", "answer": "x"}] * 8)
    return Guess(dataset=rows, rubric=vf.Rubric(funcs=[turns]), max_turns=10)
''',
    "vf_group": '''
import verifiers as vf
from datasets import Dataset

def longest(completions, **kwargs) -> list[float]:
    lengths = [len(completion[-1]["content"]) for completion in completions]
    return [float(length == max(lengths)) for length in lengths]

def length(completion, **kwargs):
    return float(len(completion[-1]["content"]))

def load_environment():
    rows = Dataset.from_list([{"question": "Write.", "answer": ""}] * 8)
    return vf.SingleTurnEnv(dataset=rows,
                            rubric=vf.Rubric(funcs=[longest, length], weights=[1.0, 0.1]))
''',
    "vf_broken": '''
import verifiers as vf
from datasets import Dataset

class Broken(vf.MultiTurnEnv):
    async def setup_state(self, state, **kwargs):
        raise RuntimeError("no sandbox")

    async def env_response(self, messages, state, **kwargs):
        return []

def load_environment():
    rows = Dataset.from_list([{"question": "Q", "answer": ""}] * 8)
    return Broken(dataset=rows, rubric=vf.Rubric(funcs=[lambda completion, **kwargs: 1.0]))
''',
}


def gym(*arguments, greet=True):
    return Parent(command=[sys.executable, "-m", "leeway_env.reasoning_gym", *arguments],
                  greet=greet)


class ReasoningGym(unittest.TestCase):
    def test_a_dataset_asks_and_scores_as_it_does_by_itself(self):
        import reasoning_gym
        with gym("chain_sum", "--size", "20", "--eval", "4", "--seed", "3", "--config",
                 "max_terms=3", "max_digits=2", "--system", "Be brief.") as parent:
            self.assertEqual(parent.hello, {"type": "hello", "protocol": 2, "train": 20, "eval": 4,
                                            "scores_groups": False})
            dataset = reasoning_gym.create_dataset("chain_sum", seed=3, size=24, max_terms=3,
                                                   max_digits=2)
            for split, index in (("train", 0), ("train", 7), ("eval", 0), ("eval", 3)):
                entry = dataset[index + (20 if split == "eval" else 0)]
                for reply, score, tagged in (
                        (f"So:\n<answer>{entry['answer']}</answer> done", 1.0, 1.0),
                        (f"<answer>0</answer><answer> {entry['answer']}\n</answer>", 1.0, 1.0),
                        (f"I think\n{entry['answer']}\n\n", 1.0, 0.0),
                        (f"<answer>{entry['answer']}1</answer>", None, 1.0),
                        ("", 0.0, 0.0)):
                    calls, last = parent.play([reply], split=split, index=index)
                    self.assertEqual(calls[0]["messages"], [
                        {"role": "system", "content": "Be brief."},
                        {"role": "user", "content": entry["question"]}])
                    value = last["rewards"]["score"]["value"]
                    if score is None:
                        self.assertLess(value, 1.0)
                    else:
                        self.assertEqual(value, score, reply)
                    self.assertEqual(last["metrics"], {"answer_tags": tagged})

    def test_no_question_is_in_both_splits(self):
        # Few different questions: those of the evaluation must be passed over in training.
        with gym("chain_sum", "--size", "60", "--eval", "20", "--config", "min_terms=2",
                 "max_terms=2", "min_digits=1", "max_digits=1") as parent:
            asked = {"train": set(), "eval": set()}
            for split, size in (("train", 60), ("eval", 20)):
                for index in range(size):
                    calls, _ = parent.play(["1"], split=split, index=index)
                    asked[split].add(calls[0]["messages"][-1]["content"])
            self.assertFalse(asked["train"] & asked["eval"])

    def test_demonstrations_are_the_training_questions_with_their_answers(self):
        import reasoning_gym
        dataset = reasoning_gym.create_dataset("spell_backward", seed=0, size=40)
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "demonstrations.jsonl"
            for system, reply in (("", "{}"), ("Be brief.", "{}"),
                                  ("Use <answer> tags.", "<answer>{}</answer>")):
                with gym("spell_backward", "--size", "30", "--eval", "10", "--system", system,
                         "--demonstrations", "20", str(path), greet=False) as parent:
                    self.assertEqual(parent.process.wait(300), 0, parent.said())
                    self.assertEqual(parent.process.stdout.read(), b"")
                lines = [json.loads(line)["messages"] for line in path.read_text().splitlines()]
                self.assertEqual(len(lines), 20)
                self.assertEqual([m["role"] for m in lines[0]],
                                 (["system"] if system else []) + ["user", "assistant"])
                held_out = {dataset[30 + index]["question"] for index in range(10)}
                answers = {entry["question"]: entry["answer"] for entry in dataset}
                for *_, question, answer in lines:
                    self.assertNotIn(question["content"], held_out)
                    self.assertEqual(answer["content"],
                                     reply.format(answers[question["content"]]))

    def test_questions_of_both_splits_are_files_without_a_question_in_common(self):
        import reasoning_gym
        dataset = reasoning_gym.create_dataset("chain_sum", seed=0, size=300, min_terms=2,
                                               max_terms=2, min_digits=1, max_digits=1)
        answers = {entry["question"]: entry["answer"] for entry in dataset}
        with tempfile.TemporaryDirectory() as folder:
            paths = [str(pathlib.Path(folder) / name) for name in ("train.jsonl", "eval.jsonl")]
            with gym("chain_sum", "--size", "260", "--eval", "40", "--system", "Be brief.",
                     "--config", "min_terms=2", "max_terms=2", "min_digits=1", "max_digits=1",
                     "--questions", *paths, greet=False) as parent:
                self.assertEqual(parent.process.wait(300), 0, parent.said())
            seen = []
            for path in paths:
                lines = [json.loads(line) for line in pathlib.Path(path).read_text().splitlines()]
                seen.append([line["prompt"][-1]["content"] for line in lines])
                for line in lines:
                    self.assertEqual(line["prompt"][0], {"role": "system", "content": "Be brief."})
                    self.assertEqual(line["answer"], answers[line["prompt"][-1]["content"]])
                    self.assertEqual(line["completion"], line["answer"])
        self.assertFalse(set(seen[0]) & set(seen[1]))
        self.assertEqual(len(seen[0]), 260)
        self.assertEqual(seen[1], [dataset[260 + index]["question"] for index in range(40)])

    def test_mistakes_are_named_and_end_with_2(self):
        for arguments, words in (
                (["chain_sun"], "near matches: chain_sum"),
                (["chain_sum", "--config", "max_term=3"], "its settings: allow_negation"),
                (["chain_sum", "--config", "max_terms"], "KEY=VALUE"),
                (["chain_sum", "--demonstrations", "none", "x"], "--demonstrations none"),
                (["chain_sum", "--size", "5", "--demonstrations", "6", "x"], "1 to --size (5)"),
                (["chain_sum", "--demonstrations", "1", "/nowhere/x"], "/nowhere/x"),
                (["chain_sum", "--questions", "/nowhere/x", "/nowhere/y"], "/nowhere/x"),
                (["chain_sum", "--size", "0"], "at least 1")):
            with gym(*arguments, greet=False) as parent:
                self.assertEqual(parent.process.wait(300), 2)
                self.assertIn(words, parent.said())


class Verifiers(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls._folder = tempfile.TemporaryDirectory()
        for name, text in ENVIRONMENTS.items():
            (pathlib.Path(cls._folder.name) / f"{name}.py").write_text(text)

    @classmethod
    def tearDownClass(cls):
        cls._folder.cleanup()

    def start(self, *arguments, greet=True):
        return Parent(command=[sys.executable, "-m", "leeway_env.verifiers", *arguments],
                      paths=[self._folder.name], greet=greet)

    def test_a_single_turn_environment_gives_its_parts_and_metrics(self):
        with self.start("vf-single", "--arg", "size=12") as parent:
            self.assertEqual((parent.hello["train"], parent.hello["eval"]), (12, 3))
            calls, last = parent.play(["5"], index=4)
            self.assertEqual(calls[0]["messages"], [{"role": "system", "content": "Count."},
                                                    {"role": "user", "content": "4+1"}])
            self.assertEqual(last["rewards"], {"exact": {"value": 1.0, "weight": 1.0},
                                               "shortness": {"value": 0.5, "weight": 0.5}})
            self.assertEqual(last["metrics"]["_lambda_"], 0.25)
            # A reply without content is a reply.
            _, last = parent.play([""], index=4)
            self.assertEqual(last["rewards"]["exact"]["value"], 0.0)

    def test_tools_are_offered_called_and_answered(self):
        with self.start("vf-tools") as parent:
            self.assertEqual((parent.hello["train"], parent.hello["eval"]), (14, 2))
            calls, last = parent.play([
                {"content": "", "tool_calls": [("add", {"a": 6, "b": 7})], "reasoning": "Hm."},
                "It is 13."])
            self.assertEqual(calls[0]["tools"][0]["function"]["name"], "add")
            asked, answered = calls[1]["messages"][1:]
            self.assertEqual(asked["tool_calls"][0]["function"]["arguments"], '{"a": 6, "b": 7}')
            self.assertEqual(asked["reasoning_content"], "Hm.")
            self.assertEqual((answered["role"], answered["content"]), ("tool", "13"))
            self.assertEqual(last["rewards"]["answered"]["value"], 1.0)

    def test_turns_go_on_until_it_stops_and_a_refused_call_ends_them(self):
        with self.start("vf-turns") as parent:
            calls, last = parent.play(["a", "b", "c"])
            self.assertEqual([m["content"] for m in calls[2]["messages"]],
                             ["Guess.", "a", "Again.", "b", "Again."])
            self.assertEqual(last["rewards"]["turns"]["value"], 3.0)
            for kind in ("max_turns", "context_length"):
                parent.episode(2)
                parent.answer(parent.hear(), "a")
                parent.refuse(parent.hear(), kind)
                last = parent.hear()
                self.assertEqual((last["type"], last["truncated"]), ("done", True), last)
                self.assertEqual(last["rewards"]["turns"]["value"], 1.0)
            # Interleaved episodes do not meet.
            for number in (3, 4):
                parent.episode(number)
            first = [parent.hear(), parent.hear()]
            for call in first:
                parent.answer(call, f"from {call['episode']}")
            for _ in range(2):
                call = parent.hear()
                self.assertEqual(call["messages"][1]["content"], f"from {call['episode']}")

    def test_groups_are_scored_together_wherever_they_ran(self):
        with self.start("vf-group") as parent:
            self.assertTrue(parent.hello["scores_groups"])
            members = []
            for number, text in ((1, "ab"), (2, "abcd")):
                _, last = parent.play([text], number=number)
                self.assertNotIn("rewards", last)
                members.append({"id": number, "index": 0, "info": last["info"]})
            wanted = [{"longest": {"value": 0.0, "weight": 1.0},
                       "length": {"value": 2.0, "weight": 0.1}},
                      {"longest": {"value": 1.0, "weight": 1.0},
                       "length": {"value": 4.0, "weight": 0.1}}]
            # The second time as if another process had run them: only `info` is left.
            for _ in range(2):
                parent.say({"type": "score_group", "id": 9, "group": 1, "episodes": members})
                answer = parent.hear()
                self.assertEqual(answer.get("rewards"), wanted, answer)

    def test_an_environment_that_breaks_is_an_error_of_its_episode(self):
        with self.start("vf-broken") as parent:
            _, last = parent.play([])
            self.assertEqual(last["type"], "error")
            self.assertIn("no sandbox", last["error"])

    def test_mistakes_are_named_and_end_with_2(self):
        for arguments, words in ((["vf-nowhere"], "vf-nowhere"),
                                 (["vf-single", "--arg", "size"], "KEY=VALUE")):
            with self.start(*arguments, greet=False) as parent:
                self.assertEqual(parent.process.wait(300), 2)
                self.assertIn(words, parent.said())


if __name__ == "__main__":
    unittest.main()
