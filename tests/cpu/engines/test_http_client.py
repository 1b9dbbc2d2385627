"""The HTTP client over real sockets: each kind of failure is told from the others."""

import asyncio
import socket
import threading
import time

import pytest
from aiohttp import web

from lockstep.engines.http import HttpClient
from lockstep.errors import (
    ConfigError,
    EngineError,
    ServerRefusedError,
    ServerSilentError,
    ServerUnreachableError,
)

HOW = "serve MODEL --port 8000"


def client(url, **settings):
    return HttpClient(
        url, **({"name": "test", "how_started": HOW, "request_seconds": 5} | settings)
    )


def free_url():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{s.getsockname()[1]}"


class Server:
    """An aiohttp server on a port that the system chose."""

    def __init__(self, **handlers):
        self.app = web.Application()
        for name, handler in handlers.items():
            self.app.router.add_route("*", f"/{name}", handler)

    async def __aenter__(self):
        self.runner = web.AppRunner(self.app, shutdown_timeout=0.1)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self.runner.addresses[0][1]}"

    async def __aexit__(self, *error):
        await self.runner.cleanup()


def run(use, **handlers):
    """`await use(url)` against a server with `handlers`."""

    async def all_of_it():
        async with Server(**handlers) as url:
            return await use(url)

    return asyncio.run(all_of_it())


def test_json_comes_back_and_the_key_goes_along_unwritten(monkeypatch):
    monkeypatch.setenv("TEST_KEY", "s3cret")

    async def echo(request):
        return web.json_response([request.headers["Authorization"], await request.json()])

    async def use(url):
        http = client(url, api_key_env="TEST_KEY")
        assert "s3cret" not in repr(http)
        return await http.post("/echo", {"ids": [1, 2]})

    assert run(use, echo=echo) == ["Bearer s3cret", {"ids": [1, 2]}]
    with pytest.raises(ConfigError, match="NO_SUCH_KEY"):
        client("http://127.0.0.1:1", api_key_env="NO_SUCH_KEY")


def failure(kind, use, **handlers):
    async def tried(url):
        http = client(url, request_seconds=0.2)
        with pytest.raises(EngineError) as caught:
            await use(http)
        assert type(caught.value) is kind
        return caught.value

    return run(tried, **handlers)


def test_a_server_that_is_down_is_told_with_how_it_starts():
    async def use(url):
        http = client(free_url())
        with pytest.raises(ServerUnreachableError, match=HOW):
            await http.post("/x", {})

    run(use)


def test_a_server_that_says_nothing_is_told_from_one_that_is_down():
    async def silent(request):
        await asyncio.sleep(60)

    error = failure(ServerSilentError, lambda http: http.post("/silent", {}), silent=silent)
    assert "nothing came for 0.2 s (engine.request_seconds)" in str(error)


def test_a_refusal_repeats_what_the_server_said():
    async def openai(request):
        return web.json_response({"error": {"message": "no such model", "code": 404}}, status=404)

    async def fastapi(request):
        return web.json_response({"detail": "x" * 5000}, status=422)

    async def bare(request):
        return web.Response(text="gone\nfishing", status=503)

    for handler, status, said in (
        (openai, 404, "no such model"), (fastapi, 422, "xxx ... (5000 characters)"),
        (bare, 503, "gone fishing"),
    ):  # fmt: skip
        error = failure(ServerRefusedError, lambda http: http.post("/x", {}), x=handler)
        assert error.status == status and f"answered {status}: " in str(error)
        assert said in str(error) and len(str(error)) < 600


def test_an_answer_that_is_not_json_is_no_answer():
    async def page(request):
        return web.Response(text="<html>hello</html>")

    error = failure(EngineError, lambda http: http.post("/x", {}), x=page)
    assert "not JSON" in str(error) and "<html>hello" in str(error)


def test_a_server_that_hangs_up_is_unreachable():
    async def hang_up(request):
        request.transport.close()
        return web.Response()

    error = failure(ServerUnreachableError, lambda http: http.post("/x", {}), x=hang_up)
    assert "connection was lost" in str(error)


def events(*parts, is_whole=True):
    async def stream(request):
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        for part in parts:
            await answer.write(part)
            await asyncio.sleep(0.005)
        if is_whole:
            await answer.write(b"data: [DONE]\n\n")
        await answer.write_eof()
        return answer

    return stream


async def collected(http):
    return [event async for event in http.stream("/x", {})]


def test_a_stream_is_read_whole_wherever_the_network_cuts_it():
    long = b'"' + b"a" * 400_000 + b'"'  # longer than a line may be for aiohttp

    async def use(url):
        http = client(url)
        return [await collected(http), await collected(http)]

    stream = events(
        b"da", b'ta: {"a"', b": 1}\n\n: still here\n\ndata: 2\r\n", b"\ndata: " + long + b"\n\n"
    )
    assert run(use, x=stream) == [[{"a": 1}, 2, "a" * 400_000]] * 2


def test_a_stream_that_breaks_off_or_carries_an_error_is_not_an_end():
    error = failure(ServerUnreachableError, collected, x=events(b"data: 1\n\n", is_whole=False))
    assert "broke off" in str(error)
    said = events(b'data: {"error": {"message": "out of memory"}}\n\n')
    assert "out of memory" in str(failure(ServerRefusedError, collected, x=said))


def test_closing_a_stream_early_closes_its_connection():
    ended = asyncio.Event()

    async def endless(request):
        answer = web.StreamResponse()
        await answer.prepare(request)
        try:
            while True:
                await answer.write(b"data: 1\n\n")
                await asyncio.sleep(0.005)
        finally:
            ended.set()

    async def use(url):
        http = client(url)
        stream = http.stream("/x", {})
        assert await anext(stream) == 1
        await stream.aclose()
        await asyncio.wait_for(ended.wait(), 5)

    run(use, x=endless)


def test_one_client_serves_several_event_loops():
    async def answer(request):
        return web.json_response("here")

    async def serve(started, ended):
        async with Server(x=answer) as url:
            started.set_result(url)
            await ended.wait()

    loop = asyncio.new_event_loop()
    started, ended = loop.create_future(), asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(serve(started, ended)))
    thread.start()
    try:
        while not started.done():
            time.sleep(0.001)
        http = client(started.result())
        assert http.wait_until_up("/x", 5) == "here"
        for _ in range(3):
            assert asyncio.run(http.post("/x", {})) == "here"
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()
        loop.close()


def test_waiting_says_how_long_it_was_and_how_a_server_starts():
    said = []
    http = client(free_url())
    with pytest.raises(ServerUnreachableError) as caught:
        http.wait_until_up("/health", 0.4, said.append)
    text = str(caught.value)
    assert "no answer to /health within 0 s (engine.start_seconds=0.4)" in text
    assert text.count(HOW) == 1 and "waiting for engine test" in said[0]
    with pytest.raises(ServerUnreachableError, match=r"status 3\b"):
        http.wait_until_up("/health", 60, is_alive=lambda: "its process ended with status 3")


def test_three_hundred_requests_are_under_way_at_once():
    arrived, everybody = [], asyncio.Event()

    async def meet(request):
        arrived.append(request)
        if len(arrived) == 300:
            everybody.set()
        await everybody.wait()
        return web.json_response(len(arrived))

    async def use(url):
        http = client(url, request_seconds=20)
        return await asyncio.gather(*(http.post("/meet", {"n": n}) for n in range(300)))

    assert run(use, meet=meet) == [300] * 300
