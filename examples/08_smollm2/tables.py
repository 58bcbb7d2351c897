"""Tables of a sweep's finished runs as Markdown, for docs/which-correction.md:

    python3 examples/08_smollm2/tables.py examples/08_smollm2/corrections.toml

For each table of the sweep two: the share of held-out prompts that are right, with the 95 % interval
of all seeds' prompts together, and what the correction did to the tokens meanwhile. A row whose runs are not finished is left out, and said so
on stderr. Needs Python 3.11 or later and nothing else.
"""
import json
import math
import pathlib
import sys
import tomllib


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def numbers(rows, key):
    return [row[key] for row in rows if row.get(key) is not None]


def mean(values):
    return sum(values) / len(values) if values else math.nan


def wilson(right, count):
    """The 95 % interval of a share."""
    z, share = 1.959964, right / count
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    return centre - half, centre + half


class Run:
    """The numbers of one finished run."""

    def __init__(self, folder):
        steps = lines_of(folder / "metrics.jsonl")
        evals = lines_of(folder / "eval.jsonl")
        self.before, self.after = (row["eval/all/pass@1"] for row in (evals[0], evals[-1]))
        self.best = max(row["eval/all/pass@1"] for row in evals)
        self.prompts = evals[-1]["eval/all/prompts"]
        self.reward = mean(numbers(steps, "reward/all/mean"))
        self.mismatch = mean(numbers(steps, "mismatch_kl/all/mean"))
        self.worst_mismatch = max(numbers(steps, "mismatch_kl/all/mean"))
        self.masked = mean(numbers(steps, "is_masked"))
        self.cut = 1 - mean(numbers(steps, "kept_share"))
        self.sample_size = mean(numbers(steps, "effective_sample_size"))
        self.least_sample_size = min(numbers(steps, "effective_sample_size"))
        self.update_sample_size = mean(numbers(steps, "update_effective_sample_size"))
        self.ratio = max(numbers(steps, "ratio_max"))
        self.entropy = mean(numbers(steps[-10:], "entropy"))
        self.lag = max(numbers(steps, "off_policy_level/all/max"))
        self.seconds = json.loads(pathlib.Path(str(folder) + ".summary.json").read_text())["seconds"]


def finished(folder):
    summary = pathlib.Path(str(folder) + ".summary.json")
    return summary.exists() and json.loads(summary.read_text()).get("end") == "finished"


def number(value):
    return f"{value:.2g}" if value < 100 else f"{value:.0f}"


def outcome(runs):
    count = sum(run.prompts for run in runs)
    low, high = wilson(sum(run.after * run.prompts for run in runs), count)
    return [f"{mean([run.after for run in runs]):.3f} [{low:.3f}, {high:.3f}]",
            ", ".join(f"{run.after:.3f}" for run in runs), f"{max(run.best for run in runs):.3f}",
            f"{mean([run.reward for run in runs]):.3f}"]


def effect(runs):
    over = {name: mean([getattr(run, name) for run in runs]) for name in vars(runs[0])}
    return [f"{number(over['mismatch'])}, {number(over['worst_mismatch'])}",
            f"{100 * over['masked']:.2f} %", f"{100 * over['cut']:.2f} %",
            f"{over['sample_size']:.3f}, {over['least_sample_size']:.3f}",
            f"{over['update_sample_size']:.3f}", number(max(run.ratio for run in runs)),
            f"{over['entropy']:.2f}", f"{max(run.lag for run in runs):.0f}", f"{over['seconds']:.0f}"]


OUTCOME = ["loss", "right after", "each seed", "best on the way", "reward while training"]
EFFECT = ["loss", "mismatch KL: mean, worst step", "masked", "masked or clipped", "ESS: mean, worst step",
          "ESS of the update", "largest ratio", "entropy at the end", "lag", "seconds"]


def show(header, lines):
    for line in [header, *lines]:
        print("| " + " | ".join(line) + " |")
        if line is header:
            print("|" + "---|" * len(header))
    print()


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sweep = tomllib.loads(pathlib.Path(sys.argv[1]).read_text())
    output = pathlib.Path(sweep["output_dir"])
    for table in sweep["table"]:
        lines, before = [], []
        for row in table["row"]:
            folders = [output / table["name"] / row["name"] / f"seed_{seed}" for seed in sweep["seeds"]]
            runs = [Run(folder) for folder in folders if finished(folder)]
            if len(runs) < len(folders):
                print(f"{table['name']}/{row['name']}: {len(runs)} of {len(folders)} runs are finished",
                      file=sys.stderr)
            if runs:
                lines.append((row.get("title", row["name"]), runs))
                before += [(run.before, run.prompts) for run in runs]
        if not lines:
            continue
        shares = sorted({share for share, _ in before})
        low, high = wilson(mean(shares) * before[0][1], before[0][1])
        print(f"### {table.get('title', table['name'])}\n")
        print(f"Before: {mean(shares):.3f} [{low:.3f}, {high:.3f}] on {before[0][1]:.0f} held-out prompts.\n")
        show(OUTCOME, [[title, *outcome(runs)] for title, runs in lines])
        show(EFFECT, [[title, *effect(runs)] for title, runs in lines])


if __name__ == "__main__":
    main()
