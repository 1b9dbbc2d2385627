"""Lockstep inside of verl 0.9.1: corrections, advantages and the watch.

    export VERL_USE_EXTERNAL_MODULES=lockstep.integrations.verl    # in every process: runtime_env
    export LOCKSTEP="correction=mis watch=/data/doctor tokenizer=MODEL"

    actor_rollout_ref.rollout.calculate_log_probs=True
    actor_rollout_ref.actor.policy_loss.loss_mode=lockstep         # the objective of LOCKSTEP
    algorithm.adv_estimator=lockstep                               # the advantage of LOCKSTEP
    trainer.checkpoint_callback_class=lockstep.integrations.verl.Callback

The correction of `Callback` is over the whole batch, on the driver, and every loss of verl reads
its weights. With correction.anchor=rollout (algorithm.rollout_correction.bypass_mode=True) the loss
`lockstep` corrects each micro-batch by its own forward.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import cache, wraps
from typing import Any
from uuid import uuid4

import numpy as np
import torch

from lockstep.agent.gateway.config import GatewayConfig
from lockstep.agent.gateway.opening import RunGateway
from lockstep.agent.gateway.session import GatewaySession
from lockstep.agent.turns import Budget, TurnSampler
from lockstep.correction.layout import Layout
from lockstep.correction.weighing import correct
from lockstep.doctor.inputs.base import Facts
from lockstep.doctor.tokenization import find_tokenization
from lockstep.engines.base import Capabilities, Engine
from lockstep.errors import ConfigError, EngineError
from lockstep.integrations.common import Settings, check_version, hook_of, token_losses, watch_of
from lockstep.objectives.advantages import leaf_advantages
from lockstep.objectives.config import GRPO, AdvantageConfig
from lockstep.renderers.base import Renderer
from lockstep.types import Delta, Request, Sample, SamplingParams, Trajectory, frozen_ids

Tensor = torch.Tensor
Batch = Any
"""verl's DataProto."""

TESTED = "0.9.1"
NAME = "lockstep"
"""Name of the policy loss and of the advantage estimator in verl's registries."""
ALGORITHMS, TRAINER = "verl.trainer.ppo.core_algos", "verl.trainer.ppo.v1.trainer_base"
CORRECTION = "compute_rollout_correction_and_add_to_batch"
"""verl's function of the driver that `correct_batch` replaces."""
LOOKED_AT = 64
"""Rows of a step that are fetched from the queue for the watch."""


@dataclass(frozen=True, kw_only=True)
class VerlSettings(Settings):
    """Settings of the variable LOCKSTEP under verl."""

    advantage: AdvantageConfig = field(default_factory=GRPO)
    """For `algorithm.adv_estimator=lockstep`; the other trainers compute advantages themselves."""


settings = VerlSettings.read


def policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """A policy loss of verl's registry: the objective, weighed by the correction.

    Under anchor=rollout `old_log_prob` is the sampler's, and this forward corrects it; otherwise
    `rollout_is_weights` are the weights of `correct_batch`.
    """
    known, mask = settings(), response_mask != 0
    is_bypass = known.correction.anchor == "rollout"
    if known.correction.changes_tokens and not is_bypass and rollout_is_weights is None:
        raise ConfigError(
            "the batch has no rollout_is_weights of the correction. Set trainer."
            "checkpoint_callback_class=lockstep.integrations.verl.Callback and "
            "actor_rollout_ref.rollout.calculate_log_probs=True."
        )
    found = token_losses(
        known,
        log_prob,
        rollout=old_log_prob if is_bypass else None,
        old=None if is_bypass else old_log_prob,
        weights=None if is_bypass else rollout_is_weights,
        advantages=advantages,
        layout=Layout.padded(mask),
    )
    divide = hook_of(ALGORITHMS, "agg_loss", tested=TESTED)
    counted = found.keep if known.correction.denominator == "kept" else mask
    loss = divide(
        loss_mat=found.loss,
        loss_mask=counted.to(found.loss.dtype),
        loss_agg_mode=loss_agg_mode,
        **config.global_batch_info,
    )
    means = torch.stack([(values * mask).sum() for values in found.figures.values()])
    figures = zip(found.figures, (means / mask.sum().clamp(min=1)).tolist(), strict=True)
    metrics = {f"actor/{name}": value for name, value in figures}
    return loss, metrics | (found.report.to_metrics(by_part=False) if found.report else {})


def advantages(
    token_level_rewards: Tensor, response_mask: Tensor, index: Any = None, **_: Any
) -> tuple[Tensor, Tensor]:
    """An advantage estimator of verl's registry: the one of LOCKSTEP, twice, as of verl's own.

    index: [B], the prompt of each row; None: all rows are of one.
    """
    rows = torch.arange(len(response_mask), device=response_mask.device)
    groups = torch.zeros_like(rows)
    if index is not None:
        groups = torch.from_numpy(np.unique(index, return_inverse=True)[1]).to(rows.device)
    rewards = token_level_rewards.sum(-1)
    found = leaf_advantages(settings().advantage, rewards, trajectories=rows, groups=groups)
    out = found[:, None].to(rewards.dtype) * response_mask
    return out, out


def correct_batch(batch: Batch, rollout_corr_config: Any) -> tuple[Batch, dict[str, float]]:
    """Replaces verl's correction on the driver: weights of the whole batch, normalised too.

    rollout_corr_config: verl's settings, which are not read. Rejected tokens weigh 0; with
    denominator=kept they also leave the mask.
    """
    known, columns = settings(), batch.batch
    mask = columns["response_mask"]
    found = correct(
        columns["old_log_probs"],
        columns["rollout_log_probs"],
        known.correction,
        layout=Layout.padded(mask),
    )
    columns["rollout_is_weights"] = found.weights
    if known.correction.denominator == "kept":
        columns["response_mask"] = found.keep.to(mask.dtype)
    return batch, found.to_metrics()


class Callback:
    """`trainer.checkpoint_callback_class`: verl makes one on the driver before it trains.

    It is the only hook of 0.9.1's trainer that a setting names, and it is called when a checkpoint
    was saved. So it puts `correct_batch` in the place of verl's correction, and the watch before
    each update of the actor.
    """

    def __init__(self, config: Any = None) -> None:
        """config: all settings of the run. Raises ConfigError for a correction whose anchor
        contradicts verl's mode."""
        known = settings()
        check_version("verl", TESTED)
        has_bypass = bool(_get(config, "algorithm", "rollout_correction", "bypass_mode"))
        is_bypass = known.correction.anchor == "rollout"
        if known.correction.changes_tokens and has_bypass != is_bypass:
            raise ConfigError(
                f"correction.anchor={known.correction.anchor} needs "
                f"algorithm.rollout_correction.bypass_mode={is_bypass}; found {has_bypass}."
            )
        if known.correction.changes_advantages or (known.correction.changes_loss and not is_bypass):
            raise ConfigError(
                "correction.kl_penalty_coef: verl's own kl_loss_coef and use_kl_in_reward are for "
                "that; with anchor=rollout, kl_penalty_form=loss works too."
            )
        if known.correction.changes_tokens and not is_bypass:
            hook_of(TRAINER, CORRECTION, tested=TESTED)
            setattr(importlib.import_module(TRAINER), CORRECTION, correct_batch)
        if known.watch:
            known.attempt("the watch", _attach, lambda: None)

    def on_save(self, trainer: Any = None, **_: Any) -> None:
        """Writes the watch's page."""
        known = settings()
        if known.watch:
            watch_of(known.watch, known.tokenizer).try_page()


def _attach() -> None:
    """The watch looks at the batch of each step before the actor's update."""
    trainer = hook_of(TRAINER, "PPOTrainer", tested=TESTED)
    update = hook_of(trainer, "_update_actor", tested=TESTED)
    if hasattr(update, "__wrapped__"):
        return  # by an earlier callback of this process

    @wraps(update)
    def watched(self: Any, batch: Any, metrics: dict[str, Any]) -> Any:
        known = settings()

        def look() -> None:
            queue = hook_of(TRAINER, "tq", tested=TESTED)
            keys, tags = batch.keys[:LOOKED_AT], batch.tags[:LOOKED_AT]
            rows = queue.kv_batch_get(keys=keys, partition_id=batch.partition_id)
            found = watch_of(known.watch, known.tokenizer).verl(
                rows, step=self.global_steps, keys=keys, tags=tags
            )
            metrics.update(found)

        known.attempt("the watch", look, lambda: None)
        return update(self, batch, metrics)

    trainer._update_actor = watched


def _get(config: Any, *names: str) -> Any:
    for name in names:
        config = None if config is None else config.get(name)
    return config


# -- an agent loop over the gateway ---------------------------------------------------------------


class Servers(Engine):
    """verl's inference servers as the engine of a gateway: ids in, ids and log-probs out."""

    def __init__(self, client: Any, *, vocab_size: int, max_tokens: int) -> None:
        """client: the agent loop's `server_manager`."""
        self._client = client
        self.version = 0  # the trainer counts its own
        self.capabilities = Capabilities(
            name="verl",
            vocab_size=vocab_size,
            max_tokens=max_tokens,
            distributions=("model", "tempered", "sampled"),
            weight_sources=(),
        )

    async def generate(self, request: Request) -> AsyncIterator[Delta]:
        sampling = request.sampling
        out = await self._client.generate(
            request.affinity or request.id,
            prompt_ids=request.prompt_ids.tolist(),
            sampling_params={
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k or -1,
                "max_tokens": sampling.max_tokens,
                "stop_token_ids": [*sampling.stop_ids],
                "logprobs": True,
            },
        )
        ids = frozen_ids(out.token_ids, where=f"request {request.id}")
        if out.log_probs is None or len(out.log_probs) != len(ids):
            raise EngineError(f"request {request.id}: verl's server gave no log-probs of its ids.")
        has_stopped = len(ids) > 0 and int(ids[-1]) in sampling.stop_ids
        yield Delta(
            token_ids=ids,
            logprobs=np.array(out.log_probs, np.float32),
            policy_version=0,
            finish_reason="stop" if has_stopped else "length" if len(ids) else "abort",
            stop=int(ids[-1]) if has_stopped else None,
        )


@cache
def _gateway_of(model: str) -> tuple[RunGateway, Renderer]:
    """One gateway for a process, and the renderer of its model."""
    words = find_tokenization(Facts(), tokenizer=model)
    if words.renderer is None:
        raise ConfigError(f"the agent loop has no renderer of {model}: {words.lacks['renderer']}")
    return RunGateway(GatewayConfig(), words.renderer, model=model), words.renderer


@cache
def _gateway_loop() -> Any:
    base = "verl.experimental.agent_loop.agent_loop"
    loop, output, metrics = (
        hook_of(base, name, tested=TESTED)
        for name in ("AgentLoopBase", "AgentLoopOutput", "AgentLoopMetrics")
    )

    class GatewayLoop(loop):
        """An agent loop whose agent asks over HTTP. Its yaml in `agent_loop_config_path`:

            - {name: gateway, _target_: lockstep.integrations.verl.GatewayLoop, agent: my_agent.run}

        agent: an async function of base_url, api_key and row, the fields of the data set's row. It
        returns the reward, or None to leave that to verl. Each row of its token tree is an output.
        """

        def __init__(self, *args: Any, agent: str, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            module, _, name = agent.rpartition(".")
            self._agent = getattr(importlib.import_module(module), name)

        async def run(self, sampling_params: dict[str, Any], **row: Any) -> list[Any]:
            gateway, renderer = _gateway_of(self.config.actor_rollout_ref.model.path)
            server, rollout = await gateway.open(), self.rollout_config
            size = rollout.prompt_length + rollout.response_length
            engine = Servers(  # pyright: ignore[reportAbstractUsage]
                self.server_manager, vocab_size=renderer.tokenizer.vocab_size, max_tokens=size
            )
            sampling = SamplingParams(
                max_tokens=rollout.response_length,
                temperature=sampling_params.get("temperature", 1.0),
                top_p=sampling_params.get("top_p", 1.0),
                top_k=max(sampling_params.get("top_k", 0), 0),
            )
            budget = Budget(max_tokens=size, max_turn_tokens=rollout.response_length)
            trajectory = Trajectory(id=uuid4().hex)
            sampler = TurnSampler(engine, renderer, trajectory, sampling=sampling, budget=budget)
            session = server.sessions.add(GatewaySession(sampler, seed=0))
            try:
                reward = await self._agent(
                    base_url=f"{server.url}/s/{session.id}/v1", api_key=session.key, row=row
                )
                await session.set_reward(reward or 0.0, parts={})
                await session.finish()
            finally:
                await server.sessions.remove(session.id)
            return [self._output(sample, reward) for sample in trajectory.rows()]

        def _output(self, sample: Sample, reward: float | None) -> Any:
            start = int(sample.loss_mask.argmax())
            reply = slice(start, start + self.rollout_config.response_length)
            return output(
                prompt_ids=sample.token_ids[:start].tolist(),
                response_ids=sample.token_ids[reply].tolist(),
                response_mask=sample.loss_mask[reply].astype(int).tolist(),
                response_logprobs=np.nan_to_num(sample.columns["rollout_logprobs"][reply]).tolist(),
                reward_score=reward,
                num_turns=len(np.unique(sample.columns["turn"][sample.loss_mask])),
                metrics=metrics(),
            )

    return GatewayLoop


def __getattr__(name: str) -> Any:
    if name == "GatewayLoop":  # made when verl asks for it: its base imports all of verl
        return _gateway_loop()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if "verl" in sys.modules:  # VERL_USE_EXTERNAL_MODULES imports this module
    hook_of(ALGORITHMS, "register_policy_loss", tested=TESTED)(NAME)(policy_loss)
    hook_of(ALGORITHMS, "register_adv_est", tested=TESTED)(NAME)(advantages)
