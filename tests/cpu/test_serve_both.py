"""One server for agents and for programs of the tinker client: one address, one key, one engine."""

import asyncio
import json
import os
import ssl
import subprocess
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.agent.gateway.config import GatewayConfig
from lockstep.agent.gateway.listener import Listener
from lockstep.cli import main
from lockstep.errors import ConfigError
from lockstep.model_server import BackgroundServer, ModelServer, find_served
from lockstep.store.run import load_run

MODEL, KEY = "tiny-qwen3", "sesame$1"


def ask(url: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    given = {"Content-Type": "application/json", **headers}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, given)) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_agents_and_programs_of_the_client_share_a_server(tmp_path: Path, monkeypatch: Any):
    pytest.importorskip("tinker._version")
    import tinker

    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    settings = ("api=agents,tinker", "agent.max_turn_tokens=8")
    turn = {"model": MODEL, "messages": [{"role": "user", "content": "Where was Bela born?"}]}
    with BackgroundServer(MODEL, *settings, key=KEY, out=tmp_path) as server:
        url, key = server.url, {"Authorization": f"Bearer {KEY}"}
        service = tinker.ServiceClient(base_url=url, api_key=f"tml-{KEY}")
        trained = service.create_lora_training_client(MODEL, rank=4).result()
        sampler = trained.save_weights_and_get_sampling_client().result()
        prompt, params = tinker.ModelInput.from_ints([5, 6]), tinker.SamplingParams(max_tokens=4)
        pending = sampler.sample(prompt, 2, params)
        status, found = ask(f"{url}/v1/chat/completions", turn, **key)
        assert status == 200 and found["choices"]
        assert len(pending.result().sequences) == 2
        for path, text in [("api/v1/nonsense", "Tinker's API"), ("nonsense", "/v1/messages")]:
            status, found = ask(f"{url}/{path}", {}, **key, **{"X-API-Key": f"tml-{KEY}"})
            assert status == 404 and text in json.dumps(found)
        wrong = {"X-API-Key": "tml-other", "Authorization": "Bearer other"}
        assert ask(f"{url}/v1/chat/completions", turn, **wrong)[0] == 401
        status, found = ask(f"{url}/api/v1/healthz", **wrong)
        assert status == 401 and "TINKER_API_KEY" in found["detail"]
        with urllib.request.urlopen(url) as answer:
            page = answer.read().decode()
        assert f"{url}/v1" in page and "TINKER_BASE_URL" in page and KEY not in page
        service.close("success").result()
    (run,) = (tmp_path / "runs").glob("agents-*")
    assert [each.trajectory.status for each in load_run(run).trajectories()] == ["finished"]
    with BackgroundServer(MODEL, *settings, out=tmp_path) as server:  # a restart
        assert ask(f"{server.url}/api/v1/training_runs")[1]["cursor"]["total_count"] == 1


def test_what_cannot_be_served_together_is_said_at_once(tmp_path: Path):
    with pytest.raises(ConfigError, match=f"Add NAME={MODEL} to tinker.models"):
        BackgroundServer(MODEL, "api=agents,tinker", 'tinker.models=["a=tiny-math"]', out=tmp_path)
    with pytest.raises(ConfigError, match="Start a server for each API"):
        BackgroundServer(MODEL, "api=agents,tinker", "engine.replicas=2", out=tmp_path)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match="agents, tinker"):
        BackgroundServer(MODEL, "api=agents,other")
    of_run = replace(find_served(MODEL, ["api=tinker"]), weights=Path("a/policy"))
    with pytest.raises(ConfigError, match="RUN --hf DIR"):
        asyncio.run(ModelServer(of_run).running().__aenter__())


# -- what is printed ------------------------------------------------------------------------------


def printed(key: str = "", **gateway: Any) -> list[str]:
    served = find_served(MODEL, [f"gateway.{name}={value}" for name, value in gateway.items()])
    server = ModelServer(served, key=key)
    server.listener, server.tinker_out = Listener(served.config.gateway), Path("runs/tinker")
    return server.lines()


@pytest.mark.parametrize(
    ("gateway", "url"),
    [
        ({"port": 80}, "http://127.0.0.1:80"),
        ({"port": 80, "host": "::1"}, "http://[::1]:80"),
        ({"port": 80, "host": "0.0.0.0"}, "http://127.0.0.1:80"),
        ({"port": 80, "host": "::"}, "http://[::1]:80"),
        ({"port": 443, "certificate": ("a.pem",)}, "https://127.0.0.1:443"),
        (
            {"port": 443, "host": "example.org", "certificate": ("a.pem",)},
            "https://example.org:443",
        ),
    ],
)
def test_the_lines_can_be_pasted_into_a_shell(monkeypatch: Any, gateway: dict[str, Any], url: str):
    monkeypatch.delenv("LOCKSTEP_KEY", raising=False)
    lines = [line for line in printed(KEY, **gateway) if "export" in line]
    script = "\n".join([*lines, 'echo "$TINKER_BASE_URL" "$TINKER_API_KEY"'])
    found = subprocess.run(["bash", "-uc", script], capture_output=True, text=True, check=True)
    assert found.stdout.split() == [url, f"tml-{KEY}"]


def test_a_key_is_printed_only_if_the_shell_does_not_have_it(monkeypatch: Any):
    monkeypatch.setenv("LOCKSTEP_KEY", KEY)
    assert not any(KEY in line for line in printed(KEY))
    assert sum(KEY in line for line in printed("tml-other" + KEY)) == 1
    assert any("TINKER_API_KEY=tml-local" in line for line in printed())
    assert any("TINKER_API_KEY=tml-$LOCKSTEP_KEY" in line for line in printed("m"))
    assert any("in place of 127.0.0.1" in line for line in printed(KEY, host="0.0.0.0"))


def test_help_says_what_the_apis_are(capsys: pytest.CaptureFixture[str]):
    assert main(["serve", "--help"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "tinker: training, too; agents,tinker: both" in told


# -- TLS ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate of 127.0.0.1, and its key in the file `key.pem` beside it."""
    place = tmp_path_factory.mktemp("tls")
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=here"]
    files = ["-keyout", place / "key.pem", "-out", place / "cert.pem"]
    try:
        subprocess.run(
            [*words, "-addext", "subjectAltName=IP:127.0.0.1", *files],
            check=True,
            capture_output=True,
        )
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    return place / "cert.pem"


def test_a_server_with_a_certificate_speaks_https_alone(certificate: Path, tmp_path: Path):
    key = certificate.with_name("key.pem")
    files = f"gateway.certificate={certificate},{key}"
    with BackgroundServer(MODEL, "api=tinker", files, key=KEY, out=tmp_path) as server:
        assert server.url.startswith("https://127.0.0.1:")
        trusted = ssl.create_default_context(cafile=str(certificate))
        request = urllib.request.Request(
            f"{server.url}/api/v1/healthz", headers={"X-API-Key": f"tml-{KEY}"}
        )
        with urllib.request.urlopen(request, context=trusted) as answer:
            assert json.load(answer) == {"status": "ok"}
        with pytest.raises(OSError):
            urllib.request.urlopen(server.url.replace("https", "http"), timeout=10)


def test_a_certificate_that_cannot_be_used_is_named(certificate: Path, tmp_path: Path):
    os.symlink(certificate, tmp_path / "alone.pem")
    for name in ("alone.pem", "missing.pem"):
        config = GatewayConfig(certificate=(str(tmp_path / name),))
        with pytest.raises(ConfigError, match=f"gateway.certificate=.*{name}.*PEM"):
            asyncio.run(Listener(config).start())
