"""Tokenizer and renderer are found by what the input says; what is not there is said, with how to
give it."""

import json
import shutil
from pathlib import Path

import pytest

from lockstep.doctor.diagnose import diagnose
from lockstep.doctor.inputs.base import Facts
from lockstep.doctor.tokenization import find_tokenization
from lockstep.errors import ConfigError, RendererError
from lockstep.models.locate import locate_model
from lockstep.renderers.chatml import ChatMLRenderer
from lockstep.renderers.harmony import HarmonyRenderer
from lockstep.renderers.jinja.renderer import JinjaRenderer

SHIPPED = "tiny-gpt-oss"


def model_copy(path: Path, *, left_out: tuple[str, ...] = ()) -> Path:
    shutil.copytree(
        locate_model("tiny-qwen3"), path, ignore=shutil.ignore_patterns("*.safetensors", *left_out)
    )
    return path


def test_both_are_those_of_the_model_that_the_input_names(tmp_path: Path):
    shipped = find_tokenization(Facts(model=SHIPPED))
    own = find_tokenization(Facts(model="gone", tokenizer=str(model_copy(tmp_path / "m"))))

    assert isinstance(shipped.renderer, HarmonyRenderer) and not shipped.lacks
    assert shipped.tokenizer is shipped.renderer.tokenizer
    assert isinstance(own.renderer, ChatMLRenderer)


def test_the_users_word_goes_before_the_inputs(tmp_path: Path):
    model = model_copy(tmp_path / "m")
    given = find_tokenization(Facts(model=SHIPPED), tokenizer=str(model / "tokenizer.json"))
    settings = '{"type": "chatml", "variant": "qwen2.5"}'
    named = find_tokenization(Facts(model=str(model)), renderer=settings)

    assert given.tokenizer.where == str(model / "tokenizer.json")
    assert isinstance(given.renderer, ChatMLRenderer)
    assert named.renderer.config.variant == "qwen2.5"


def test_a_renderer_by_its_name_has_the_settings_that_the_model_keeps(tmp_path: Path):
    model = model_copy(tmp_path / "m")
    (model / "renderer.json").write_text(
        json.dumps({"renderer": {"type": "chatml", "tools_in_prompt": False}})
    )

    found = find_tokenization(Facts(model=str(model), renderer="chatml"))

    assert found.renderer.config.tools_in_prompt is False


def test_what_the_input_names_and_is_not_here_is_left_out_and_said(tmp_path: Path):
    nothing = find_tokenization(Facts())
    elsewhere = find_tokenization(Facts(model="/models/gone"))
    on_hub = find_tokenization(Facts(model="nobody/no-such-model"))
    without = ("config.json", "renderer.json", "chat_template.jinja")
    bare = find_tokenization(Facts(model=str(model_copy(tmp_path / "m", left_out=without))))

    for found in (nothing, elsewhere, on_hub):
        assert found.tokenizer is None and found.renderer is None
        assert "--tokenizer" in found.lacks["tokenizer"]
    assert "/models/gone" in elsewhere.lacks["tokenizer"]
    assert bare.tokenizer is not None and "--renderer chatml|" in bare.lacks["renderer"]


@pytest.mark.parametrize(
    ("asked", "error", "expected"),
    [
        ({"tokenizer": "/models/gone"}, ConfigError, "tokenizer.json"),
        ({"renderer": "chatlm"}, ConfigError, "chatml, harmony"),
        ({"renderer": "{"}, ConfigError, "--renderer"),
        ({"renderer": '{"type": "chatml", "x": 1}'}, ConfigError, "--renderer: "),
        ({"renderer": "chatml"}, RendererError, "control tokens"),
    ],
)
def test_what_the_user_names_and_is_not_there_is_an_error(
    asked: dict[str, str], error: type[Exception], expected: str
):
    with pytest.raises(error, match=expected):
        find_tokenization(Facts(model=SHIPPED), **asked)


def test_a_renderer_without_a_tokenizer_is_an_error():
    with pytest.raises(ConfigError, match="needs the tokenizer of the model"):
        find_tokenization(Facts(), renderer="chatml")


def test_the_padding_id_is_the_one_of_the_tokenizers_settings(tmp_path: Path):
    model = model_copy(tmp_path / "m")
    name = "<|im_end|>"
    (model / "tokenizer_config.json").write_text(json.dumps({"pad_token": {"content": name}}))

    found = find_tokenization(Facts(model=str(model)))

    assert found.pad_id == found.tokenizer.control_id(name)


def test_a_file_that_is_no_tokenizer_is_an_error_if_it_was_named(tmp_path: Path):
    (tmp_path / "tokenizer.json").write_text("{}")

    with pytest.raises(RendererError):
        find_tokenization(Facts(), tokenizer=str(tmp_path))
    assert "--tokenizer" in find_tokenization(Facts(model=str(tmp_path))).lacks["tokenizer"]


def test_a_diagnosis_says_what_its_surroundings_lack(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"token_ids": [1], "loss_mask": [true]}\n')

    found = diagnose(path)

    assert "--tokenizer" in found.to_json()["not_in_input"]["tokenizer"]


def test_the_command_that_makes_a_check_again_names_what_the_user_named():
    found = diagnose("example", tokenizer=SHIPPED, renderer="harmony")
    (_, finding), *_ = found.causes

    command = found.command_for(finding)

    assert f"--tokenizer {SHIPPED} --renderer harmony --only {finding.check}" in command


def test_the_model_that_the_user_gives_gives_the_tokenizer_too(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"token_ids": [1, 2], "loss_mask": [false, true]}\n')

    found = diagnose(path, model=SHIPPED)

    assert found.setting.tokenizer is not None and found.options == ("--model", SHIPPED)


def test_a_model_whose_only_format_is_its_chat_template_is_read_by_it(tmp_path: Path):
    model = model_copy(tmp_path / "m", left_out=("renderer.json", "config.json"))
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    (model / "chat_template.jinja").write_text(template)
    found = find_tokenization(Facts(model=str(model)))
    assert isinstance(found.renderer, JinjaRenderer)
    (model / "config.json").write_text('{"model_type": "unheard of"}')
    assert isinstance(find_tokenization(Facts(model=str(model))).renderer, JinjaRenderer)
    (model / "chat_template.jinja").write_text("{% for %}")
    broken = find_tokenization(Facts(model=str(model)))
    assert broken.renderer is None and "Expected an expression" in broken.lacks["renderer"]


TEMPLATE = """\
{%- macro system(text) %}{{ '<|im_start|>system\\n' ~ text ~ '<|im_end|>\\n' }}{% endmacro %}
{%- if tools %}{{ system('Tools: ' ~ (tools | tojson)) }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}{{ '<|im_start|>user\\n' ~ m.content ~ '<|im_end|>\\n' }}
{%- else %}{{ '<|im_start|>' ~ m.role ~ '\\n' ~ m.content }}
{%- for call in m.tool_calls %}
{{- '<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}
{{- (call.function.arguments | tojson) ~ '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
"""ChatML that declares its tools in words of its own."""


@pytest.mark.parametrize(
    ("more", "named", "kind"),
    [
        ({"chat_template.jinja": TEMPLATE}, "", JinjaRenderer),
        ({}, "", ChatMLRenderer),
        ({"chat_template.jinja": TEMPLATE}, "chatml", ChatMLRenderer),
        ({"chat_template.jinja": "{% for %}"}, "", ChatMLRenderer),
        (
            {"chat_template.jinja": TEMPLATE, "renderer.json": '{"renderer": {"type": "chatml"}}'},
            "",
            ChatMLRenderer,
        ),
    ],
    ids=["template", "none", "named", "broken", "renderer file"],
)
def test_a_template_that_declares_tools_in_its_own_way_goes_before_the_architectures_format(
    tmp_path: Path, more: dict[str, str], named: str, kind: type
):
    model = model_copy(tmp_path / "m", left_out=("renderer.json", "chat_template.jinja"))
    for name, text in more.items():
        (model / name).write_text(text)
    by_user = find_tokenization(Facts(model=str(model)), renderer=named)
    by_input = find_tokenization(Facts(model=str(model), renderer=named))
    assert type(by_user.renderer) is type(by_input.renderer) is kind


def test_a_template_that_writes_what_the_architectures_format_does_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model = model_copy(tmp_path / "m", left_out=("renderer.json",))
    (model / "chat_template.jinja").write_text(TEMPLATE)
    own = find_tokenization(Facts(model=str(model))).renderer
    monkeypatch.setattr(ChatMLRenderer, "render", lambda _, *what: own.render(*what))
    assert isinstance(find_tokenization(Facts(model=str(model))).renderer, ChatMLRenderer)
