"""The shared part of the modules for verl, slime and prime-rl: settings, one loss of tokens, and
the rule that a failure here never ends somebody else's training."""

from __future__ import annotations

import importlib
import logging
import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Self, TypeVar

import torch

from lockstep.config import from_settings
from lockstep.correction import kl
from lockstep.correction.config import Correction
from lockstep.correction.layout import Layout
from lockstep.correction.metrics import MismatchReport
from lockstep.correction.tokens import TokenFacts
from lockstep.correction.weighing import Corrected, weigh
from lockstep.doctor.watch import Watch, words_of
from lockstep.errors import CapabilityError, ConfigError
from lockstep.objectives.config import ObjectiveConfig, PPOClip
from lockstep.objectives.losses import TokenBatch, make_loss, read_tokens

Tensor = torch.Tensor
T = TypeVar("T")

VARIABLE = "LOCKSTEP"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of Lockstep inside another trainer: the words of the variable LOCKSTEP, as on the
    command line.

    >>> Settings.read("correction=tis correction.limits=0,3 watch=/data/doctor").correction.limits
    (0.0, 3.0)
    """

    correction: Correction = field(default_factory=Correction)
    objective: ObjectiveConfig = field(default_factory=PPOClip)
    watch: str = ""
    """Directory of the watch's rows and page; empty: nothing is watched."""
    tokenizer: str = ""
    """Tokenizer of the model, for the watch's checks of text."""
    strict: bool = False
    """Raise what fails here. False reports it once, and the trainer goes on without it."""

    def __post_init__(self) -> None:
        objective, usual = self.objective, type(self.objective).aggregate
        if objective.entropy_coef or objective.kl_coef or objective.aggregate != usual:
            raise ConfigError(
                "leave out objective.entropy_coef, kl_coef and aggregate: the trainer has settings "
                "of its own for them."
            )
        if self.correction.rescorings:
            raise ConfigError(
                "correction.rescorings: the trainer's engine scores no reply again. Take the "
                "recorded log-probs: correction=bypass."
            )

    @classmethod
    def read(cls, words: str | None = None) -> Self:
        """words: None reads the variable. Losses ask for each micro-batch: a text is read once."""
        return _read(cls, os.environ.get(VARIABLE, "") if words is None else words)

    def attempt(self, what: str, ours: Callable[[], T], otherwise: Callable[[], T]) -> T:
        """`ours`, or `otherwise` with one sentence where it fails. A setting that cannot be is
        always raised."""
        try:
            return ours()
        except ConfigError:
            raise
        except Exception as error:
            if self.strict:
                raise
            why = words_of(error)
            say_once(f"{what}: {why} The trainer goes on without it; LOCKSTEP=strict=true raises.")
            return otherwise()


@cache
def _read(cls: type[T], words: str) -> T:
    return from_settings(cls, {}, shlex.split(words))


@cache
def say_once(text: str) -> None:
    _log.warning("lockstep: %s", text)


@cache
def check_version(package: str, tested: str) -> None:
    """Warns once of a version that these functions were not tested with."""
    try:
        found = version(package)
    except PackageNotFoundError:  # a checkout that is not installed
        return
    if found != tested and not found.startswith(f"{tested}."):
        say_once(f"{package} {found} is installed; tested with {tested}. It is tried all the same.")


def hook_of(owner: Any, name: str, *, tested: str) -> Any:
    """A function or class of the trainer. owner: its module or class; a string is imported.

    Raises CapabilityError if it has none of this name.
    """
    found = getattr(importlib.import_module(owner) if isinstance(owner, str) else owner, name, None)
    if found is None:
        raise CapabilityError(f"{owner} has no {name}; version {tested} of the trainer has it.")
    return found


@cache
def watch_of(directory: str, tokenizer: str) -> Watch:
    """One watch for a process."""
    return Watch(directory, tokenizer=tokenizer or None)


@dataclass(frozen=True, slots=True)
class Losses:
    """The loss of every token, weighed, and figures about it."""

    loss: Tensor
    """The layout's shape: 0.0 where a token does not count or is rejected; carries gradient."""
    keep: Tensor
    """The same shape, bool."""
    _: KW_ONLY
    figures: Mapping[str, Tensor]
    """name -> the same shape, without gradient: means over the tokens that count."""
    report: MismatchReport | None
    """The mismatch with the sampler, if a correction looked at it."""


def weigh_piece(
    correction: Correction,
    logprobs: Tensor,
    rollout: Tensor,
    *,
    layout: Layout,
    facts: TokenFacts | None = None,
) -> tuple[Corrected, dict[str, Tensor]]:
    """A micro-batch corrected, and figures of each token, on their device.

    Raises ConfigError for a correction that needs the whole batch.
    """
    if correction.needs_whole_batch:
        raise ConfigError(
            "this correction depends on the whole batch (normalize, kl_penalty_form=advantage or "
            "denominator=kept), and a loss sees one micro-batch. Set correction.normalize=false, "
            "kl_penalty_form=loss and denominator=original."
        )
    found = weigh(logprobs.detach(), rollout.detach(), correction, layout=layout, facts=facts)
    d, _ = kl.log_ratio(logprobs, rollout, layout.mask)
    return found, {"mismatch_k1": kl.k1(d), "mismatch_k3": kl.k3(d), "kept": found.keep.float()}


def token_losses(
    settings: Settings,
    logprobs: Tensor,
    *,
    rollout: Tensor | None,
    advantages: Tensor,
    layout: Layout,
    old: Tensor | None = None,
    weights: Tensor | None = None,
) -> Losses:
    """The objective's loss with the correction, of the rows of a micro-batch.

    logprobs carry gradient. rollout: of the sampler; None where `weights` were computed before.
    old: of the policy before the update; None: this forward is it. All of the layout's shape.
    """
    correction, live = settings.correction, logprobs.detach()
    old, report, compared = live if old is None else old.detach(), None, dict[str, Tensor]()
    keep = torch.ones_like(live, dtype=torch.bool) if layout.mask is None else layout.mask
    if rollout is not None:
        facts = TokenFacts(advantages=advantages)
        corrected, compared = weigh_piece(correction, old, rollout, layout=layout, facts=facts)
        weights, keep, report = corrected.weights, corrected.keep, corrected.report
    anchor = {"rollout": rollout, "on_policy": live}.get(correction.anchor, old)
    columns = read_tokens(
        keep,
        logprobs=logprobs,
        old_logprobs=old if anchor is None else anchor,
        advantages=advantages,
        rollout_logprobs=old if rollout is None else rollout,
    )
    logprobs, *others = (x.reshape(-1) for x in columns)
    names = ("old_logprobs", "advantages", "rollout_logprobs")
    tokens = TokenBatch(
        logprobs=logprobs,
        entropy=torch.zeros_like(logprobs.detach()),
        columns=dict(zip(names, others, strict=True)),
        row=layout.expand(torch.arange(layout.num_rows, device=live.device)).reshape(-1),
        num_rows=layout.num_rows,
        sizes=layout.offsets[1:] - layout.offsets[:-1],
        mask=keep.reshape(-1),
    )
    out = make_loss(settings.objective)(tokens)
    loss = out.loss if weights is None else out.loss * weights.reshape(-1)
    if out.regularizer is not None:
        loss = loss + out.regularizer
    if correction.changes_loss and rollout is not None:
        rest = {"coef": correction.kl_penalty_coef, "clip": correction.kl_penalty_clip}
        loss = loss + kl.pull(tokens.logprobs, tokens.columns["rollout_logprobs"], **rest)
    figures = {name: values.float() for name, values in out.mean.items()} | compared
    if weights is not None:
        figures["weight"] = weights
    shaped = {name: values.reshape(layout.shape) for name, values in figures.items()}
    loss = torch.where(keep, loss.reshape(layout.shape), 0.0)
    return Losses(loss, keep, figures=shaped, report=report)
