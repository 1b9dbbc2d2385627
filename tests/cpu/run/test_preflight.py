"""What a run is told about its model before any weight is read."""

import json
import shutil

import pytest
from quickstarts import quickstart_with

from lockstep.config import resolve
from lockstep.errors import CheckpointError, ConfigError, RendererError
from lockstep.models.locate import SHIPPED_ROOT
from lockstep.recipes import find_recipe
from lockstep.renderers.llama3 import LLAMA3_TOKENS
from lockstep.renderers.mistral import LATER_TOKEN, MISTRAL_TOKENS, V7_TOKENS
from lockstep.run.preflight import plan, preflight, read_model_files
from lockstep.testing.faults import injected
from lockstep.testing.faults.rows import ShiftedLogprobs
from lockstep.testing.tokenizers import byte_tokenizer_json
from lockstep.types import Message


@pytest.fixture
def directory(tmp_path):
    """A model directory without weights: nothing here may read them."""
    for name in ("config.json", "tokenizer.json", "renderer.json"):
        shutil.copy(SHIPPED_ROOT / "tiny-qwen3" / name, tmp_path / name)
    return tmp_path


def model_files_of(directory, *overrides, **changes):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return read_model_files(quickstart_with(f"model={directory}", *overrides))


def test_a_family_without_a_renderer_of_ours_asks_for_one(directory):
    found = model_files_of(directory, model_type="olmo3", rope_parameters={})
    assert found.model.architecture == "olmo3"
    (directory / "renderer.json").unlink()
    with pytest.raises(ConfigError, match="olmo3"):
        model_files_of(directory)
    assert model_files_of(directory, "renderer=chatml").renderer.name == "chatml"


TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""


def test_a_model_with_a_chat_template_is_written_by_it_where_no_format_of_ours_is_its_own(
    directory,
):
    (directory / "renderer.json").unlink()
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    mistral = {"model_type": "mistral", "sliding_window": None}
    assert model_files_of(directory, **mistral).renderer.name == "jinja"
    assert model_files_of(directory, model_type="llama").renderer.name == "jinja"  # ChatML's tokens
    assert model_files_of(directory, model_type="qwen3").renderer.name == "chatml"
    assert model_files_of(directory, "renderer=jinja").renderer.name == "jinja"
    (directory / "chat_template.jinja").unlink()
    settings = json.dumps({"chat_template": [{"name": "default", "template": TEMPLATE}]})
    (directory / "tokenizer_config.json").write_text(settings)
    assert model_files_of(directory, "fallback=true", model_type="olmo2").renderer.name == "jinja"


def test_the_plan_of_a_run_says_why_it_is_written_by_its_template(directory):
    (directory / "renderer.json").unlink()
    for source, line in (
        (TEMPLATE, "renderer   chatml: equals the model's chat template on"),
        (
            TEMPLATE.replace("assistant\\n' }}", "assistant\\n<think>\\n' }}"),
            "renderer   jinja: the",
        ),
    ):
        (directory / "chat_template.jinja").write_text(source)
        config = quickstart_with(f"model={directory}")
        assert any(said.startswith(line) for said in plan(config, read_model_files(config)))


def test_the_plan_of_a_run_says_what_was_proved_of_its_template(directory):
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    recipe, words = find_recipe("quickstart"), [f"model={directory}", "renderer=jinja"]

    def said(label, *more):
        config = resolve(recipe, [*words, *more])
        lines = plan(config, read_model_files(config))
        return "".join(line for line in lines if line.startswith(label))

    own = "renderer.tools=template"
    assert "dialogues extend exactly; refused: take tools" in said("template", own)
    assert not said("renderer", own)
    assert said("template").endswith("11 of 11 dialogues extend exactly")
    assert said("renderer").startswith(
        "renderer   jinja: tools as text, schemas in the first system"
    )
    with pytest.raises(RendererError, match="no way to take tools"):
        preflight(resolve(recipe, [*words, own]))


def test_a_llama_is_written_as_llama_3_and_one_with_other_tokens_is_told_so(directory):
    (directory / "renderer.json").unlink()
    with pytest.raises(RendererError, match=r"<\|begin_of_text\|>"):
        model_files_of(directory, model_type="llama")
    (directory / "tokenizer.json").write_text(byte_tokenizer_json(control_tokens=LLAMA3_TOKENS))
    assert model_files_of(directory).renderer.name == "llama3"


def test_a_mistral_is_written_in_its_own_format_if_its_tokens_are_of_a_version_that_is_known(
    directory,
):
    (directory / "renderer.json").unlink()
    tokens = (*MISTRAL_TOKENS, *V7_TOKENS, LATER_TOKEN, "<|im_end|>")
    (directory / "tokenizer.json").write_text(byte_tokenizer_json(control_tokens=tokens))
    dialogue = [Message(role="system", content="a"), Message(role="user", content="b")]
    for named, written in (
        ("", "<s>[INST]a\n\nb[/INST]"),
        (V7_TOKENS[0], "<s>[SYSTEM_PROMPT]a[/SYSTEM_PROMPT][INST]b[/INST]"),
        (LATER_TOKEN, None),  # by its own template
    ):
        (directory / "chat_template.jinja").write_text(f"{TEMPLATE}{{# [INST] {named} #}}")
        found = model_files_of(directory, model_type="mistral", sliding_window=None).renderer
        assert found.name == ("jinja" if written is None else "mistral")
        if written is not None:
            assert found.tokenizer.decode(found.render(dialogue)) == written


def test_the_qwen_families_are_written_in_chatml(directory):
    (directory / "renderer.json").unlink()
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    for architecture in ("qwen2", "qwen3", "qwen3_moe"):
        found = model_files_of(directory, model_type=architecture, **moe)
        assert found.renderer.name == "chatml"
        assert found.renderer_config.variant == ("qwen2.5" if architecture == "qwen2" else "qwen3")


def test_an_unknown_architecture_is_refused_before_anything_is_read(directory):
    with pytest.raises(CheckpointError, match=r"'olmo2'.*fallback=true"):
        model_files_of(directory, model_type="olmo2")


def test_a_fallback_is_refused_what_only_the_decoder_can_and_all_of_it_is_listed(directory):
    def check(*overrides):
        words = [f"model={directory}", "fallback=true", *overrides]
        return preflight(quickstart_with(*words))

    with pytest.raises(ConfigError) as error:
        check("contract=true-on-policy", "advantage=gae", "trainer.routing_replay=recompute")
    for part in ("engine=embedded runs the decoder", "set contract=none",
                 "name one with critic.model",
                 "set trainer.routing_replay=none"):  # fmt: skip
        assert part in str(error.value)
    with injected(ShiftedLogprobs()), pytest.raises(ConfigError, match=r"fallback=true.*--fault"):
        check()
    with pytest.raises(ConfigError, match=r"fallback=true.*\blora\b"):
        check("lora.rank=4")
    with pytest.raises(ConfigError, match=r"fallback=true.*trainer\.recompute=none"):
        check("trainer.recompute=blocks")


def test_a_fallback_without_a_renderer_asks_for_one(directory):
    found = model_files_of(directory, "fallback=true", model_type="olmo2").model
    assert (found.architecture, found.num_layers, found.family) == ("olmo2", 2, "dense")
    (directory / "renderer.json").unlink()
    with pytest.raises(ConfigError, match="olmo2"):
        model_files_of(directory, "fallback=true")


def test_a_fallback_is_written_in_the_format_of_its_architecture(directory):
    (directory / "renderer.json").unlink()
    assert model_files_of(directory, "fallback=true").renderer.name == "chatml"
