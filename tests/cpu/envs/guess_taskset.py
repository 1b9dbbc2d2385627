"""A taskset for verifiers with an agent that talks to the model in this process, without a program.

Imported by the Python that has verifiers; see test_verifiers.py.
"""

import httpx
import verifiers.v1 as vf
from verifiers.v1.runtimes import ProgramResult


class GuessData(vf.TaskData):
    answer: str


class GuessTask(vf.Task[GuessData]):
    @vf.reward(weight=1.0)
    async def correct(self, trace: vf.Trace) -> float:
        return float(self.data.answer in trace.last_reply)

    @vf.reward(weight=0.1)
    async def brief(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) < 20)


class GuessConfig(vf.TasksetConfig):
    num: int = 20


class GuessTaskset(vf.Taskset[GuessTask, GuessConfig]):
    def load(self):
        for n in range(self.config.num):
            yield GuessTask(
                GuessData(prompt=f"What is {n} + 1?", answer=str(n + 1)), self.config.task
            )


class ChatHarness(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None
    ):
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            reply = await client.post(
                f"{endpoint}/chat/completions",
                headers={"Authorization": f"Bearer {secret}"},
                json={"model": ctx.model, "messages": [{"role": "user", "content": data.prompt}]},
            )
        failed = reply.status_code != 200
        return ProgramResult(exit_code=int(failed), stdout="", stderr=reply.text if failed else "")


__all__ = ["ChatHarness", "GuessTaskset"]
