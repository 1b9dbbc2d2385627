"""What ends and opens turns in a template: by its renderer, or counted in rows, and the counts do
not grow with the dump."""

import numpy as np
import pytest
from cpu.doctor.checks.text_dumps import looked
from cpu.renderers.made_up_templates import NEXT_ROLE, NEXT_ROLE_TOKENS

from lockstep.doctor.checks.base import Setting
from lockstep.doctor.checks.rows import Rows
from lockstep.doctor.checks.tokens.context import (
    MAX_OPENINGS,
    DroppedSeparator,
    DuplicatedPrompt,
    TemplateIds,
    openings_of,
    separators_of,
)
from lockstep.doctor.checks.tokens.masks import AfterStop, Boundary, ObservationTrained
from lockstep.renderers.config import JinjaConfig
from lockstep.renderers.jinja.renderer import JinjaRenderer
from lockstep.testing.tokenizers import byte_tokenizer
from lockstep.types import Message, ToolCall

WORDS_OPEN = """\
{%- for message in messages %}
{{- {'user': 'Human', 'tool': 'Result', 'system': 'System', 'assistant': 'Bot'}[message.role] }}
{{- ': ' ~ message.content }}
{%- if message.role == 'assistant' %}{{ '<|end|>' }}{% endif %}{{ '\\n\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'Bot: ' }}{% endif %}
"""
"""A format whose only control token ends a turn."""
UNOPENED = """\
{%- for message in messages %}
{%- if message.role == 'user' %}{{ '<|user|>' ~ message.content ~ '<|assistant|>' }}
{%- elif message.role == 'tool' %}{{ '<|tool|>' ~ message.content ~ '<|tool_end|>' }}
{%- elif message.role == 'system' %}{{ message.content }}
{%- else %}{{ message.content }}
{%- for call in message.tool_calls %}
{{- '<call>' ~ call.function.name ~ ':' ~ call.function.arguments ~ '</call>' }}
{%- endfor %}
{{- '<|end|>' }}
{%- endif %}
{%- endfor %}
"""
"""No opening after a tool's reply: DeepSeek's way."""
UNOPENED_TOKENS = ("<|end|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|tool_end|>")


@pytest.fixture
def renderer_of(tmp_path):
    def make(template, *tokens):
        path = tmp_path / "it.jinja"
        path.write_text(template)
        tokenizer = byte_tokenizer(control_tokens=tokens)
        return JinjaRenderer(tokenizer, JinjaConfig(template=str(path)))

    return make


def spelt_separators(renderer):
    """{stop token: (separator, openers)} of a renderer, in words."""
    show = renderer.tokenizer.decode
    return {
        show([stop]): (show(found.ids), {show(opener) for opener in found.openers})
        for stop, found in separators_of(renderer).items()
    }


def masked_rows(renderer, *, num=8, is_dropping=False):
    """Rows that know their mask alone: a call, a tool's reply and an answer."""
    ids, mask = [], []
    for number in range(num):
        row, trained = list(renderer.render([Message(role="user", content=f"ask {number}")])), []
        trained += [False] * len(row)
        call = ToolCall(name="find", arguments=f'{{"q": "{number}"}}')
        for message in (
            Message(role="assistant", tool_calls=(call,)),
            Message(role="assistant", content=f"it is {number}"),
        ):
            reply = renderer.render_reply(message)
            row, trained = [*row, *reply], [*trained, *[True] * len(reply)]
            if message.tool_calls:
                more = renderer.extend(reply, [Message(role="tool", name="find", content="b")])
                row, trained = [*row, *more], [*trained, *[False] * len(more)]
        ids.append(row)
        mask.append(trained)
    return Rows(
        row_ids=tuple(map(str, range(num))),
        offsets=np.cumsum([0, *map(len, ids)]),
        token_ids=np.concatenate(ids).astype(np.int32),
        loss_mask=np.concatenate(mask),
    )


def test_messages_that_begin_with_text_have_their_separator_and_first_words_named(renderer_of):
    renderer = renderer_of(WORDS_OPEN, "<|end|>")
    separator, openers = spelt_separators(renderer)["<|end|>"]
    assert separator == "\n\n"
    assert all(opener.startswith(("Human:", "System:", "Result:")) for opener in openers)
    assert len(openers) >= 2


def test_a_message_whose_header_is_the_stop_id_has_no_content_named_for_an_opener(renderer_of):
    renderer = renderer_of(NEXT_ROLE, *NEXT_ROLE_TOKENS)
    assert spelt_separators(renderer) == {"<|observation|>": ("\n", {"<tool_response>"})}


def test_a_lost_separator_is_found_before_a_message_that_begins_with_text(renderer_of):
    renderer = renderer_of(WORDS_OPEN, "<|end|>")
    reply = renderer.render_reply(Message(role="assistant", content="so"))
    user = [Message(role="user", content="b")]
    prompt, more = renderer.render(user), renderer.extend(reply, user)
    lost = more[len(renderer.tokenizer.encode("\n\n")) :]
    for glue, verdict in ((more, "consistent"), (lost, "differs")):
        row = [*prompt, *reply, *glue, *reply]
        mask = [False] * len(prompt) + [True] * len(reply)
        mask += [False] * len(glue) + [True] * len(reply)
        rows = Rows(
            row_ids=tuple("abcd"),
            offsets=np.arange(5) * len(row),
            token_ids=np.array(row * 4, np.int32),
            loss_mask=np.array(mask * 4),
        )
        _, findings = looked([DroppedSeparator], rows, renderer)
        assert findings["tokens/dropped_separator"].verdict == verdict


def test_the_end_of_a_tools_reply_that_no_opening_follows_is_an_opening(renderer_of):
    renderer = renderer_of(UNOPENED, *UNOPENED_TOKENS)
    show = renderer.tokenizer.decode
    assert list(map(show, openings_of(renderer))) == ["<|assistant|>", "<|tool_end|>"]
    opened = renderer_of(WORDS_OPEN, "<|end|>")
    assert list(map(show, openings_of(opened))) == ["Bot: "]


def test_replies_that_follow_a_tools_reply_without_an_opening_were_sampled(renderer_of):
    renderer = renderer_of(UNOPENED, *UNOPENED_TOKENS)
    rows = masked_rows(renderer)
    kinds = (ObservationTrained, AfterStop, Boundary)
    _, findings = looked(kinds, rows, renderer)
    assert {f.verdict for f in findings.values()} == {"consistent"}

    first = rows.spans.begin[rows.spans.is_first]
    every = rows.with_(loss_mask=np.arange(rows.num_tokens) >= np.repeat(first, rows.sizes))
    _, findings = looked(kinds, every, renderer)
    assert findings["tokens/observation_trained"].verdict == "differs"
    observed = int((every.loss_mask & ~rows.loss_mask).sum())
    assert findings["tokens/observation_trained"].figures["observed_tokens_trained"] == observed


def test_openings_that_are_never_the_same_are_not_kept_without_end():
    draw = np.random.default_rng(0)
    ids = TemplateIds(Setting())
    for _ in range(4):
        num = 3000
        mask = np.tile([False, False, True], num)
        ids.add(
            Rows(
                row_ids=tuple(map(str, range(num))),
                offsets=np.arange(num + 1, dtype=np.int64) * 3,
                token_ids=draw.integers(0, 2**31 - 1, 3 * num).astype(np.int32),
                loss_mask=mask,
            )
        )

        assert len(ids._openings) <= MAX_OPENINGS
    assert ids.openings == ()


def test_padding_before_a_row_is_not_its_prompt_again():
    pad, prompt, reply = [0] * 24, list(range(5, 29)), [40, 41]

    def rows(*parts):
        ids = np.array([i for part in parts for i in part], np.int32)
        return Rows(
            row_ids=("a",),
            offsets=np.array([0, len(ids)]),
            token_ids=ids,
            loss_mask=np.arange(len(ids)) >= len(ids) - len(reply),
        )

    for parts, verdict in (((pad, prompt), "consistent"), ((prompt, prompt), "differs")):
        check = DuplicatedPrompt(Setting())
        check.look(rows(*parts, reply))
        assert check.conclude().verdict == verdict
