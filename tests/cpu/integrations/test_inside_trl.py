"""The mixin for TRL's trainers, on a hand-written trainer: what it records, weighs and says.

tests/parity/test_trl_equal.py runs TRL's own.
"""

import logging
from types import SimpleNamespace

import pytest
import torch

import lockstep
from lockstep import diagnose
from lockstep.correction import Correction
from lockstep.errors import CapabilityError, ConfigError
from lockstep.integrations import common
from lockstep.integrations import trl as integration
from lockstep.integrations.trl import LockstepMixin, Sampler
from lockstep.models.locate import locate_model

PROMPTS = torch.tensor([[0, 5, 6], [5, 6, 7]])
COMPLETIONS = torch.tensor([[10, 20, 11, 0], [12, 0, 0, 0]])
TRAINER = torch.tensor([[-0.5, -0.75, -0.25, 9.0], [-1.0, 9.0, 9.0, 9.0]])
SAMPLER = torch.tensor([[-0.5, -1.75, -0.25, 0.0], [-1.0, 0.0, 0.0, 0.0]])


def batch_of(**changed):
    batch = {
        "prompt_ids": PROMPTS, "prompt_mask": PROMPTS.ne(0).int(),
        "completion_ids": COMPLETIONS, "completion_mask": COMPLETIONS.ne(0).int(),
        "advantages": torch.tensor([1.0, -1.0]), "num_items_in_batch": torch.tensor(4),
        "sampling_per_token_logps": SAMPLER,
    } | changed  # fmt: skip
    return {name: value for name, value in batch.items() if value is not None}


class FakeTrainer:
    """The parts of a GRPOTrainer that the integration uses. A step computes the losses of the rows
    one by one, in another order."""

    num_generations, rollout_func, eos_token_ids, loss_type = 2, None, [3], "dapo"
    ref_model = None

    def __init__(self, out, batch):
        self.args = SimpleNamespace(output_dir=str(out), temperature=1.0, top_p=1.0, top_k=0)
        self.args.per_device_train_batch_size = 1
        self.model = SimpleNamespace(training=True, config=SimpleNamespace(_name_or_path="a/b"))
        self.state = SimpleNamespace(global_step=0)
        self.processing_class = None
        self._metrics = {"train": Logged()}
        self.batch, self.losses = batch, {}

    def _generate_single_turn(self, prompt_ids):
        return prompt_ids, None

    def _generate_and_score_completions(self, inputs):
        return self.batch

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, batch_size=None
    ):
        firsts = COMPLETIONS[:, 0].tolist()
        rows = [firsts.index(ids[-logits_to_keep].item()) for ids in input_ids]
        return TRAINER[rows], None, None

    def _compute_loss(self, model, inputs):
        self._get_per_token_logps_and_entropies(model, inputs["completion_ids"], None, 4)
        self.losses[int(inputs["completion_ids"][0, 0])] = inputs["advantages"]

    def train(self):
        out = self._generate_and_score_completions(["a prompt"])
        for row in (1, 0) if "completion_ids" in out else ():
            self._compute_loss(self.model, {name: x[[row]] for name, x in out.items() if x.ndim})
        return out


class Logged(dict):
    def __missing__(self, name):
        return self.setdefault(name, [])


class Trainer(LockstepMixin, FakeTrainer):
    pass


def test_a_trainer_is_watched_from_the_call_on_and_logs_the_metrics(tmp_path):
    trainer = FakeTrainer(tmp_path, batch_of())
    watching = lockstep.watch(trainer)
    trainer.train()
    logged = trainer._metrics["train"]
    assert logged["doctor/rows"] == [2]
    assert logged["mismatch/compared_tokens"] == [4] and logged["mismatch/unequal_tokens"] == [1]
    assert logged["mismatch/max_abs_diff"] == [1.0]
    assert (tmp_path / "doctor" / "doctor.html").exists()
    facts = watching.facts
    assert (facts.trainer, facts.model, facts.temperature) == ("trl", "a/b", 1.0)
    assert facts.stop_ids == frozenset({3})


def test_log_probs_of_the_losses_are_put_to_the_rows_that_they_are_of(tmp_path):
    seen = []
    trainer = Trainer(tmp_path, batch_of())
    trainer._lockstep.watching.trl = lambda batch, **_: seen.append(batch) or {}
    trainer.train()
    [batch] = seen
    assert torch.equal(batch["old_per_token_logps"], TRAINER)
    assert torch.equal(batch["advantages"], torch.tensor([1.0, -1.0]))


def test_weights_of_the_correction_multiply_the_advantages(tmp_path):
    trainer = Trainer(tmp_path, batch_of(), correction=Correction.tis(2.0), watch=False)
    trainer.train()
    assert trainer.losses[10].tolist() == [[1.0, 2.0, 1.0, 0.0]]  # exp(1) is cut at 2
    assert trainer.losses[12].tolist() == [[-1.0, -0.0, -0.0, -0.0]]
    assert trainer._metrics["train"]["correction/weight_mean"] == [pytest.approx(5 / 4)]


def test_weights_that_depend_on_all_rows_are_known_before_the_first_loss(tmp_path):
    by_sequence = Correction.tis(2.0, level="sequence")  # weights of mean 1: 2 / 1.5 and 1 / 1.5
    trainer = Trainer(tmp_path, batch_of(), correction=by_sequence, watch=False)
    trainer.train()
    assert trainer.losses[10].tolist()[0] == pytest.approx([4 / 3] * 3 + [0])
    assert trainer.losses[12].tolist()[0] == pytest.approx([-2 / 3, 0, 0, 0])


def test_tools_have_no_part_in_the_gap(tmp_path):
    mask = torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1]])
    trainer = Trainer(tmp_path, batch_of(tool_mask=mask), watch=False)
    trainer.train()
    assert trainer._metrics["train"]["mismatch/unequal_tokens"] == [0]


def test_weights_of_vllm_are_replaced_before_the_loss(tmp_path):
    batch = batch_of(old_per_token_logps=TRAINER, importance_sampling_ratio=torch.full((2, 4), 7.0))
    trainer = Trainer(tmp_path, batch, correction=Correction.tis(2.0), watch=False)
    out = trainer._generate_and_score_completions([])
    assert out["importance_sampling_ratio"].tolist() == [[1.0, 2.0, 1.0, 1.0], [1.0] * 4]
    assert out["advantages"] is batch["advantages"]
    how = Correction(anchor="on_policy", kl_penalty_coef=0.5, kl_penalty_form="advantage")
    out = Trainer(tmp_path, batch, correction=how, watch=False)._generate_and_score_completions([])
    assert out["importance_sampling_ratio"].tolist() == [[1.0] * 4] * 2
    # k1 is -1 at one of four tokens, and -0.25 in the mean
    assert out["advantages"][0].tolist() == [0.875, 1.375, 0.875, 1.0]
    assert out["old_per_token_logps"] is None, "TRL's ratio is then exactly 1"


def test_the_anchor_rollout_is_what_trls_ratio_is_to(tmp_path):
    batch = batch_of(old_per_token_logps=TRAINER)
    trainer = Trainer(tmp_path, batch, correction=Correction.bypass(), watch=False)
    out = trainer._generate_and_score_completions([])
    mask = batch["completion_mask"].bool()
    assert torch.equal(out["old_per_token_logps"], torch.where(mask, SAMPLER, TRAINER))


@pytest.mark.parametrize(
    "how", [Correction.averaged(), Correction(anchor="recomputed", kl_penalty_coef=0.1)]
)
def test_what_trl_computes_itself_is_refused(tmp_path, how):
    with pytest.raises(ConfigError, match=r"leave out correction\.rescorings and"):
        Trainer(tmp_path, batch_of(), correction=how)


class FakeRLOO(FakeTrainer):
    """Scores in its generation, and keeps the sums of a reply alone."""

    rollout_func = loss_type = property()

    def _generate_and_score_completions(self, inputs):
        self._generate_single_turn([[5, 6], [5, 6, 7]])
        old = self._get_per_token_logps_and_entropies(self.model, COMPLETIONS, None, 4)[0]
        self._get_per_token_logps_and_entropies("the reference", COMPLETIONS.flip(0), None, 4)
        return self.batch | {"old_logps": old.sum(1)}


class RLOO(LockstepMixin, FakeRLOO):
    pass


class FixedSampler(Sampler):
    def sample(self, prompt_ids, trainer):
        return [[10, 20, 11], [12]], [[-0.5, -1.75, -0.25], [-1.0]]


def test_a_reply_of_rloo_has_one_weight(tmp_path):
    trainer = RLOO(
        tmp_path, batch_of(sampling_per_token_logps=None), sampler=FixedSampler(), watch=False,
        correction=Correction.tis(2.0, level="sequence"),
    )  # fmt: skip
    assert trainer.train()["advantages"].tolist() == pytest.approx([4 / 3, -2 / 3])
    with pytest.raises(ConfigError, match=r"level=token: RLOOTrainer .* sequence or geo"):
        RLOO(tmp_path, {}, correction=Correction.tis())


def test_generations_of_an_evaluation_are_not_looked_at(tmp_path):
    trainer = FakeTrainer(tmp_path, batch_of())
    lockstep.watch(trainer, directory=tmp_path / "elsewhere")
    trainer.model.training = False
    assert trainer.train() is trainer.batch
    assert trainer._metrics["train"]["doctor/rows"] == []
    assert not (tmp_path / "elsewhere").exists()


def test_a_trainer_whose_batches_changed_trains_on_alone_unless_strict(tmp_path, caplog):
    batch = {"other": torch.zeros(2)}
    trainer = Trainer(tmp_path, batch)
    assert trainer.train() is batch and trainer.train() is batch
    [record] = caplog.records
    assert record.getMessage().startswith("step 0: lockstep: ends here, training goes on: this tra")
    assert "has no completion_ids, completion_mask, advantages; TRL 1.16 has" in record.getMessage()
    with pytest.raises(CapabilityError, match="has no completion_ids"):
        Trainer(tmp_path, batch, strict=True).train()


def test_a_model_on_several_devices_trains_on_alone_unless_strict(tmp_path, caplog):
    class OnTwo(FakeTrainer):
        def __init__(self, out, batch, devices):
            super().__init__(out, batch)
            self.model.hf_device_map = devices

    class Split(LockstepMixin, OnTwo):
        pass

    trainer = Split(tmp_path, batch_of(), {"model.layers.0": 0, "model.layers.1": 1, "lm_head": 1})
    out = trainer.train()
    assert "lockstep_row" not in out and not trainer._metrics["train"]
    assert [record.getMessage() for record in caplog.records] == [
        "step 0: lockstep: ends here, training goes on: the model is on 0 and 1 "
        "(hf_device_map); expected one device in each process. Load it without device_map, or "
        "train with data parallelism."
    ]
    with pytest.raises(CapabilityError, match="on cpu and cuda:0"):
        Split(tmp_path, batch_of(), {"model": "cuda:0", "lm_head": "cpu"}, strict=True)
    whole = Split(tmp_path, batch_of(), {"": 0}, strict=True)
    assert "lockstep_row" in whole.train()


def test_a_hook_that_is_missing_is_named_with_its_release(tmp_path, caplog):
    class Old(FakeTrainer):
        _compute_loss = property()  # hasattr: False

    trainer = Old(tmp_path, batch_of())
    lockstep.watch(trainer)
    assert "has no _compute_loss; TRL 1.16 has. Install" in caplog.text
    assert trainer._generate_and_score_completions([]) is trainer.batch
    with pytest.raises(CapabilityError, match="_compute_loss"):
        lockstep.watch(Old(tmp_path, batch_of()), strict=True)


def test_a_trainer_of_another_kind_trains_on_alone(tmp_path, caplog):
    class Async:
        """As TRL's AsyncGRPOTrainer: none of the methods that the mixin extends."""

        def __init__(self, out):
            self.args, self.state = SimpleNamespace(output_dir=str(out)), SimpleNamespace()
            self.model, self.processing_class = SimpleNamespace(), None

        def train(self):
            return "trained"

    class Mixed(LockstepMixin, Async):
        pass

    assert Mixed(tmp_path, correction=Correction.mis()).train() == "trained"
    [record] = caplog.records
    assert "training goes on: this trainer has no _generate_single_turn" in record.getMessage()
    with pytest.raises(CapabilityError, match="has no _generate_single_turn"):
        Mixed(tmp_path, strict=True)


def test_another_release_of_trl_is_named_once_and_tried(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(common, "version", lambda name: "1.19.2")
    common.check_version.cache_clear()
    common.say_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        trainer = Trainer(tmp_path, batch_of())
    trainer.train()
    assert [r.getMessage() for r in caplog.records if "1.19.2" in r.getMessage()] == [
        "lockstep: trl 1.19.2 is installed; tested with 1.16. It is tried all the same."
    ]
    assert trainer._metrics["train"]["doctor/rows"] == [2]


def test_an_object_that_is_no_trainer_is_refused_with_what_to_do():
    with pytest.raises(ConfigError, match="SimpleNamespace"):
        lockstep.watch(SimpleNamespace(step=1))


def test_the_tokenizer_of_the_trainer_is_kept_for_the_command(tmp_path):
    text = (locate_model("tiny-qwen3") / "tokenizer.json").read_text()
    trainer = FakeTrainer(tmp_path, batch_of(old_per_token_logps=SAMPLER - 1e-3))
    trainer.processing_class = SimpleNamespace(
        name_or_path="", backend_tokenizer=SimpleNamespace(to_str=lambda: text)
    )
    lockstep.watch(trainer)
    trainer.train()
    assert sorted(path.name for path in (tmp_path / "doctor").iterdir()) == [
        "causes-rank-0.json", "doctor.html", "step-000000-rank-0.parquet", "tokenizer.json",
    ]  # fmt: skip
    assert diagnose(tmp_path / "doctor").setting.tokenizer.vocab_size == 550


@pytest.mark.parametrize(
    ("settings", "found"),
    [({"min_p": 0.1}, "min_p"), ({"generation_kwargs": {"num_beams": 2}}, "num_beams")],
)
def test_settings_that_the_engine_does_not_have_are_named(settings, found):
    args = {"generation_kwargs": None, "min_p": None, "repetition_penalty": 1.0} | settings
    trainer = SimpleNamespace(args=SimpleNamespace(**args), max_completion_length=4)
    with pytest.raises(ConfigError, match=f"does not know {found}"):
        integration._params_of(trainer)


def test_a_model_of_transformers_cannot_be_sampled(tmp_path):
    trainer = FakeTrainer(tmp_path, {})
    trainer.accelerator = SimpleNamespace(unwrap_model=lambda model: model)
    with pytest.raises(ConfigError, match=r"LockstepForCausalLM; found a SimpleNamespace\. Load"):
        Sampler().sample([[5]], trainer)
