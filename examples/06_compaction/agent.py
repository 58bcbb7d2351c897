"""An agent that collects letters by a tool and whose context is compacted twice per rollout.

Each segment of a rollout is a context of its own: the letters so far, a call of the tool `next`,
the letter that it gives. Then the context is compacted: a user message asks for all letters, and
the next segment begins with nothing but the reply. The last segment's reply is the answer.

    PYTHONPATH=python python3 examples/06_compaction/agent.py [--strip]
    PYTHONPATH=python python3 examples/06_compaction/agent.py --demonstrations 400

--strip sends past turns without their thinking when it asks for a compaction, as chat templates
strip it at a user message: sampled tokens change, and the request becomes a sample of its own.
"""
import argparse
import itertools
import json
import random

COMPACTIONS = 2
LETTERS = "abcdef"
REQUEST = {"role": "user", "content": "Write all letters."}

# All words of one letter per segment; the last ones of a shuffled list are for evaluation.
WORDS = ["".join(word) for word in itertools.product(LETTERS, repeat=COMPACTIONS + 1)]
random.Random(6).shuffle(WORDS)
EVAL = 32
TRAIN = len(WORDS) - EVAL


def task(seen):
    return {"role": "user", "content": f"Letters: {seen or '-'}. Call next."}


def letters_in(reply):
    """What a reply says, as far as it can go into the next context."""
    return "".join(c for c in reply.content if c in LETTERS)[:8]


def without_thinking(messages):
    return [{**message, "reasoning_content": ""} if message["role"] == "assistant" else message
            for message in messages]


async def rollout(ctx, strip):
    word = WORDS[ctx.index + (TRAIN if ctx.split == "eval" else 0)]
    seen, called, kept = "", 0, 0
    for segment, letter in enumerate(word):
        messages = [task(seen)]
        reply = await ctx.sample(messages)
        asked = any(c["status"] == "ok" and c["name"] == "next" for c in reply.tool_calls)
        called += asked
        messages += [reply.message, {"role": "tool", "content": letter if asked else "no call"}]
        if segment < COMPACTIONS:
            messages = without_thinking(messages) if strip else messages
            messages.append(REQUEST)
        reply = await ctx.sample(messages)
        kept += reply.content.strip() == seen + letter
        seen = letters_in(reply)
    ctx.reward("exact", reply.content.strip() == word)
    ctx.reward("kept", kept / len(word), weight=0.3)
    ctx.reward("called", called / len(word), weight=0.1)


def demonstrations(number):
    """Single segments as they should go, of words for training."""
    draw = random.Random(1)
    for _ in range(number):
        word, end = draw.choice(WORDS[:TRAIN]), draw.randint(1, COMPACTIONS + 1)
        call = {"type": "function", "function": {"name": "next", "arguments": "{}"}}
        messages = [task(word[:end - 1]),
                    {"role": "assistant", "content": "", "reasoning_content": "next",
                     "tool_calls": [call]},
                    {"role": "tool", "content": word[end - 1]}]
        if end <= COMPACTIONS:
            messages.append(REQUEST)
        messages.append({"role": "assistant", "content": word[:end], "reasoning_content": "all"})
        yield {"messages": messages}


def main():
    parser = argparse.ArgumentParser(description="An agent whose context is compacted.")
    parser.add_argument("--strip", action="store_true")
    parser.add_argument("--demonstrations", type=int, metavar="N", help="write N and end")
    options = parser.parse_args()
    if options.demonstrations:
        for line in demonstrations(options.demonstrations):
            print(json.dumps(line, separators=(",", ":")))
        return
    import leeway_env  # takes the standard output, which demonstrations are written to

    async def episode(ctx):
        await rollout(ctx, options.strip)

    leeway_env.run(episode, train=TRAIN, eval=EVAL)


main()
