"""Answers the turns of examples/04_process/config.toml: JSON lines in, JSON lines out.

A prompt "c-g=" asks for "cdefg" and a new line. Two parts make the reward: the whole answer, and
how much of its beginning is right.
"""
import json
import sys


def judge(request):
    first, last = request["example"]["first"], request["example"]["last"]
    wanted = "".join(map(chr, range(ord(first), ord(last) + 1))) + "\n"
    reply = request["reply"]["text"]
    right = 0
    while right < min(len(reply), len(wanted)) and reply[right] == wanted[right]:
        right += 1
    return {
        "exact": 1.0 if reply == wanted else 0.0,
        "beginning": {"value": right / len(wanted), "weight": 0.2},
    }


def main():
    for line in sys.stdin:
        request = json.loads(line)
        if request["type"] == "hello":
            answer = {"type": "hello", "protocol": 1}
        else:
            try:
                answer = {"id": request["id"], "rewards": judge(request)}
            except (KeyError, TypeError, ValueError) as error:
                answer = {"id": request["id"], "error": f"{type(error).__name__}: {error}"}
        # Without the flush the answer would stay in a buffer.
        print(json.dumps(answer), flush=True)


main()
