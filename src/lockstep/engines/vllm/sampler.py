"""Draws and their log-probs inside vLLM, by the arithmetic of the trainer and the embedded engine.

vLLM's sampler divides by temperatures, cuts by top-p and takes the log-softmax by kernels of its
own, of other bits. Here the draw is `engines.sampling.sample`: for a seed and a text it is
the embedded engine's, whatever else is in the batch, after a preemption and in any chunks.

Guard: tests/vllm/test_decoder.py.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.sample.sampler import Sampler

from lockstep.engines.sampling import DrawRule, DrawTable, stream_of
from lockstep.engines.vllm.plugin import DISTRIBUTION, SEED, SUPPORT
from lockstep.models.decoder import Decoder
from lockstep.types import Int32Array


@dataclass(frozen=True, slots=True)
class _DrawRow:
    """A request in the batch."""

    rule: DrawRule
    stream: np.uint64
    top_p: float
    top_k: int
    num_prompt: int
    output_ids: list[int]
    """vLLM's own list, which grows with every token."""


NO_ROW = _DrawRow(DrawRule(0.0, False, "model"), np.uint64(0), 1.0, 0, 0, [])
"""A row of vLLM's trial runs, which sample for no request."""


class DrawSettings(LogitsProcessor):
    """The settings of each request in the batch, as vLLM hands them out to processors of logits;
    changes none."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.rows: dict[int, _DrawRow] = {}

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Refuses what another arithmetic than `sample` would be needed for."""
        for name, is_set in (
            ("min_p", bool(sampling_params.min_p)),
            ("logprobs above 0", sampling_params.logprobs not in (None, 0)),
            ("prompt_logprobs above 0", sampling_params.prompt_logprobs not in (None, 0)),
        ):
            if is_set:
                raise ValueError(
                    f"{name}: Lockstep's decoder draws by temperature, top_p and top_k, and gives "
                    "the log-prob of the drawn token alone. Leave it out, or start vLLM with its "
                    "own model."
                )

    def is_argmax_invariant(self) -> bool:
        return True

    def apply(self, logits: Tensor) -> Tensor:
        return logits

    def update_state(self, batch_update: Any) -> None:
        process_dict_updates(self.rows, batch_update, _row)


def _row(params: SamplingParams, prompt_ids: list[int] | None, output_ids: list[int]) -> _DrawRow:
    given = params.extra_args or {}
    seed = given.get(SEED, params.seed)
    top_k = max(params.top_k, 0)
    is_filtered = params.temperature > 0 and (params.top_p < 1 or top_k > 0)
    distribution, has_support = given.get(DISTRIBUTION, "sampled"), given.get(SUPPORT, False)
    rule = DrawRule(params.temperature, is_filtered, distribution, has_support)
    stream = stream_of(secrets.randbits(63) if seed is None else seed)
    return _DrawRow(rule, stream, params.top_p, top_k, len(prompt_ids or ()), output_ids)


def _unpacked(kept: npt.NDArray[np.bool_]) -> Int32Array:
    return np.flatnonzero(kept).astype(np.int32)


class ExactSampler(Sampler):
    """Takes the place of vLLM's sampler."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__("processed_logprobs")
        self._decoder = [decoder]  # in a list: its weights are the model's, and not this module's
        self.support: list[Int32Array] | None = None
        """Ids that each row's token was drawn from, in the last step; empty for all of them. None
        if no row asked."""

    def forward(
        self,
        logits: Tensor,
        sampling_metadata: Any,
        predict_bonus_token: bool = False,
        logprobs_mode_override: Any = None,
    ) -> SamplerOutput:
        """One token for each row of logits [B, V], with its log-prob by the row's rule."""
        processors = sampling_metadata.logitsprocs.argmax_invariant
        known = next((found.rows for found in processors if isinstance(found, DrawSettings)), {})
        rows = [known.get(at, NO_ROW) for at in range(len(logits))]
        positions = np.array([row.num_prompt + len(row.output_ids) for row in rows], np.int64)
        with torch.inference_mode():
            logits = self.apply_logits_processors(
                logits.float(), sampling_metadata, predict_bonus_token
            )
            rules = list(dict.fromkeys(row.rule for row in rows))
            table = DrawTable(
                rules=rules,
                rule_of=np.array([rules.index(row.rule) for row in rows]),
                streams=np.array([row.stream for row in rows], np.uint64),
                top_p=np.array([row.top_p for row in rows], np.float32),
                top_k=np.array([row.top_k for row in rows], np.int64),
            )
            everyone, ops = np.arange(len(rows)), self._decoder[0].ops
            ids, logprobs, support = table.draw(logits, everyone, positions, ops, pack=_unpacked)
            self.support = None
            if support:
                none = np.empty(0, np.int32)
                self.support = [support.get(at, none) for at in range(len(rows))]
            tensors = None
            if sampling_metadata.max_num_logprobs is not None:
                chosen = logits.gather(1, ids[:, None])
                ranks = (logits >= chosen).sum(1)
                tensors = LogprobsTensors(ids[:, None].int(), logprobs[:, None], ranks)
        return SamplerOutput(sampled_token_ids=ids[:, None].int(), logprobs_tensors=tensors)

    def compute_logprobs(self, logits: Tensor) -> Tensor:
        """The model's log-probs, for the tokens of prompts."""
        return self._decoder[0].ops.log_softmax(logits)
