"""The family that docs/models.md adds on one screen, against transformers and in a run."""

import re
from pathlib import Path

import pytest
import torch
from cpu import schedules
from parity.test_decoder_parity import distances, our_logits, their_gradients

from lockstep.cli import OK, main
from lockstep.models.config import ModelConfig
from lockstep.models.decoder import Decoder
from lockstep.models.hf_io import WEIGHTS, load_checkpoint, save_checkpoint
from lockstep.models.reading import FAMILIES
from lockstep.models.shapes import decoder_layout
from lockstep.ops import selftest
from lockstep.store.run import load_run

transformers = pytest.importorskip("transformers", reason="pip install 'lockstep-rl[transformers]'")
PAGE = Path(__file__).parents[2] / "docs" / "models.md"
FILE, MODEL = re.findall(
    r"```python\n(.*?)```", PAGE.read_text().partition("## A family of your own")[2], re.S
)[:2]


@pytest.fixture
def family():
    exec(FILE, {"__name__": "olmo2"})
    return FAMILIES["olmo2"]


@pytest.fixture
def model(family, tmp_path, monkeypatch):
    """The page's model, with norms that are not at their start."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    exec(MODEL, {})
    theirs = transformers.Olmo2ForCausalLM.from_pretrained(
        "tiny-olmo2", attn_implementation="eager"
    )
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape))
    theirs.save_pretrained("tiny-olmo2")
    return theirs.eval(), tmp_path / "tiny-olmo2"


def test_its_logits_gradients_and_checkpoints_are_those_of_transformers(model, tmp_path):
    theirs, directory = model
    ours, lengths = load_checkpoint(directory), [21, 4, 33]
    generator = torch.Generator().manual_seed(3)
    # transformers' embedding has no gradient at the id of padding, which is 1.
    ids = torch.randint(2, ours.config.vocab_size, (sum(lengths),), generator=generator)
    wanted = torch.cat([theirs(input_ids=row[None]).logits[0] for row in ids.split(lengths)])
    found = our_logits(ours, lengths, ids)
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()

    weight = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(4))
    (found.log_softmax(-1) * weight).sum().backward()
    gradients = {name: parameter.grad for name, parameter in ours.named_parameters()}
    mine = {
        piece.name: piece.view(gradients[name]).reshape(piece.shape)
        for name, layout in decoder_layout(ours.config).items()
        for piece in layout.pieces
    }
    assert max(distances(mine, their_gradients(theirs, lengths, ids, weight)).values()) <= 1e-5

    save_checkpoint(ours, tmp_path / "again", like=directory)
    assert (tmp_path / "again" / WEIGHTS).read_bytes() == (directory / WEIGHTS).read_bytes()


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_its_sampler_and_trainer_agree_in_every_bit(model, lora_rank, monkeypatch):
    _, directory = model
    config = ModelConfig.from_directory(directory)
    given = ("rms_norm_eps", "rope_theta", "max_positions")  # by `make_model`
    fields = {name: getattr(config, name) for name in config.__slots__ if name not in given}
    monkeypatch.setitem(schedules.FAMILIES, "olmo2", fields)
    made = schedules.make_model("olmo2", "float32", lora_rank=lora_rank)
    assert isinstance(made, Decoder) and selftest.prove(made).is_kept
    arm = schedules.Arm(
        model="olmo2", dtype="float32", threads=(1, 1), seeds=(0,), lora_rank=lora_rank
    )
    tally = schedules.compare(arm)
    assert tally.compared > 1000 and tally.unequal == 0 and tally.updates == 2


def test_a_run_and_the_doctor_take_it(model, tmp_path):
    settings = ["model=tiny-olmo2", "contract=true-on-policy", "steps=2"]
    settings += ["groups_per_step=2", "group_size=2", "evaluation=none", "out=run"]
    assert main(["train", "quickstart", *settings, "lora.rank=4"]) == OK
    rows = [row for row in load_run(tmp_path / "run").metrics if "train/loss" in row]
    assert len(rows) == 2 and all(row["mismatch/k3"] == 0.0 for row in rows)
    assert main(["doctor", "run", "--model", "own"]) == OK
