"""Samplers of Tinker's API on engines outside of this process: pushed, verified, taken by turns."""

import asyncio
import contextlib

import numpy as np
import pytest
import torch
from engine_models import packed_logprobs
from fake_sglang import FakeSGLang
from test_adapters_by_name import adapted

from lockstep.config import resolve
from lockstep.errors import CapabilityError, ConfigError, EngineError
from lockstep.model_server import BackgroundServer, open_base
from lockstep.models.hf_io import copy_decoder, load_checkpoint, save_checkpoint
from lockstep.models.locate import locate_model
from lockstep.models.peft_io import save_adapter
from lockstep.run_config import ServeConfig
from lockstep.tinker.embedded import EmbeddedBackend
from lockstep.tinker.requests import Sampling, TinkerError
from lockstep.training.config import TrainerConfig
from lockstep.types import SamplingParams

MODEL = "tiny-qwen3"
PROMPT = [5, 6, 7, 8, 9, 10]


def config(*settings):
    return resolve(
        ServeConfig(model=MODEL), ("api=[tinker]", "gateway.port=0", "max_tokens=128", *settings)
    )


@pytest.fixture(scope="module")
def models():
    base = load_checkpoint(locate_model(MODEL))
    whole = copy_decoder(base)
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return {"": base, "a": adapted(base, seed=1), "b": adapted(base, seed=2), "whole": whole}


@pytest.fixture(scope="module")
def directories(models, tmp_path_factory):
    place, like = tmp_path_factory.mktemp("weights"), locate_model(MODEL)
    for name in ("a", "b"):
        save_adapter(models[name], place / name, base=like)
    save_checkpoint(models["whole"], place / "whole", like=like)
    return {"": None, **{name: place / name for name in ("a", "b", "whole")}}


class Server(FakeSGLang):
    """deaf_after: loads of adapters after which it samples the base, whatever it is asked."""

    def __init__(self, *, deaf_after=99):
        super().__init__(load_checkpoint(locate_model(MODEL)), flags=("enable_lora",))
        self.deaf_after, self.num_loads = deaf_after, 0

    async def load_adapter(self, http):
        self.num_loads += 1
        return await super().load_adapter(http)

    def request_of(self, body, asked):
        if self.num_loads > self.deaf_after:
            body = {name: value for name, value in body.items() if name != "lora_path"}
        return super().request_of(body, asked)


@contextlib.asynccontextmanager
async def backend_over(server, place, *settings):
    told = []
    settings = ("engine=sglang", f"engine.urls=[{server.url}]", *settings)
    opened = await open_base(config(*settings), MODEL, MODEL, place=place, note=told.append)
    backend = EmbeddedBackend([opened], TrainerConfig())
    try:
        yield backend, told, opened.facts
    finally:
        await backend.close()
        await opened.engine.close()


def sampling(num=1, **settings):
    prompt_ids, params = np.array(PROMPT, np.int32), SamplingParams(max_tokens=12)
    return Sampling(prompt_ids=prompt_ids, num_samples=num, params=params, **settings)


async def draw(backend, name, seed=0, **settings):
    return await backend.sample(
        name, sampling(**settings), seeds=[seed], sequence_ids=[f"{name}/{seed}"]
    )


def assert_of(model, result):
    (reply,) = result.sequences
    wanted = packed_logprobs(model, [*PROMPT, *reply.token_ids])[len(PROMPT) :]
    assert np.abs(reply.logprobs - wanted).max() < 1e-4


def test_adapters_and_whole_models_are_sampled_side_by_side_and_by_turns(
    models, directories, tmp_path
):
    async def run(server):
        async with backend_over(server, tmp_path) as (backend, told, facts):
            assert "Verified as qualified: adapter arrive" in told[-1]
            assert facts["contract"] == "none" and not facts["is_one_process"]
            assert "engine sglang cannot keep it" in facts["numerics"]
            for name, directory in directories.items():
                await backend.open_sampler(f"s{name}", MODEL, directory, version=3)
            asked = [(name, seed) for seed in range(3) for name in directories]
            found = await asyncio.gather(
                *(draw(backend, f"s{n}", s, has_prompt_logprobs=True) for n, s in asked)
            )
            for (name, _), result in zip(asked, found, strict=True):
                assert_of(models[name], result)
                wanted = packed_logprobs(models[name], PROMPT)[1:]
                assert np.abs(result.prompt_logprobs[1:] - wanted).max() < 1e-4
                assert set(result.sequences[0].versions) == {3 if name else 0}
            num_whole = sum(path == "/update_weights_from_disk" for path, _ in server.bodies)
            assert 2 <= num_whole <= 6, "turns are taken in order, not for every request"
            top = await draw(backend, "sa", 9, topk_sample_logprobs=3)
            assert top.sequences[0].topk.ids.shape == (12, 3)
            for name in directories:
                await backend.close_sampler(f"s{name}")
            assert not server.adapters

    with Server() as server:
        asyncio.run(run(server))


def test_new_weights_of_a_sampler_are_sampled_under_their_version(models, directories, tmp_path):
    async def run(server):
        async with backend_over(server, tmp_path) as (backend, *_):
            await backend.open_sampler("s", MODEL, directories["a"], version=1)
            assert_of(models["a"], await draw(backend, "s", 0))
            await backend.open_sampler("s", MODEL, directories["b"], version=2)
            result = await draw(backend, "s", 1)
            assert_of(models["b"], result)
            assert set(result.sequences[0].versions) == {2}
            await backend.open_sampler("w", MODEL, directories["whole"], version=1)
            assert_of(models["whole"], await draw(backend, "w", 0))
            await backend.open_sampler("w", MODEL, directories["whole"], version=2)
            assert set((await draw(backend, "w", 1)).sequences[0].versions) == {2}

    with Server() as server:
        asyncio.run(run(server))


def test_an_engine_that_does_not_run_what_it_is_sent_is_refused(directories, tmp_path):
    async def start(server):
        async with backend_over(server, tmp_path):
            pass

    async def push(server):
        async with backend_over(server, tmp_path) as (backend, *_):
            server.deaf_after = 0
            with pytest.raises(TinkerError, match="nats from them on the probe"):
                await backend.open_sampler("s", MODEL, directories["a"], version=1)
            assert not server.adapters

    with Server(deaf_after=0) as server, pytest.raises(EngineError, match="does not run"):
        asyncio.run(start(server))
    with Server() as server:
        asyncio.run(push(server))


def test_a_server_without_adapters_is_refused(tmp_path):
    async def start(server):
        async with backend_over(server, tmp_path):
            pass

    with Server() as server:
        server.flags.clear()
        with pytest.raises(CapabilityError, match="takes no adapters by name"):
            asyncio.run(start(server))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("engine=vllm",), "Set engine.max_adapter_rank=32"),
        (("engine.share_device=true",), "cannot sleep"),
        (("fallback=true",), "only the decoder is trained"),
    ],
)
def test_settings_that_cannot_sample_what_is_trained_are_refused(settings, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        asyncio.run(open_base(config(*settings), MODEL, MODEL, place=tmp_path, note=print))


# -- replicas of the embedded engine, and the real client -----------------------------------------


def test_replicas_of_the_embedded_engine_give_the_bits_of_forward(tmp_path, monkeypatch):
    pytest.importorskip("tinker._version")
    tinker = pytest.importorskip("tinker")
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    settings = ("engine.replicas=2", "engine.kv_cache_tokens=2048", "contract=true-on-policy")
    server = BackgroundServer(MODEL, "api=tinker", *settings, out=tmp_path)
    service = tinker.ServiceClient(base_url=server.url, api_key="tml-none")
    params = tinker.SamplingParams(max_tokens=8, stop=[], seed=7)
    prompt = tinker.ModelInput.from_ints(PROMPT)
    trainers = [
        service.create_lora_training_client(MODEL, rank=rank, seed=rank).result() for rank in (4, 8)
    ]
    for _ in range(2):
        for trainer in trainers:
            sampler = trainer.save_weights_and_get_sampling_client().result()
            replies = sampler.sample(prompt, 4, params).result().sequences
            data = [datum_of(tinker, reply) for reply in replies]
            found = trainer.forward_backward(data, "importance_sampling").result()
            for reply, output in zip(replies, found.loss_fn_outputs, strict=True):
                trained = output["logprobs"].tolist()[len(PROMPT) - 1 :]
                assert trained == list(reply.logprobs)
            trainer.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()
    service.close("success").result()
    server.close()


def datum_of(tinker, reply):
    ids, before = PROMPT + list(reply.tokens), len(PROMPT) - 1
    advantages = [0.0] * before + [1.0] * len(reply.tokens)
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(ids[:-1]),
        loss_fn_inputs={
            "target_tokens": ids[1:],
            "logprobs": [0.0] * before + list(reply.logprobs),
            "advantages": advantages,
        },
    )
