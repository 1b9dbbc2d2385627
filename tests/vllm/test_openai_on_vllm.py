"""engine=openai over a real vLLM: its /v1/completions is one that returns token ids."""

import numpy as np
import pytest
from vllm_models import run, trainer_logprobs

from lockstep.engines.base import EngineContext
from lockstep.engines.config import OpenAIConfig
from lockstep.engines.registry import make_engine
from lockstep.models.decoder import Decoder
from lockstep.models.hf_io import load_checkpoint
from lockstep.models.locate import locate_model
from lockstep.testing.check_engine import check_engine
from lockstep.types import Request, SamplingParams

MODEL = "tiny-qwen3"


@pytest.fixture(scope="module")
def url(started):
    with started(locate_model(MODEL)) as engine:
        yield engine.wire.url


def engine_at(url, directory=None):
    directory = directory or locate_model(MODEL)
    model = load_checkpoint(directory)
    assert isinstance(model, Decoder)
    context = EngineContext(
        model=model, token_bytes=(), directory=directory, vocab_size=model.config.vocab_size,
        max_tokens=256, dtype="float32",
    )  # fmt: skip
    return make_engine(OpenAIConfig(urls=(url,), start_seconds=20), context)


def test_every_promise_is_kept_over_v1_completions(url):
    engine = engine_at(url)
    found = engine.capabilities
    assert found.distributions == ("sampled",) and not found.has_score
    report = run(check_engine(engine, prompt_ids=[5, 6, 7, 8], tolerance=1e-4))
    assert {"stop ids", "abort", "streams", "distributions"} <= set(report.passed)
    run(engine.close())


def test_its_log_probs_are_the_trainers(url):
    engine = engine_at(url)
    prompt = np.array([5, 6, 7, 8], np.int32)
    request = Request(id="a", prompt_ids=prompt, sampling=SamplingParams(max_tokens=64), seed=1)

    async def replied():
        return [delta async for delta in engine.generate(request)]

    (delta,) = run(replied())
    path = np.concatenate([prompt, delta.token_ids])
    gap = np.abs(trainer_logprobs(locate_model(MODEL), path)[4:] - delta.logprobs)
    assert gap.max() < 1e-4
    run(engine.close())
