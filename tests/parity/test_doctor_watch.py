"""The watch in the loops of other trainers, on their own packages.

TRL: steps of a GRPOTrainer on the CPU, with a rollout_func that makes a mistake, and one that makes
none. verl: its own DataProto. Tinker: its client's Datum. slime and prime-rl are not on PyPI:
tests/cpu/doctor/test_watch.py has their structures.

make test-trainers
"""

import importlib.util
from itertools import cycle, islice

import numpy as np
import pytest
import torch
from trl_packages import dataset_of, trl_modules

import lockstep
from lockstep.doctor.inputs.native import RowsDump
from lockstep.errors import MismatchError
from lockstep.models.locate import locate_model

PROMPTS = ["2 + 2?", "What is the name of Sara's cat?"]
NUM_NEW = 24
"""Tokens of a reply."""


def said(caplog):
    """The sentences of the watch."""
    return [r.getMessage() for r in caplog.records if r.name == "lockstep.doctor.watch"]


# -- TRL -------------------------------------------------------------------------------------------


@torch.no_grad()
def sampled(prompts, trainer):
    """Replies of the trainer's own model, token by token, with its log-probs: no mistake."""
    model, tokenizer = trainer.model, trainer.processing_class
    out = {"prompt_ids": [], "completion_ids": [], "logprobs": []}
    was_training = model.training
    model.eval()
    for prompt in prompts:
        ids = tokenizer.encode(prompt)
        logprobs = []
        begin = len(ids)
        while len(ids) < begin + NUM_NEW and ids[-1] != tokenizer.eos_token_id:
            all_logprobs = model(torch.tensor([ids])).logits[0, -1].float().log_softmax(-1)
            ids = [*ids, int(torch.multinomial(all_logprobs.exp(), 1))]
            logprobs.append(float(all_logprobs[ids[-1]]))
        out["prompt_ids"].append(ids[:begin])
        out["completion_ids"].append(ids[begin:])
        out["logprobs"].append(logprobs)
    model.train(was_training)
    return out


def with_shifted_logprobs(prompts, trainer):
    """Each log-prob stands one token before its own."""
    out = sampled(prompts, trainer)
    return out | {"logprobs": [[*row[1:], row[0]] for row in out["logprobs"]]}


def with_encoded_replies(prompts, trainer):
    """The reply is decoded and encoded again; its log-probs are those of the sampled ids."""
    out, tokenizer = sampled(prompts, trainer), trainer.processing_class
    again = [tokenizer.encode(tokenizer.decode(ids)) for ids in out["completion_ids"]]
    logprobs = [
        list(islice(cycle(row), len(ids))) for row, ids in zip(out["logprobs"], again, strict=True)
    ]
    return out | {"completion_ids": again, "logprobs": logprobs}


@pytest.fixture
def make_trainer(tmp_path, monkeypatch):
    trl, GRPOTrainer = trl_modules()
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    file = locate_model("tiny-qwen3") / "tokenizer.json"

    def make(rollout_func, **settings):
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(file))
        tokenizer.eos_token = tokenizer.pad_token = tokenizer.convert_ids_to_tokens(
            len(tokenizer) - 1
        )
        torch.manual_seed(0)
        config = LlamaConfig(
            initializer_range=0.1, vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32,
            num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
            max_position_embeddings=128,
        )  # fmt: skip
        return GRPOTrainer(
            model=LlamaForCausalLM(config),
            args=trl.GRPOConfig(**{
                "output_dir": str(tmp_path), "max_steps": 4, "num_generations": 4,
                "per_device_train_batch_size": 8, "max_completion_length": NUM_NEW,
                "num_iterations": 2, "logging_steps": 1, "report_to": [], "use_cpu": True,
                "bf16": False, "save_strategy": "no", "learning_rate": 1e-3, **settings,
            }),
            processing_class=tokenizer,
            reward_funcs=[lambda completions, **_: [float(len(c)) for c in completions]],
            train_dataset=dataset_of(PROMPTS * 4),
            rollout_func=rollout_func,
        )  # fmt: skip

    return make


def test_a_healthy_run_of_trl_is_silent_and_logs_what_was_looked_at(make_trainer, tmp_path, caplog):
    trainer = make_trainer(sampled)
    watching = lockstep.watch(trainer, max_share=1000)
    trainer.train()
    assert said(caplog) == []
    logged = [row for row in trainer.state.log_history if "doctor/rows" in row]
    assert [(row["doctor/rows"], row["doctor/causes"]) for row in logged] == [(8.0, 0.0)] * 2
    diagnosis = lockstep.diagnose(tmp_path / "doctor")
    assert diagnosis.outcome == "consistent" and diagnosis.examination.num_rows == 8
    assert (tmp_path / "doctor" / "doctor.html").exists()
    assert watching.facts.trainer == "trl" and watching.facts.stop_ids == frozenset()


def test_replies_of_trl_that_are_encoded_again_are_a_gap_that_ids_alone_do_not_explain(
    make_trainer, caplog
):
    trainer = make_trainer(with_encoded_replies)
    lockstep.watch(trainer, max_share=1000)
    trainer.train()
    assert sum("doctor: unexplained: k2 is " in text for text in said(caplog)) == 1


def test_a_mistake_in_a_rollout_of_trl_is_found_while_it_trains(make_trainer, tmp_path, caplog):
    cause = "shifted"
    trainer = make_trainer(with_shifted_logprobs)
    lockstep.watch(trainer, max_share=1000)
    trainer.train()
    assert sum(f"doctor: {cause} (" in text for text in said(caplog)) == 1
    assert [
        row[f"doctor/{cause}"] for row in trainer.state.log_history if "doctor/rows" in row
    ] == [1.0] * 2
    assert f"`lockstep doctor {tmp_path / 'doctor'}` shows the tokens." in said(caplog)[0]
    assert cause in [found.name for found, _ in lockstep.diagnose(tmp_path / "doctor").causes]


def test_training_by_trl_ends_at_a_cause_if_it_is_to(make_trainer):
    trainer = make_trainer(with_shifted_logprobs)
    lockstep.watch(trainer, on_cause="raise")
    with pytest.raises(MismatchError, match=r"step 0\b") as caught:
        trainer.train()
    assert caught.value.cause == "shifted" and trainer.state.global_step == 0


def test_a_run_of_trl_without_log_probs_is_told_the_settings_that_give_them(make_trainer, caplog):
    trainer = make_trainer(None, num_iterations=1, max_steps=1)
    lockstep.watch(trainer)
    trainer.train()
    of_sampler, of_trainer = said(caplog)
    assert "no log-probs of the sampler" in of_sampler and "use_vllm=True" in of_sampler
    assert "no log-probs of the trainer" in of_trainer and "num_iterations > 1" in of_trainer


# -- verl ------------------------------------------------------------------------------------------


def test_a_data_proto_of_verl_is_looked_at_before_the_update(tmp_path, caplog):
    for name in ("verl", "tensordict"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"pip install --no-deps {name}")
    protocol = pytest.importorskip("verl.protocol")
    rng = torch.Generator().manual_seed(0)
    logprobs = -torch.rand(8, 32, generator=rng) * 4
    trainer = logprobs + torch.randn(8, 32, generator=rng) * 1e-3
    ids = torch.randint(10, 500, (8, 32), generator=rng)

    def batch(rollout):
        return protocol.DataProto.from_dict(
            tensors={
                "prompts": torch.full((8, 3), 5),
                "responses": ids,
                "attention_mask": torch.ones(8, 35, dtype=torch.int64),
                "response_mask": torch.ones(8, 32, dtype=torch.int64),
                "rollout_log_probs": rollout,
                "old_log_probs": trainer,
                "advantages": torch.ones(8, 32),
            },
            non_tensors={"uid": np.array(list("aabbccdd"), object)},
            meta_info={"temperature": 1.0},
        )

    watching = lockstep.watch(tmp_path, rows=4, max_share=1000)
    assert watching.verl(batch(logprobs), step=1)["doctor/causes"] == 0
    assert said(caplog) == []
    found = watching.verl(batch(logprobs.roll(-1, 1)), step=2)
    assert found["doctor/rows"] == 4 and found["doctor/shifted"] == 1.0
    [rows] = RowsDump(tmp_path / "step-000002-rank-0.parquet").chunks()
    assert rows.row_ids == ("2/4", "2/5", "2/6", "2/7") and rows.groups.tolist() == [0, 0, 1, 1]
    assert rows.token_ids[3:35].tolist() == ids[4].tolist()


# -- Tinker ----------------------------------------------------------------------------------------


def test_datums_of_tinkers_client_are_looked_at_after_the_step(tmp_path, caplog):
    if importlib.util.find_spec("tinker") is None:
        pytest.skip("pip install tinker")
    import tinker

    rng = np.random.default_rng(0)

    def datum(ids, logprobs, mask):
        tensors = {
            "target_tokens": np.array(ids[1:]),
            "logprobs": np.array(logprobs, np.float32),
            "advantages": np.ones(len(mask), np.float32),
            "mask": np.array(mask, np.float32),
        }
        return tinker.Datum(
            model_input=tinker.ModelInput.from_ints(ids[:-1]),
            loss_fn_inputs={n: tinker.TensorData.from_numpy(t) for n, t in tensors.items()},
        )

    ids = rng.integers(10, 500, (8, 40)).tolist()
    mask = [0.0] * 7 + [1.0] * 32
    logprobs = -rng.exponential(1.0, (8, 39)) * np.array(mask)
    training = [torch.tensor(row + rng.normal(0, 1e-3, len(row))) for row in logprobs]
    watching = lockstep.watch(tmp_path, max_share=1000)
    right = [datum(*row, mask) for row in zip(ids, logprobs, strict=True)]
    assert watching.tinker(right, training, step=0) | {"time/doctor_seconds": 0} == {
        "doctor/rows": 8, "doctor/causes": 0, "time/doctor_seconds": 0,
    }  # fmt: skip
    assert said(caplog) == []
    wrong = [datum(*row, mask) for row in zip(ids, np.roll(logprobs, -1, 1), strict=True)]
    assert watching.tinker(wrong, training, step=1)["doctor/shifted"] == 1.0
    [rows] = RowsDump(tmp_path / "step-000001-rank-0.parquet").chunks()
    assert rows.token_ids[:40].tolist() in ids
    assert rows.loss_mask[:40].tolist() == [False] * 8 + [True] * 32
