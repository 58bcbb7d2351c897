"""Environments for `leeway train` in Python: protocol 2 of `process` environments, no dependencies.

    import leeway_env

    async def episode(ctx):
        reply = await ctx.sample([{"role": "user", "content": "Say yes."}])
        ctx.reward("exact", float(reply.content == "yes"))

    leeway_env.run(episode, train=1000, eval=100)

An episode is one rollout. It asks for as many replies as it wants, each with the whole context as
OpenAI writes messages: messages that repeat an earlier context and its reply continue the sampled
tokens, anything else replaces the context. Many episodes run at once in one asyncio loop; what
blocks belongs into `asyncio.to_thread`.

Importing this package takes the standard input and output for the protocol: what the
environment's code, or a program that it starts, prints goes to stderr, and reading gives nothing.
"""
from .episode import Context, Refused, Reply
from .loop import run

__all__ = ["Context", "Refused", "Reply", "run"]
