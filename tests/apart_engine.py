"""A plugin: the embedded engine with weights of its own."""

import copy
import dataclasses

from lockstep.engines.config import EmbeddedConfig, EngineConfig
from lockstep.engines.embedded.engine import EmbeddedEngine
from lockstep.engines.registry import make_engine


@dataclasses.dataclass(frozen=True, kw_only=True)
class ApartConfig(EngineConfig):
    pages: int = 64


class ApartEngine(EmbeddedEngine):
    @property
    def capabilities(self):
        return dataclasses.replace(super().capabilities, weight_sources=("tensors",))


@make_engine.register
def _(config: ApartConfig, context):
    settings = EmbeddedConfig(kv_cache_tokens=128 * config.pages)
    return ApartEngine(copy.deepcopy(context.model), settings)
