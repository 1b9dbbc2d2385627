"""The decoder as a model of transformers: against transformers, against PEFT, and against our
engine bit by bit."""

import asyncio

import numpy as np
import pytest
import torch

from lockstep.engines.config import EmbeddedConfig
from lockstep.engines.embedded.engine import EmbeddedEngine
from lockstep.errors import CapabilityError
from lockstep.models.hf_io import load_checkpoint
from lockstep.types import frozen_ids

transformers = pytest.importorskip("transformers", reason="pip install 'lockstep-rl[transformers]'")
peft = pytest.importorskip("peft", reason="pip install peft")

from lockstep.integrations.causal_lm import IGNORED, LockstepConfig, LockstepForCausalLM  # noqa: E402

SHAPE = {
    "vocab_size": 211, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
    "intermediate_size": 96, "initializer_range": 0.3,
}  # fmt: skip
TARGETS = ["q_proj", "v_proj", "o_proj", "down_proj"]
ROUNDING = 2e-5
"""Of two float32 forwards of this model, whose logits are below 32: some 10 ulps."""


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def theirs(request, tmp_path_factory):
    torch.manual_seed(0)
    kind = {"qwen3": transformers.Qwen3ForCausalLM, "llama": transformers.LlamaForCausalLM}
    config = kind[request.param].config_class(**SHAPE, tie_word_embeddings=request.param == "qwen3")
    model = kind[request.param](config).float().eval()
    model.place = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(model.place)
    return model


@pytest.fixture
def ours(theirs):
    return LockstepForCausalLM.from_pretrained(theirs.place)


@pytest.fixture(scope="module")
def padded():
    """Prompts padded on the left, replies on the right, as TRL pads."""
    ids = torch.randint(2, 211, (4, 14), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :4] = mask[1, 9:] = mask[2, :2] = mask[2, 12:] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    labels = ids.masked_fill(mask == 0, IGNORED)
    labels[:, :6] = IGNORED
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}, positions


def logprobs_of(model, batch, positions):
    ids, mask = batch["input_ids"], batch["attention_mask"]
    logits = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
    found = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return found.masked_fill(batch["labels"][:, 1:] == IGNORED, 0)


def with_adapter(model):
    settings = {"r": 4, "lora_alpha": 8, "target_modules": TARGETS, "task_type": "CAUSAL_LM"}
    out = peft.get_peft_model(model, peft.LoraConfig(**settings))
    generator = torch.Generator().manual_seed(2)
    for name, parameter in out.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) / 8
    return out


def test_logits_log_probs_and_loss_equal_those_of_transformers(theirs, ours, padded):
    batch, positions = padded
    out, kept = ours(**batch), batch["attention_mask"].bool()
    logits = theirs(batch["input_ids"], batch["attention_mask"], positions).logits
    assert (out.logits - logits)[kept].abs().max() < ROUNDING
    assert not out.logits[~kept].any()
    expected = logprobs_of(theirs, batch, positions)
    assert (out.log_probs - expected).abs().max() < ROUNDING
    assert out.loss.item() == pytest.approx(-expected.sum().item() / (expected != 0).sum().item())
    last = ours(batch["input_ids"], batch["attention_mask"], logits_to_keep=3).logits
    assert torch.equal(last, out.logits[:, -3:])
    alone = ours(**batch, fused_lm_head=True)
    assert alone.logits is None and torch.equal(alone.log_probs, out.log_probs)


def test_gradients_equal_those_of_transformers_also_with_checkpointing(theirs, ours, padded):
    batch, positions = padded
    theirs.zero_grad()
    logprobs_of(theirs, batch, positions).sum().backward()
    expected = theirs.model.layers[0].self_attn.q_proj.weight.grad
    found = []
    for is_recomputed in (False, True):
        ours.zero_grad()
        ours.train()
        if is_recomputed:
            ours.activation_checkpointing_enable()
            assert ours.is_activation_checkpointing
        ours(**batch).log_probs.sum().backward()
        found.append(ours.decoder.layers[0].attention.qkv_proj.weight.grad.clone())
    assert torch.equal(*found)
    scale = expected.abs().max()
    assert (found[0][: len(expected)] - expected).abs().max() < 1e-4 * scale


@pytest.mark.parametrize("has_adapter", [False, True])
def test_the_engine_has_the_same_bits(ours, padded, has_adapter):
    batch, _ = padded
    model = with_adapter(ours) if has_adapter else ours
    ours.temperature = 0.7
    assert ours.numerics.is_kept, ours.numerics.line
    engine = EmbeddedEngine(ours.for_engine(), EmbeddedConfig(kv_cache_tokens=1024))
    with torch.no_grad():
        found = model(**batch, fused_lm_head=True).log_probs
    for row, (ids, mask, labels) in enumerate(zip(*batch.values(), strict=True)):
        asked = frozen_ids(ids[mask.bool()].tolist(), where="row")
        scored = asyncio.run(engine.score(asked, distribution="tempered", temperature=0.7))
        theirs_T = torch.full(ids.shape, float("nan"))
        theirs_T[mask.bool()] = torch.from_numpy(np.array(scored.logprobs))
        chosen = labels[1:] != IGNORED
        assert torch.equal(theirs_T[1:][chosen], found[row][chosen])


def test_an_adapter_of_peft_computes_what_peft_computes(theirs, ours, padded, tmp_path):
    batch, positions = padded
    before = ours(**batch).log_probs
    model = with_adapter(ours)
    reference = with_adapter(transformers.AutoModelForCausalLM.from_pretrained(theirs.place))
    names = dict(reference.named_parameters())
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert trained.keys() == {name for name, p in names.items() if p.requires_grad}
    out, expected = model(**batch), logprobs_of(reference, batch, positions)
    assert (out.log_probs - expected).abs().max() < 5 * ROUNDING
    out.log_probs.sum().backward()
    expected.sum().backward()
    for name, parameter in trained.items():
        scale = names[name].grad.abs().max()
        assert (parameter.grad - names[name].grad).abs().max() < 1e-3 * scale, name
    with model.disable_adapter():
        assert torch.equal(model(**batch).log_probs, before)
    model.save_pretrained(tmp_path)
    again = LockstepForCausalLM.from_pretrained(theirs.place)
    again = peft.PeftModel.from_pretrained(again, tmp_path)
    assert torch.equal(again(**batch).log_probs, out.log_probs)


def test_rows_that_positions_begin_again_do_not_see_each_other(ours, padded):
    ids = padded[0]["input_ids"][:2, :5]
    apart = ours(ids, labels=ids).log_probs
    one = ids.reshape(1, -1)
    positions = torch.arange(5).repeat(2)[None]
    joined = ours(one, position_ids=positions, labels=one).log_probs[0]
    assert torch.equal(joined[:4], apart[0]) and torch.equal(joined[5:], apart[1])
    assert joined[4] == 0, "the second row's first token has no token before it"


def test_a_row_without_tokens_changes_no_other(ours, padded):
    batch = {name: column.clone() for name, column in padded[0].items()}
    batch["attention_mask"][2], batch["labels"][2] = 0, IGNORED
    found, expected = ours(**batch).log_probs, ours(**padded[0]).log_probs
    others = [0, 1, 3]
    assert torch.equal(found[others], expected[others]) and not found[2].any()


def test_a_saved_model_is_read_by_transformers_and_by_us(theirs, ours, padded, tmp_path):
    ids = padded[0]["input_ids"]
    (tmp_path / "checkpoint-1").mkdir()
    with torch.no_grad():
        ours.decoder.final_norm.mul_(1.5)
    ours.save_pretrained(tmp_path)
    assert (tmp_path / "checkpoint-1").is_dir(), "what a trainer has beside the weights stays"
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(read) is type(theirs) and torch.equal(
        read.model.norm.weight, ours.decoder.final_norm
    )
    assert torch.equal(load_checkpoint(tmp_path).final_norm, ours.decoder.final_norm)
    config = LockstepConfig.from_pretrained(tmp_path)
    by_auto = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, config=config)
    assert isinstance(by_auto, LockstepForCausalLM)
    assert torch.equal(by_auto(ids).logits, ours(ids).logits)
    fresh = LockstepForCausalLM.from_pretrained(theirs.place)
    fresh.load_state_dict(read.state_dict())
    assert torch.equal(fresh(ids).logits, ours(ids).logits)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m, _: m.generate(), "does not generate: Lockstep's engine samples"),
        (lambda m, ids: m(ids).last_hidden_state, "no hidden states. For TRL: .*LockstepMixin"),
        (lambda m, ids: m(ids, past_key_values=1), "cannot take past_key_values. Leave it out"),
        (lambda m, ids: m(ids, output_router_logits=True), "cannot take output_router_logits"),
        (lambda m, _: m.get_input_embeddings()(1), "its decoder computes"),
        (
            lambda m, _: m.from_pretrained(m.config.checkpoint, quantization_config=1),
            "cannot take quantization_config; it takes config, dtype",
        ),
        (
            lambda m, _: peft.get_peft_model(
                m, peft.LoraConfig(task_type="CAUSAL_LM", target_modules=TARGETS, lora_dropout=0.1)
            ),
            "lora_dropout=0.1 would make the sides differ",
        ),
        (
            lambda m, _: peft.get_peft_model(
                m, peft.LoraConfig(task_type="CAUSAL_LM", target_modules=TARGETS, use_dora=True)
            ),
            "use_dora=True is not implemented",
        ),
    ],
)
def test_options_that_the_decoder_does_not_have_are_refused_by_name(ours, padded, call, message):
    with pytest.raises(CapabilityError, match=message):
        call(ours, padded[0]["input_ids"])
