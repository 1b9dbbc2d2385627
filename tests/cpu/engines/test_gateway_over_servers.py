"""`lockstep serve` over an engine that is a server: what it answers, and what its death does."""

import json
import urllib.error
import urllib.request

import torch
from fake_sglang import FakeSGLang

from lockstep.model_server import BackgroundServer
from lockstep.models.hf_io import load_checkpoint
from lockstep.models.locate import locate_model


def ask(url: str, text: str) -> dict:
    messages = [{"role": "user", "content": text}]
    body = {"model": "tiny-qwen3", "messages": messages, "temperature": 0, "max_tokens": 16}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)["choices"][0]["message"]


def test_a_server_is_served_like_the_model_in_it_and_its_death_is_a_503():
    model = load_checkpoint(locate_model("tiny-qwen3"), dtype=torch.float32, device="cpu")
    with BackgroundServer("tiny-qwen3") as embedded:
        expected = ask(embedded.url, "Where was Bela born?")
    with FakeSGLang(model) as server:
        settings = ("engine=sglang", f"engine.urls={server.url}", "engine.start_seconds=5")
        gateway = BackgroundServer("tiny-qwen3", *settings)
        found = ask(gateway.url, "Where was Bela born?")
    with gateway:
        assert found["content"] == expected["content"]
        try:
            ask(gateway.url, "Where was Vera born?")
        except urllib.error.HTTPError as error:
            assert (error.code, error.headers["Retry-After"]) == (503, "1")
            assert json.load(error)["error"]["code"] == "engine_down"
        else:
            raise AssertionError("the engine is down, and something answered")
        with urllib.request.urlopen(f"{gateway.url}/health", timeout=10) as response:
            assert response.status == 200
