"""A taskset of verifiers (v1) whose agent is answered by `leeway serve`: URL and key are the arguments.

The model thinks "A" and calls add with 1 and 2, whatever it is asked. Without tools the call is text.
"""
import asyncio
import json
import os
import sys

import verifiers.v1 as vf
from verifiers.v1.harnesses import null


class QuestionData(vf.TaskData):
    answer: str


class QuestionTask(vf.Task[QuestionData]):
    @vf.reward
    async def has_the_answer(self, trace) -> float:
        return float(self.data.answer in trace.last_reply)

    @vf.metric
    async def turns(self, trace) -> float:
        return float(trace.num_turns)


class QuestionTaskset(vf.Taskset[QuestionTask]):
    def load(self):
        for index, answer in enumerate(["add", "nothing of the kind"]):
            yield QuestionTask(QuestionData(idx=index, prompt=f"{index} + 2?", answer=answer,
                                            system_prompt="You calculate."), self.config.task)


class HereHarness(vf.Harness[vf.HarnessConfig]):
    """The loop of the null harness in this interpreter, where it has its packages already."""
    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        system, prompt = self.resolve_prompt(data)
        return await runtime.run_program(
            [sys.executable, os.path.join(null.__path__[0], "program.py"), f"--base-url={endpoint}",
             f"--api-key={secret}", f"--model={ctx.model}", f"--system-prompt={system}",
             f"--prompt={prompt}"], {})


__all__ = ["HereHarness"]


async def main(url, key):
    os.environ["SERVED_KEY"] = key
    agent = vf.Agent(vf.AgentConfig(
        harness={"id": "taskset_client_test"}, model="chain", sampling={"max_tokens": 20},
        runtime={"type": "subprocess"},
        client={"type": "eval", "base_url": url, "api_key_var": "SERVED_KEY"}))
    async with agent:
        traces = [await agent.run(task) for task in QuestionTaskset(vf.TasksetConfig())]
    for trace in traces:
        assert trace.ok, trace.model_dump_json(indent=1)
        assert json.loads(trace.last_reply.split("<tool_call>")[1].split("</tool_call>")[0])[
            "arguments"] == {"a": 1, "b": 2}, trace.last_reply
        assert trace.num_turns == 1 and trace.num_output_tokens > 3, trace
    assert [trace.reward for trace in traces] == [1.0, 0.0], traces


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))
    print("taskset: passed")
