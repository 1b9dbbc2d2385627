"""The fields of each dialect's requests, and what becomes of them.

A field is honoured, accepted without effect, ignored (counted in the trajectory's metrics), or
refused. A field in no table is refused as well, because its sender expects something of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

TEXT_ONLY = "Only text is read here; leave the other parts out."
NO_CONSTRAINT = "Logits are not altered, so that log-probs stay the model's own."
LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"


@dataclass(frozen=True, slots=True)
class Field:
    """Treatment of one field of a body."""

    treatment: Literal["honoured", "accepted", "ignored", "refused"]
    """accepted: changes nothing and need not. ignored: has no effect; a request that sets it is
    counted as gateway/ignored/NAME. refused: status 400."""
    about: str = ""
    """Explains how the field is honoured, why it is accepted or ignored, or what to send instead.
    """
    neutral: tuple[Any, ...] = ()
    """Values of an ignored or refused field that change nothing; null always is one."""


Fields = Mapping[str, Field]

honoured, accepted = partial(Field, "honoured"), partial(Field, "accepted")


def ignored(about: str, *neutral: Any) -> Field:
    return Field("ignored", about, neutral)


def refused(about: str, *neutral: Any) -> Field:
    return Field("refused", about, neutral)


ABSENT = refused("There is nothing like it here; leave it out.")
FORMAT = honoured("text, json_object or json_schema, with engine=embedded; others refuse JSON")
CHOICE = honoured("auto, none, any tool, or one by name, with engine=embedded; others do not force")
VERBOSITY = ignored("Ask for it in a message.")

SHARED: Fields = {
    "model": honoured("one of GET /v1/models"),
    "tools": honoured("functions; `strict` is not enforced"),
    "temperature": honoured("0 is greedy"),
    "top_p": honoured(),
    "stream": honoured("sent when the turn is complete"),
    "metadata": accepted("the sender's own notes"),
    "service_tier": accepted("there is one"),
}
"""Fields that all dialects have."""

OPENAI: Fields = {
    **SHARED,
    "tool_choice": CHOICE,
    "top_logprobs": refused("Only the log-probs of sampled ids are recorded.", 0),
    "parallel_tool_calls": ignored("A turn may have several calls; a forced one has one.", True),
    **dict.fromkeys(("user", "safety_identifier"), accepted("names the sender, not the session")),
    **dict.fromkeys(
        ("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
        accepted("prefixes are reused by what they are"),
    ),
}
"""Fields that both OpenAI dialects have."""

OTHERS: Fields = {
    **{
        name: refused(NO_CONSTRAINT, neutral)
        for neutral, names in (
            (0, "frequency_penalty presence_penalty min_p top_a min_tokens min_new_tokens"),
            (0, "no_repeat_ngram_size xtc_probability dry_multiplier"),
            (1, "repetition_penalty length_penalty typical_p"),
            (False, "ignore_eos use_beam_search"),
        )
        for name in names.split()
    },
    **dict.fromkeys(("logit_bias", "vllm_xargs"), refused(NO_CONSTRAINT, {})),
    **dict.fromkeys(
        ("bad_words", "allowed_token_ids", "logits_processors", "stop_token_ids"),
        refused(NO_CONSTRAINT, []),
    ),
    **dict.fromkeys(("n", "best_of"), refused("One reply is drawn for each request.", 1)),
    **dict.fromkeys(
        ("skip_special_tokens", "spaces_between_special_tokens", "detokenize"),
        refused("Replies are text without control tokens. Ask for ids: x-lockstep-ids.", True),
    ),
    **dict.fromkeys(
        ("logprobs", "prompt_logprobs", "return_token_ids", "return_tokens_as_token_ids"),
        refused("Ask for ids and their log-probs: x-lockstep-ids.", False),
    ),
    **dict.fromkeys(("include_reasoning", "separate_reasoning"), refused("It always comes.", True)),
    "include_stop_str_in_output": refused("Replies end before it.", False),
    **dict.fromkeys(
        ("echo", "continue_final_message", "add_special_tokens"),
        refused("The renderer writes the prompt.", False),
    ),
    "add_generation_prompt": refused("The renderer writes the prompt.", True),
    **dict.fromkeys(
        ("chat_template_kwargs", "mm_processor_kwargs"),
        refused("They are settings of the renderer, the same for all requests.", {}),
    ),
    "documents": refused(TEXT_ONLY, []),
    "priority": refused("Episodes have theirs from the run.", 0),
}
"""Fields of other servers, vLLM among them: refused in all dialects unless they change nothing."""

CHAT = {
    **OPENAI,
    "messages": honoured("text; a last message of the assistant's is refused"),
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "seed"), honoured()),
    "top_k": honoured("not OpenAI's, but usual; 0 and -1 are off"),
    "stop": honoured("the reply that is sent ends before it; its ids are kept"),
    "n": honoured("siblings in the session's tree"),
    "stream_options": honoured("include_usage"),
    "logprobs": honoured("of every sampled id, thinking and stop id included"),
    "reasoning_effort": ignored("It is a setting of the renderer, the same for all requests."),
    "verbosity": VERBOSITY,
    "response_format": FORMAT,
    "modalities": refused(TEXT_ONLY, ["text"]),
    "function_call": refused("It is the old form: use tool_choice.", "auto", "none"),
    **dict.fromkeys(
        ("audio", "prediction", "functions", "web_search_options", "moderation"), ABSENT
    ),
    "store": accepted("every session is kept"),
}

_READ = ("role", "content", "tool_calls", "tool_call_id", "reasoning_content", "reasoning", "name")
_NOTES = ("annotations", "cache_control", "lockstep")  # of servers and agents; ours among them
CHAT_MESSAGE: Fields = dict.fromkeys((*_READ, *_NOTES), honoured())

RESPONSES = {
    **OPENAI,
    "input": honoured("text, or items: messages, calls and their outputs, reasoning, references"),
    "instructions": honoured("a system message before all others, of this request alone"),
    "previous_response_id": honoured("of the same session, unless it was sent with store=false"),
    "store": honoured("false: no later request can name this one; the session keeps it anyway"),
    **dict.fromkeys(("max_output_tokens", "seed"), honoured()),
    "top_k": honoured("not OpenAI's, but usual; 0 and -1 are off"),
    "stop": honoured("not OpenAI's; the reply that is sent ends before it; its ids are kept"),
    "include": honoured(f"{LOGPROBS}; {ENCRYPTED}, which is plain text in base64"),
    "text": honoured("verbosity is ignored; a format is refused"),
    "reasoning": ignored(
        "How long the model thinks is a setting of the renderer.", {}, {"summary": "auto"}
    ),
    "truncation": refused("A dialogue that is too long is refused, not cut.", "disabled"),
    "background": refused("Every turn is waited for.", False),
    "context_management": refused("Histories are the agent's; shorten the input yourself.", []),
    **dict.fromkeys(("background_options", "max_tool_calls", "conversation", "prompt"), ABSENT),
    **dict.fromkeys(("image", "access_programs", "moderation"), ABSENT),
    "stream_options": accepted("include_obfuscation: nothing is padded"),
    "client_metadata": accepted("the sender's own notes"),
}
RESPONSES_TEXT = {
    "verbosity": VERBOSITY,
    "format": FORMAT,
}

MESSAGES = {
    **SHARED,
    "messages": honoured("text; a last message of the assistant's is refused"),
    "system": honoured("text, or blocks of it"),
    "max_tokens": honoured(),
    "tool_choice": CHOICE,
    "stop_sequences": honoured("the reply that is sent ends before it; its ids are kept"),
    **dict.fromkeys(("top_k", "seed"), honoured()),
    "thinking": ignored(
        "Whether the model thinks, and how long, is a matter of the model and its renderer.",
        {"type": "adaptive"},
        {"type": "adaptive", "display": "summarized"},
    ),
    "output_config": honoured("effort is ignored; a format is refused"),
    "context_management": ignored("Histories are the agent's; shorten the messages yourself.", {}),
    "container": ABSENT,
    "mcp_servers": refused("Connect to them yourself, and give the model their tools.", []),
    "cache_control": accepted("prefixes are reused by what they are"),
    **dict.fromkeys(
        ("betas", "anthropic_beta", "anthropic_version", "diagnostics"),
        accepted("the fields of the body decide"),
    ),
    **dict.fromkeys(("inference_geo", "speed"), accepted("there is one")),
    **dict.fromkeys(("user_profile_id", "workspace_id"), accepted("names the sender")),
}

MESSAGES_MESSAGE = {"role": honoured(), "content": honoured()}
MESSAGES_OUTPUT = {
    "effort": ignored("How long the model thinks is a setting of the renderer."),
    "format": FORMAT,
}
