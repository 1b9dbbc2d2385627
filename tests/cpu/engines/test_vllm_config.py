"""Settings of vLLM: what contradicts itself is refused before anything starts."""

import pytest

from lockstep.config import resolve
from lockstep.engines.base import EngineContext
from lockstep.engines.config import VllmConfig
from lockstep.engines.vllm.started import VllmServer, engine_arguments
from lockstep.models.locate import locate_model
from lockstep.recipes.registry import RECIPES


def test_a_recipe_takes_vllm_by_its_tag():
    config = resolve(
        RECIPES["quickstart"](), ["engine=vllm", "engine.python=/somewhere/bin/python"]
    )
    assert isinstance(config.engine, VllmConfig)
    assert config.engine.python == "/somewhere/bin/python"


def context_of(**facts):
    return EngineContext(
        model=None, token_bytes=(), directory=locate_model("tiny-qwen3"), vocab_size=550,
        max_tokens=256, dtype="bfloat16", **facts,
    )  # fmt: skip


def arguments(has_gpu=True, **settings):
    context = context_of()
    return engine_arguments(
        VllmConfig(**settings),
        context,
        context.directory,
        has_gpu=has_gpu,
        max_tokens=256,
        is_ours=False,
    )


def test_an_engine_that_takes_turns_on_a_gpu_can_sleep_and_leaves_room_for_the_trainer():
    alone = arguments()
    turns = arguments(share_device=True, memory_share=0.4567)
    assert sorted(set(turns) - set(alone)) == [
        "--enable-sleep-mode", "--gpu-memory-utilization=0.456",
    ]  # fmt: skip
    assert "--enable-sleep-mode" in arguments(in_process=True)
    assert "--enable-sleep-mode" not in arguments(has_gpu=False, share_device=True)


@pytest.mark.parametrize(("gpus", "seen"), [(("2,3", "4,5"), "4,5"), ((), "0,1")])
def test_a_server_sees_the_gpus_of_its_replica_and_without_any_what_the_trainer_sees(
    gpus, seen, monkeypatch, tmp_path
):
    class Unstarted(VllmServer):
        def start(self, directory):
            self.environment = self._environment()

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    context = context_of(gpus=gpus, replica=1, scratch=tmp_path)
    server = Unstarted(VllmConfig(decoder="vllm", tensor_parallel=2), context)
    assert server.environment["CUDA_VISIBLE_DEVICES"] == seen
