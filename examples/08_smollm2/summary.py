"""What runs of this folder's recipes came to, as Markdown:

    python3 examples/08_smollm2/summary.py runs/smollm2_chain_sum [RUN ..]

For each run: a row of the table of docs/your-model.md, the mean reward of ten parts of the run, and
three sampled rollouts of its first and of its last file of rollouts.
"""
import json
import pathlib
import sys


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def interval(row, name):
    key = f"eval/all/{name}"
    return f"{row[key]:.3f} [{row[key + '/low']:.3f}, {row[key + '/high']:.3f}]"


def curve(values, parts=10):
    edges = [len(values) * part // parts for part in range(parts + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in zip(edges, edges[1:]) if b > a]


def text_of(sample):
    """What was sampled, in order; what stands between two of its turns is shown as [..]."""
    text, before = "", 1
    for token, sampled in zip(sample["tokens"], sample["loss_mask"]):
        if sampled and not before:
            text += " [..] "
        text += token if sampled else ""
        before = sampled or not text
    return text.replace("<|im_end|>", "").strip()


def question_of(sample):
    """The last user message before the first sampled token."""
    prompt = "".join(token for token, _ in zip(sample["tokens"], sample["loss_mask"]))
    first = prompt.find("<|im_start|>assistant\n")
    return prompt[:first].split("<|im_start|>user\n")[-1].split("<|im_end|>")[0].strip()


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    runs = [pathlib.Path(name) for name in sys.argv[1:]]
    for run in [run for run in runs if not lines_of(run / "metrics.jsonl")]:
        print(f"{run}: has no step", file=sys.stderr)
        runs.remove(run)
    print("| run | right before | right after | greedy reward | steps | rollouts | seconds | sampled tokens/s | trained tokens/s |")
    print("|---|---|---|---|---|---|---|---|---|")
    for run in runs:
        steps, evals = lines_of(run / "metrics.jsonl"), lines_of(run / "eval.jsonl")
        half = steps[len(steps) // 2:]
        rate = [sum(row[f"perf/{kind}_tokens_per_second"] for row in half) / len(half)
                for kind in ("sampled", "trained")]
        greedy = [f"{row['eval/all/greedy/mean']:.3f}" for row in (evals[0], evals[-1])
                  if "eval/all/greedy/mean" in row]
        print(f"| {run.name} | {interval(evals[0], 'pass@1')} | {interval(evals[-1], 'pass@1')} | "
              f"{', then '.join(greedy)} | {len(steps)} | {steps[-1]['progress/rollouts']:.0f} | "
              f"{steps[-1]['time/elapsed']:.0f} | {rate[0]:.0f} | {rate[1]:.0f} |")
    for run in runs:
        steps = lines_of(run / "metrics.jsonl")
        files = sorted((run / "rollouts").glob("step_*.jsonl"), key=lambda path: int(path.stem[5:]))
        print(f"\n### {run.name}\n")
        print("reward:", " ".join(f"{value:.3f}" for value in
                                  curve([row["reward/all/mean"] for row in steps])))
        for path in [files[0], files[-1]] if files else []:
            print(f"\n{path.stem}:")
            rollouts, groups = lines_of(path), set()
            for rollout in rollouts:
                if rollout["group"] in groups or not rollout.get("samples"):
                    continue
                groups.add(rollout["group"])
                sample = rollout["samples"][-1]
                print(f"- {question_of(sample)!r} -> {text_of(sample)!r}, reward {rollout['reward']:.2f}")
                if len(groups) == 3:
                    break


if __name__ == "__main__":
    main()
