"""A sandbox on a server: the protocol, lost answers, servers that lie."""

import asyncio
from dataclasses import replace

import pytest

pytest.importorskip("aiohttp", reason="the extra `http` is not installed")
pytest.importorskip("pydantic_monty", reason="the extra `sandbox` is not installed")

import aiohttp
from aiohttp import web

from lockstep.agent.sandbox import MontyConfig, RemoteConfig, SandboxLimits
from lockstep.agent.sandbox.server import sandbox_server
from lockstep.errors import ConfigError, SandboxError
from lockstep.testing.check_sandbox import check_sandbox

LIMITS = SandboxLimits(seconds=1.0, memory_mib=64)
FEW = {"loop": "while True: pass", "file": "open('SECRET_PATH')", "flood": "print('x' * 10 ** 6)"}


def test_a_remote_sandbox_keeps_every_promise_over_the_network(monkeypatch):
    monkeypatch.setenv("KEY_OF_THE_TEST", "k")

    async def play():
        inner = MontyConfig(limits=LIMITS, workers=2).open()
        await inner.run("1")  # its processes are this one's, and stay
        async with sandbox_server(inner, port=0, key="k") as url:
            config = RemoteConfig(url=url, api_key_env="KEY_OF_THE_TEST", limits=LIMITS)
            await asyncio.to_thread(config.check)
            with pytest.raises(ConfigError, match="Unauthorized"):
                await asyncio.to_thread(replace(config, api_key_env="").check)
            found = await check_sandbox(config.open(), limits=LIMITS, programs=FEW)
            with pytest.raises(SandboxError, match="the key is wrong or missing"):
                await replace(config, api_key_env="").open().run("1")
        await inner.close()
        return found

    assert asyncio.run(play()).endings == {"loop": "timeout", "file": "refused", "flood": "output"}


class Counting:
    """A server's sandbox that counts, and is slow."""

    dialect = "A Python of the test."

    def __init__(self):
        self.inner = MontyConfig(limits=LIMITS, workers=1).open()
        self.num_runs = 0

    async def run(self, code, *, session=""):
        self.num_runs += 1
        await asyncio.sleep(0.3)
        return await self.inner.run(code, session=session)

    async def end_session(self, session):
        await self.inner.end_session(session)

    async def close(self):
        await self.inner.close()


def test_a_program_whose_answer_was_lost_is_asked_for_again_and_run_once():
    async def play():
        counting = Counting()
        async with sandbox_server(counting, port=0) as url:
            config = RemoteConfig(url=url, request_seconds=0.2, retries=3, limits=LIMITS)
            sandbox = config.open()
            result = await sandbox.run("x = 1\nx", session="a")
            await sandbox.close()
        await counting.close()
        return result, counting.num_runs

    result, num_runs = asyncio.run(play())
    assert (result.output, num_runs) == ("1", 1)


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (200, "[]", "answered a list"),
        (200, "{", "not JSON"),
        (200, '{"output": "a", "ending": "fine"}', "ending='fine'"),
        (200, '{"output": 5, "ending": "ok"}', "output of type int"),
        (200, '"' + "x" * 200_000 + '"', "more than"),
        (500, "it broke", "answered 500: it broke"),
        (503, "", "status 503, 1 times"),
    ],
    ids=["list", "half", "ending", "output", "long", "error", "busy"],
)
def test_a_server_that_answers_what_cannot_be_is_no_programs_fault(status, body, words):
    async def answer(request):
        return web.Response(status=status, text=body)

    async def play():
        app = web.Application()
        app.router.add_post("/run", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        sandbox = RemoteConfig(url=f"http://127.0.0.1:{port}", retries=0, limits=LIMITS).open()
        try:
            await sandbox.run("1")
        finally:
            await sandbox.close()
            await runner.cleanup()

    with pytest.raises(SandboxError, match=words):
        asyncio.run(play())


def test_a_server_that_is_not_there_is_named():
    config = RemoteConfig(url="http://127.0.0.1:9", retries=0)
    with pytest.raises(ConfigError, match="Is a sandbox server up there"):
        config.check()
    sandbox = config.open()

    async def play():
        try:
            await sandbox.run("1")
        finally:
            await sandbox.close()

    with pytest.raises(SandboxError, match=r"127\.0\.0\.1:9/run.*Is the server up"):
        asyncio.run(play())


def test_the_server_refuses_malformed_requests_and_stays_up():
    async def play():
        inner = MontyConfig(limits=LIMITS, workers=1).open()
        async with sandbox_server(inner, port=0) as url, aiohttp.ClientSession() as client:
            statuses = []
            for body in (b"", b"{", b"[]", b'{"code": 1}', b'{"code": "1", "session": 2}'):
                async with client.post(url + "/run", data=body) as answer:
                    statuses.append((answer.status, "expected" in (await answer.json())["error"]))
            async with client.post(url + "/run", data=b"x" * 2_000_000) as answer:
                statuses.append((answer.status, True))
            async with client.get(url + "/") as answer:
                dialect = (await answer.json())["dialect"]
            async with client.post(url + "/run", json={"code": "1 + 1"}) as answer:
                found = await answer.json()
        await inner.close()
        return statuses, dialect, found

    statuses, dialect, found = asyncio.run(play())
    assert statuses == [(400, True)] * 5 + [(413, True)]
    assert "inheritance" in dialect and found["output"] == "2"


def test_a_server_for_others_needs_a_key_and_settings_are_checked(monkeypatch):
    inner = MontyConfig(limits=LIMITS).open()

    async def serve():
        async with sandbox_server(inner, host="0.0.0.0"):
            pass

    with pytest.raises(ConfigError, match="Give a key"):
        asyncio.run(serve())
    with pytest.raises(ConfigError, match=r"sandbox\.url"):
        RemoteConfig(url="localhost:1")
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(ConfigError, match="NO_SUCH_KEY"):
        RemoteConfig(url="http://localhost:1", api_key_env="NO_SUCH_KEY").check()
