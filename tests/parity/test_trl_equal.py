"""TRL's own trainers with Lockstep inside: equal numbers, corrections and tools, on the CPU.

make test-trainers. The trainer and its model are the ones of docs/proof/trl_equal.py, which runs
50 steps.
"""

import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch
from quickstarts import quickstart_with

from lockstep.correction import Correction
from lockstep.errors import CapabilityError
from lockstep.integrations.trl import Sampler

ADDED = ("lockstep_row", "sampling_per_token_logps")
"""Columns of a batch that the mixin adds."""
ROOT = Path(__file__).resolve().parents[2]
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
for name in ("trl", "datasets", "pandas", "peft"):
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"pip install {name}", allow_module_level=True)


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    # TRL looks for an installed vllm: not for the folder tests/vllm.
    before, sys.path[:] = sys.path[:], [p for p in sys.path if Path(p) != ROOT / "tests"]
    try:
        spec.loader.exec_module(module)
        importlib.import_module("trl").GRPOTrainer, importlib.import_module("trl").RLOOTrainer
    finally:
        sys.path[:] = before
    return module


proof = load(ROOT / "docs" / "proof" / "trl_equal.py")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return proof.write_small_model(tmp_path_factory.mktemp("model"))


def trained(*arguments, **parts):
    trainer = proof.make_trainer(*arguments, **parts)
    trainer.train()
    return trainer, proof.gap_of(trainer)


def check_equal(gap, *, steps):
    assert gap["steps"] == steps and gap["compared_tokens"] > 100
    assert gap["unequal_tokens"] == 0 and gap["largest_kl"] == gap["largest_difference"] == 0.0
    shortest, longest = gap["reply_tokens"]
    assert shortest < longest, "no row was padded"


def test_both_sides_of_grpo_have_equal_numbers_and_so_has_the_reference(model, tmp_path):
    """The reference policy is a decoder too: its KL is exactly 0 before the first update."""
    settings = {"max_steps": 3, "beta": 0.1, "temperature": 0.8}
    trainer, gap = trained(model, tmp_path, settings=settings)
    check_equal(gap, steps=3)
    logged = trainer.state.log_history
    assert logged[0]["kl"] == 0.0 and logged[2]["kl"] > 0
    assert [row["doctor/causes"] for row in logged[:3]] == [0.0] * 3


def test_the_gradient_of_a_batch_is_the_one_that_trl_computes_with_its_own_model(
    model, tmp_path, monkeypatch
):
    settings = {"max_steps": 1, "gradient_accumulation_steps": 2, "learning_rate": 0.0}
    parts = {"settings": settings, "lora": True}
    ours = proof.make_trainer(model, tmp_path / "ours", **parts)
    own = proof.make_trainer(model, tmp_path / "own", is_alone=True, **parts)
    theirs, mine = (
        {n: p for n, p in t.model.named_parameters() if p.requires_grad} for t in (own, ours)
    )
    assert theirs.keys() == mine.keys()
    with torch.no_grad():
        for name, parameter in theirs.items():
            mine[name].copy_(parameter.normal_(0.0, 0.05))
    seen, found = [], {}

    def keep(self, model, inputs, *args, **more):
        seen.append({k: v for k, v in inputs.items() if k not in ADDED})
        return compute(self, model, inputs, *args, **more)

    compute = type(ours)._compute_loss
    monkeypatch.setattr(type(ours), "_compute_loss", keep)
    clock = proof.Clock()
    clock.on_pre_optimizer_step = lambda *_, **__: found.update(
        {name: p.grad.clone() for name, p in mine.items()}
    )
    ours.add_callback(clock)
    ours.train()
    own.model.train()
    own.current_gradient_accumulation_steps = len(seen)
    for inputs in seen:
        own._compute_loss(own.model, inputs).backward()
    assert len(seen) == 2 and sum(float(p.grad.square().sum()) for p in theirs.values()) > 1e-3
    for name, parameter in theirs.items():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-6)
    apart = sum(float((found[n] - p.grad).square().sum()) for n, p in theirs.items())
    assert apart < 3e-6**2 * sum(float(p.grad.square().sum()) for p in theirs.values())


def test_the_decoder_without_the_mixin_is_told_what_is_missing(model, tmp_path):
    from lockstep.integrations.causal_lm import LockstepForCausalLM

    trainer = proof.make_trainer(
        model, tmp_path, is_alone=True, settings={"max_steps": 1}, rollout_func=Sampler(),
        model=LockstepForCausalLM.from_pretrained(model),
    )  # fmt: skip
    with pytest.raises(CapabilityError, match="LockstepMixin"):
        trainer.train()


def test_an_adapter_of_peft_keeps_them_equal_with_gradient_checkpointing(model, tmp_path):
    settings = {"max_steps": 3, "gradient_checkpointing": True, "num_iterations": 2}
    trainer, gap = trained(model, tmp_path, lora=True, settings=settings)
    assert gap["unequal_tokens"] == 0 and gap["largest_difference"] == 0.0
    factors = [p for name, p in trainer.model.named_parameters() if "lora_B" in name]
    assert all(p.abs().max() > 0 for p in factors), "each factor has had a gradient"


def test_weights_of_equal_sides_are_1_and_change_no_loss(model, tmp_path):
    losses = []
    for correction in (None, Correction.mis()):
        settings = {"max_steps": 2}
        trainer, _ = trained(model, tmp_path, correction=correction, settings=settings)
        losses.append([row["loss"] for row in trainer.state.log_history if "loss" in row])
        rows = [row for row in trainer.state.log_history if "correction/weight_mean" in row]
        assert [row["correction/weight_mean"] for row in rows] == [1.0] * len(rows)
        assert len(rows) == (0 if correction is None else 2)
    assert losses[0] == losses[1]


def test_the_sampler_is_a_rollout_func(model, tmp_path):
    parts = {"rollout_func": Sampler(), "sampler": None, "settings": {"max_steps": 2}}
    check_equal(trained(model, tmp_path, **parts)[1], steps=2)


def test_rloo_samples_with_the_engine(model, tmp_path):
    correction = Correction.tis(level="sequence")
    settings = {"max_steps": 2, "beta": 0.0}
    gap = trained(
        model, tmp_path, base="RLOOTrainer", correction=correction, settings=settings
    )[1]  # fmt: skip
    check_equal(gap, steps=2)


def test_replies_after_the_answer_of_a_tool_continue_the_sampled_ids(tmp_path):
    """TRL's own loop over tools calls the engine turn by turn; ids are never encoded again."""
    from lockstep.integrations.causal_lm import LockstepForCausalLM

    peer = load(ROOT / "benchmarks" / "peers" / "trl_grpo.py")
    overrides = ["model=tiny-qwen3", "steps=2", "groups_per_step=4", "group_size=4"]
    config = quickstart_with(*overrides)
    parts = peer.search_parts(config)
    theirs = parts.pop("model")
    decoder = LockstepForCausalLM.from_pretrained("tiny-qwen3")
    decoder.generation_config = theirs.generation_config
    seen = []

    class Keeping(Sampler):
        def sample(self, prompt_ids, trainer):
            found = super().sample(prompt_ids, trainer)
            seen.append((prompt_ids, list(found[0])))  # TRL changes its list
            return found

    settings = parts.pop("settings") | {"max_steps": 1, "temperature": config.agent.temperature}
    trainer, gap = trained(
        "tiny-qwen3", tmp_path, model=decoder, sampler=Keeping(), peft_config=None,
        settings=settings, **parts,
    )  # fmt: skip
    assert gap["unequal_tokens"] == 0 and gap["compared_tokens"] > 100
    [row] = [row for row in trainer.state.log_history if "tools/call_frequency" in row]
    assert row["tools/call_frequency"] > 0
    (prompts, replies), (longer, _), *_ = seen
    begun = [p + r for p, r in zip(prompts, replies, strict=True)]
    assert longer
    assert all(any(ids[: len(b)] == b for b in begun) for ids in longer)
