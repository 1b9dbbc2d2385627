"""Tiny models, datums and requests for the tests of this folder."""

import json

import numpy as np
import torch

from lockstep.models.config import ModelConfig
from lockstep.models.decoder import Decoder
from lockstep.models.lora import add_adapter
from lockstep.models.lora_config import lora_shape
from lockstep.models.tiny import hf_config
from lockstep.tinker.learner import TinkerLearner, adapter_config
from lockstep.tinker.requests import Datum, ForwardBackward, ModelSpec, OptimStep

VOCAB = 61


def make_learner(folder, kind="qwen3", *, rank=4, seed=0, ops=None, dtype=None, **spec):
    """A learner over random weights, none of them at its start; rank 0 trains all of them."""
    source = hf_config(kind, VOCAB, None)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(source))
    model = Decoder(ModelConfig.from_hf(source), ops=ops)
    model.init_weights(std=0.3, seed=seed)
    if dtype is not None:
        model = model.to(dtype)
    spec = ModelSpec(base_model="tiny", rank=rank, **{"seed": seed, **spec})
    config = adapter_config(spec, model.config)
    if config is not None:
        add_adapter(model, lora_shape(config, model.config), seed=spec.seed)
        fill_adapter(model, seed=seed + 1)
    return TinkerLearner(model, like=folder)


def fill_adapter(model, *, seed):
    """B is no longer 0, so that the adapter is seen in every number."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora" in name:
                drawn = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(0.1 * drawn)


def make_datum(length=9, *, seed=0, width=None, **inputs):
    """A datum with any ids as targets. width: K of [N, K]."""
    rng = np.random.default_rng(seed)
    shape = (length,) if width is None else (length, width)
    return Datum(
        token_ids=rng.integers(0, VOCAB, length).astype(np.int32),
        inputs={"target_tokens": rng.integers(0, VOCAB, shape)} | inputs,
    )


def policy_datum(length=9, *, seed=0, **inputs):
    """A datum with what policy losses read, ratios within about 1.5 of 1 left to the caller."""
    rng = np.random.default_rng(seed + 1000)
    return make_datum(
        length,
        seed=seed,
        logprobs=rng.uniform(-6, -2, length).astype(np.float32),
        advantages=rng.normal(size=length).astype(np.float32),
        **inputs,
    )


def weighted_datum(length=9, *, seed=0, width=None):
    rng = np.random.default_rng(seed + 2000)
    shape = (length,) if width is None else (length, width)
    return make_datum(
        length, seed=seed, width=width, weights=rng.uniform(0, 1, shape).astype(np.float32)
    )


def call(learner, data, loss="cross_entropy", *, forward_only=False, custom=None, **config):
    asked = {"data": tuple(data), "loss": loss, "config": config, "custom": custom}
    return learner.forward_backward(ForwardBackward(**asked, is_forward_only=forward_only))


def gradients(learner):
    return {name: g.clone() for name, g in learner.optimizer.gradients().items()}


def step(learner, **settings):
    return learner.apply(OptimStep(**({"learning_rate": 1e-2} | settings)))


def parameters(learner):
    return {n: p.detach().clone() for n, p in learner.optimizer.parameters.items()}
