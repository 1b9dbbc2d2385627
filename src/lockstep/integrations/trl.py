"""Lockstep inside of TRL's GRPOTrainer and RLOOTrainer: record, watch, correct, and equal numbers.

    class Trainer(LockstepMixin, GRPOTrainer): ...

    Trainer(
        model=LockstepForCausalLM.from_pretrained(NAME),    # both sides on one decoder: KL is 0
        sampler=Sampler(),
        correction=Correction.mis(),                        # in place of TRL's own weights
        ...                                                 # as for GRPOTrainer
    )

`lockstep.watch(trainer)` records in a trainer that exists already. Nothing here imports TRL.
"""

# The packages that it extends are not typed.
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportOptionalSubscript=false, reportOptionalMemberAccess=false, reportIndexIssue=false, reportAssignmentType=false
from __future__ import annotations

import asyncio
import logging
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lockstep.correction.config import Correction
from lockstep.correction.tokens import TokenFacts
from lockstep.correction.weighing import correct, measure, merged
from lockstep.doctor.watch import Watch, words_of
from lockstep.engines.config import EmbeddedConfig
from lockstep.engines.embedded.engine import EmbeddedEngine
from lockstep.errors import CapabilityError, ConfigError, MismatchError
from lockstep.integrations.common import check_version
from lockstep.launch.event_loop import run_to_end
from lockstep.types import Request, SamplingParams, frozen_ids

TESTED = "1.16"
"""Release of TRL that tests/parity/test_trl_equal.py runs."""
HOOKS = (
    "_generate_single_turn",
    "_generate_and_score_completions",
    "_get_per_token_logps_and_entropies",
    "_compute_loss",
)
"""Methods of TRL's trainer that the mixin extends."""
COLUMNS = ("completion_ids", "completion_mask", "advantages")
"""Columns of a batch of generations that are read here; the watch reads more."""
LOGGED = tuple(
    f"mismatch/{name}" for name in ("k1", "k3", "max_abs_diff", "compared_tokens", "unequal_tokens")
)
_log = logging.getLogger(__name__)


def watch(
    target: Any,
    *,
    directory: str | Path | None = None,
    tokenizer: Any = None,
    strict: bool = False,
    **options: Any,
) -> Watch:
    """Watches a training run of another trainer. `lockstep.watch` is this function.

    target: a trainer of TRL, which is watched from here on, or the directory to write to: then
    hand over each step's batch, `watch.verl(batch, step=...)`. directory: where a trainer's rows
    and page are written; by default OUTPUT_DIR/doctor. tokenizer and options (rows, every,
    on_cause, max_share, renderer, facts): as for `Watch`. strict: as for `LockstepMixin`.

    >>> import tempfile
    >>> watching = watch(tempfile.mkdtemp())
    >>> row = {"token_ids": [5, 6], "loss_mask": [0, 1], "rollout_logprobs": [None, 0.5]}
    >>> watching.rows([row], step=0)["doctor/positive"]
    1.0
    """
    if isinstance(target, str | os.PathLike):
        if directory is not None:
            raise ConfigError(f"watch({str(target)!r}) names the directory: leave directory= out.")
        return Watch(Path(target), tokenizer=tokenizer, **options)
    if not hasattr(target, "_generate_and_score_completions"):
        raise ConfigError(
            f"lockstep.watch takes a GRPOTrainer of TRL, or a directory; found a "
            f"{type(target).__name__}. For any other trainer: watch = lockstep.watch(DIRECTORY), "
            "then watch.verl, .slime, .prime_rl, .tinker or .rows in its loop."
        )
    watching = _watch_of(target, directory=directory, tokenizer=tokenizer, **options)
    if not isinstance(target, LockstepMixin):
        kind = type(target)
        target.__class__ = type(kind.__name__, (LockstepMixin, kind), {})
    session = target._lockstep or _Session(trainer=target, strict=strict)
    session.watching, session.strict = watching, strict
    target._lockstep = session
    return watching


class LockstepMixin:
    """Goes before GRPOTrainer or RLOOTrainer in the bases of a class.

    Each row's two log-probs are compared before its first update, and logged as `mismatch/...`.
    With TRL's loss on the sampled policy this costs no forward. Whatever fails here is reported in
    one sentence, and the trainer goes on alone; with `strict` it raises.
    """

    _lockstep: _Session | None = None

    def __init__(
        self,
        *args: Any,
        watch: bool | Mapping[str, Any] = True,
        correction: Correction | None = None,
        sampler: Sampler | None = None,
        strict: bool = False,
        **kwargs: Any,
    ) -> None:
        """watch: options of `lockstep.watch`; False records nothing. correction: replaces TRL's
        importance weights. sampler: samples in place of TRL's `generate` or vLLM, the turns after
        a tool's answer too. Everything else goes to TRL.

        Raises ConfigError for a correction that this trainer cannot apply.
        """
        super().__init__(*args, **kwargs)
        is_rloo = hasattr(super(), "_compute_loss") and not hasattr(self, "loss_type")
        if correction and is_rloo and correction.level not in ("sequence", "geometric"):
            raise ConfigError(
                f"correction.level={correction.level}: RLOOTrainer has one ratio for a reply; "
                "expected sequence or geometric."
            )
        is_own = correction and (correction.rescorings or correction.changes_loss)
        if correction and (is_own or (is_rloo and correction.changes_advantages)):
            raise ConfigError(
                "the loss and the engine are TRL's own: leave out correction.rescorings and "
                "kl_penalty_coef. With kl_penalty_form=advantage GRPOTrainer takes a penalty."
            )
        options = {} if watch is True else watch
        self._lockstep = _Session(
            trainer=self,
            watching=None if options is False else _watch_of(self, **options),
            strict=strict,
            correction=correction,
            sampler=sampler,
        )

    def train(self, *args: Any, **more: Any) -> Any:
        out = super().train(*args, **more)
        if self._lockstep is not None and self._lockstep.watching is not None:
            self._lockstep.watching.try_page()
        return out

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **more: Any) -> Any:
        session = self._lockstep
        if session is None or session.sampler is None:
            return super()._generate_single_turn(prompt_ids, *args, **more)
        ids, logprobs = session.sampler.sample(prompt_ids, self)
        session.logprobs = logprobs
        return (ids, logprobs) if hasattr(self, "rollout_func") else ids  # RLOO takes ids alone

    def _generate_and_score_completions(self, inputs: Any, *args: Any, **more: Any) -> Any:
        session = self._lockstep
        if session is None or not self.model.training:
            return super()._generate_and_score_completions(inputs, *args, **more)
        session.first_scores = None
        batch = super()._generate_and_score_completions(inputs, *args, **more)
        return session.guarded(lambda: session.take_batch(batch)) or batch

    def _get_per_token_logps_and_entropies(self, *args: Any, **more: Any) -> Any:
        found = super()._get_per_token_logps_and_entropies(*args, **more)
        session = self._lockstep
        if session is not None and self.model.training:
            if session.first_scores is None:
                session.first_scores = found[0].detach()
            if session.in_loss is not None:
                session.guarded(session.take_loss)
                session.in_loss = None
        return found

    def _compute_loss(self, model: Any, inputs: Any, *args: Any, **more: Any) -> Any:
        session = self._lockstep
        if session is not None and "lockstep_row" in inputs:
            inputs = dict(inputs)  # the weights of this pass are put into it
            session.first_scores, session.in_loss = None, inputs
        return super()._compute_loss(model, inputs, *args, **more)


@dataclass(kw_only=True)
class _Session:
    """A trainer, and its batch of generations on the way to the first loss."""

    trainer: Any
    strict: bool
    watching: Watch | None = None
    correction: Correction | None = None
    sampler: Sampler | None = None
    first_scores: torch.Tensor | None = None
    """Log-probs [rows, tokens] of the policy, which TRL computes first in a generation or loss."""
    logprobs: Sequence[Sequence[float]] | None = None
    """The sampler's, of the last turn."""
    in_loss: dict[str, Any] | None = None
    """Inputs of the loss that is being computed, if its log-probs are wanted."""
    waiting: dict[str, Any] | None = None
    """A batch whose trainer's log-probs come with its losses."""
    num_seen: int = 0
    """Rows of it that have them."""
    reports: list[Any] = field(default_factory=list[Any])
    is_off: bool = False

    def __post_init__(self) -> None:
        trainer = self.trainer
        check_version("trl", TESTED)
        own = super(LockstepMixin, trainer)
        self.guarded(lambda: _check_there(HOOKS, [name for name in HOOKS if hasattr(own, name)]))
        self.guarded(lambda: _check_one_device(trainer.model))
        _use_decoder(trainer)

    def guarded(self, function: Callable[[], Any]) -> Any:
        """The function's value. None if it fails: then nothing is done from here on."""
        if self.is_off:
            return None
        try:
            return function()
        except MismatchError:
            raise  # of a watch with on_cause="raise"
        except Exception as error:
            if self.strict:
                raise
            self.is_off = True
            step, text = getattr(self.trainer.state, "global_step", 0), words_of(error)
            _log.warning("step %s: lockstep: ends here, training goes on: %s", step, text)
            return None

    def take_batch(self, batch: dict[str, Any]) -> dict[str, Any]:
        """A batch of generations as TRL is to train on it."""
        _check_there(COLUMNS, batch)
        batch, self.reports, self.waiting = dict(batch), [], None
        if "old_logps" in batch:  # RLOO keeps their sums alone
            batch["old_per_token_logps"] = self.first_scores
        if self.logprobs is not None and "sampling_per_token_logps" not in batch:
            batch["sampling_per_token_logps"] = _padded(self.logprobs, batch["completion_ids"])
        self.logprobs = None
        is_waiting = "sampling_per_token_logps" in batch and "old_per_token_logps" not in batch
        how = self.correction
        if is_waiting and how and (how.is_normalized or how.changes_advantages):
            batch["old_per_token_logps"] = self.score(batch)
        elif is_waiting:
            self.waiting, self.num_seen = dict(batch), 0
            batch["lockstep_row"] = torch.arange(len(batch["completion_ids"]))
            return batch
        seen = dict(batch)
        if "sampling_per_token_logps" in batch:
            self.weigh(batch, batch["old_per_token_logps"])
        self.look(seen)
        return batch

    def score(self, batch: dict[str, Any]) -> torch.Tensor:
        """The trainer's log-probs of a batch, by a forward of its own: for a correction whose
        weights depend on all rows at once."""
        ids, mask = (
            torch.cat([batch[f"prompt_{part}"], batch[f"completion_{part}"]], 1)
            for part in ("ids", "mask")
        )
        trainer, size = self.trainer, self.trainer.args.per_device_train_batch_size
        with torch.no_grad():
            return trainer._get_per_token_logps_and_entropies(
                trainer.model, ids, mask, batch["completion_ids"].shape[1], batch_size=size
            )[0]

    def take_loss(self) -> None:
        """Weighs the rows of a loss, whose log-probs TRL has just computed."""
        inputs, logprobs = self.in_loss, self.first_scores
        assert inputs is not None and logprobs is not None, "called inside of a loss"
        self.weigh(inputs, logprobs)
        if (batch := self.waiting) is None:  # the rows' second pass
            return
        rows = inputs["lockstep_row"]
        empty = torch.zeros_like(batch["sampling_per_token_logps"])
        column = batch.setdefault("old_per_token_logps", empty)
        column[rows] = logprobs
        self.num_seen += len(rows)
        if self.num_seen >= len(column):
            self.waiting = None
            self.look(batch)

    def weigh(self, inputs: dict[str, Any], logprobs: Any) -> None:
        """Measures the gap of some rows and puts weights into the inputs of their loss."""
        mask = (inputs["completion_mask"] * inputs.get("tool_mask", 1)).bool()
        rollout, advantages = inputs["sampling_per_token_logps"], inputs["advantages"]
        if self.correction is None:
            self.reports.append(measure(logprobs, rollout, layout=mask))
            return
        by_token = advantages[:, None].expand_as(mask) if advantages.ndim == 1 else advantages
        facts = TokenFacts(advantages=by_token)
        found = correct(logprobs, rollout, self.correction, layout=mask, facts=facts)
        self.reports.append(found.report)
        if found.penalty is not None:
            advantages = by_token = by_token + found.penalty
        if "importance_sampling_ratio" in inputs:  # TRL's own, of vLLM
            weights = found.weights.masked_fill(~mask, 1.0)
            inputs |= {"importance_sampling_ratio": weights, "advantages": advantages}
        elif "old_logps" in inputs:
            inputs["advantages"] = advantages * found.weights.amax(1)
        else:
            inputs["advantages"] = by_token * found.weights
        # TRL's ratio is to its own policy before the update, or with None exactly 1.
        anchors = {"rollout": torch.where(found.keep, rollout, logprobs), "on_policy": None}
        if self.correction.anchor in anchors:
            inputs["old_per_token_logps"] = anchors[self.correction.anchor]

    def look(self, batch: dict[str, Any]) -> None:
        """Logs the gap and the causes of a batch that has all its log-probs."""
        trainer, found = self.trainer, dict[str, float]()
        if self.reports:
            figures = merged(self.reports).to_metrics()
            found = {
                name: value
                for name, value in figures.items()
                if name.startswith("correction/") or name in LOGGED
            }
        if self.watching is not None:
            found |= self.watching.trl(
                batch, step=trainer.state.global_step, group_size=trainer.num_generations
            )
        logged: Any = getattr(trainer, "_metrics", {}).get("train")
        for name, value in found.items() if logged is not None else ():
            logged[name].append(value)


class Sampler:
    """Samples a trainer's replies with the embedded engine, from the decoder that it trains.

    The mixin's `sampler`; a `rollout_func` of GRPOTrainer too. Log-probs are of the full
    distribution at TRL's temperature, also with top_p and top_k.
    """

    def __init__(self, config: EmbeddedConfig | None = None) -> None:
        self.config = config or EmbeddedConfig()
        self._made: tuple[Any, Any] | None = None
        """(decoder, its engine)."""
        self._drawn = (-1, 0)
        """(step, requests of that step)."""

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """TRL's `rollout_func`: prompts become ids as TRL writes them."""
        prompt_ids = trainer._tokenize_prompts(prompts)[0]
        ids, logprobs = self.sample(prompt_ids, trainer)
        return {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": logprobs}

    def sample(
        self, prompt_ids: Sequence[Sequence[int]], trainer: Any
    ) -> tuple[list[list[int]], list[list[float]]]:
        """(ids, log-probs) of a reply to each prompt. Raises ConfigError for another model."""
        decoder, step = _decoder_model(trainer).for_engine(), trainer.state.global_step
        if self._made is None or self._made[0] is not decoder:
            self._made = decoder, EmbeddedEngine(decoder, self.config)
            self._drawn = (-1, 0)
        engine = self._made[1]
        is_first, params = self._drawn[0] != step, _params_of(trainer)
        number = 0 if is_first else self._drawn[1]
        self._drawn = (step, number + len(prompt_ids))
        where = f"{trainer.args.seed}/{trainer.accelerator.process_index}/{step}"
        requests: list[Request] = []
        for at, ids in enumerate(prompt_ids, start=number):
            room = engine.max_tokens - len(ids)
            requests.append(
                Request(
                    id=f"{where}/{at}",
                    prompt_ids=frozen_ids(ids, where="prompt_ids"),
                    sampling=replace(params, max_tokens=max(min(params.max_tokens, room), 1)),
                    seed=zlib.crc32(f"{where}/{at}".encode()) << 32 | at,
                )
            )

        async def all_of_them() -> list[tuple[list[int], list[float]]]:
            if is_first:
                await engine.load_weights(None, version=step)
            return await asyncio.gather(*(_reply(engine, request) for request in requests))

        found = run_to_end(all_of_them())
        return [ids for ids, _ in found], [logprobs for _, logprobs in found]


async def _reply(engine: Any, request: Request) -> tuple[list[int], list[float]]:
    deltas = [delta async for delta in engine.generate(request)]
    ids, logprobs = (
        np.concatenate([getattr(d, n) for d in deltas]) for n in ("token_ids", "logprobs")
    )
    return ids.tolist(), logprobs.tolist()


def _params_of(trainer: Any) -> SamplingParams:
    args = trainer.args
    more = dict(args.generation_kwargs or {})
    limit = more.pop("max_new_tokens", trainer.max_completion_length)
    more |= {} if args.min_p is None else {"min_p": args.min_p}
    more |= {} if args.repetition_penalty == 1 else {"repetition_penalty": args.repetition_penalty}
    if more:
        raise ConfigError(
            f"lockstep.integrations.trl.Sampler does not know {', '.join(more)}: it takes "
            "temperature, top_p, top_k and max_new_tokens. Leave them out of the GRPOConfig."
        )
    return SamplingParams(
        max_tokens=limit,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k or 0,
        stop_ids=tuple(trainer.eos_token_ids),
    )


# -- the trainer's model ---------------------------------------------------------------------------


def _base(model: Any) -> Any:
    """The model inside of PEFT's."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _decoder_model(trainer: Any) -> Any:
    model = _base(trainer.accelerator.unwrap_model(trainer.model))
    if not hasattr(model, "for_engine"):
        raise ConfigError(
            f"Sampler samples from a LockstepForCausalLM; found a {type(model).__name__}. Load the "
            "model by lockstep.integrations.causal_lm.LockstepForCausalLM.from_pretrained(NAME)."
        )
    return model


def _use_decoder(trainer: Any) -> None:
    """Lets the decoder compute the log-probs: TRL has put a head of its own over its forward. The
    reference policy becomes a decoder too."""
    mine = _base(trainer.model)
    if not hasattr(mine, "for_engine"):
        return
    reference = _base(trainer.ref_model)
    if reference is not None and not hasattr(reference, "for_engine"):
        theirs = type(mine).from_pretrained(mine.config.checkpoint, dtype=mine.dtype)
        theirs.to(trainer.accelerator.device).requires_grad_(False)
        trainer.ref_model = trainer.accelerator.prepare_model(theirs, evaluation_mode=True)
    for model in (mine, _base(trainer.ref_model)):
        if model is not None:
            vars(model).pop("forward", None)
            model.temperature = trainer.temperature


# -- pieces ----------------------------------------------------------------------------------------


def _check_there(expected: Sequence[str], found: Any) -> None:
    if missing := [name for name in expected if name not in found]:
        raise CapabilityError(
            f"this trainer has no {', '.join(missing)}; TRL {TESTED} has. Install that release."
        )


def _check_one_device(model: Any) -> None:
    places = (getattr(model, "hf_device_map", None) or {}).values()
    if len(devices := sorted({str(place) for place in places})) > 1:
        raise CapabilityError(
            f"the model is on {' and '.join(devices)} (hf_device_map); expected one device in each "
            "process. Load it without device_map, or train with data parallelism."
        )


def _padded(rows: Sequence[Sequence[float]], like: Any) -> Any:
    """[B, T] float32, on the device of `like` [B, T], zeros after the end of a row."""
    out = torch.zeros(like.shape)
    for number, row in enumerate(rows):
        out[number, : len(row)] = torch.tensor(row)
    return out.to(like.device)


def _watch_of(
    trainer: Any, *, directory: str | Path | None = None, tokenizer: Any = None, **options: Any
) -> Watch:
    """A watch that knows what the trainer's settings tell."""
    args, config = trainer.args, getattr(trainer.model, "config", None)
    place = Path(args.output_dir) / "doctor" if directory is None else Path(directory)
    tokenizer = tokenizer or getattr(trainer, "processing_class", None)
    watching = Watch(place, tokenizer=tokenizer, **options)
    if getattr(trainer, "rollout_func", None) is None:  # else only it knows how replies end
        watching.learn(stop_ids=frozenset(getattr(trainer, "eos_token_ids", ())))
    drawn = {name: getattr(args, name, None) for name in ("temperature", "top_p", "top_k")}
    watching.learn(model=str(getattr(config, "_name_or_path", "")), **drawn)
    return watching
