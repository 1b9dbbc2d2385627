"""Lockstep inside of prime-rl 0.8: a loss that its configuration names, and the watch.

    [trainer.loss]
    type = "custom"
    import_path = "lockstep.integrations.prime_rl.loss"
    kwargs = { correction = "icepop", objective = "dppo", watch = "/data/doctor" }

prime-rl makes one update of a batch, so the policy before the update is the one in training, and
the forward has its log-probs. The token export of a run is read by `lockstep doctor`.
"""

from __future__ import annotations

from functools import cache, wraps
from typing import Any

from lockstep.config import flatten, from_settings
from lockstep.correction.layout import Layout
from lockstep.doctor.watch import Watch
from lockstep.integrations.common import Settings, check_version, hook_of, token_losses, watch_of

TESTED = "0.8"
EXPORT = "prime_rl.trainer.rl.token_export"


def loss(inputs: Any, **settings: Any) -> Any:
    """The loss of one sequence: a sum over its tokens, which the trainer divides.

    settings: as in `Settings`, nested or by dotted names. The figures are means over the
    sequence's tokens, and stay on the device.
    """
    found = token_losses(
        _settings(tuple(f"{name}={_text(value)}" for name, value in flatten(settings).items())),
        inputs.trainer_logprobs,
        rollout=inputs.inference_logprobs,
        advantages=inputs.advantages,
        layout=Layout.packed([len(inputs.loss_mask)], inputs.loss_mask),
    )
    total = found.loss if inputs.loss_weights is None else found.loss * inputs.loss_weights
    count = inputs.loss_mask.sum().clamp(min=1)
    figures = {
        f"lockstep/{name}": (values * inputs.loss_mask).sum() / count
        for name, values in found.figures.items()
    }
    outputs = hook_of("prime_rl.trainer.rl.loss", "LossOutputs", tested=TESTED)
    return outputs(loss=total.sum(), metrics=figures)


@cache
def _settings(words: tuple[str, ...]) -> Settings:
    check_version("prime-rl", TESTED)
    settings = from_settings(Settings, {}, words)
    if settings.watch:
        settings.attempt("the watch", lambda: _attach(settings), lambda: None)
    return settings


def _text(value: Any) -> str:
    """A value of TOML as on the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(_text, value)) if isinstance(value, list | tuple) else str(value)


def _attach(settings: Settings) -> None:
    """Looks at every micro batch that the trainer hands to its token export, enabled or not."""
    watching = watch_of(settings.watch, settings.tokenizer)
    for name in ("TokenExporter", "DisabledTokenExporter"):
        _extend(hook_of(EXPORT, name, tested=TESTED), watching)


def _extend(exporter: Any, watching: Watch) -> None:
    export, close = exporter.export, exporter.close

    @wraps(export)
    def watched(
        self: Any, step: int, micro_step: int, batch: Any, output: Any, lengths: Any, *more: Any
    ) -> None:
        watching.prime_rl(batch, output, lengths, step=step)
        export(self, step, micro_step, batch, output, lengths, *more)

    @wraps(close)
    def closed(self: Any) -> None:
        watching.try_page()
        close(self)

    exporter.export, exporter.close = watched, closed
