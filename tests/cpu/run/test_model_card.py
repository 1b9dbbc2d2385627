"""An export has a model card that the hub's own reader accepts, and goes to the hub or stays."""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from command_line import refusal
from huggingface_hub import ModelCard

import lockstep
from lockstep.cli import BAD_INPUT, OK, main
from lockstep.run.model_card import write_card
from lockstep.store.run import RunDirectory, load_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("card") / "run"
    words = "steps=2 groups_per_step=1 group_size=2 evaluation.num_tasks=2 checkpoint.every=1"
    assert main(["train", "quickstart", *words.split(), f"out={path}", "--json"]) == OK
    return path


def card_of(directory):
    card = ModelCard.load(directory / "README.md")
    return card.data, card.text


def test_an_export_has_a_card_with_the_figures_measured_on_its_checkpoint(run, tmp_path):
    lockstep.export(run, tmp_path / "hf")
    data, text = card_of(tmp_path / "hf")
    said = {result.metric_name: result.metric_value for result in data.eval_results}
    measured = load_run(run).metrics[-1]
    assert said["greedy"] == measured["eval/greedy/mean@1"]
    assert data.library_name == "transformers" and "lockstep" in data.tags
    assert data.license is None and data.base_model is None, "tiny-gpt-oss is no hub model"
    assert "All are equal to the sampler's, bit for bit." in text
    assert '"group_size": 2' in text and "Recipe `quickstart`, with these changes" in text
    assert str(run) not in text, "no directory of this machine"


def test_a_checkpoint_that_was_not_evaluated_has_no_figures(run, tmp_path):
    lockstep.export(f"{run}@1", tmp_path / "hf")
    data, text = card_of(tmp_path / "hf")
    assert data.eval_results is None
    assert "was not evaluated on held-out tasks" in text


def test_an_adapters_card_names_the_model_and_the_data_set_of_the_hub(tmp_path):
    config = {
        "name": "mine", "model": "Qwen/Qwen3-0.6B", "task": {"type": "math", "source": "gsm8k"},
        "objective": {"type": "cispo"}, "out": str(tmp_path / "secret"),
    }  # fmt: skip
    row = {"mismatch/compared_tokens": 9, "mismatch/unequal_tokens": 3}
    with RunDirectory.create(tmp_path / "run", config) as writer:
        writer.log({"step": 0, **row, "mismatch/k3": 0.02, "mismatch/max_abs_diff": 0.5})
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    write_card(
        tmp_path / "adapter", load_run(tmp_path / "run"), checkpoint="step-000001", hub="me/own"
    )
    data, text = card_of(tmp_path / "adapter")
    assert data.base_model == "Qwen/Qwen3-0.6B" and data.base_model_relation == "adapter"
    assert data.datasets == ["openai/gsm8k"] and data.library_name == "peft"
    assert {"lora", "cispo"} <= set(data.tags)
    assert 'PeftModel.from_pretrained(base, "me/own")' in text
    assert "3 differ from the sampler's. The largest difference is 0.5 nats" in text
    assert str(tmp_path) not in text


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as an upload asks for; keeps the names of what was committed."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        said = {}
        if self.path == "/api/repos/create":
            said = {"url": f"http://{self.headers['Host']}/me/my-model", "id": "me/my-model"}
        elif "/preupload/" in self.path:
            files = json.loads(body)["files"]
            fate = {"uploadMode": "regular", "shouldIgnore": False, "oid": None}
            said = {"files": [{"path": each["path"], **fate} for each in files]}
        elif "/commit/" in self.path:
            lines = map(json.loads, body.splitlines())
            self.server.committed += [
                line["value"]["path"] for line in lines if line["key"] == "file"
            ]
            place = f"http://{self.headers['Host']}/me/my-model"
            said = {"commitUrl": f"{place}/commit/1", "commitOid": "1"}
        self.answer(said)

    def do_GET(self):
        self.answer({"id": "me/my-model", "siblings": [], "sha": "1"})

    def answer(self, said):
        sent = json.dumps(said).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(sent)))
        self.end_headers()
        self.wfile.write(sent)

    def log_message(self, *_):
        pass


def exported(run, *words, endpoint):
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_TOKEN": "hf_x", "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-m", "lockstep.cli", "export", str(run), *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


def test_an_export_is_kept_when_the_hub_is_out_of_reach_and_uploaded_when_it_is_back(run):
    failed = exported(run, "--hub", "me/my-model", endpoint="http://127.0.0.1:9")
    said = " ".join(failed.stderr.split())
    assert failed.returncode == BAD_INPUT and "Traceback" not in said, said
    assert "me/my-model was not uploaded (ConnectError" in said
    assert "Nothing is lost" in said and "hf upload me/my-model" in said
    kept = run / "hub" / "step-000002"
    assert {"README.md", "config.json", "model.safetensors"} <= {p.name for p in kept.iterdir()}
    (kept / "README.md").write_text((kept / "README.md").read_text() + "\nmine\n")

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as hub:
        hub.committed = []
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{hub.server_address[1]}"
        done = exported(run, "--hub", "me/my-model", "--json", endpoint=url)
        hub.shutdown()
    assert done.returncode == OK, done.stderr
    assert json.loads(done.stdout)["hub"].endswith("/me/my-model")
    assert set(hub.committed) == {p.name for p in kept.iterdir()}
    assert "mine" in (kept / "README.md").read_text(), "an edited card is uploaded as it is"


def test_a_name_that_no_repository_can_have_is_refused_before_anything_is_written(run, capsys):
    said = refusal("export", run, "--hub", "a/b/c", capsys=capsys)
    assert "expected ORG/NAME or NAME" in said
    assert "Give --hf DIR, or --hub NAME" in refusal("export", run, capsys=capsys)
