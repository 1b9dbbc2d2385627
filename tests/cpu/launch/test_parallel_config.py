"""What can be divided over processes, and what cannot, known before any is started."""

import pytest
from quickstarts import quickstart_with

from lockstep.engines.config import EmbeddedConfig, VllmConfig
from lockstep.errors import ConfigError
from lockstep.launch.config import ParallelConfig
from lockstep.run.preflight import preflight
from lockstep.run_config import SupervisedConfig
from lockstep.supervised import check_supervised
from lockstep.testing.faults import injected
from lockstep.testing.faults.rows import RetokenizedRows
from lockstep.training.config import SFTConfig


def test_torchrun_says_how_many_processes_there_are():
    assert ParallelConfig().num_processes({}) == 1
    assert ParallelConfig(processes=3).num_processes({}) == 3
    assert ParallelConfig().num_processes({"WORLD_SIZE": "4"}) == 4
    assert ParallelConfig(processes=4, sequence=2).num_processes({"WORLD_SIZE": "4"}) == 4


def test_processes_that_torchrun_did_not_start_are_refused():
    with pytest.raises(ConfigError, match=r"processes=2.*\b4\b"):
        ParallelConfig(processes=2).num_processes({"WORLD_SIZE": "4"})


def test_a_sequence_that_does_not_divide_the_processes_is_refused():
    with pytest.raises(ConfigError, match=r"sequence=2.*\b3\b"):
        ParallelConfig(processes=3, sequence=2).num_processes({})


@pytest.mark.parametrize(
    ("heads", "kv_heads", "possible"),
    [(64, 8, (1, 2, 4, 8, 16, 32, 64)), (4, 2, (1, 2, 4)), (6, 3, (1, 3, 6)), (14, 2, (1, 2, 14))],
)
def test_a_head_count_that_cannot_be_split_is_refused_with_those_that_can(
    heads, kv_heads, possible
):
    for size in range(1, heads + 1):
        parallel = ParallelConfig(sequence=size)
        if size in possible:
            parallel.check_heads(num_heads=heads, num_kv_heads=kv_heads)
            continue
        with pytest.raises(ConfigError, match=f"sequence={size} ") as refused:
            parallel.check_heads(num_heads=heads, num_kv_heads=kv_heads)
        assert f"Possible are {', '.join(map(str, possible))}." in str(refused.value)


def test_a_fault_is_refused_in_several_processes():
    config = quickstart_with("parallel.processes=2")
    with injected(RetokenizedRows()), pytest.raises(ConfigError, match=r"--fault.*\b2\b"):
        preflight(config)


def test_supervised_training_is_refused_in_several_processes():
    config = SupervisedConfig(
        sft=SFTConfig(path="dialogues.jsonl"), parallel=ParallelConfig(processes=2)
    )
    with pytest.raises(ConfigError, match=r"\b2\b.*lockstep sft"):
        check_supervised(config)


@pytest.mark.parametrize(
    "engine, name",
    [
        (EmbeddedConfig(replicas=3), "replicas"),
        (VllmConfig(replicas=3), "replicas"),
        (VllmConfig(urls=("http://a:1", "http://b:1", "http://c:1")), "urls"),
    ],
)
def test_engines_are_dealt_to_the_processes_that_train_each_to_one(engine, name):
    assert engine.for_rank(0, 1) == engine
    shares = [engine.for_rank(rank, 2).replica_configs() for rank in range(2)]
    assert [len(share) for share in shares] == [1, 2]
    if name == "urls":
        assert [c.urls for share in shares for c in share] == [(url,) for url in engine.urls]
    with pytest.raises(ConfigError, match=rf"engine\.{name}.*\b3\b.*\b4\b"):
        engine.for_rank(0, 4)


def test_an_engine_inside_each_process_is_not_dealt():
    for engine in (EmbeddedConfig(), VllmConfig(in_process=True)):
        assert engine.for_rank(1, 2) is engine
