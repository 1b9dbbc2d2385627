"""Places on a cluster: what is asked for, and what cannot be."""

import pytest
from quickstarts import quickstart_with

from lockstep.errors import ConfigError
from lockstep.launch.config import Demand, ParallelConfig, RayPlacement
from lockstep.run.preflight import plan, read_model_files

RAY = ("placement=ray", "parallel.processes=2", "engine.replicas=4")


def test_each_rank_has_a_place_with_its_engines():
    placement, parallel = RayPlacement(), ParallelConfig(processes=2)
    assert placement.places(parallel, Demand(num_engines=3, cores=2)) == [{"CPU": 4}, {"CPU": 6}]


def test_the_gpus_of_a_place_follow_from_device_and_engine():
    def places(*settings):
        config = quickstart_with(*RAY, "device=cuda", *settings)
        return config.placement.places(config.parallel, config.demand)

    assert places("engine.replicas=3") == [{"CPU": 2, "GPU": 2}, {"CPU": 3, "GPU": 3}]
    assert places("engine.share_device=true") == [{"CPU": 3, "GPU": 1}] * 2
    assert places("threads=4", "device=cpu") == [{"CPU": 12}] * 2


def test_an_engine_over_several_gpus_has_them_in_its_place():
    config = quickstart_with(
        "placement=ray", "parallel.processes=2", "device=cuda", "engine=vllm", "engine.replicas=2",
        "engine.tensor_parallel=2",
    )  # fmt: skip
    assert config.placement.places(config.parallel, config.demand) == [{"CPU": 2, "GPU": 3}] * 2


def test_the_plan_shows_the_places():
    config = quickstart_with(*RAY, "placement.address=auto")
    lines = plan(config, read_model_files(config))
    at = next(i for i, line in enumerate(lines) if line.startswith("placement"))
    assert "the Ray cluster of this machine" in lines[at]
    assert lines[at + 2].strip() == "rank 1 and its engines: 3 CPU"


def test_the_plan_on_gpus_says_which_process_has_which_and_how_much_memory(monkeypatch):
    def table(*settings):
        config = quickstart_with("device=cuda", *settings)
        lines = plan(config, read_model_files(config))
        return [line.split(maxsplit=2)[1:] for line in lines if line.startswith("GPU ")]

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    ranks = ("parallel.processes=2", "engine.replicas=2")
    apart = table(*ranks)
    assert [gpu for gpu, _ in apart] == ["0", "2", "1", "3"]
    assert apart[0][1].startswith("rank 0: ") and apart[0][1].endswith(" GiB")
    assert apart[1][1] == "engine 0 of rank 0: 90% of the memory"
    turns = table(*ranks, "engine.share_device=true")
    assert [gpu for gpu, _ in turns] == ["0", "0", "1", "1"] and "in turns" in turns[1][1]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,5,3,1,0")
    servers = ("engine=vllm", "engine.replicas=2")
    assert [gpu for gpu, _ in table(*servers, "engine.tensor_parallel=2")] == ["7", "5,3", "1,0"]
    with pytest.raises(ConfigError, match=r"engine\.replicas=2.*\b3\b GPU.*\b5\b"):
        table(*servers, "engine.tensor_parallel=3")
