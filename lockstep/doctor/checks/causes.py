"""The known causes of a mismatch, and the remedy of each.

Causes of one *class* leave the same marks on rows; a verdict is right if it names one of them. The
classes were fixed before the doctor was tried on anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

Room = Literal["tokens", "template", "values", "numerics", "noise", "training"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """One way in which sampler and trainer come to differ, with what users read about it."""

    name: str = ""
    room: Room = "tokens"
    kind: str = ""
    """Class of the cause; empty if it is the only one of its class."""
    title: str
    """The defect, in one sentence."""
    remedy: str
    """The repair, in any trainer."""
    in_trainers: Mapping[str, str] = field(default_factory=dict[str, str])
    """Trainer -> the setting or command that repairs it there."""
    in_engines: Mapping[str, str] = field(default_factory=dict[str, str])
    """Engine or library of models -> the same."""

    @property
    def equivalents(self) -> str:
        return self.kind or self.name


ENGINES = ("vllm", "sglang", "transformers")
"""The programs of `in_engines`; all others are trainers."""


def _cause(*, title: str, remedy: str, kind: str = "", **programs: str) -> Cause:
    """programs: what repairs the cause in each, as in `in_trainers` and `in_engines`."""
    in_engines = {name: text for name, text in programs.items() if name in ENGINES}
    in_trainers = {name: text for name, text in programs.items() if name not in ENGINES}
    return Cause(
        title=title,
        remedy=remedy,
        kind=kind,
        in_trainers=in_trainers,
        in_engines=in_engines,
    )


_CAUSES: dict[Room, dict[str, Cause]] = {
    # The ids, or what is done with them, are not those of what was sampled.
    "tokens": {
        "reencoded": _cause(
            title="The sampled ids were decoded to text and encoded again.",
            remedy="Keep the engine's ids, from sampling to the loss. Text is for people to read.",
            verl="actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent passes ids; "
            "rollout.multi_turn.tokenization_sanity_check_mode=strict warns about rows that were "
            "encoded again.",
            trl="your rollout_func must return completion_ids as the engine gave them.",
            slime="append the ids in meta_info.output_token_logprobs to Sample.tokens; never "
            "encode Sample.response.",
        ),
        "rerendered": _cause(
            title="Earlier turns were rendered from messages again: their ids were not sampled.",
            remedy="Extend the ids turn by turn; do not apply the template to the whole history.",
            verl="actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent appends ids turn "
            "by turn.",
            tinker="use a renderer whose has_extension_property is True; otherwise make each turn "
            "a row of its own.",
        ),
        "missing_final": _cause(
            title="The last sampled tokens of a turn, often its stop id, are not in the row.",
            remedy="Add sampled ids, stop id included, before asking whether the episode is done.",
            vllm="use the ids (token_ids; over HTTP return_token_ids=true): they include the stop "
            "id, which the text does not.",
        ),
        "dropped_separator": _cause(
            title="The separator that the template puts between two turns is missing.",
            remedy="After a sampled stop id, add the template's separator as observed ids.",
        ),
        "shifted": _cause(
            title="Log-probs are at the wrong tokens: they are off by one or more positions.",
            remedy="Place log-probs by the position of their turn, and shift in one function only.",
        ),
        "after_stop": _cause(
            title="Tokens after a stop id are trained as if the model had sampled them.",
            remedy="Cut the reply at its first stop id, and mask everything after it.",
        ),
        "observation_trained": _cause(
            title="Tokens that the model did not sample are trained, such as tool replies.",
            remedy="Mask observations: only sampled tokens belong in the loss.",
            verl="AgentLoopOutput.response_mask must be 0 over tool replies.",
            slime="Sample.loss_mask must be 0 over tool replies.",
            trl="your rollout_func must return env_mask, 0 over tokens that the model did not "
            "sample.",
        ),
        "boundary": _cause(
            title="The boundary between prompt and response is at the wrong position.",
            remedy="Take the prompt's length from the prompt that was sent, not from arithmetic.",
        ),
        "duplicated_prompt": _cause(
            title="The prompt is in the row twice.",
            remedy="Append what is new since the last turn. A slice [-0:] is the whole list.",
        ),
        "fillers": _cause(
            title="Trained tokens have a filler, such as 0.0, in place of a log-prob.",
            remedy="Mask tokens that have no log-prob: 0.0 claims that the token was certain.",
        ),
        "padding": _cause(
            title="Padding tokens are inside of rows, or before them.",
            remedy="Remove padding by the attention mask; do not pad with the stop token.",
        ),
        "post_processed": _cause(
            title="Replies were changed after they were sampled: stripped, cut or completed.",
            remedy="Train the sampled ids; give the environment a changed copy.",
        ),
        "injected_control": _cause(
            title="Text from a tool or user was encoded as control tokens.",
            remedy="Encode text of people and tools by a tokenizer without control tokens.",
            transformers="split_special_tokens=True stops special tokens, but not those that are "
            "only 'added' (<tool_call>): encode with those removed.",
        ),
    },
    "template": {
        "wrong_template": _cause(
            title="The trainer's prompt is not what the sampler read, or what the model was made "
            "for.",
            remedy="Take the prompt's ids from the engine. If both sides must render, give them "
            "one template, one list of tools, the same thinking switch, and the beginning token "
            "once.",
            trl="a processing_class with the model's own chat template; set chat_template_kwargs "
            "for both sides.",
            verl="data.apply_chat_template_kwargs reaches the agent loop too; keep prompts as ids "
            "from it.",
            vllm="send prompt ids, or add_special_tokens=false for a text that a template has "
            "written.",
        ),
        "thinking_dropped": _cause(
            title="The template drops the thinking of earlier turns from the row.",
            remedy="Keep thinking in the history, or make each turn a row of its own.",
            verl="actor_rollout_ref.rollout.multi_turn.use_inference_chat_template=False keeps it.",
        ),
    },
    # The numbers are not log-probs of the sampled tokens.
    "values": {
        "processed": _cause(
            title="Only one side's log-probs are taken after temperature, top-p or top-k.",
            remedy="Divide the trainer's logits by the temperature, ask the engine for log-probs "
            "after it, and sample with top_p=1 and no top_k, or renormalise over the kept tokens. "
            "An engine's upgrade may change which log-probs are its default.",
            lockstep="agent.record_support=true (the default) keeps the ids that top_p and top_k "
            "left; an engine that cannot needs agent.top_p=1 agent.top_k=0.",
            verl="actor_rollout_ref.rollout.logprobs_mode=processed_logprobs (the default) with "
            "top_p=1 and top_k=-1: the actor divides by the temperature, and does not truncate.",
            trl="vllm_mode=colocate asks vLLM for processed log-probs; a server of your own needs "
            "--logprobs-mode processed_logprobs. Keep top_p=1.",
            vllm="--logprobs-mode processed_logprobs; its default, raw_logprobs, is before "
            "temperature, top_p and top_k (the engine before V1 returned those after them).",
            sglang="leave SGLANG_RETURN_ORIGINAL_LOGPROB unset: with it log-probs are before "
            "temperature.",
        ),
        "generation_defaults": _cause(
            kind="processed",
            title="The engine samples as generation_config.json says, and not as the run does.",
            remedy="Send temperature, top_p, top_k and repetition_penalty with every request, or "
            "start the engine without the model's defaults.",
            vllm="--generation-config vllm",
            sglang="--sampling-defaults openai",
        ),
        "draft_logprobs": _cause(
            title="The sampler's log-probs are of a distribution that did not draw the tokens.",
            remedy="Record the log-probs of the model that accepts the token, not of the draft "
            "model or another head, and check that the two columns of log-probs are not swapped.",
        ),
        "zero_routes": _cause(
            title="Routes of experts are fillers: zeros, or one list at every token.",
            remedy="Mark routes that the engine did not return as -1 (not recorded), and let the "
            "trainer's router decide there.",
        ),
        "clamped": _cause(
            title="Log-probs were clamped at a bound.",
            remedy="Store log-probs as they are; clamp ratios where they are used.",
        ),
        "quantised": _cause(
            title="Log-probs were rounded, to decimals or to a narrow dtype.",
            remedy="Store float32.",
        ),
        "nonfinite": _cause(
            title="Trained tokens have log-probs that are not finite.",
            remedy="Mask them, and find the op that overflowed.",
        ),
        "positive": _cause(
            title="Log-probs are no natural logs: they are probabilities, negated, log2 or log10.",
            remedy="Store the natural log of each token's probability.",
        ),
    },
    # The two sides compute different numbers.
    "numerics": {
        "kernel_noise": _cause(
            title="The sampler's kernels round differently: every token has some noise.",
            remedy="Correct by importance sampling, or sample with the trainer's own ops.",
            lockstep="contract=true-on-policy, correction=mis or correction=averaged",
            verl="algorithm.rollout_correction.rollout_is=token",
            vllm="VLLM_BATCH_INVARIANT=1 makes its log-probs independent of the batch; it does not "
            "make them equal to another trainer's",
        ),
        "routing_flips": _cause(
            title="Tokens near a tie are routed to different experts by the two sides.",
            remedy="Replay the sampler's routes in the trainer.",
            lockstep="trainer.routing_replay=rollout",
            verl="with the Megatron engine: "
            "actor_rollout_ref.rollout.enable_rollout_routing_replay=true "
            "actor_rollout_ref.actor.megatron.router_replay.mode=R3",
            slime="--use-rollout-routing-replay",
        ),
        "ignored_sinks": _cause(
            title="One side's attention ignores the model's attention sinks, or those of a layer.",
            remedy="Use an attention kernel that supports sinks, in every layer.",
            transformers="attn_implementation=eager, flex_attention, flash_attention_4 or "
            "kernels-community/vllm-flash-attn3 (Hopper): gpt-oss does not support "
            "flash_attention_2 and sdpa.",
        ),
        "ignored_window": _cause(
            title="One side's attention does not keep to the model's sliding windows.",
            remedy="Pass each layer's own window to the attention kernel.",
        ),
        "ignored_rope_scaling": _cause(
            title="One side turns queries and keys by other rotary angles than the model's.",
            remedy="Read rope_parameters (rope_scaling and rope_theta) of the model's config.json.",
            vllm="leave --hf-overrides without rope settings, and serve the config.json that is "
            "trained.",
            sglang="leave --json-model-override-args without rope settings.",
        ),
        "wrong_positions": _cause(
            title="One side counts the positions of a row's tokens wrongly.",
            remedy="Give the model position ids that count the row's own tokens from 0, over all "
            "of its turns.",
            transformers="pass position_ids: without them a padded or packed batch counts padding, "
            "or the row before.",
        ),
        "packing_leak": _cause(
            title="Attention sees the row that is packed before a row.",
            remedy="Give attention the bounds of the rows, or compute each row by itself.",
            transformers="attn_implementation=flash_attention_2 with position_ids that begin at 0 "
            "in each row, and no attention_mask.",
        ),
        "padding_attended": _cause(
            title="Attention sees padding, or does not see tokens beside it.",
            remedy="Pass an attention mask that is 1 at the row's own tokens, made on the side on "
            "which the batch is padded.",
        ),
        "quantised_rollout": _cause(
            title="The sampler runs weights that are rounded to a narrower format.",
            remedy="Serve the weights as they are trained, or correct by importance sampling.",
            vllm="leave --quantization out, and serve a directory without quantization_config.",
            sglang="leave --quantization out.",
        ),
        "half_head": _cause(
            title="The two sides compute the output projection in different precisions.",
            remedy="Compute the head in one precision on both sides; float32 has the least noise.",
        ),
        "dropout": _cause(
            kind="trainer_noise",
            title="The trainer's log-probs are computed with dropout.",
            remedy="Put the model in eval mode, or set its dropout to 0.",
            slime="--attention-dropout 0 --hidden-dropout 0: Megatron's default is 0.1.",
            transformers="model.eval(), or attention_dropout=0 in the config.",
        ),
        "other_weights": _cause(
            kind="weights",
            title="The two sides run different weights: a sync was late, or a checkpoint is wrong.",
            remedy="Verify the engine's weights after each sync, and compare their versions.",
            lockstep="sync.verify_every=1",
            vllm="call reset_prefix_cache after loading: keys and values of the old weights remain "
            "otherwise.",
        ),
        "adapter_not_merged": _cause(
            kind="weights",
            title="One side runs the base model without its adapter.",
            remedy="Load the adapter into the engine after each update.",
        ),
        "precision": _cause(
            title="The two sides compute in different precisions.",
            remedy="Nothing, or use one dtype on both sides.",
            lockstep="engine.dtype=same",
        ),
    },
    # Training itself.
    "training": {
        "stale": _cause(
            kind="weights",
            title="The tokens were sampled by weights that are several updates old.",
            remedy="Reduce the staleness, or correct for it.",
            lockstep="max_staleness, correction=mis",
            slime="--update-weights-interval",
        ),
        "mixed_versions": _cause(
            kind="weights",
            title="The weights changed while replies were sampled: their first part is older.",
            remedy="Correct each token by its own version's log-probs, or let replies end before "
            "the weights change.",
            lockstep="correction=mis",
        ),
        "late_version": _cause(
            kind="weights",
            title="The version of a reply is that of its end, not of the weights that began it.",
            remedy="Stamp each token, or each part of a reply, when it is sampled; a reply that is "
            "continued after a sync has two versions.",
        ),
        "after_resume": _cause(
            kind="weights",
            title="The two sides differ since the run was resumed.",
            remedy="Load the checkpoint's weights into the engine before it samples, clear its "
            "prefix cache, and compare the versions of both sides.",
            lockstep="sync.verify_every=1",
            vllm="call reset_prefix_cache after loading: keys and values of the old weights remain "
            "otherwise.",
        ),
        "grows_without_learning": _cause(
            title="The gap grows while the weights do not change: another state grows apart.",
            remedy="Look at what is kept from step to step besides the weights: cached keys and "
            "values, buffers that the sync sends, scales of a quantised engine.",
            vllm="call reset_prefix_cache after each sync.",
        ),
        "late_advantages": _cause(
            title="Advantages are one token away from the tokens that they are of.",
            remedy="Give each trained token its own advantage; shift to 'predicts the next' in one "
            "function only, for log-probs, mask and advantages alike.",
        ),
        "after_update": _cause(
            kind="weights",
            title="The trainer's log-probs were computed after the update on these rows.",
            remedy="Compute them before the first optimizer step, or use the sampler's.",
        ),
        "unphysical": _cause(
            title="The statistics of training contradict each other.",
            remedy="Check the tokens first: such statistics come from rows that were not sampled.",
        ),
    },
}

CAUSES: dict[str, Cause] = {
    name: replace(cause, name=name, room=room)
    for room, causes in _CAUSES.items()
    for name, cause in causes.items()
}
"""Every cause by name; `add_cause` adds a plugin's."""


def add_cause(cause: Cause) -> None:
    """Makes a cause known, for a check of a plugin that names it."""
    CAUSES[cause.name] = cause


def is_same_class(one: str, other: str) -> bool:
    """True if naming `one` is right where `other` is the cause."""
    return CAUSES[one].equivalents == CAUSES[other].equivalents
