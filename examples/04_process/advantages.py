"""Computes the advantages of a run instead of orchestrator.advantage: JSON lines in, JSON lines out.

    leeway train examples/04_process/config.toml \
        --set orchestrator.advantage_command="python3 examples/04_process/advantages.py"

It is asked once for each group, that is for the rollouts of one prompt. Groups that are all right
are dropped; in the others a rollout's advantage is its distance from the median, and one that was
cut off by a length limit has none.
"""
import json
import statistics
import sys


def decide(group):
    rewards = group["rewards"]
    if min(rewards) == max(rewards) and rewards[0] > 0:
        return {"drop": "all right"}
    middle = statistics.median(rewards)
    return {
        "advantages": [
            0.0 if cut_off else reward - middle
            for reward, cut_off in zip(rewards, group["truncated"])
        ]
    }


def main():
    for line in sys.stdin:
        request = json.loads(line)
        if request["type"] == "hello":
            answer = {"type": "hello", "protocol": 1}
        else:
            try:
                answer = {"id": request["id"], **decide(request)}
            except (KeyError, TypeError, ValueError) as error:
                answer = {"id": request["id"], "error": f"{type(error).__name__}: {error}"}
        # Without the flush the answer would stay in a buffer.
        print(json.dumps(answer), flush=True)


main()
