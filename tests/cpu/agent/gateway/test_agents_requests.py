"""Requests as Codex and Claude Code send them, unmodified, play several turns on one exact path."""

import json
from pathlib import Path
from typing import Any

import pytest
from gateways import Gateway, says

from lockstep.agent.gateway.config import GatewayConfig
from lockstep.types import Message

REQUESTS = Path(__file__).parent / "requests"
PATCH = "*** Begin Patch\n*** Update File: a.py\n*** End Patch"


def script(prompt: str) -> Message:
    last = prompt.rpartition("<|im_start|>user")[2]
    if "Done!" in last:
        return says("It is mended.", thinking="All green.")
    if "1 failed" in last:
        return says("I see.", thinking="A typo.", apply_patch=json.dumps({"input": PATCH}))
    shell = "shell_command" if "shell_command" in prompt else "Bash"
    return says("", thinking="Run it first.", **{shell: '{"command": "pytest"}'})


@pytest.fixture
def gateway():
    with Gateway(script, config=GatewayConfig(names=("*",))) as found:
        yield found


def events_of(raw: bytes) -> list[dict[str, Any]]:
    lines = [line for line in raw.decode().splitlines() if line.startswith("data: ")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_codex_plays_with_its_own_requests(gateway: Gateway):
    body = json.loads((REQUESTS / "codex.json").read_text())
    _, made = gateway.ask("POST", "/sessions")

    def ask() -> list[dict[str, Any]]:
        status, raw, _ = gateway.ask_raw("POST", f"/s/{made['id']}/v1/responses", body)
        assert status == 200, raw
        found = events_of(raw)
        assert found[0]["type"] == "response.created"
        assert found[-1]["type"] == "response.completed" and found[-1]["response"]["usage"]
        items = [one["item"] for one in found if one["type"] == "response.output_item.done"]
        assert items == found[-1]["response"]["output"]
        for item in items:
            if item["type"] == "reasoning":  # it sends back no text, only what is encrypted
                item = {k: v for k, v in item.items() if k not in ("id", "content", "status")}
            body["input"].append(item)
        return items

    *_, call = ask()
    assert (call["type"], call["name"]) == ("function_call", "shell_command")
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "1 failed"}
    body["input"].append(output)
    reasoning, _, call = ask()
    assert reasoning["encrypted_content"]
    assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "apply_patch", PATCH)
    output = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "Done!"}
    body["input"].append(output)
    assert ask()[-1]["content"][0]["text"] == "It is mended."
    gateway.check_exact(made["id"], num_turns=3)
    trajectory = gateway.sessions.get(made["id"]).trajectory
    for name in ("reasoning", "text.verbosity", "tools.web_search", "parallel_tool_calls"):
        assert trajectory.metrics[f"gateway/ignored/{name}"] == 3


def test_claude_code_plays_with_its_own_requests(gateway: Gateway):
    body = json.loads((REQUESTS / "claude_code.json").read_text())
    _, made = gateway.ask("POST", "/sessions")
    headers = {"anthropic_version": "2023-06-01", "anthropic_beta": "claude-code-20250219"}
    url = f"/s/{made['id']}/v1/messages"

    def ask() -> list[dict[str, Any]]:
        status, raw, _ = gateway.ask_raw("POST", f"{url}?beta=true", body, **headers)
        assert status == 200, raw
        blocks: list[dict[str, Any]] = []
        for one in events_of(raw):
            if one["type"] == "content_block_start":
                blocks.append(one["content_block"])
            elif one["type"] == "content_block_delta":
                (key,) = one["delta"].keys() - {"type"}
                blocks[-1][key] = blocks[-1].get(key, "") + one["delta"][key]
        for block in blocks:
            if block["type"] == "tool_use":
                block["input"] = json.loads(block.pop("partial_json"))
        body["messages"].append({"role": "assistant", "content": blocks})
        return blocks

    counted = {k: v for k, v in body.items() if k not in ("max_tokens", "stream")}
    status, found = gateway.ask("POST", f"{url}/count_tokens?beta=true", counted, **headers)
    assert status == 200 and found["input_tokens"] > 0
    thinking, call = ask()
    assert thinking["signature"] and call["input"] == {"command": "pytest"}
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "Done!"}
    block = {**result, "is_error": False, "cache_control": {"type": "ephemeral"}}
    reminder = {"type": "text", "text": "<system-reminder>Use the tools.</system-reminder>"}
    body["messages"].append({"role": "user", "content": [block]})
    assert ask()[-1]["text"] == "It is mended."
    body["messages"].append({"role": "user", "content": [reminder]})
    ask()
    gateway.check_exact(made["id"], num_turns=3)
    metrics = gateway.sessions.get(made["id"]).trajectory.metrics
    assert (
        metrics["gateway/ignored/thinking"] == metrics["gateway/ignored/output_config.effort"] == 3
    )
