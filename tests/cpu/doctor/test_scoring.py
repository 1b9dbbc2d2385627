"""With the model: what one side computes otherwise, and what the sampler read, is scored again."""

from dataclasses import replace

import numpy as np
import pytest
from array_dumps import ArrayDump

import lockstep
from lockstep.doctor.inputs.base import Facts
from lockstep.doctor.inputs.registry import open_dump
from lockstep.doctor.rows import Rows
from lockstep.doctor.scoring.layouts import Layout
from lockstep.doctor.scoring.model import Distribution, Model, open_model
from lockstep.renderers.config import HarmonyConfig
from lockstep.renderers.harmony import HarmonyRenderer
from lockstep.renderers.tokenizer import Tokenizer

MODEL = "tiny-gpt-oss"


class Dump(ArrayDump):
    @property
    def has(self):
        return self.rows.has


@pytest.fixture(scope="module")
def sound():
    """(rows whose two sides are the model's own numbers, the model)."""
    dump = open_dump("example")
    (rows,) = dump.chunks()
    rows = rows.take([r for r, at in enumerate(rows.slices) if rows.loss_mask[at].any()][:24])
    rows = rows.with_(messages=None, turn=None, is_sampled=None, steps=None)
    model = open_model(dump, Facts(model=MODEL), model=MODEL)
    plain = model.plain(rows)
    return both(rows, plain, plain), model


def both(rows, sampler, trainer):
    noise = np.random.default_rng(0).normal(0, 0.002, rows.num_tokens)
    sides = [np.minimum(side, 0) for side in (sampler + noise, trainer)]
    one, other = (np.where(rows.loss_mask, x, np.nan).astype(np.float32) for x in sides)
    return rows.with_(rollout_logprobs=one, trainer_logprobs=other)


def named(rows, model, **facts):
    found = lockstep.diagnose(
        Dump(rows, **facts), model=Model(weights=model.weights), tokenizer=MODEL
    )
    return [cause.name for cause, _ in found.causes], found


def test_what_agrees_with_the_model_is_consistent(sound):
    rows, model = sound
    causes, found = named(rows, model)
    assert causes == [] and found.outcome == "consistent"


@pytest.mark.parametrize(
    "kind",
    [Distribution(temperature=0.6), Distribution(top_k=5),
     Distribution(temperature=0.7, min_p=0.05), Distribution(repetition_penalty=1.3)],
)  # fmt: skip
def test_processed_logits_are_told_exactly(sound, kind):
    rows, model = sound
    values = model.processed(rows, [kind])[kind]
    causes, found = named(both(rows, values, model.plain(rows)), model)
    assert causes[0] in ("processed", "generation_defaults")
    assert kind.describe() in found.causes[0][1].measured


@pytest.mark.parametrize("side", ["sampler", "trainer"])
def test_arithmetic_of_either_side_is_told_with_its_side(sound, side):
    rows, model = sound
    change = next(c for c in model.scorer.changes(model.loaded(rows)) if c.kind == "sinks")
    with change.made():
        values = model.score(rows, np.arange(len(rows)))
    plain = model.plain(rows)
    sides = (values, plain) if side == "sampler" else (plain, values)
    causes, found = named(both(rows, *sides), model)
    assert causes[0] == "ignored_sinks"
    assert f"the {side} without its sinks" in found.causes[0][1].measured


def test_a_prompt_that_only_the_sampler_read_is_found_and_proved(sound):
    rows, model = sound
    ids = np.split(rows.token_ids, rows.offsets[1:-1])
    laid = [
        (np.r_[own[:1], own], np.arange(len(own) + 1),
         np.r_[-1, np.arange(len(own)) + rows.offsets[r]])
        for r, own in enumerate(ids)
    ]  # fmt: skip
    values = model.score_laid(rows, Layout.of(laid, rows))
    causes, found = named(both(rows, values, model.plain(rows)), model)
    assert causes[0] == "wrong_template"
    cause, finding = found.causes[0]
    assert found.certainty_of(cause, finding)[0] == "proved"
    assert "with its first token twice" in finding.measured


def test_noise_of_the_sampler_is_told_from_other_weights(sound):
    rows, model = sound
    spread = np.sqrt(model.spread(rows))
    rng = np.random.default_rng(1)
    noisy = model.plain(rows) + 0.3 * spread * rng.standard_normal(rows.num_tokens)
    assert named(both(rows, np.minimum(noisy, 0), model.plain(rows)), model)[0] == ["kernel_noise"]


def test_a_shift_is_found_as_without_a_model(sound):
    rows, model = sound
    at = np.flatnonzero(rows.loss_mask)
    values = model.plain(rows).copy()
    values[at] = np.roll(values[at], 1)
    assert named(both(rows, values, model.plain(rows)), model)[0][0] == "shifted"


def test_a_model_that_cannot_be_loaded_is_not_judged(sound, tmp_path):
    rows, _ = sound
    (tmp_path / "config.json").write_text('{"architectures": ["GptOssForCausalLM"]}')
    with pytest.raises(lockstep.errors.LockstepError):
        lockstep.diagnose(Dump(rows), model=str(tmp_path / "none"))
    found = lockstep.diagnose(Dump(rows), model=str(tmp_path))
    assert found.outcome == "not_judged" and "the model cannot be used" in found.headline


def test_sound_messages_change_nothing():
    """A call's id and its JSON are no difference: rows of the example, with their dialogues."""
    dump = open_dump("example")
    (rows,) = dump.chunks()
    gap = [float(np.nanmax(np.abs(rows.gap[at]), initial=0)) for at in rows.slices]
    healthy = rows.take(np.argsort(gap)[:24])
    tokenizer = Tokenizer.from_file(lockstep.models.locate.locate_model(MODEL))
    renderer = HarmonyRenderer(tokenizer, HarmonyConfig(system_message=False))
    found = lockstep.diagnose(Dump(healthy), renderer=renderer, model=MODEL)
    assert found.causes == []


def test_rows_of_another_size_of_vocabulary_are_refused(sound):
    rows, _ = sound
    beyond = rows.token_ids.copy()
    beyond[3] = 10**6
    with pytest.raises(lockstep.errors.DataError, match="another model"):
        lockstep.diagnose(Dump(rows.with_(token_ids=beyond)), model=MODEL)
    assert isinstance(replace(Distribution(), top_k=3), Distribution) and isinstance(rows, Rows)
