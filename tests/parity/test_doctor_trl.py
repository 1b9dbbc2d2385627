"""The doctor's readers of TRL's files, on what a GRPOTrainer writes in two steps on the CPU.

pip install trl (it brings datasets, pandas and accelerate)
"""

import os

import numpy as np
import pytest
import torch
from trl_packages import dataset_of, trl_modules

from lockstep.doctor.inputs.registry import open_dump
from lockstep.doctor.inputs.trainers import TrlDump

PAD, EOS = 0, 1
PROMPTS = ["2 + 2?", "10 - 7 ="]
CHARACTERS = [chr(code) for code in range(32, 127)]


def tokenizer():
    """A character an id, so that every text has its ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": PAD, "<eos>": EOS} | {c: i + 2 for i, c in enumerate(CHARACTERS)}
    out = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    out.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    out.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=out, pad_token="<pad>", eos_token="<eos>")


def rollout(prompts, trainer):
    """The reply is the prompt backwards, with a tool's `=` in its midst: log-probs that say which
    token they are of."""
    encode = trainer.processing_class.encode
    prompt_ids = [encode(prompt) for prompt in prompts]
    completion_ids = [[*ids[::-1], *encode("="), EOS] for ids in prompt_ids]
    return {
        "prompt_ids": prompt_ids,
        "completion_ids": completion_ids,
        "logprobs": [[-i / 100 for i in ids[:-2]] + [0.0, -0.5] for ids in completion_ids],
        "env_mask": [[1] * (len(ids) - 2) + [0, 1] for ids in completion_ids],
    }


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    trl, GRPOTrainer = trl_modules()
    from transformers import Qwen3Config, Qwen3ForCausalLM

    class Saving(GRPOTrainer):
        """As docs/doctor-dumps.md says it."""

        def _generate_and_score_completions(self, inputs):
            batch = super()._generate_and_score_completions(inputs)
            tensors = {name: value for name, value in batch.items() if torch.is_tensor(value)}
            path = f"{self.args.output_dir}/batches/{self.state.global_step:05d}.pt"
            os.makedirs(os.path.dirname(path), exist_ok=True)
            torch.save(tensors, path)
            return batch

    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    out = tmp_path_factory.mktemp("trl")
    config = Qwen3Config(
        vocab_size=len(CHARACTERS) + 2, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8,
    )  # fmt: skip
    trainer = Saving(
        model=Qwen3ForCausalLM(config),
        args=trl.GRPOConfig(
            output_dir=str(out), max_steps=2, num_generations=2, per_device_train_batch_size=4,
            max_completion_length=16, num_iterations=2, log_completions=True, logging_steps=1,
            report_to=[], use_cpu=True, bf16=False, save_strategy="no",
        ),
        processing_class=tokenizer(),
        reward_funcs=[lambda completions, **_: [float(len(c)) for c in completions]],
        train_dataset=dataset_of(PROMPTS * 4),
        rollout_func=rollout,
    )  # fmt: skip
    trainer.train()
    monkeypatch.undo()
    return out


def test_a_batch_of_the_trainer_is_read_token_by_token(output):
    dump = open_dump(output / "batches")
    assert isinstance(dump, TrlDump)
    rows = next(iter(dump.chunks()))
    encode, decode = tokenizer().encode, tokenizer().decode
    for i, at in enumerate(rows.slices):
        ids, sampled = rows.token_ids[at], rows.loss_mask[at]
        prompt = ids[: rows.prompt_lengths[i]].tolist()
        assert decode(prompt) in PROMPTS
        assert ids.tolist() == [*prompt, *prompt[::-1], *encode("="), EOS]
        assert sampled.tolist() == [False] * len(prompt) + [True] * len(prompt) + [False, True]
        logprobs = rows.rollout_logprobs[at]
        assert np.isnan(logprobs[~sampled]).all()
        expected = [-i / 100 for i in prompt[::-1]] + [-0.5]
        assert logprobs[sampled] == pytest.approx(expected, abs=1e-6)
    assert np.isfinite(rows.gap[rows.loss_mask]).all(), "num_iterations=2 has old log-probs"
    assert "advantages" in dump.has
