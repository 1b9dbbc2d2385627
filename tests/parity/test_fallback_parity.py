"""Models that only transformers has, in the trainer: its log-probs and its gradients."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from lockstep.config import resolve
from lockstep.engines.base import EngineContext
from lockstep.engines.config import EmbeddedConfig, EngineConfig
from lockstep.engines.embedded.engine import EmbeddedEngine
from lockstep.engines.registry import make_engine
from lockstep.errors import CapabilityError, CheckpointError
from lockstep.models.config import FallbackConfig
from lockstep.models.hf_io import hf_tensors, load_checkpoint, read_tensors
from lockstep.models.locate import locate_model
from lockstep.objectives.config import Reinforce
from lockstep.objectives.losses import make_loss
from lockstep.ops.context import PackedContext, Support
from lockstep.recipes import find_recipe
from lockstep.run.train import train
from lockstep.training.config import TrainerConfig
from lockstep.training.trainer import Trainer
from lockstep.types import Ragged, Sample

transformers = pytest.importorskip("transformers", reason="pip install 'lockstep-rl[transformers]'")

from lockstep.models.fallback import load_fallback  # noqa: E402

KINDS = json.loads(Path(__file__).with_suffix(".json").read_text())
"""The head of Phi has a bias. The body of Llama4Text has another name than its class says."""
PLAIN = {"Olmo2", "Olmoe", "GPT2"}


def make(kind, path):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**KINDS[kind])
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.save_pretrained(path)
    return model.eval()


@pytest.fixture(params=KINDS)
def pair(request, tmp_path):
    theirs = make(request.param, tmp_path / "hf")
    return request.param, theirs, load_fallback(tmp_path / "hf"), tmp_path


def rows():
    """Three begin alike: packing computes their beginning once, and a fallback once for each."""
    rng = np.random.default_rng(1)
    stem = rng.integers(1, 61, 9)
    out = []
    for number, length in enumerate((5, 9, 2, 21)):
        ids = rng.integers(1, 61, length)
        ids = (np.concatenate([stem, ids]) if number < 3 else ids).astype(np.int32)
        mask = np.zeros(len(ids), bool)
        mask[-length // 2 :] = True
        advantages = np.where(mask, rng.normal(), 0.0).astype(np.float32)
        out.append(Sample(id=str(number), token_ids=ids, loss_mask=mask,
                          columns={"advantages": advantages}))  # fmt: skip
    return out


def test_a_step_of_the_trainer_has_the_gradient_of_transformers(pair):
    kind, theirs, ours, root = pair
    assert ours.has_plain_head == (kind in PLAIN)
    trainer = Trainer(ours, TrainerConfig(), like=root / "hf")
    samples = rows()
    trainer.forward_backward(samples, make_loss(Reinforce()), column="logprobs")
    trainer.optimizer.gradient_norm()

    num_trained = sum(int(s.loss_mask.sum()) for s in samples)
    for sample in samples:
        ids = torch.from_numpy(sample.token_ids.astype(np.int64))
        logprobs = theirs(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
        logprobs = logprobs.gather(1, ids[1:, None])[:, 0][sample.loss_mask[1:]]
        found = torch.from_numpy(sample.columns["logprobs"][sample.loss_mask])
        # Rounding: a padded batch beside one row. 1e-5 but for Gemma 2 under transformers 5.17.
        assert (found - logprobs).abs().max() <= 2e-5 * logprobs.abs().max()
        weight = torch.from_numpy(sample.columns["advantages"][sample.loss_mask])
        (-(logprobs * weight).sum() / num_trained).backward()
    expected = {f"inner.{n}": p.grad for n, p in theirs.named_parameters()}
    found = trainer.optimizer.gradients()
    for name, gradient in expected.items():
        error = (found[name] - gradient).norm() / gradient.norm().clamp(min=1e-6)
        assert error <= 2e-5, (name, float(error))


def test_it_is_saved_and_loaded_as_transformers_would(pair):
    _, theirs, ours, root = pair
    like = json.loads((root / "hf" / "config.json").read_text())
    trainer = Trainer(ours, TrainerConfig(lr=1e-2), like=root / "hf")
    trainer.save(root / "before")
    trainer.forward_backward(rows(), make_loss(Reinforce()))
    trainer.optim_step()
    trainer.save(root / "after")
    saved = json.loads((root / "after" / "policy" / "config.json").read_text())
    assert {k: v for k, v in saved.items() if like.get(k) != v} == {}
    again = type(theirs).from_pretrained(root / "after" / "policy")
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, ours.inner.get_parameter(name))
    trainer.load(root / "before")
    for name, parameter in theirs.named_parameters():
        assert torch.equal(parameter, ours.inner.get_parameter(name))
    on_disk = read_tensors(root / "before" / "policy")
    sent = dict(hf_tensors(ours))
    assert sent.keys() == on_disk.keys()
    assert all(torch.equal(tensor, on_disk[name].read()) for name, tensor in sent.items())


def test_what_was_drawn_from_a_part_of_the_vocabulary_is_scored_over_it(tmp_path):
    theirs = make("Gemma2", tmp_path)
    ours = load_fallback(tmp_path)
    ids = torch.tensor([5, 9, 3, 7])
    kept = Ragged.of([np.array(ids, np.int32) for ids in ([3, 4, 9], [], [7, 1])])
    logprobs, entropy = ours.score(
        ids, torch.arange(4), PackedContext.of([4]), predictors_N=torch.arange(3),
        targets_N=ids[1:], temperature=0.7, support=Support.of(kept),
    )  # fmt: skip
    logits = theirs(input_ids=ids[None]).logits[0, :3] / 0.7
    wanted = [
        logits[0, [3, 4, 9]].log_softmax(0)[2], logits[1].log_softmax(0)[3],
        logits[2, [7, 1]].log_softmax(0)[0],
    ]  # fmt: skip
    assert torch.allclose(logprobs, torch.stack(wanted), atol=1e-5)
    assert 0 < entropy[0] <= np.log(3) and 0 < entropy[2] <= np.log(2)


def test_what_only_the_decoder_can_is_refused_by_name(tmp_path):
    make("Olmo2", tmp_path)
    ours = load_fallback(tmp_path)
    ids = torch.arange(3)
    with pytest.raises(CapabilityError, match="found object: no embedded engine"):
        ours(ids, ids, object())
    with pytest.raises(CapabilityError, match="cannot replay or report routes"):
        ours(ids, ids, PackedContext.of([3]), object())
    with pytest.raises(CapabilityError, match="cannot run a FallbackModel"):
        context = EngineContext(
            model=ours, token_bytes=(), directory=tmp_path, vocab_size=64, max_tokens=64,
            dtype="float32",
        )  # fmt: skip
        make_engine(EmbeddedConfig(), context)


def test_tensors_that_transformers_would_fill_at_random_are_an_error(tmp_path):
    from safetensors.torch import load_file, save_file

    make("Olmo2", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.norm.weight"]
    tensors["stray"] = torch.zeros(2)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"\(1\): model\.norm.*\(1\)"):
        load_fallback(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(
        {"model_type": "nobody", "vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 1}
    ))  # fmt: skip
    assert FallbackConfig.from_directory(tmp_path).architecture == "nobody"
    with pytest.raises(CheckpointError, match="transformers cannot load nobody"):
        load_fallback(tmp_path)


# -- a run ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class OutsideConfig(EngineConfig):
    """An engine that has weights of its own and is sent the trainer's."""


class OutsideEngine(EmbeddedEngine):
    @property
    def capabilities(self):
        return replace(super().capabilities, weight_sources=("tensors",))


@make_engine.register
def _(config: OutsideConfig, context):
    decoder = load_checkpoint(locate_model("tiny-qwen3"))
    return OutsideEngine(decoder, EmbeddedConfig(), token_bytes=context.token_bytes)


def test_a_run_trains_through_transformers_with_an_engine_that_is_sent_its_weights(tmp_path):
    words = [
        "model=tiny-qwen3", "fallback=true", "contract=auto", "steps=2", "groups_per_step=2",
        "group_size=4", "evaluation.num_tasks=2", "evaluation.at_start=false",
    ]  # fmt: skip
    recipe = replace(find_recipe("quickstart"), engine=OutsideConfig())
    train(resolve(recipe, words), out=tmp_path / "run", view="json")
    rows = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "train/loss" in row]
    assert len(steps) == 2
    for row in steps:  # one computes by the decoder's ops, the other by transformers' modules
        assert 0 < row["mismatch/max_abs_diff"] < 1e-3, row["mismatch/max_abs_diff"]
        assert row["mismatch/k3"] < 1e-8
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert "transformers computes the model" in environment["numerics"]
