"""An architecture's format is used only if the checkpoint's own template writes the same. Real
templates: tests/parity/test_jinja_parity.py."""

import json

import pytest
from made_up_templates import BRACKETS, CHATML, COUNTS, HOSTILE, QWEN3_TOOLS, template

from lockstep import errors
from lockstep.errors import MissingExtraError, RendererError
from lockstep.renderers.config import (
    ChatMLConfig,
    HarmonyConfig,
    JinjaConfig,
    Llama3Config,
    MistralConfig,
)
from lockstep.renderers.harmony import HARMONY_TOKENS
from lockstep.renderers.llama3 import LLAMA3_TOKENS
from lockstep.renderers.mistral import MISTRAL_TOKENS
from lockstep.renderers.registry import choose_renderer
from lockstep.renderers.tokenizer import Tokenizer
from lockstep.testing.tokenizers import CHATML_TOKENS, byte_tokenizer_json

# What the Qwen3 format says, as a template: probes of `CHATML` differ in the words about tools.
QWEN3 = QWEN3_TOOLS + CHATML.split("{%- elif messages[0].role == 'system' %}\n", 1)[1]
IS_SHOWN = "loop.index0 > ns.last and (loop.last or message.reasoning_content)"
for old, new in {
    "message.reasoning_content and loop.index0 > ns.last": IS_SHOWN,
    "+ message.reasoning_content +": "+ (message.reasoning_content or '') +",
    "{{- message.content }}": (
        "{{- message.content.lstrip('\\n') if " + IS_SHOWN + " else message.content }}"
    ),
}.items():
    QWEN3 = template("json", QWEN3).replace(old, new)
PLAIN = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
TOKENS = (*CHATML_TOKENS, *LLAMA3_TOKENS, *MISTRAL_TOKENS)


@pytest.fixture
def choose(tmp_path):
    def chosen(source, format, tokens=TOKENS):
        (tmp_path / "tokenizer.json").write_text(byte_tokenizer_json(control_tokens=tokens))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
        if source is not None:
            (tmp_path / "chat_template.jinja").write_text(source)
        return choose_renderer(format, Tokenizer.from_file(tmp_path))

    return chosen


def changed(old, new, source=QWEN3):
    assert old in source
    return source.replace(old, new)


OPENING = "{{ '<|im_start|>assistant\\n' }}{% endif %}"
SAME = {
    "qwen3": (QWEN3, ChatMLConfig(), "equals the model's chat template on 20 probes"),
    "other comments": (QWEN3 + "{# made anew #}", ChatMLConfig(), "on 20 probes"),
    "no tools, no thinking": (PLAIN, ChatMLConfig(), "probes; the template has no tools"),
    "no template": (None, ChatMLConfig(), ""),
    "mistral": (BRACKETS, MistralConfig(), "as mistral-common writes it"),
}
OTHER = {
    "a system message of its own": changed(
        "{%- elif messages[0].role == 'system' %}",
        "{%- elif messages[0].role != 'system' %}{{ '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}"
        "{%- elif messages[0].role == 'system' %}",
    ),
    "opens with thinking": changed(
        OPENING, OPENING.replace("assistant\\n'", "assistant\\n<think>\\n'")
    ),
    "opens with an empty thought": changed(
        OPENING, OPENING.replace("assistant\\n'", "assistant\\n<think>\\n\\n</think>\\n\\n'")
    ),
    "calls as tags": template("xml"),
    "calls without line breaks": changed("'<tool_call>\\n{\"name", "'<tool_call>{\"name"),
    "another key for arguments": changed('"arguments": \' +', '"parameters": \' +'),
    "another word about tools": changed("one or more functions", "functions"),
    "tools in a message of their own": template(),
    "replies by the tool role": changed("{{ '<|im_start|>user' }}", "{{ '<|im_start|>tool' }}"),
    "replies without tags": changed(
        "'\\n<tool_response>\\n' + message.content + '\\n</tool_response>'",
        "'\\n' + message.content",
    ),
    "one message a reply": changed(
        "{%- if messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}",
        "{{ '<|im_start|>user' }}",
    ).replace(
        "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}"
        "{% endif %}",
        "{{ '<|im_end|>\\n' }}",
    ),
    "thinking is kept": changed("loop.index0 > ns.last and (", "(true or ns.last) and ("),
    "no line break behind thinking": changed("</think>\\n\\n'", "</think>\\n'"),
    "no empty thinking at the end": changed("(loop.last or message.", "(message."),
    "trims words": changed("message.content + '<|im_end|>", "message.content | trim + '<|im_end|>"),
    "a space before words": changed("role + '\\n' + message", "role + '\\n ' + message"),
    "no line break after a turn": PLAIN.replace("<|im_end|>\\n", "<|im_end|>"),
    "capital roles": PLAIN.replace(
        "message.role + '\\n'", "message.role | capitalize + '\\n'"
    ).replace("assistant\\n' }}", "Assistant\\n' }}"),
    "names of another speaker": PLAIN.replace(
        "message.role + '\\n'", "('model' if message.role == 'assistant' else message.role) + '\\n'"
    ).replace("assistant\\n' }}", "model\\n' }}"),
    "shows tools, and takes none": PLAIN.replace(
        "{%- for message", "{{ tools | tojson if tools }}{%- for message", 1
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_a_format_is_used_where_the_template_writes_the_same(choose, name):
    source, format_, why = SAME[name]
    found = choose(source, format_)
    assert type(found.config) is type(format_) and why in found.why
    assert "\n" not in found.line


@pytest.mark.parametrize("name", OTHER)
def test_the_template_is_used_where_it_writes_otherwise(choose, name):
    found = choose(OTHER[name], ChatMLConfig())
    assert isinstance(found.config, JinjaConfig) and found.renderer.name == "jinja"
    assert (found.config.tools == "text") == bool(found.renderer.tools_line)
    assert found.line.startswith("jinja: the model's chat template, which differs from chatml in ")
    assert "\n" not in found.line


def test_a_template_without_thinking_takes_the_empty_block_from_the_format(choose):
    found = choose(PLAIN, ChatMLConfig())
    assert found.config == ChatMLConfig(has_empty_thinking=False)


@pytest.mark.parametrize("format_", [Llama3Config(), MistralConfig()])
def test_a_fine_tune_that_speaks_chatml_is_written_so(choose, format_):
    assert choose(QWEN3, format_).config == JinjaConfig()
    lacking = choose(QWEN3, format_, CHATML_TOKENS)
    assert lacking.config == JinjaConfig() and "lacks the tokens of" in lacking.why


def test_a_tokenizer_without_the_tokens_and_without_a_template_is_refused(choose):
    with pytest.raises(RendererError, match="control tokens"):
        choose(None, Llama3Config(), CHATML_TOKENS)


def test_a_template_that_cannot_be_extended_is_an_error_that_names_the_format(choose):
    source = COUNTS.replace("<|start|>", "<|im_start|>").replace("<|end|>", "<|im_end|>")
    with pytest.raises(RendererError, match="renderer=chatml"):
        choose(source, ChatMLConfig())


@pytest.mark.parametrize("what", ["fails", "is no template", "multiplies"])
def test_a_template_that_is_broken_for_every_program_leaves_the_format_and_says_so(choose, what):
    found = choose(HOSTILE[what][0], ChatMLConfig())
    assert found.config == ChatMLConfig() and "the chat template cannot be used" in found.line


def test_without_jinja_a_line_says_that_nothing_was_compared(choose, monkeypatch):
    monkeypatch.setattr(errors, "find_spec", lambda name: None)
    found = choose(template("xml"), ChatMLConfig())
    assert found.config == ChatMLConfig()
    assert "not compared with the model's chat template" in found.why
    assert "jinja2" in found.line and "\n" not in found.line
    with pytest.raises(MissingExtraError):
        choose(template("xml"), None)


def test_a_model_without_a_format_is_written_by_its_template_if_it_has_one(choose):
    assert choose(None, None) is None
    assert choose(PLAIN, None).line == (
        "jinja: the model's chat template; tools as text, schemas in the first system message, "
        "results in tool turns, since the template cannot take tools: it writes nothing for a call"
    )


def test_harmony_is_as_its_library_writes_it(choose):
    tokens = (*TOKENS, *HARMONY_TOKENS)
    found = choose("{# <|channel|> #}" + PLAIN, HarmonyConfig(), tokens)
    assert found.line == "harmony: as openai-harmony writes it"
    assert choose(PLAIN, HarmonyConfig(), tokens).config == JinjaConfig(tools="text")
