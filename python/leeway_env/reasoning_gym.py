"""Datasets of the package reasoning-gym as environments, by name:

    python3 -m leeway_env.reasoning_gym chain_sum --size 10000 --config max_terms=4

Questions are made from the seed, scores are the dataset's own. The answer is what stands in the
last <answer>..</answer> of the reply (thinking is not looked at), as the package's system prompts
ask for, else its last line that is not empty. The examples for evaluation follow those for
training in the same sequence; a training question that evaluation has too is passed over for the
next one. With --demonstrations N FILE the program writes the first N training examples with the
dataset's own answers to a file, as [sft] reads them, and ends. With --questions TRAIN EVAL it writes
all questions with their answers as two files for a `jsonl` environment, which needs no Python while
training and compares answers by its own rules, and ends.
"""
import argparse
import asyncio
import difflib
import json
import sys
from concurrent.futures import ThreadPoolExecutor

import leeway_env


def extract(text):
    """The answer in a reply, and whether it stood in tags."""
    close = text.rfind("</answer>")
    begin = text.rfind("<answer>", 0, close) if close >= 0 else -1
    if begin >= 0:
        return text[begin + len("<answer>"):close].strip(), True
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return (lines[-1] if lines else ""), False


class Tasks:
    """The questions of both splits of a dataset, and their scores."""

    def __init__(self, dataset, train, eval_):
        self._dataset, self._train = dataset, train
        self._eval = [dataset[train + index] for index in range(eval_)]
        self._held_out = {entry["question"] for entry in self._eval}
        # Datasets promise nothing about threads: one asks them, beside the loop.
        self._thread = ThreadPoolExecutor(max_workers=1)

    def _ask(self, function, *arguments):
        return asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    def entry_now(self, split, index):
        if split == "eval":
            return self._eval[index]
        for step in range(self._train):
            entry = self._dataset[(index + step) % self._train]
            if entry["question"] not in self._held_out:
                return entry
        raise ValueError("every question for training is one for evaluation: raise --size")

    async def entry(self, split, index):
        return await self._ask(self.entry_now, split, index)

    async def score(self, answer, entry):
        return await self._ask(self._dataset.score_answer, answer, entry)


def fail(words):
    print(f"leeway_env.reasoning_gym: {words}", file=sys.stderr)
    sys.exit(2)


def value_of(text):
    try:
        return json.loads(text)
    except ValueError:
        return text


def parse(arguments):
    parser = argparse.ArgumentParser(prog="leeway_env.reasoning_gym",
                                     description="A dataset of reasoning-gym as an environment.")
    parser.add_argument("dataset")
    parser.add_argument("--size", type=int, default=10000, help="examples for training")
    parser.add_argument("--eval", type=int, default=100, help="examples for evaluation")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--config", nargs="+", action="extend", default=[], metavar="KEY=VALUE",
                        help="settings of the dataset; values as JSON, or else text")
    parser.add_argument("--system", help="the system message instead of the package's own for "
                        "<answer> tags; empty: none")
    parser.add_argument("--demonstrations", nargs=2, metavar=("N", "FILE"),
                        help="write N training examples with their answers to FILE, and end")
    parser.add_argument("--questions", nargs=2, metavar=("TRAIN", "EVAL"),
                        help="write the questions of both splits with their answers as data and "
                        "eval_data of a jsonl environment, and end")
    options = parser.parse_args(arguments)
    if options.size < 1 or options.eval < 1:
        fail("--size and --eval must be at least 1")
    if options.demonstrations:
        count = options.demonstrations[0]
        if not count.isdecimal() or not 1 <= int(count) <= options.size:
            fail(f"--demonstrations {count}: a number from 1 to --size ({options.size}) is expected")
    for item in options.config:
        if "=" not in item:
            fail(f"--config {item}: KEY=VALUE is expected")
    return options


def make_dataset(options):
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        fail(f"{error}: pip install reasoning-gym")
    name = options.dataset
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=5, cutoff=0.5)
        near += sorted(known for known in DATASETS if name in known and known not in near)
        fail(f"no dataset {name!r}; " + ("near matches: " + ", ".join(near) if near else
                                         "all: " + ", ".join(sorted(DATASETS))))
    config = {key: value_of(value)
              for key, value in (item.split("=", 1) for item in options.config)}
    try:
        return reasoning_gym.create_dataset(
            name, **{"seed": options.seed, "size": options.size + options.eval, **config})
    except Exception as error:  # a dataset checks its settings as it likes
        keys = sorted(getattr(DATASETS[name][1], "__dataclass_fields__", {}))
        fail(f"{name}: {type(error).__name__}: {error}; its settings: {', '.join(keys)}")


def question(entry, system):
    messages = [{"role": "system", "content": system}] if system else []
    return messages + [{"role": "user", "content": entry["question"]}]


def write_demonstrations(tasks, count, path, system):
    """Lines of messages that end with the dataset's answer; in tags if the system message asks for
    them."""
    lines = []
    for index in range(count):
        entry = tasks.entry_now("train", index)
        answer = str(entry["answer"])
        reply = f"<answer>{answer}</answer>" if "<answer>" in system else answer
        lines.append(json.dumps({"messages": question(entry, system) +
                                 [{"role": "assistant", "content": reply}]}) + "\n")
    write(path, lines, "--demonstrations")


def write_questions(tasks, counts, paths, system):
    """Lines of `prompt`, `answer`, and the answer as `completion` for [sft], as often as the dataset
    has them: easy questions may come up many times."""
    for split, count, path in zip(("train", "eval"), counts, paths):
        lines = []
        for index in range(count):
            entry = tasks.entry_now(split, index)
            answer = str(entry["answer"])
            lines.append(json.dumps({"prompt": question(entry, system), "answer": answer,
                                     "completion": answer}) + "\n")
        write(path, lines, "--questions")


def write(path, lines, option):
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.writelines(lines)
    except OSError as error:
        fail(f"{option}: {error}")


def main(arguments=None):
    options = parse(arguments)
    dataset = make_dataset(options)
    if options.system is None:
        from reasoning_gym.utils import SYSTEM_PROMPTS
        options.system = SYSTEM_PROMPTS["default"]
    tasks = Tasks(dataset, options.size, options.eval)
    if options.demonstrations:
        count, path = options.demonstrations
        write_demonstrations(tasks, int(count), path, options.system)
        return
    if options.questions:
        write_questions(tasks, (options.size, options.eval), options.questions, options.system)
        return

    async def episode(ctx):
        entry = await tasks.entry(ctx.split, ctx.index)
        reply = await ctx.sample(question(entry, options.system))
        answer, tagged = extract(reply.content)
        ctx.reward("score", await tasks.score(answer, entry))
        ctx.metric("answer_tags", tagged)

    leeway_env.run(episode, train=options.size, eval=options.eval)


if __name__ == "__main__":
    main()
