"""How weights reach an engine: forms, versions, what is written, and what goes wrong on the way."""

import asyncio
import errno
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from broken_engines import (
    ENGINE,
    Lagging,
    Taking,
    ignoring_all,
    make_trainer,
    nudge,
    publish,
    publisher_of,
)

from lockstep.engines.embedded.engine import EmbeddedEngine
from lockstep.errors import CapabilityError, EngineError
from lockstep.models.hf_io import HFTensors, hf_tensors
from lockstep.models.locate import locate_model
from lockstep.models.lora import add_adapter
from lockstep.models.lora_config import LoraConfig, lora_shape
from lockstep.models.peft_io import load_adapter
from lockstep.sync.config import SyncConfig
from lockstep.sync.directory import WeightsDirectory
from lockstep.sync.publisher import Publisher, choose_form


def held_by(engine):
    return hf_tensors(engine._model)


def is_held(engine, trainer):
    ours, theirs = hf_tensors(trainer.model), held_by(engine)
    return all(torch.equal(ours[n].to(t.dtype), t) for n, t in theirs.items())


# -- forms -----------------------------------------------------------------------------------------


def test_shared_weights_move_nothing_and_are_not_verified():
    trainer = make_trainer("tiny-qwen3")
    engine = EmbeddedEngine(trainer.model, ENGINE)
    publisher = Publisher(engine, trainer, trainer.model)
    assert publish(publisher, 4) == [{}]
    assert (engine.version, publisher.form, publisher.level) == (4, "shared", "shared")


@pytest.mark.parametrize("form", ["tensors", "directory"])
def test_an_engine_with_weights_of_its_own_runs_the_trainers_after_a_sync(form, tmp_path):
    trainer = make_trainer("tiny-gpt-oss")
    engine = Taking(trainer.model, sources=("tensors", "directory"))
    publisher = Publisher(
        engine, trainer, trainer.model, SyncConfig(form=form, qualify="off"), place=tmp_path / "w"
    )
    for version in (0, 1):
        nudge(trainer, 0.1, version)
        row = publish(publisher, version)[0]
        assert is_held(engine, trainer)
        assert engine.version == version
    assert row["sync/bytes"] >= 646208
    if form == "directory":
        assert [p.name for p in (tmp_path / "w").iterdir()] == ["v000001"]
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
            p.name for p in (tmp_path / "w" / "v000001").iterdir()
        }
    publisher.close()
    assert not (tmp_path / "w").exists()


def test_tensors_are_made_one_by_one_in_the_order_of_the_model():
    trainer = make_trainer("tiny-gpt-oss")
    add_adapter(trainer.model, lora_shape(LoraConfig(), trainer.model.config), seed=0)
    tensors = hf_tensors(trainer.model)
    assert isinstance(tensors, HFTensors)
    for name in tensors:
        tensors[name]
        assert len(tensors._values) == 1  # one parameter with its adapter merged, no second model
    assert {n: t.shape for n, t in tensors.items()} == {
        n: t.shape for n, t in tensors.outlines().items()
    }


def test_of_an_adapter_only_the_adapter_is_written(tmp_path):
    path = locate_model("tiny-gpt-oss")

    class Adapted(Taking):
        async def load_weights(self, source, *, version):
            load_adapter(self._model, source)
            self._base.version = version
            self.files = sorted(os.listdir(source))

    trainer = make_trainer("tiny-gpt-oss")
    add_adapter(trainer.model, lora_shape(LoraConfig(rank=4), trainer.model.config), seed=0)
    engine = Adapted(trainer.model, sources=("tensors", "adapter"))
    publisher = Publisher(engine, trainer, trainer.model, place=tmp_path / "weights")
    assert publisher.form == "adapter"
    with torch.no_grad():
        trainer.model.layers[0].attention.o_proj.lora.B[0].normal_()
    row = publish(publisher, 0)[0]
    assert engine.files == ["adapter_config.json", "adapter_model.safetensors", "base_model.json"]
    assert publisher.level == "qualified"
    assert list(publisher.qualification.marks) == ["adapter"]
    assert row["sync/bytes"] < os.path.getsize(path / "model.safetensors") / 2
    ours = dict(trainer.model.named_parameters())
    assert all(torch.equal(p, ours[n]) for n, p in engine._model.named_parameters())
    publisher.close()


def test_the_form_is_the_first_that_engine_and_model_have_or_the_one_that_is_set():
    capabilities = Taking(make_trainer("tiny-qwen3").model).capabilities

    def chosen(sources, form="auto", has_adapter=False):
        config = SyncConfig(form=form)
        return choose_form(
            config, replace(capabilities, weight_sources=sources), has_adapter=has_adapter
        )

    assert chosen(("shared", "tensors", "directory")) == "shared"
    assert chosen(("tensors", "directory", "adapter")) == "tensors"
    assert chosen(("tensors", "directory", "adapter"), has_adapter=True) == "adapter"
    assert chosen(("tensors", "directory"), form="directory") == "directory"
    with pytest.raises(CapabilityError, match=r"sync\.form=directory"):
        chosen(("tensors",), form="directory")
    with pytest.raises(CapabilityError, match="this run has no adapter"):
        chosen(("tensors", "adapter"), form="adapter")
    with pytest.raises(CapabilityError, match=r"takes no weights at all\. It cannot follow"):
        chosen(())


def test_a_version_that_the_engine_has_is_not_sent_again():
    trainer = make_trainer("tiny-qwen3")
    engine = Taking(trainer.model)
    rows = publish(publisher_of(trainer, engine, qualify="off"), 0, 0, 1)
    assert engine.loads == [0, 1]
    assert rows[1] == {}


# -- errors ----------------------------------------------------------------------------------------


def test_a_load_that_fails_half_way_says_that_what_the_engine_runs_is_unknown():
    trainer = make_trainer("tiny-qwen3")

    def half(old, new, version):
        if version == 1:
            raise EngineError("worker 3 died after 17 of 26 tensors.")
        return new

    publisher = publisher_of(trainer, Taking(trainer.model, half), qualify="off")
    with pytest.raises(EngineError, match=r"version 1\b.*17 of 26"):
        publish(publisher, 0, 1)
    assert publisher.level == "none"
    half_healed = publish(publisher, 2)  # a later load is taken whole
    assert half_healed[0]["sync/level"] == 1


def test_an_engine_that_says_another_version_is_refused():
    trainer = make_trainer("tiny-qwen3")
    engine = Taking(trainer.model)

    async def load_weights(source, *, version):
        await Taking.load_weights(engine, source, version=7)

    engine.load_weights = load_weights
    with pytest.raises(EngineError, match=r"version 7\b.*\b0\b"):
        publish(publisher_of(trainer, engine, qualify="off"), 0)


def test_scores_of_another_version_than_was_loaded_are_an_error():
    class Stuck(Taking):
        async def score(self, ids, **settings):
            return replace(await super().score(ids, **settings), policy_version=0)

    trainer = make_trainer("tiny-qwen3")
    publisher = publisher_of(trainer, Stuck(trainer.model), qualify="off")
    with pytest.raises(EngineError, match=r"version 1\b.*version 0\b"):
        publish(publisher, 0, 1)


def test_a_load_while_requests_run_ends_their_segments():
    from lockstep.types import Request, SamplingParams

    trainer = make_trainer("tiny-qwen3")
    engine = Taking(trainer.model)
    publisher = publisher_of(trainer, engine, qualify="off")
    request = Request(
        id="a", prompt_ids=np.array([5, 6, 7], np.int32), stream=True,
        sampling=SamplingParams(max_tokens=20),
    )  # fmt: skip

    async def run():
        await publisher.publish(0)
        deltas = []
        async for delta in engine.generate(request):
            deltas.append(delta)
            if len(deltas) == 5:
                await publisher.publish(1)
        return deltas

    deltas = asyncio.run(run())
    ends = [d.finish_reason for d in deltas]
    assert ends.count("weight_update") == 1
    cut = ends.index("weight_update") + 1
    assert {d.policy_version for d in deltas[:cut]} == {0}
    assert {d.policy_version for d in deltas[cut:]} == {1}


def test_a_disk_that_is_full_or_read_only_is_an_error_before_anything_is_lost(tmp_path):
    place = WeightsDirectory(tmp_path / "weights")
    with pytest.raises(EngineError, match=r"version 3\b.*MiB"):
        place.check_room(3, 1 << 60)

    def fill(directory: Path):
        directory.mkdir()
        (directory / "model.safetensors").write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(EngineError, match=r"version 3\b"):
        place.write(3, fill)
    assert not list((tmp_path / "weights").iterdir())
    (tmp_path / "file").write_text("")
    with pytest.raises(EngineError, match="cannot be written"):
        WeightsDirectory(tmp_path / "file" / "weights").check_room(0, 1)


def test_versions_that_a_killed_run_has_left_are_removed(tmp_path):
    (tmp_path / "v000007").mkdir()
    (tmp_path / "v000008").mkdir()
    WeightsDirectory(tmp_path)
    assert not list(tmp_path.iterdir())


# -- following -------------------------------------------------------------------------------------


def looks_of(take, *, dtype=torch.bfloat16, size=0.003, loads=10, seed=0, name="tiny-gpt-oss"):
    """The rows of a run of small updates with this engine, and the warnings."""
    from copy import deepcopy

    trainer = make_trainer(name)
    engine = Taking(deepcopy(trainer.model).to(dtype), take)
    publisher = publisher_of(trainer, engine, qualify="off")

    def update(version):
        if version:
            nudge(trainer, size, 100 * seed + version)

    return publish(publisher, *range(loads), between=update), publisher


def test_an_engine_that_follows_has_slope_one_and_no_alarm():
    rows, publisher = looks_of(lambda old, new, version: new, size=0.01)
    assert not publisher.warnings
    assert all(row["sync/alarm"] == 0 for row in rows)
    assert rows[-1]["sync/slope"] == pytest.approx(1, abs=0.1)
    assert rows[-1]["sync/correlation"] > 0.5


def test_an_engine_that_keeps_its_weights_does_not_follow():
    rows, publisher = looks_of(ignoring_all)
    assert abs(rows[-1]["sync/slope"]) < 0.1
    assert rows[-1]["sync/alarm"] == 1
    assert "follow 0.0" in publisher.warnings[0] or "follow -0.0" in publisher.warnings[0]


def test_an_engine_that_is_a_load_behind_is_found_by_the_last_load():
    rows, publisher = looks_of(Lagging())
    assert rows[-1]["sync/last_slope"] == pytest.approx(0, abs=0.2)
    assert publisher.warnings


def test_updates_too_small_for_the_noise_are_not_judged():
    rows, publisher = looks_of(lambda old, new, version: new, size=1e-6)
    assert not publisher.warnings
    assert rows[-1].get("sync/slope_error", 1.0) > 0.1
