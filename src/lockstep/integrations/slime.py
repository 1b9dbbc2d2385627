"""Lockstep inside of slime 0.3.1 and miles 0.1: three functions that their arguments name.

    export LOCKSTEP="correction=tis correction.limits=0,2 watch=/data/doctor tokenizer=MODEL"
    --use-tis --custom-tis-function-path lockstep.integrations.slime.correct
    --rollout-data-postprocess-path lockstep.integrations.slime.watch --get-mismatch-metrics

    --loss-type custom_loss --custom-loss-function-path lockstep.integrations.slime.loss

`correct` weighs the trainer's own loss; `loss` replaces it, with `LOCKSTEP="objective=..."`. Not
both at once. Nothing here imports the trainer before it is called.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lockstep.correction.layout import Layout
from lockstep.errors import AlignmentError, CapabilityError, ConfigError
from lockstep.integrations.common import (
    Settings,
    check_version,
    hook_of,
    token_losses,
    watch_of,
    weigh_piece,
)

Tensor = torch.Tensor
Batch = Mapping[str, Any]

TESTED = {"slime": "0.3.1", "miles": "0.1"}
SCORING = {
    "slime": "slime.backends.megatron_utils.loss",
    "miles": "miles.backends.training_utils.loss_hub.losses",
}
"""Trainer -> its module with `get_log_probs_and_entropy`."""


def correct(
    args: Any,
    *,
    pg_loss: Tensor,
    train_log_probs: Sequence[Tensor],
    rollout_log_probs: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    **_: Any,
) -> tuple[Tensor, Sequence[Tensor], dict[str, Tensor]]:
    """`--custom-tis-function-path`: the trainer's policy loss of each token, weighed.

    Rejected tokens are out of the masks; the trainer divides by all tokens all the same. The
    figures are of each token: the trainer takes their means, and nothing is copied to the host.
    """
    settings = _settings()
    if settings.correction.changes_loss or not settings.correction.changes_tokens:
        raise ConfigError(
            "expected weights or rules for slime's own loss, as LOCKSTEP=correction=tis; an anchor "
            "and kl_penalty_form=loss are for --custom-loss-function-path."
        )

    def ours() -> tuple[Tensor, Sequence[Tensor], dict[str, Tensor]]:
        layout = _layout(loss_masks, train_log_probs=train_log_probs)
        old, rollout = torch.cat([*train_log_probs]), torch.cat([*rollout_log_probs])
        found, figures = weigh_piece(settings.correction, old, rollout, layout=layout)
        masks = torch.split(found.keep.to(loss_masks[0].dtype), [len(m) for m in loss_masks])
        kept_loss = torch.where(found.keep, pg_loss, 0.0)
        return kept_loss * found.weights, list(masks), figures | {"tis": found.weights}

    return settings.attempt("the correction", ours, lambda: (pg_loss, loss_masks, {}))


def loss(
    args: Any, batch: Batch, logits: Tensor, sum_of_sample_mean: Callable[[Tensor], Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """`--custom-loss-function-path`: the objective and the correction of LOCKSTEP.

    Raises ConfigError without the sampler's log-probs: `--use-rollout-logprobs` or `--use-tis`
    keeps them.
    """
    settings, name = _settings(), _trainer()
    score = hook_of(SCORING[name], "get_log_probs_and_entropy", tested=TESTED[name])
    # miles has no log-probs over the ids that top-p kept.
    more = getattr(sys.modules[SCORING[name]], "get_rollout_top_p_logprob_kwargs", lambda *_: {})
    _, scored = score(
        logits,
        args=args,
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
        with_entropy=bool(args.entropy_coef),
        **more(args, batch),
    )
    if not batch.get("rollout_log_probs"):
        raise ConfigError("the batch has no rollout_log_probs: sample with --use-tis.")
    logprobs = scored["log_probs"]
    found = token_losses(
        settings,
        torch.cat([*logprobs]),
        rollout=torch.cat([*batch["rollout_log_probs"]]),
        old=torch.cat([*batch["log_probs"]]) if batch.get("log_probs") else None,
        advantages=torch.cat([*batch["advantages"]]),
        layout=_layout(batch["loss_masks"], log_probs=logprobs),
    )
    total = policy = sum_of_sample_mean(found.loss)
    if args.entropy_coef:
        total = total - args.entropy_coef * sum_of_sample_mean(torch.cat([*scored["entropy"]]))
    figures = {name: sum_of_sample_mean(values) for name, values in found.figures.items()}
    return total, {"loss": total.detach(), "pg_loss": policy.detach(), **figures}


def watch(args: Any, rollout_id: int | None = None, rollout_data: Batch | None = None) -> None:
    """`--rollout-data-postprocess-path`: looks at the share of a rank that has log-probs."""
    settings = _settings()
    if not settings.watch:
        raise ConfigError('the watch has no directory: export LOCKSTEP="watch=/data/doctor".')

    def ours() -> None:
        if rollout_data is None or rollout_id is None:
            raise CapabilityError(
                "--rollout-data-postprocess-path of miles 0.1 hands over no batch; slime 0.3.1 "
                "does."
            )
        mpu = importlib.import_module("megatron.core").mpu
        if mpu.is_pipeline_last_stage() and mpu.get_tensor_model_parallel_rank() == 0:
            watch_of(settings.watch, settings.tokenizer).slime(rollout_data, step=rollout_id)

    settings.attempt("the watch", ours, lambda: None)


def _trainer() -> str:
    """The trainer that runs in this process."""
    return "miles" if "miles" in sys.modules else "slime"


def _settings() -> Settings:
    name = _trainer()
    check_version(name, TESTED[name])
    return Settings.read()


def _layout(masks: Sequence[Tensor], **columns: Sequence[Tensor]) -> Layout:
    """Rows of the replies of a micro-batch, one after another."""
    sizes = [len(mask) for mask in masks]
    for name, rows in columns.items():
        if [len(row) for row in rows] != sizes:
            raise AlignmentError(
                f"{name} have the lengths {[len(row) for row in rows]}, loss_masks {sizes}: under "
                "context parallelism a rank has a part of every row. Use "
                "--context-parallel-size 1."
            )
    return Layout.packed(sizes, torch.cat([*masks]))
