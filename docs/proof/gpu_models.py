"""Configurations of models that people train, at their real widths. Layers are few: all alike, but
every other one of the hybrid has attention (every fourth of the real one)."""

import json
from pathlib import Path

from lockstep.models.config import ModelConfig

MODELS = json.loads(Path(__file__).with_suffix(".json").read_text())


def config_of(name: str, *, num_layers: int) -> ModelConfig:
    return ModelConfig.from_hf(MODELS[name] | {"num_hidden_layers": num_layers})
