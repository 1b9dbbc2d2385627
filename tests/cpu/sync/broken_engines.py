"""Engines with weights of their own, and ways to take weights wrongly."""

import asyncio
from copy import deepcopy
from dataclasses import replace

import torch

from lockstep.engines.config import EmbeddedConfig
from lockstep.engines.embedded.engine import EmbeddedEngine
from lockstep.models.hf_io import load_checkpoint
from lockstep.models.locate import locate_model
from lockstep.sync.config import SyncConfig
from lockstep.sync.publisher import Publisher
from lockstep.training.config import TrainerConfig
from lockstep.training.trainer import Trainer

ENGINE = EmbeddedConfig(
    page_size=16, kv_cache_tokens=2048, max_num_sequences=8, max_step_tokens=512
)


class Taking(EmbeddedEngine):
    """Takes weights as `take(old, new, version)` says: {name: tensor} each."""

    def __init__(self, model, take=lambda old, new, version: new, sources=("tensors",)):
        super().__init__(deepcopy(model).requires_grad_(False), ENGINE, is_shared=False)
        self.take, self.sources = take, sources
        self.held = None
        self.loads = []

    @property
    def capabilities(self):
        return replace(super().capabilities, weight_sources=self.sources)

    async def load_weights(self, source, *, version):
        new = read(source)
        held = self.take(self.held or new, new, version)
        if held is None:
            self.loads.append(version)
            self.version = version
            return
        self.held = held
        await super().load_weights(held, version=version)
        self.loads.append(version)


def read(source):
    from lockstep.models.hf_io import read_tensors

    if isinstance(source, str):
        return {name: stored.read() for name, stored in read_tensors(source).items()}
    return {name: tensor.clone() for name, tensor in source.items()}


def ignoring(*words):
    """What has any of these words in its name keeps its first values."""

    def take(old, new, version):
        return {n: old[n] if any(w in n for w in words) else t for n, t in new.items()}

    return take


def permuting(word):
    """The numbers of such tensors arrive in another order."""

    def take(old, new, version):
        generator = torch.Generator().manual_seed(1)
        out = dict(new)
        for name, tensor in new.items():
            if word in name and name.endswith("proj"):
                order = torch.randperm(tensor[0].numel(), generator=generator)
                out[name] = tensor.flatten(1)[:, order].view_as(tensor)
        return out

    return take


def halving(old, new, version):
    """The first half of the tensors arrives."""
    half = len(new) // 2
    return {n: t if i < half else old[n] for i, (n, t) in enumerate(new.items())}


def ignoring_all(old, new, version):
    return old


class Lagging:
    """Runs what it was given the load before."""

    def __init__(self):
        self.before = None

    def __call__(self, old, new, version):
        held, self.before = self.before or new, new
        return held


def make_trainer(name="tiny-gpt-oss", *, dtype=torch.float32, lr=1e-3):
    path = locate_model(name)
    return Trainer(load_checkpoint(path, dtype=dtype), TrainerConfig(lr=lr), like=path)


class _Sync(SyncConfig):
    window = 4


def publisher_of(trainer, engine, **settings):
    warnings = []
    out = Publisher(engine, trainer, trainer.model, _Sync(**settings), warn=warnings.append)
    out.warnings = warnings
    return out


def publish(publisher, *versions, between=lambda version: None):
    """The metrics of each of these loads, in one event loop."""

    async def run():
        found = []
        for version in versions:
            between(version)
            found.append(await publisher.publish(version))
        return found

    return asyncio.run(run())


def nudge(trainer, size, seed):
    """An update of about this relative size, of every parameter."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise * size * parameter.float().square().mean().sqrt().clamp(min=1e-3))
