"""Settings that lower the memory of a run. They are chosen if the user left them open, and named in
an error if the user's own settings do not fit.

They are ordered by cost: first free ones, then settings that cost time, then settings that change
the trained model.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from lockstep.config import flatten, nested, overlaid, to_dict
from lockstep.engines.config import CPU_CACHE_TOKENS, EmbeddedConfig
from lockstep.memory import GIB, MemoryPlan, memory_limit, predict_memory
from lockstep.models import peft_format
from lockstep.models.config import ModelConfig
from lockstep.run_config import Config, ModelChoice

FIT_SHARE = 0.9
"""Share of the free memory that chosen settings may take: the rest is for other programs, whose use
changes while a run starts."""
FAST_TOKENS = 4096
"""Tokens of a micro-batch below which a step takes more time."""
LORA_RANK = 16

C = TypeVar("C", bound=ModelChoice)


def left_open(settings: Mapping[str, Any], given: Collection[str]) -> dict[str, Any]:
    """The settings that are neither given nor below a given one."""
    return {
        path: value
        for path, value in settings.items()
        if not any(path == g or path.startswith(f"{g}.") for g in given)
    }


def fit_memory(
    config: C, given: Collection[str], model: ModelConfig, directory: Path, *, may_adapt: bool
) -> C:
    """`config` with open settings lowered until its predicted peak fits into the free memory. If
    even the lowest do not fit, the check at the start refuses the run.

    A run that reads other models too, as critic or teacher, stays as it is. given: paths of the
    settings that the user gave. may_adapt: whether a model too large for full
    training gets an adapter.
    """
    limit = memory_limit(config)
    others = isinstance(config, Config) and (config.critic.model or config.distill)
    if limit is None or others:  # the files of other models are checked first
        return config
    for change in _changes(config, may_adapt=may_adapt):
        if _plan(config, model, directory).num_bytes <= FIT_SHARE * limit[0]:
            break
        config = overlaid(config, nested(left_open(change, given)))
    return config


def ways_to_fit(config: ModelChoice, model: ModelConfig, directory: Path, num_bytes: int) -> str:
    """A sentence for a run that does not fit into `num_bytes`: each setting that alone makes it
    fit, with its largest value; else all of them together, or the memory that they still need."""

    def peak(settings: Mapping[str, Any]) -> int:
        changed = overlaid(config, nested(settings))
        return _plan(changed, model, directory).num_bytes

    alone: dict[str, Any] = {}
    smallest: dict[str, Any] = {}
    for change in _changes(config, may_adapt=True):
        smallest |= change
        (path, value), *others = change.items()
        if path not in alone and not others and peak(change) <= num_bytes:
            alone[path] = value
    known = flatten(to_dict(config))
    for path, value in alone.items():
        if isinstance(value, int) and not isinstance(value, bool) and known.get(path):
            # `value` fits: the largest is as many above it as fit too.
            above = range(value + 1, known[path] + 1)
            alone[path] += bisect(above, False, key=lambda n, p=path: peak({p: n}) > num_bytes)
    if alone:
        return f"It fits with {' or with '.join(f'{p}={_text(v)}' for p, v in alone.items())}."
    together = " ".join(f"{path}={_text(value)}" for path, value in smallest.items())
    least = peak(smallest)
    if least <= num_bytes:
        return f"It fits with {together}."
    return (
        f"With {together} it still needs {least / GIB:.1f} GiB: use a machine with that much free, "
        "a smaller model, or a smaller max_tokens."
    )


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _plan(config: ModelChoice, model: ModelConfig, directory: Path) -> MemoryPlan:
    lora = config.lora
    shape = lora and peft_format.resolve_shape(lora, model, directory, name=config.model)
    is_invariant = isinstance(config, Config) and config.contract != "none"
    return predict_memory(config, model, shape, is_invariant=is_invariant)


def _changes(config: ModelChoice, *, may_adapt: bool) -> Iterator[dict[str, Any]]:
    """Changes of settings that lower the memory further and further."""
    longest, budget = config.max_tokens, config.trainer.max_tokens_per_microbatch
    device = config.expected_device
    engine = getattr(config, "engine", None)
    fast = max(longest, FAST_TOKENS)
    cache = 0
    if isinstance(engine, EmbeddedConfig) and device == "cpu":
        cache = engine.kv_cache_tokens or CPU_CACHE_TOKENS
        longest_pages = -(-longest // engine.page_size) * engine.page_size
    yield from _halved("trainer.max_tokens_per_microbatch", budget, fast)
    yield {"trainer.recompute": "blocks"}
    if cache:
        yield from _halved("engine.kv_cache_tokens", cache, 2 * max(longest_pages, fast))
    yield from _halved("trainer.max_tokens_per_microbatch", min(budget, fast), longest)
    if cache:
        yield {"engine.resident_rows": False}
        yield from _halved("engine.kv_cache_tokens", 2 * max(longest_pages, fast), longest_pages)
    if device == "cuda" and config.lora is None:
        yield {"trainer.offload": "optimizer"}
    if may_adapt and config.lora is None:
        yield {"lora.rank": LORA_RANK} | ({"trainer.offload": "none"} if device == "cuda" else {})
    if config.compute_dtype == "float32" and device == "cuda":
        yield {"dtype": "bfloat16"}


def _halved(path: str, value: int, least: int) -> Iterator[dict[str, int]]:
    while value > least:
        value = max(value // 2, least)
        yield {path: value}
