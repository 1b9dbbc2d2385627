"""Lockstep's decoder as a model of vLLM: its registration, and what a vLLM must be started with. No
torch and no vLLM.

vLLM calls `register` in each of its processes, by the entry point `vllm.general_plugins` of this
package's installation; the servers and engines that a run starts call it themselves.
"""

from __future__ import annotations

import base64
import json
import pickle
import shlex
from collections.abc import Mapping
from typing import Any

from lockstep.config import read_json
from lockstep.engines.base import EngineContext
from lockstep.engines.config import DecoderChoice, VllmConfig
from lockstep.errors import CapabilityError, CheckpointError
from lockstep.models.config import ModelConfig
from lockstep.models.reading import FAMILIES
from lockstep.ops.contract import TRUE_ON_POLICY
from lockstep.package import package_version
from lockstep.tables import tables_beside

ARCHITECTURE = "LockstepForCausalLM"
"""Name of the model in vLLM, for --hf-overrides."""

ENTRY_POINT = "[vllm.general_plugins]\nlockstep = lockstep.engines.vllm.plugin:register\n"
"""The entry of `pyproject.toml`, as installed packages have it."""

KNOWN_VERSIONS = ("0.32",)
"""Minor versions of vLLM whose interfaces the model, the cache and the sampler were tested with."""

_STARTED_WITH = tables_beside(__file__)

NEEDS: list[dict[str, Any]] = _STARTED_WITH["decoder"]["needs"]
"""Values of vLLM's settings that the decoder needs."""


def arguments_of(part: str) -> dict[str, Any]:
    """Arguments of vLLM, without their dashes, that a part of `plugin.toml` needs."""
    return dict(_STARTED_WITH[part]["arguments"])


def written(arguments: Mapping[str, Any]) -> list[str]:
    """The words of a command line. arguments: name -> value, or True for a flag.

    >>> written({"port": 8000, "enforce-eager": True})
    ['--port=8000', '--enforce-eager']
    """
    return [f"--{k}" if value is True else f"--{k}={value}" for k, value in arguments.items()]


def environment_of(part: str) -> dict[str, str]:
    """Environment variables that a part of `plugin.toml` needs."""
    return dict(_STARTED_WITH[part]["environment"])


OTHER_CACHES = {"deepseek_v3", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"}
"""Architectures whose latents or states vLLM caches in another layout than Lockstep."""

OPS = "lockstep_ops"
"""Key of vLLM's additional configuration: the trainer's ops, pickled, in base64."""

SEED = "lockstep_seed"
"""Key of a request's seed in vLLM's `extra_args`. vLLM's own `seed` would make a generator, which
cannot be rolled back on a CPU when a prompt is computed in chunks."""

SUPPORT = "lockstep_support"
"""Key of whether a request gets the ids that its tokens were drawn from."""

DISTRIBUTION = "lockstep_distribution"
"""Key of the distribution whose log-probs are recorded; without it, the one of the draws."""


SCORE_FROM = "lockstep_score_from"
"""Key of the first id whose log-prob a scored text wants."""


def settings_for(ops: object) -> dict[str, Any]:
    """Arguments that make Lockstep's decoder in vLLM compute as the trainer does. ops: the
    trainer's; None lets the decoder's own self-test find them."""
    settings = arguments_of("decoder")
    if ops is not None:
        text = base64.b64encode(pickle.dumps(ops)).decode()
        settings["additional-config"] = json.dumps({OPS: text})
    return settings


def register() -> None:
    """Tells vLLM in this process where the model is, which it imports when it makes one; and mends
    the scoring of a version whose inside is known."""
    import vllm  # pyright: ignore
    from vllm.model_executor.models.registry import ModelRegistry  # pyright: ignore

    if is_known_version(vllm.__version__):
        from lockstep.engines.vllm.scoring import read_cached_prefixes

        read_cached_prefixes(SCORE_FROM)
    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(ARCHITECTURE, f"lockstep.engines.vllm.model:{ARCHITECTURE}")


def is_known_version(found: str) -> bool:
    return ".".join(found.split(".")[:2]) in KNOWN_VERSIONS


def check_version(found: str) -> None:
    """Raises CapabilityError for a vLLM version that the decoder was not tested with."""
    if not is_known_version(found):
        known = ", ".join(f"{name}.x" for name in KNOWN_VERSIONS)
        raise CapabilityError(
            f"engine.decoder=lockstep: Lockstep's decoder is known to run in vLLM {known}, and "
            f"this is {found}. Install one of those, or set engine.decoder=vllm."
        )


def check_attached(decoder: DecoderChoice, facts: Mapping[str, str], *, url: str) -> None:
    """Raises CapabilityError for a server that somebody started, if it runs another model than the
    settings say, or another version of this package. facts: of `LockstepWorker`."""
    is_ours = bool(facts.get("fingerprint"))
    if decoder == "lockstep" and not is_ours:
        environment = [f"{name}={value}" for name, value in environment_of("decoder").items()]
        raise CapabilityError(
            f"engine.decoder=lockstep, and {url} runs vLLM's own model. Start it with "
            f"{shlex.join(written(arguments_of('decoder')))}, {' '.join(environment)} "
            "in its environment, and this package installed there."
        )
    if decoder == "vllm" and is_ours:
        raise CapabilityError(
            f"engine.decoder=vllm, and {url} runs Lockstep's decoder. Leave engine.decoder out."
        )
    if is_ours and facts["version"] != package_version():
        raise CapabilityError(
            f"{url} has version {facts['version']} of this package, and here is "
            f"{package_version()}: its draws and log-probs may be others. Install the same "
            "version there."
        )


def runs_decoder(config: VllmConfig, context: EngineContext) -> bool:
    """True if an engine that the run starts runs Lockstep's decoder.

    Raises CapabilityError if the user asks for it and it lacks the model's architecture, and
    CheckpointError for a config that it cannot read, such as quantised weights.
    """
    architecture = read_json(context.directory / "config.json", CheckpointError).get("model_type")
    is_known = architecture in FAMILIES and architecture not in OTHER_CACHES
    if config.decoder == "lockstep" and not is_known:
        known = ", ".join(sorted(FAMILIES.keys() - OTHER_CACHES))
        raise CapabilityError(
            f"engine.decoder=lockstep: there is no decoder of a {architecture} for vLLM, only of "
            f"{known}. vLLM may have one of its own: set engine.decoder=vllm."
        )
    is_default = is_known and context.contract == TRUE_ON_POLICY and not config.why_no_decoder
    if config.decoder == "vllm" or (config.decoder == "auto" and not is_default):
        return False
    ModelConfig.from_directory(context.directory)
    return True
