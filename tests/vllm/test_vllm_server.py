"""vLLM's server, started by the run: what it samples, what it is told, and what it does with it."""

import asyncio
import json
import os
import urllib.request
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from check_engine import check_engine
from vllm_models import make_changed, make_checkpoint, run, trainer_logprobs

from lockstep.config import resolve
from lockstep.engines.vllm import wire
from lockstep.engines.vllm.started import VllmServer
from lockstep.engines.weight_link import WeightSender
from lockstep.errors import CapabilityError, EngineError, LeaseError
from lockstep.models import peft_format
from lockstep.models.hf_io import hf_tensors, load_checkpoint
from lockstep.models.locate import locate_model
from lockstep.models.lora import add_adapter
from lockstep.models.lora_config import LoraConfig
from lockstep.models.peft_io import save_adapter
from lockstep.recipes import find_recipe
from lockstep.run.train import train
from lockstep.store.run import load_run
from lockstep.types import Request, SamplingParams

TOLERANCE = 1e-4  # float32 over 64 wide rows: 1e-6 is usual, one part in 10,000 is another model
PROMPT = np.array([5, 6, 7, 8], np.int32)


def ask(engine, name, *, prompt=PROMPT, seed=0, **sampling):
    sampling = SamplingParams(**({"max_tokens": 24} | sampling))
    request = Request(id=name, prompt_ids=prompt, sampling=sampling, seed=seed)

    async def replied():
        return [delta async for delta in engine.generate(request)]

    return run(replied())


def path_of(deltas, prompt=PROMPT):
    """(all ids, log-probs of the sampled ones)"""
    return (
        np.concatenate([prompt, *(d.token_ids for d in deltas)]),
        np.concatenate([d.logprobs for d in deltas]),
    )


def url_of(engine):
    return engine.wire.url


def post(engine, path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url_of(engine) + path, data=data or b"", method="POST")
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read() or b"null")


def gap_to_trainer(engine, directory, ids):
    """Largest difference of the engine's score and the trainer's log-probs of `directory`."""
    scores = run(engine.score(ids))
    return np.abs(scores.logprobs - trainer_logprobs(directory, ids))[1:].max()


def reload_by_vllm(engine, directory):
    call = {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}
    post(engine, "/collective_rpc", call)
    post(engine, "/reset_prefix_cache")


def load(engine, directory, version):
    run(engine.load_weights(str(directory), version=version))


def send(engine, directory, version):
    run(engine.load_weights(hf_tensors(load_checkpoint(directory)), version=version))


def sender_elsewhere(sender, **settings):
    return sender(**settings | {"is_same_host": False})


def test_a_server_that_ended_is_started_again_for_tensors_and_refuses_those_of_another_model(
    started, place
):
    directory = make_checkpoint("qwen3", place / "again")
    new = make_changed(directory, place / "again-new")
    other = make_checkpoint("llama", place / "again-other")
    ids = np.arange(3, 67, dtype=np.int32)
    with started(directory) as engine:
        send(engine, new, 1)
        engine.wire.server.process.stop()
        send(engine, new, 2)
        assert gap_to_trainer(engine, new, ids) < TOLERANCE
        with pytest.raises(EngineError, match=r"\b4\b.*19"):
            send(engine, other, 3)
        send(engine, directory, 4)
        assert gap_to_trainer(engine, directory, ids) < TOLERANCE


@pytest.fixture(scope="module")
def dense(started):
    """A server of the shipped dense model, whose heads are narrower than vLLM's CPU kernels."""
    with started(locate_model("tiny-qwen3")) as engine:
        yield engine


@pytest.fixture(scope="module")
def changed(place):
    return make_changed(locate_model("tiny-qwen3"), place / "tiny-qwen3-changed")


def test_a_shipped_model_is_sampled_as_the_trainer_computes_it(dense):
    for temperature in (1.0, 0.7):
        for seed in range(4):
            name = f"parity-{temperature}-{seed}"
            ids, logprobs = path_of(
                ask(dense, name, seed=seed, temperature=temperature, max_tokens=64)
            )
            found = trainer_logprobs(locate_model("tiny-qwen3"), ids, temperature=temperature)
            assert np.abs(found[len(PROMPT) :] - logprobs).max() < TOLERANCE


def test_truncated_draws_record_what_they_were_drawn_from(dense):
    whole = path_of(ask(dense, "whole", seed=3, max_tokens=1))
    cut = path_of(ask(dense, "cut", seed=3, max_tokens=1, top_k=1, distribution="sampled"))
    assert whole[1][0] < 0 and cut[1][0] == 0
    with pytest.raises(CapabilityError, match="'tempered'"):
        ask(dense, "cut-tempered", temperature=0.7, top_k=4)


def test_the_engine_keeps_every_promise(dense, changed):
    report = run(
        check_engine(dense, prompt_ids=PROMPT.tolist(), weights=str(changed), page_size=128)
    )
    assert set(report.skipped) == {"support", "routed experts", "stop strings", "sleep and wake"}


def test_scores_are_the_models_whatever_the_server_records(dense):
    ids, logprobs = path_of(ask(dense, "scored", seed=1, max_tokens=32))
    scores = run(dense.score(ids, first=len(PROMPT)))
    assert np.abs(scores.logprobs[len(PROMPT) :] - logprobs).max() < TOLERANCE
    with pytest.raises(CapabilityError, match="temperature"):
        run(dense.score(ids, distribution="tempered", temperature=0.7))


def test_an_id_outside_of_the_vocabulary_never_reaches_the_server(dense):
    # Without a tokenizer vLLM does not look at them, and the first such id ends its engine.
    with pytest.raises(EngineError, match="vocabulary"):
        ask(dense, "outside", prompt=np.array([5, 100_000], np.int32))
    assert len(path_of(ask(dense, "inside"))[0]) > len(PROMPT)


def test_more_prompts_than_fit_into_a_step_do_not_end_the_server(dense):
    # vLLM would compute the last one in two parts, and on a CPU cannot take back a seeded draw.
    prompts = [np.random.default_rng(i).integers(0, 500, 150).astype(np.int32) for i in range(40)]

    async def sampled(i):
        sampling = SamplingParams(max_tokens=4)
        request = Request(id=f"long-{i}", prompt_ids=prompts[i], sampling=sampling, seed=i)
        return [delta async for delta in dense.generate(request)]

    async def all_of_them():
        return await asyncio.gather(*map(sampled, range(len(prompts))))

    for deltas in run(all_of_them()):
        assert sum(len(delta.token_ids) for delta in deltas) == 4


def test_a_temperature_that_vllm_would_change_is_refused(dense):
    with pytest.raises(EngineError, match="vLLM would draw at"):
        ask(dense, "cold", temperature=0.001)


def test_both_routes_draw_the_same_tokens(dense):
    settings = {"max_tokens": 8, "temperature": 1.0, "seed": 5}
    chosen = post(
        dense,
        "/inference/v1/generate",
        {
            "token_ids": PROMPT.tolist(),
            "sampling_params": {**settings, "logprobs": 0, "ignore_eos": True, "detokenize": False},
        },
    )["choices"][0]
    other = post(
        dense,
        "/v1/completions",
        {
            "model": "lockstep", "prompt": PROMPT.tolist(), **settings, "logprobs": 0,
            "ignore_eos": True, "return_token_ids": True, "return_tokens_as_token_ids": True,
        },
    )["choices"][0]  # fmt: skip
    assert chosen["token_ids"] == other["token_ids"]
    found = [entry["logprob"] for entry in chosen["logprobs"]["content"]]
    assert np.allclose(found, other["logprobs"]["token_logprobs"], atol=TOLERANCE)


def test_new_weights_are_exact_where_vllms_own_reload_leaves_a_tied_head_old(dense, changed):
    ids = np.arange(3, 67, dtype=np.int32)
    started = locate_model("tiny-qwen3")  # its output head is its embedding
    for version, directory in enumerate((changed, started), start=10):
        load(dense, directory, version)
        assert gap_to_trainer(dense, directory, ids) < TOLERANCE
    reload_by_vllm(dense, changed)
    gap = gap_to_trainer(dense, changed, ids)
    load(dense, started, 12)
    assert gap > 0.1, f"vLLM's own reload of a tied head is exact by now ({gap:g}): use it"


def test_weights_that_somebody_else_loads_are_noticed_by_the_next_reply(dense):
    load(dense, locate_model("tiny-qwen3"), dense.version + 1)
    label = run(dense.wire.read_label())
    assert label.startswith("lockstep/") and label.endswith(f"/{dense.version}")
    try:
        post(dense, "/update_weight_version", {"new_version": "lockstep/another/77/7"})
        with pytest.raises(LeaseError, match="'another'"):
            ask(dense, "theirs")
        with pytest.raises(LeaseError, match="not trained on"):
            run(dense.check_lease())
    finally:
        post(dense, "/update_weight_version", {"new_version": label})
    ask(dense, "ours")


def resident_bytes(server: VllmServer):
    """Of all processes of the server's session."""
    session, total = server.process.pid, 0
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session:
            total += int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
    return total


def test_sleep_on_a_cpu_frees_nothing_and_is_not_claimed(dense):
    assert not dense.capabilities.has_sleep
    with pytest.raises(CapabilityError, match="cannot give its memory back"):
        run(dense.sleep())
    before = resident_bytes(dense.wire.server)
    post(dense, "/sleep?level=2")  # it says that it sleeps
    try:
        freed = before - resident_bytes(dense.wire.server)
        assert freed < 0.02 * before, "vLLM frees memory on a CPU: claim has_sleep there"
    finally:
        post(dense, "/wake_up")
    ask(dense, "awake")


@pytest.mark.parametrize(
    "kind", ["qwen3", "qwen3_moe", "gpt_oss", "glm4_moe", "deepseek_v3", "olmo3", "gemma3_text"]
)
def test_new_weights_are_exact_where_vllms_own_reload_is_only_for_dense_ones(
    kind, started, place, monkeypatch
):
    directory = make_checkpoint(kind, place / kind)
    new = make_changed(directory, place / f"{kind}-new")
    newer = make_changed(new, place / f"{kind}-newer", seed=2)
    ids = np.random.default_rng(0).integers(0, 384, 96).astype(np.int32)
    with started(directory, delta_sync=True) as engine:
        assert gap_to_trainer(engine, directory, ids) < TOLERANCE
        for version, weights in enumerate((new, newer, directory), start=1):
            load(engine, weights, version)
            assert gap_to_trainer(engine, weights, ids) < TOLERANCE
            assert engine.version == version
        for version, weights in enumerate((new, newer, new, newer), start=4):
            send(engine, weights, version)
            assert gap_to_trainer(engine, weights, ids) < TOLERANCE
            if version == 5:  # from another machine, they would come by broadcast
                monkeypatch.setattr(wire, "WeightSender", partial(sender_elsewhere, WeightSender))
                engine.wire._drop_link()
        reload_by_vllm(engine, new)
        gap = gap_to_trainer(engine, new, ids)
    if kind in ("qwen3", "olmo3"):
        assert gap < TOLERANCE
    else:
        assert gap > 0.1, f"vLLM's own reload of {kind} is exact by now ({gap:g}): use it"


def test_adapters_by_name_are_mixed_replaced_and_there_again_after_a_restart(started, place):
    directory = locate_model("tiny-qwen3")
    models = {"": load_checkpoint(directory)}
    for seed, name in enumerate(("a", "b", "new")):
        model = models[name] = load_checkpoint(directory)
        shape = peft_format.resolve_shape(LoraConfig(rank=4), model.config, directory, name=name)
        add_adapter(model, shape, seed=seed)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.normal_(0.0, 0.2, generator=generator)
        save_adapter(model, place / name, base=directory)

    async def drawn(engine, adapter, name):
        request = Request(
            id=f"{name}/{adapter}",
            prompt_ids=PROMPT,
            sampling=SamplingParams(max_tokens=64),
            adapter=adapter,
        )
        deltas = [delta async for delta in engine.generate(request)]
        return *path_of(deltas), {delta.policy_version for delta in deltas}

    async def look(engine):
        await engine.load_adapter("a", str(place / "a"), version=1)
        await engine.load_adapter("b", str(place / "b"), version=2)
        first = asyncio.gather(*(drawn(engine, name, "first") for name in ("", "a", "b")))
        await asyncio.sleep(0.1)
        await engine.load_adapter("a", str(place / "new"), version=3)
        found = [await first]
        engine.wire.server.process.stop()
        await engine.load_weights(str(directory), version=4)
        names = ("", "a", "b")
        found.append(await asyncio.gather(*(drawn(engine, name, "again") for name in names)))
        await engine.drop_adapter("b")
        return found

    with started(directory, max_adapter_rank=8, args=("--max-loras=3",)) as engine:
        first, again = run(look(engine))
    for name, (ids, logprobs, versions) in zip(("", "a", "b"), first, strict=True):
        if name != "a":  # which had two, each for a part of the reply
            wanted = trainer_logprobs(models[name], ids)[len(PROMPT) :]
            assert np.abs(wanted - logprobs).max() < TOLERANCE
        assert versions <= {"": {0}, "a": {1, 3}, "b": {2}}[name]
    for name, (ids, logprobs, _) in zip(("", "new", "b"), again, strict=True):
        wanted = trainer_logprobs(models[name], ids)[len(PROMPT) :]
        assert np.abs(wanted - logprobs).max() < TOLERANCE


def test_a_server_teaches_as_its_model_does_in_the_process_of_the_student(started, tmp_path):
    """A whole run of two updates; the reward makes the first, and then the student is another."""
    how = (
        "model=tiny-qwen3", "distill.teacher.model=tiny-qwen3", "distill.signal=sampled",
        "distill.coef=0.5", "distill.reward_coef=1", "group_size=4", "groups_per_step=3", "steps=2",
        "evaluation=none", "checkpoint.every=0", "trainer.schedule=constant", "contract=none",
    )  # fmt: skip

    def gaps(name, *settings):
        config = resolve(find_recipe("distill"), [*how, *settings])
        rows = load_run(train(config, out=tmp_path / name, view="json").path).metrics
        return [row["distill/kl"] for row in rows]

    here = gaps("here")
    with started(locate_model("tiny-qwen3")) as engine:
        url = f"distill.teacher.engine.urls={url_of(engine)}"
        served = gaps("served", "distill.teacher.engine=vllm", url)
    assert served == pytest.approx(here, abs=1e-5) and here[1] > 1e-3
