"""The server: whose session, which status, and that nothing brings it down."""

import asyncio
import http.client
import itertools
import json
import socket
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
from gateways import MODEL, Gateway, says
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep.agent.gateway.config import GatewayConfig
from lockstep.agent.gateway.exchange import Refusal
from lockstep.errors import ConfigError, EngineDownError
from lockstep.types import Message

USER = {"role": "user", "content": "hi"}
BODY: dict[str, Any] = {"model": MODEL, "messages": [USER]}
CHAT = "/v1/chat/completions"


class _Quick(GatewayConfig):
    keep_alive_seconds, read_seconds = 0.05, 0.5


class _Rotating(GatewayConfig):
    rotate_tokens = 200


class _FewConnections(GatewayConfig):
    max_connections = 20


TURNS = itertools.count()


def script(prompt: str) -> Message:
    if "engine down" in prompt:
        raise EngineDownError("connection refused")
    if "down at the second turn" in prompt and next(TURNS) == 1:
        raise EngineDownError("connection refused")
    if "broken" in prompt:
        raise ZeroDivisionError
    return says("hello")


@pytest.fixture(scope="module")
def gateway():
    config = _Quick(max_body_bytes=100_000)
    with Gateway(script, config=config) as found:
        yield found


@pytest.fixture(autouse=True)
def _without_delay(gateway: Gateway):
    yield
    gateway.engine.delay = 0.0


@pytest.fixture(scope="module")
def locked():
    with Gateway(script, key="master") as found:
        yield found


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def asking(text: str) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}]}


# -- whose session --------------------------------------------------------------------------------


def test_a_session_is_found_by_its_address_by_its_key_and_by_a_header(gateway: Gateway):
    _, made = gateway.ask("POST", "/sessions")
    for path, headers in (
        (f"/s/{made['id']}{CHAT}", {}),
        (CHAT, bearer(made["api_key"])),
        (CHAT, {"x-api-key": made["api_key"]}),
        (CHAT, {"x-lockstep-session": made["id"]}),
        (f"/s/{made['id']}{CHAT}", bearer("any-key-that-is-of-no-session")),
    ):
        status, _, answer = gateway.ask_raw("POST", path, BODY, **headers)
        assert (status, answer["x-lockstep-session"]) == (200, made["id"])
    _, shown = gateway.ask("GET", f"/sessions/{made['id']}")
    assert shown["num_turns"] == 5


def test_requests_that_name_no_session_share_one_until_it_is_full():
    with Gateway(script, config=_Rotating()) as gateway:
        found = [
            gateway.ask_raw("POST", CHAT, asking(f"{at} {'x' * 30}"))[2]["x-lockstep-session"]
            for at in range(20)
        ]
        assert found[0] == found[1]
        assert len(set(found)) > 1
        assert [s.id for s in gateway.finished] == list(dict.fromkeys(found))[:-1]


def test_a_key_of_one_session_opens_no_other(gateway: Gateway):
    _, mine = gateway.ask("POST", "/sessions")
    _, other = gateway.ask("POST", "/sessions")
    key = bearer(mine["api_key"])
    for method, path, body in (
        ("POST", f"/s/{other['id']}{CHAT}", BODY),
        ("POST", f"/sessions/{other['id']}/reward", {"reward": 1.0}),
        ("POST", f"/sessions/{other['id']}/finish", None),
        ("GET", f"/sessions/{other['id']}/trajectory", None),
        ("DELETE", f"/sessions/{other['id']}", None),
        ("POST", "/sessions", None),
        ("GET", "/sessions", None),
        ("POST", "/claim", None),
    ):
        status, found = gateway.ask(method, path, body, **key)
        assert status == 403, (path, found)
        assert found["error"]["type"] == "permission_error"
    assert not gateway.sessions.get(other["id"]).trajectory.segments
    for body in ({"task_id": "a"}, {"task": {"id": "a", "question": "q"}}):
        assert gateway.ask("POST", "/sessions", body)[0] == 400


def test_with_a_key_of_its_own_the_server_lets_nobody_else_in(locked: Gateway):
    _, made = locked.ask("POST", "/sessions", **bearer("master"))
    assert locked.ask("GET", "/health")[0] == 200
    for method, path, body in (
        ("POST", CHAT, BODY),
        ("POST", f"/s/{made['id']}{CHAT}", BODY),
        ("POST", "/v1/messages", BODY),
        ("GET", "/v1/models", None),
        ("GET", "/metrics", None),
        ("POST", "/sessions", None),
        ("GET", f"/sessions/{made['id']}/trajectory", None),
    ):
        for headers in ({}, bearer("wrong"), bearer("Master"), {"x-api-key": "schl\xfcssel"}):
            assert locked.ask(method, path, body, **headers)[0] == 401
    for key in ("master", made["api_key"]):
        assert locked.ask("POST", f"/s/{made['id']}{CHAT}", BODY, **bearer(key))[0] == 200
        assert locked.ask("GET", "/v1/models", **bearer(key))[0] == 200


def test_it_does_not_listen_for_other_machines_without_a_key():
    with pytest.raises(ConfigError, match=r"host=0\.0\.0\.0.*LOCKSTEP_KEY"):
        Gateway(script, config=GatewayConfig(host="0.0.0.0"))
    with Gateway(script, config=GatewayConfig(host="0.0.0.0"), key="k") as gateway:
        assert gateway.ask("POST", CHAT, BODY, **bearer("k"))[0] == 200


def test_a_page_in_a_browser_cannot_use_a_server_without_a_key(gateway: Gateway):
    for headers in ({"Host": "evil.example"}, {"Origin": "https://evil.example"}):
        status, found = gateway.ask("POST", CHAT, BODY, **headers)
        assert (status, found["error"]["code"]) == (403, "foreign_origin")
    # A form needs no permission of the server, and cannot send this content type.
    status, _ = gateway.ask("POST", CHAT, BODY, Content_Type="text/plain")
    assert status == 415
    assert gateway.ask("POST", CHAT, BODY, Origin="http://localhost:3000")[0] == 200


# -- statuses -------------------------------------------------------------------------------------


def test_what_is_not_there_is_404_and_what_is_over_is_410(gateway: Gateway):
    _, made = gateway.ask("POST", "/sessions")
    assert gateway.ask("POST", "/s/nobody/v1/chat/completions", BODY)[0] == 404
    assert gateway.ask("POST", "/sessions/nobody/reward", {"reward": 1})[0] == 404
    assert gateway.ask("GET", "/nothing")[0] == 404
    assert gateway.ask("GET", CHAT)[0] == 405
    status, found = gateway.ask("POST", CHAT, {**BODY, "model": "gpt-9"})
    assert (status, found["error"]["code"]) == (404, "model_not_found")
    assert gateway.ask("POST", f"/sessions/{made['id']}/finish")[0] == 200
    status, raw, headers = gateway.ask_raw("POST", f"/s/{made['id']}{CHAT}", BODY)
    assert (status, headers["x-should-retry"]) == (410, "false")
    assert json.loads(raw)["error"]["code"] == "session_finished"
    assert gateway.ask("DELETE", f"/sessions/{made['id']}")[0] == 200
    assert gateway.ask("POST", f"/s/{made['id']}{CHAT}", BODY)[0] == 404


def test_a_dialogue_that_is_too_long_has_the_dialects_own_code(gateway: Gateway):
    long = "x" * 30_000
    _, found = gateway.ask("POST", CHAT, asking(long))
    assert found["error"]["code"] == "context_length_exceeded"
    status, found = gateway.ask("POST", "/v1/messages", {**asking(long), "max_tokens": 5})
    assert (status, found["error"]["type"]) == (400, "invalid_request_error")
    assert found["error"]["message"].startswith("prompt is too long: ")


def test_an_engine_that_is_down_is_503_and_an_error_inside_is_500(gateway: Gateway, caplog: Any):
    status, raw, headers = gateway.ask_raw("POST", CHAT, asking("engine down"))
    assert (status, headers["Retry-After"]) == (503, "1")
    assert json.loads(raw)["error"]["code"] == "engine_down"
    status, raw, headers = gateway.ask_raw("POST", CHAT, asking("broken"))
    assert (status, headers["x-should-retry"]) == (500, "false")
    assert "ZeroDivisionError" in caplog.text
    assert gateway.ask("POST", CHAT, BODY)[0] == 200


def test_bodies_that_are_too_large_or_too_slow_are_refused(gateway: Gateway):
    status, found = gateway.ask("POST", CHAT, asking("x" * 200_000))
    assert (status, found["error"]["code"]) == (413, "body_too_large")
    host, port = gateway.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as slow:
        slow.sendall(
            f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            "Content-Length: 1000\r\n\r\n{".encode()
        )
        assert slow.recv(4096).startswith(b"HTTP/1.1 408")


def test_headers_that_never_end_are_timed_out(gateway: Gateway):
    host, port = gateway.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as slow:
        slow.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nX-Half: ".encode())
        assert slow.recv(4096) == b"", "the connection is closed"


def test_a_body_whose_compression_is_broken_is_refused(gateway: Gateway):
    for encoding in ("gzip", "deflate"):
        body = b"\x1f\x8b\x08\x00 this is no compressed data at all"
        status, found = gateway.ask("POST", CHAT, body, Content_Encoding=encoding)
        assert (status, found["error"]["code"]) == (400, "unreadable_body")


def test_an_id_that_the_tokenizer_does_not_spell_has_empty_bytes(gateway: Gateway):
    padded = gateway.renderer.tokenizer.vocab_size + 7
    reply = gateway.engine._reply
    gateway.engine._reply = lambda request: [padded, *reply(request)]
    try:
        found = gateway.chat(USER, logprobs=True)
    finally:
        gateway.engine._reply = reply
    first = found["choices"][0]["logprobs"]["content"][0]
    assert (first["token"], first["bytes"]) == ("", [])


@pytest.mark.parametrize(
    "reward",
    [float("nan"), float("inf"), "1", None, True, 10**400, [1]],
    ids=["nan", "infinite", "text", "none", "true", "huge", "list"],
)
def test_rewards_that_are_no_finite_number_are_refused(gateway: Gateway, reward: Any):
    _, made = gateway.ask("POST", "/sessions")
    path = f"/sessions/{made['id']}/reward"
    body = json.dumps({"reward": reward}).encode()
    assert gateway.ask("POST", path, body)[0] == 400
    assert (
        gateway.ask("POST", path, json.dumps({"reward": 1, "parts": {"a": reward}}).encode())[0]
        == 400
    )


def test_a_session_is_rewarded_finished_and_read(gateway: Gateway):
    _, made = gateway.ask("POST", "/sessions", {"task": {"id": "t1", "payload": {"a": 1}}})
    found = gateway.chat(USER, path=f"/s/{made['id']}")
    assert found["choices"][0]["message"]["content"] == "hello"
    _, shown = gateway.ask("POST", f"/sessions/{made['id']}/reward", {"reward": 0.5})
    assert list(shown["rewards"].values()) == [0.5] and not shown["is_finished"]
    _, shown = gateway.ask("GET", f"/sessions/{made['id']}")
    assert list(shown["rewards"].values()) == [0.5]
    _, shown = gateway.ask("POST", f"/sessions/{made['id']}/finish", {})
    assert list(shown["rewards"].values()) == [0.5]
    assert shown["is_finished"]
    assert shown["task"] == "t1"
    _, trajectory = gateway.ask("GET", f"/sessions/{made['id']}/trajectory")
    sampled = [s for s in trajectory["segments"] if s["is_sampled"]]
    assert len(sampled) == 1
    assert len(sampled[0]["token_ids"]) == len(sampled[0]["logprobs"])


# -- time, retries, clients that leave ------------------------------------------------------------


def test_a_stream_that_takes_long_begins_with_signs_of_life(gateway: Gateway):
    _, made = gateway.ask("POST", "/sessions")
    gateway.engine.delay = 0.2
    body = {**BODY, "stream": True}
    _, raw, _ = gateway.ask_raw("POST", f"/s/{made['id']}{CHAT}", body)
    assert raw.startswith(b": the turn is being sampled\n\n")
    assert raw.endswith(b"data: [DONE]\n\n")
    late = {**asking("engine down"), "stream": True}
    status, raw, _ = gateway.ask_raw("POST", f"/s/{made['id']}{CHAT}", late)
    assert status == 200 and b'"code": "engine_down"' in raw
    body = {**late, "max_tokens": 5}
    _, raw, _ = gateway.ask_raw("POST", f"/s/{made['id']}/v1/messages", body)
    assert b"event: ping" in raw and b"event: error" in raw and b"overloaded_error" in raw


def test_a_retry_gets_the_first_attempts_turn_and_a_new_request_another(gateway: Gateway):
    _, made = gateway.ask("POST", "/sessions")
    path = f"/s/{made['id']}{CHAT}"
    session = gateway.sessions.get(made["id"])

    def ask(**headers: str) -> str:
        return gateway.ask_raw("POST", path, BODY, **headers)[2]["x-lockstep-leaf"]

    first = ask(x_stainless_retry_count="0")
    assert ask(x_stainless_retry_count="1") == ask(x_stainless_retry_count="2") == first
    second = ask(x_stainless_retry_count="0")
    assert second != first
    assert ask(x_stainless_retry_count="1") == second
    assert ask() != ask()
    assert session.trajectory.num_turns == 4


def test_the_turn_of_a_client_that_leaves_is_there_for_its_retry(gateway: Gateway):
    _, made = gateway.ask("POST", "/sessions")
    session = gateway.sessions.get(made["id"])
    gateway.engine.delay = 0.2
    host, port = gateway.url.removeprefix("http://").split(":")

    def leave(**headers: str) -> None:
        connection = http.client.HTTPConnection(host, int(port))
        sent = {"Content-Type": "application/json", **headers}
        connection.request("POST", f"/s/{made['id']}{CHAT}", json.dumps(BODY), sent)
        time.sleep(0.05)
        connection.close()

    leave(**{"x-stainless-retry-count": "0"})
    time.sleep(0.3)
    assert session.trajectory.num_turns == 1
    leave()  # nobody can ask for this one again
    time.sleep(0.3)
    assert session.trajectory.num_turns == 1
    gateway.ask("POST", f"/sessions/{made['id']}/reward", {"reward": 1.0})
    gateway.ask("POST", f"/sessions/{made['id']}/finish")
    assert session.trajectory.rewards == {}, "nobody received it"
    assert session.trajectory.metrics["gateway/abandoned_turns"] == 1


def test_a_choice_that_fails_takes_the_others_with_it_until_a_retry(gateway: Gateway):
    _, made = gateway.ask("POST", "/sessions")
    session, path = gateway.sessions.get(made["id"]), f"/s/{made['id']}{CHAT}"
    body = asking("down at the second turn") | {"n": 2}
    for attempt, expected, num_rewarded in ((0, 503, 0), (1, 200, 2)):
        headers = {"x-stainless-retry-count": str(attempt)}
        assert gateway.ask("POST", path, body, **headers)[0] == expected
        gateway.ask("POST", f"/sessions/{made['id']}/reward", {"reward": 1.0})
        assert len(session.rewards) == num_rewarded
    assert session.trajectory.num_turns == 3  # the one that nobody received is left out


def test_concurrent_requests_are_answered_side_by_side(gateway: Gateway):
    _, made = gateway.ask("POST", "/sessions")
    gateway.engine.delay = 1.0
    began, path = time.monotonic(), f"/s/{made['id']}{CHAT}"
    with ThreadPoolExecutor(8) as pool:
        assert [*pool.map(lambda _: gateway.ask("POST", path, BODY)[0], range(8))] == [200] * 8
    assert time.monotonic() - began < 8


def test_many_sessions_at_once_are_each_one_exact_path(gateway: Gateway):
    num_turns = 5

    def play(at: int) -> str:
        _, made = gateway.ask("POST", "/sessions")
        dialogue: list[Any] = []
        for turn in range(num_turns):
            dialogue.append({"role": "user", "content": f"agent {at}, turn {turn}"})
            found = gateway.chat(*dialogue, path=f"/s/{made['id']}")
            dialogue.append(found["choices"][0]["message"])
        return made["id"]

    with ThreadPoolExecutor(16) as agents:
        ids = list(agents.map(play, range(16)))
    for id_ in ids:
        gateway.check_exact(id_, num_turns=num_turns)


def test_a_claim_where_nothing_hands_out_episodes_says_so(gateway: Gateway):
    status, found = gateway.ask("POST", "/claim", {"wait_seconds": 0.1})
    assert (status, found["error"]["code"]) == (409, "nothing_to_claim")
    assert gateway.ask("POST", "/claim", {"wait_seconds": -1})[0] == 400


def test_models_are_listed_and_other_names_let_in_by_setting():
    with Gateway(script, config=GatewayConfig(names=("gpt-9",))) as gateway:
        _, found = gateway.ask("GET", "/v1/models")
        assert [entry["id"] for entry in found["data"]] == [MODEL, "gpt-9"]
        assert gateway.ask("GET", "/v1/models/gpt-9") == (200, found["data"][1])
        assert gateway.ask("GET", "/v1/models/other")[0] == 404
        assert gateway.ask("POST", CHAT, {**BODY, "model": "other"})[0] == 404
        assert gateway.ask("POST", CHAT, {**BODY, "model": "gpt-9"})[0] == 200
    with Gateway(script, config=GatewayConfig(names=("*",))) as gateway:
        assert gateway.ask("POST", CHAT, {**BODY, "model": "anything"})[0] == 200


def test_a_port_that_is_taken_is_one_clear_error(gateway: Gateway):
    other = Gateway(script, config=GatewayConfig(port=int(gateway.url.rpartition(":")[2])))
    with pytest.raises(ConfigError, match="port=0"):
        asyncio.run(other.server.start())


def test_an_address_of_another_machine_is_not_said_to_lack_a_free_port():
    other = Gateway(script, config=GatewayConfig(host="203.0.113.1"), key="secret")
    with pytest.raises(ConfigError, match=r"gateway.host=203\.0\.113\.1") as caught:
        asyncio.run(other.server.start())
    assert "takes a free one" not in str(caught.value)


def test_refusals_show_what_was_sent(gateway: Gateway):
    for change, text in (
        ({"temperature": -1}, "found -1."),
        ({"max_tokens": 0}, "found 0."),
        ({"messages": [{"role": "wizard", "content": "a"}]}, 'found "wizard".'),
        ({"messages": [{"content": "a"}]}, "found null."),
    ):
        status, body = gateway.ask("POST", CHAT, {**BODY, **change})
        assert status == 400 and body["error"]["message"].endswith(text)


# -- anything at all ------------------------------------------------------------------------------

_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)
_SEEDS: dict[str, dict[str, Any]] = {
    CHAT: {
        **BODY,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
        "stream": False,
        "n": 1,
        "stop": ["a"],
        "stream_options": {"include_usage": True},
        "messages": [
            USER,
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
                ],
            },
            {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "x"}]},
        ],
    },
    "/v1/messages": {
        "model": MODEL,
        "max_tokens": 9,
        "system": [{"type": "text", "text": "s"}],
        "tools": [{"name": "f", "input_schema": {}}],
        "messages": [
            USER,
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "c", "content": "x"}],
            },
        ],
    },
    "/v1/responses": {
        "model": MODEL,
        "instructions": "s",
        "include": [],
        "tools": [{"type": "function", "name": "f", "parameters": {}}],
        "input": [
            {"role": "user", "content": "hi"},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "t"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "x"},
        ],
    },
}


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inside = value.items() if isinstance(value, dict) else enumerate(value)
    found = [path] if path else []
    if isinstance(value, dict | list):
        for key, inner in inside:
            found += (
                _places(inner, (*path, key)) if isinstance(inner, dict | list) else [(*path, key)]
            )
    return found


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_bodies_changed_at_random_are_answered_or_refused_in_good_form(
    gateway: Gateway, data: st.DataObject
):
    path = data.draw(st.sampled_from(sorted(_SEEDS)))
    body = json.loads(json.dumps(_SEEDS[path]))
    for _ in range(data.draw(st.integers(1, 2))):
        *above, last = data.draw(st.sampled_from(_places(body)))
        target = body
        for key in above:
            target = target[key]
        target[last] = data.draw(_VALUES)
        if not isinstance(target[last], dict | list):
            break
    status, raw, _ = gateway.ask_raw("POST", path, json.dumps(body).encode())
    assert status in (200, 400, 404), raw
    if status != 200:
        error = json.loads(raw)["error"]
        assert error["message"] and error["type"]


@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(raw=st.binary(max_size=200), path=st.sampled_from([*sorted(_SEEDS), "/sessions", "/claim"]))
def test_bytes_at_random_are_refused_in_good_form(gateway: Gateway, raw: bytes, path: str):
    status, answer, _ = gateway.ask_raw("POST", path, raw)
    assert 200 <= status < 500, answer


def test_refusals_keep_what_programs_read():
    refusal = Refusal(404, "unknown_session", "text", parameter="p")
    assert (refusal.status, refusal.code, refusal.parameter) == (404, "unknown_session", "p")


def test_idle_connections_do_not_lock_anybody_out(caplog: Any):
    with Gateway(script, config=_FewConnections()) as gateway, ExitStack() as idle:
        host, port = gateway.url.removeprefix("http://").split(":")
        held = [
            idle.enter_context(socket.create_connection((host, int(port)), timeout=10))
            for _ in range(60)
        ]
        assert gateway.ask("GET", "/health")[0] == 200
        assert held[0].recv(1) == b"", "the one that waited longest made room"
        held[-1].sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert held[-1].recv(4096).startswith(b"HTTP/1.1 200")
    assert not caplog.records


# -- log and page ---------------------------------------------------------------------------------


def test_each_request_is_a_line_of_the_log_without_what_was_said(tmp_path):
    log = tmp_path / "requests.jsonl"
    with Gateway(script, config=GatewayConfig(log=str(log))) as gateway:
        gateway.ask("POST", CHAT, asking("a secret"))
        gateway.ask_raw("POST", CHAT, {**asking("a secret"), "stream": True})
        gateway.ask("POST", CHAT, {**asking("a secret"), "seed": "secret"})
        with urllib.request.urlopen(gateway.url, timeout=30) as response:
            status, page = response.status, response.read().decode()
    assert "secret" not in log.read_text() and "secret" not in page and f"{gateway.url}/v1" in page
    answered, streamed, refused, shown = map(json.loads, log.read_text().splitlines())
    for line in (answered, streamed):
        assert (line["route"], line["status"], line["model"]) == (f"POST {CHAT}", 200, MODEL)
        assert line["tokens_in"] > 5 and line["tokens_out"] > 3 and line["session"]
        assert line["milliseconds"] > 0 and line["time"].endswith("Z")
    assert (refused["status"], refused["error"]) == (400, "invalid_value")
    assert shown["route"] == "GET /" and status == 200


def test_a_log_that_cannot_be_written_is_said_before_the_server_starts(tmp_path):
    config = GatewayConfig(log=str(tmp_path / "none" / "requests.jsonl"))
    with pytest.raises(ConfigError, match=r"gateway\.log="), Gateway(script, config=config):
        pass


def test_prometheus_reads_the_counts(gateway: Gateway):
    def counts() -> dict[str, str]:
        status, raw, headers = gateway.ask_raw("GET", "/metrics")
        assert status == 200 and headers["Content-Type"].startswith("text/plain; version=0.0.4")
        lines = [line for line in raw.decode().splitlines() if not line.startswith("#")]
        return dict(line.split(" ") for line in lines)

    before = counts()
    gateway.ask("GET", "/no/such/path")
    after = counts()
    name = "lockstep_gateway_refused_total"
    assert int(after[name]) == int(before[name]) + 1
    assert {"lockstep_gateway_sessions", "lockstep_gateway_sampled_tokens_total"} <= after.keys()
