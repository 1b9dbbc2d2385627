"""Files that start Lockstep elsewhere: each is linted, and each of its commands plans a run."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lockstep.cli import main
from lockstep.models.locate import locate_model

DEPLOY = Path(__file__).parents[2] / "deploy"
TEXTS = {path.name: path.read_text() for path in sorted(DEPLOY.iterdir())}


def commands(text):
    """The words of each `lockstep train`, of shell lines and of a compose file's command."""
    joined = re.sub(r"\\\n\s*", "", text)
    found = re.findall(r"^[^#\n]*?\blockstep train (.*)$", joined, re.M)
    found += re.findall(r"^\s+train (.*)$", joined, re.M)
    return [shlex.split(each) for each in found]


COMMANDS = [(name, words) for name, text in TEXTS.items() for words in commands(text)]


def lint(tool, *words, text=None):
    program = shutil.which(tool, path=str(Path(sys.executable).parent)) or shutil.which(tool)
    if program is None:
        pytest.skip(f"{tool} is not installed: pip install {tool}-bin or {tool}-py")
    done = subprocess.run([program, *words], input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_dockerfile_is_sound():
    lint("hadolint", str(DEPLOY / "Dockerfile"))


@pytest.mark.parametrize("name", [name for name in TEXTS if name.endswith(".slurm")])
def test_the_job_scripts_are_sound(name):
    lint("shellcheck", str(DEPLOY / name))


def test_the_scripts_of_the_cloud_are_sound():
    task = yaml.safe_load(TEXTS["sky.yaml"])
    for part in ("setup", "run"):
        lint("shellcheck", "--shell=bash", "-", text=task[part])
    assert set(task) <= {"name", "resources", "file_mounts", "workdir", "setup", "run"}


def test_the_services_agree_with_each_other():
    services = yaml.safe_load(TEXTS["compose.yaml"])["services"]
    trainer, engine = services["trainer"], services["vllm"]
    assert list(trainer["depends_on"]) == ["vllm"] and "http://vllm:8000" in trainer["command"]
    shared = [volume for volume in engine["volumes"] if volume in trainer["volumes"]]
    assert "runs:/srv/lockstep/runs" in shared and len(shared) == 2
    assert "lockstep.engines.vllm.worker.LockstepWorker" in engine["command"][-1]


@pytest.mark.parametrize(("name", "words"), COMMANDS, ids=[name for name, _ in COMMANDS])
def test_every_command_plans_a_run(name, words, tmp_path, capsys, monkeypatch):
    """The model is a small one of the same architecture, and the data set has a few rows."""
    monkeypatch.chdir(tmp_path)
    if "resume=true" in words:  # of the run that the file's other command starts
        started = [word for other, each in COMMANDS if other == name for word in each]
        assert f"out={words[0]}" in started
        return
    shutil.copytree(locate_model("tiny-qwen3"), tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["max_position_embeddings"] = 40960
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    rows = [{"question": f"What is {n} + 1?", "answer": f"#### {n + 1}"} for n in range(200)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    python = f"engine.python={sys.executable}"  # there is no environment of vLLM here
    words = [python if word.startswith("engine.python=") else word for word in words]
    settings = [word for word in words if not word.startswith(("model=", "out="))]
    settings += ["model=model", "task.path=train.jsonl", "task.source=file"]
    assert main(["train", *settings, "--dry-run"]) == 0, capsys.readouterr().err
    assert "episodes" in capsys.readouterr().out


def test_every_file_has_a_command():
    named = {name for name, _ in COMMANDS}
    assert named | {"Dockerfile"} == set(TEXTS)
