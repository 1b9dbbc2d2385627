"""The chat template of an exported model writes what its run wrote."""

import json

import pytest
from made_up_templates import THINKS_AT_ONCE, template
from test_text_tools import CALLS, DROPS, ECHO, REPLIES, STRICT, SYSTEM, TOKENIZER, USER

from lockstep.renderers.config import ChatMLConfig, JinjaConfig
from lockstep.renderers.jinja.proof import TOOL
from lockstep.renderers.registry import make_renderer, write_template
from lockstep.renderers.tokenizer import Tokenizer
from lockstep.testing.tokenizers import byte_tokenizer_json

CONTROLS = ("<|start|>", "<|end|>", "</s>")
CHATML = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>",
          "<tool_response>", "</tool_response>")  # fmt: skip


def model(folder, source, controls=CONTROLS):
    folder.mkdir()
    (folder / "tokenizer.json").write_text(byte_tokenizer_json(control_tokens=controls))
    fields = {"chat_template": source, "eos_token": controls[1]}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    return folder


DIALOGUES = (
    ([USER], []),
    ([SYSTEM, USER], []),
    ([USER], [TOOL]),
    ([SYSTEM, USER], [TOOL]),
    ([SYSTEM, USER, CALLS, *REPLIES], [TOOL]),
    ([USER, CALLS, *REPLIES, USER], [TOOL]),
)


@pytest.mark.parametrize("source", [ECHO, DROPS, STRICT])
def test_an_exported_template_writes_tools_as_text_as_the_run_did(tmp_path, source):
    place = model(tmp_path / "it", source)
    trained = make_renderer(JinjaConfig(tools="text"), Tokenizer.from_file(place))
    config, line = write_template(place, trained.config, lambda: Tokenizer.from_file(place))
    assert "chat_template.jinja writes what the run wrote: text_tools included." in line
    assert "--tool-call-parser hermes" in line and "\n" not in line
    assert "chat_template" not in json.loads((place / "tokenizer_config.json").read_text())
    served = make_renderer(config, Tokenizer.from_file(place))
    assert not served.tools_line and served.parse(served.render_reply(CALLS)) == CALLS
    for messages, tools in DIALOGUES:
        assert served.render(messages, tools) == trained.render(messages, tools)
    again = write_template(place, config, lambda: Tokenizer.from_file(place))
    assert again == (config, "")


def test_variables_and_a_template_of_the_run_become_the_exported_template(tmp_path):
    place = model(tmp_path / "it", "{{ raise_exception('of the base') }}")
    own = tmp_path / "own.jinja"
    own.write_text("{{ greeting }}" + ECHO)
    config = JinjaConfig(template=str(own), variables={"greeting": "<|end|>It's\n\u00fc"})
    trained = make_renderer(config, Tokenizer.from_file(place))
    exported, line = write_template(place, trained.config, lambda: Tokenizer.from_file(place))
    assert "greeting, text_tools included" in line and exported.template == ""
    own.unlink()
    served = make_renderer(exported, Tokenizer.from_file(place))
    for messages, tools in DIALOGUES:
        assert served.render(messages, tools) == trained.render(messages, tools)


def test_a_template_that_does_not_write_what_was_trained_is_named_with_a_way_out(tmp_path):
    place = model(tmp_path / "it", template(source=THINKS_AT_ONCE), CHATML)
    config = ChatMLConfig()
    kept, line = write_template(place, config, lambda: Tokenizer.from_file(place))
    assert kept is config and "lockstep serve RUN" in line and "\n" not in line
    assert "dialogue 'plain', token" in line
    alone = tmp_path / "none"
    alone.mkdir()
    (alone / "tokenizer.json").write_text(byte_tokenizer_json(control_tokens=CHATML))
    _, line = write_template(alone, config, lambda: Tokenizer.from_file(alone))
    assert "has no chat template" in line and TOKENIZER is not None
