"""With the model: what one side computes otherwise, and what the sampler read, is scored again."""

from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from array_dumps import ArrayDump

import lockstep
from lockstep.doctor.hypotheses.arithmetic import moved_in_bfloat16
from lockstep.doctor.inputs.base import Facts
from lockstep.doctor.inputs.registry import open_dump
from lockstep.doctor.rows import Rows
from lockstep.doctor.scoring.distribution import Distribution
from lockstep.doctor.scoring.layouts import Layout
from lockstep.doctor.scoring.model import Model, open_model
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
        Dump(rows, **facts),
        model=Model(weights=model.weights, config=model.config),
        tokenizer=MODEL,
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
    causes, found = named(both(rows, model.processed(rows, [kind])[kind], model.plain(rows)), model)
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


def test_noise_of_the_trainer_is_dropout_however_large(sound):
    rows, model = sound
    drawn = np.random.default_rng(1).standard_normal(rows.num_tokens)
    noisy = model.plain(rows) + 3 * np.sqrt(model.spread(rows)) * drawn
    assert named(both(rows, model.plain(rows), -np.abs(noisy)), model)[0] == ["dropout"]


def test_deviations_of_all_sizes_are_no_noise_of_the_sampler(sound):
    rows, model = sound
    rng = np.random.default_rng(1)
    sizes = 0.3 * np.sqrt(model.spread(rows)) * np.exp(2 * rng.standard_normal(rows.num_tokens))
    uneven = model.plain(rows) + sizes * rng.standard_normal(rows.num_tokens)
    causes, found = named(both(rows, np.minimum(uneven, 0), model.plain(rows)), model)
    assert "kernel_noise" not in causes and found.outcome == "differs"


def test_log_probs_of_other_tokens_are_no_noise(sound):
    rows, model = sound
    values, at = model.plain(rows).copy(), np.flatnonzero(rows.loss_mask)
    values[at] = values[np.random.default_rng(0).permutation(at)]
    causes, found = named(both(rows, values, model.plain(rows)), model)
    assert "kernel_noise" not in causes and found.outcome == "differs"


def test_rounded_log_probs_of_another_temperature_are_both(sound):
    rows, model = sound
    kind = Distribution(temperature=0.7)
    cold = model.score(rows, np.arange(len(rows)), distribution=kind)
    rows = both(rows, cold, model.plain(rows))
    rows = rows.with_(rollout_logprobs=np.round(rows.rollout_logprobs, 1))
    assert set(named(rows, model)[0]) == {"processed", "quantised"}


@pytest.fixture(scope="module")
def moved(sound):
    """(rows in pairs of equal ids, log-probs by the same model with one layer changed)"""
    rows, model = sound
    other = deepcopy(model.loaded(rows))
    generator = torch.Generator().manual_seed(0)
    for weight in (p for name, p in other.named_parameters() if "layers.0." in name):
        if weight.ndim > 1:
            weight += 0.3 * weight.std() * torch.randn(weight.shape, generator=generator)
    twice = rows.take([*range(12), *range(12)])
    return twice, model.score(twice, np.arange(len(twice)), of=other)


def test_other_weights_of_the_sampler_are_told_from_noise_and_from_another_prompt(sound, moved):
    (_, model), (rows, values) = sound, moved
    assert named(both(rows, values, model.plain(rows)), model)[0] == ["other_weights"]


def test_a_sampler_that_deviates_in_all_rows_of_some_prompts_read_other_prompts(sound, moved):
    (_, model), (rows, values) = sound, moved
    prompts = rows.prefix_keys[rows.firsts(rows.spans.begin) - 1]
    is_hit = np.isin(prompts, np.unique(prompts)[::2])[rows.row_of]
    assert 0 < is_hit.mean() < 1
    sampler = np.where(is_hit, values, model.plain(rows)).astype(np.float32)
    hit = both(rows, sampler, model.plain(rows)).with_(rollout_logprobs=sampler)
    assert named(hit, model)[0] == ["wrong_template"]


def test_noise_that_bfloat16_could_make_is_a_defect_of_one_process(sound, moved):
    (_, model), (rows, _) = sound, moved
    plain, numeric = model.plain(rows), np.sqrt(model.noise(rows))
    noise = np.random.default_rng(0).normal(0, 1, rows.num_tokens) * np.sqrt(model.spread(rows))
    noisy = np.where(rows.loss_mask, plain + noise * numeric / noise[rows.loss_mask].std(), np.nan)
    rows = both(rows, plain, plain).with_(rollout_logprobs=noisy.astype(np.float32))
    assert named(rows, model)[0] == []
    assert named(rows, model, is_one_process=True)[0] == ["kernel_noise"]


def test_noise_of_the_trainer_on_few_tokens_is_dropout(sound, moved):
    (_, model), (rows, _) = sound, moved
    generator, plain = np.random.default_rng(0), model.plain(rows)
    noise = generator.normal(0, 1, rows.num_tokens) * (generator.random(rows.num_tokens) < 0.3)
    trainer = plain + noise * np.sqrt(model.spread(rows))
    assert named(both(rows, plain, trainer), model)[0] == ["dropout"]


def test_without_equal_contexts_nothing_tells_noise_from_other_weights(sound):
    rows, model = sound
    _, place, num = np.unique(rows.prefix_keys, return_inverse=True, return_counts=True)
    rows = rows.with_(loss_mask=rows.loss_mask & (num[place] == 1))
    plain, spread = model.plain(rows), np.sqrt(model.spread(rows))
    noisy = plain + spread * np.random.default_rng(1).normal(0, 0.3, rows.num_tokens)
    for sides in ((plain, noisy), (noisy, plain)):
        causes, found = named(both(rows, *sides), model)
        assert causes == [] and found.outcome == "differs"
        assert found.next_steps[0].startswith("score the same rows twice")


def test_noise_is_told_by_equal_contexts_though_other_tokens_have_far_more_of_it(sound):
    rows, model = sound
    _, place, num = np.unique(rows.prefix_keys, return_inverse=True, return_counts=True)
    std = np.where(num[place] == 1, 6.0, 0.6) * np.sqrt(model.spread(rows))
    noisy = model.plain(rows) + std * np.random.default_rng(1).normal(0, 1, rows.num_tokens)
    assert named(both(rows, model.plain(rows), -np.abs(noisy)), model)[0] == ["dropout"]


def test_log_probs_of_other_tokens_are_no_other_weights(sound, moved):
    (_, model), (rows, _) = sound, moved
    values, half = model.plain(rows).copy(), rows.num_tokens // 2  # rows in pairs: equal halves
    at = np.flatnonzero(rows.loss_mask[:half])
    values[at] = values[half + at] = values[np.random.default_rng(0).permutation(at)]
    causes, found = named(both(rows, values, model.plain(rows)), model)
    assert "other_weights" not in causes and found.outcome == "differs"


def test_captured_graphs_deviate_but_at_the_first_token_of_a_reply(sound, moved):
    (_, model), (rows, values) = sound, moved
    mask, values = rows.loss_mask.copy(), values.copy()
    for begin, end in zip(rows.spans.begin, rows.spans.end, strict=True):
        unsure = np.flatnonzero(model.spread(rows)[begin:end] > 0.05)
        # certain tokens tell nothing
        mask[begin : begin + unsure[0] if len(unsure) else end] = False
    rows = rows.with_(loss_mask=mask)
    first = rows.spans.begin
    values[first] = model.plain(rows)[first]
    assert named(both(rows, values, model.plain(rows)), model)[0] == ["captured_graphs"]


def test_a_second_cause_shows_behind_padding(sound):
    rows, model = sound
    values = model.plain(rows).copy()
    at = np.flatnonzero(rows.loss_mask & (rows.row_of % 2 == 0))
    values[at] = np.roll(values[at], 1)
    padded = Rows.joined([
        Rows(
            row_ids=(str(row),), offsets=np.array([0, len(ids) + 12]),
            token_ids=np.r_[np.full(12, 5, np.int32), ids],
            loss_mask=np.r_[np.zeros(12, bool), rows.loss_mask[tokens]],
            rollout_logprobs=np.r_[np.full(12, np.nan), values[tokens]].astype(np.float32),
        )
        for row, tokens in enumerate(rows.slices)
        for ids in [rows.token_ids[tokens]]
    ])  # fmt: skip
    trainer = np.where(padded.loss_mask, model.plain(padded), np.nan).astype(np.float32)
    causes, _ = named(padded.with_(trainer_logprobs=trainer), model, pad_id=5)
    assert set(causes) == {"padding", "shifted"}


def test_updates_that_bfloat16_does_not_show(sound):
    rows, _ = sound
    old, new = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
    with torch.no_grad():
        old.weight.fill_(1.0)
        old.bias.fill_(1.0)
        new.weight.fill_(1.0 + 2**-12)  # bfloat16 has steps of 2^-7 there
        new.bias.fill_(1.125)

    def model(own):
        scorer = SimpleNamespace(load=lambda weights: weights)
        return SimpleNamespace(own=lambda rows: own, scorer=scorer, weights=(old, new))

    assert moved_in_bfloat16(model(1), rows) == 8 / 72
    assert moved_in_bfloat16(model(0), rows) == 1.0


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
    (rows,) = open_dump("example").chunks()
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
