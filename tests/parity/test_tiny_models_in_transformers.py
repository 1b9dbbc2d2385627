"""The shipped models and what is exported of them load in transformers: the same ids of any text,
special tokens included, and the same prompts by the chat template."""

import json

import pytest
import tiny_models  # noqa: F401  its recipes register themselves
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.cli import OK, main
from lockstep.models.locate import SHIPPED_ROOT, shipped_models
from lockstep.run.preflight import read_model_files
from lockstep.run_config import ModelChoice
from lockstep.types import Message, ToolCall

transformers = pytest.importorskip("transformers", reason="pip install 'lockstep-rl[transformers]'")

TEXTS = [
    "", " ", "\n", "\n\n", "Where was Bela born?", "12345 + 67 = ?", "a  b\tc", "don't",
    "\u65e5\u672c\u8a9e \ud55c\uad6d", "\U0001f642", "e\u0301", "functions.find to=assistant",
    'commentary to=functions.find {"q": ["x"', '\n{"name": "find", "arguments": {"q": "', "x" * 300,
    "\x00\x01", "a\r\nb", "  leading", "trailing  ", "[PAD] <s> </s> <unk>", "1,000.50", "\ufb01",
]  # fmt: skip
CALL = ToolCall(name="find", arguments='{"q": "Bela"}')
U, A, T = (lambda text, role=role, **more: Message(role=role, content=text, **more) for role in
           ("user", "assistant", "tool"))  # fmt: skip
S = Message(role="system", content="Be brief.")
DIALOGUES = [
    [U("hi")], [S, U("hi")], [U("hi"), A("yes"), U("and?")], [S, U("hi"), A("yes"), U("and?")],
    [U("hi"), A("", tool_calls=(CALL,)), T("in Rome", name="find")],
    [U("hi"), A("I look.", tool_calls=(CALL,)), T("in Rome", name="find"), A("Rome"), U("sure?")],
    [U("hi"), A("", tool_calls=(CALL,)), T("1", name="find"), T("2", name="find")],
    [U("hi"), A("yes", thinking="I think."), U("and?")],
    [U("hi"), A("", thinking="hm", tool_calls=(CALL,)), T("in Rome", name="find")],
    [U("12 + 3"), A("15"), U("na\u00efve \U0001f642\n\n x")],
    [U("")], [U(" a "), A(" b "), U("\n")],
    [U("hi"), A("a\nb"), S, U("hi")], [Message(role="developer", content="D"), U("x")],
]  # fmt: skip


@pytest.fixture(scope="module", params=[*shipped_models(), "export", "sft", "created"])
def pair(request, tmp_path_factory):
    """(files as Lockstep reads them, transformers' tokenizer)."""
    path, run = SHIPPED_ROOT / request.param, tmp_path_factory.mktemp("run") / "run"
    if request.param == "export":
        words = "steps=1 groups_per_step=1 group_size=2 evaluation.num_tasks=0"
        assert main(["train", "quickstart", *words.split(), f"out={run}", "--json"]) == OK
        path = run.parent / "hf"
        assert main(["export", str(run), "--hf", str(path)]) == OK
    elif not path.is_dir():
        recipe = "tiny-qwen3-next" if request.param == "created" else "tiny-instructions"
        words = ["sft.steps=1", "sft.rows_per_step=1"]
        assert main(["sft", recipe, *words, f"out={run}", "--json"]) == OK
        path = run / "model"
    files = read_model_files(ModelChoice(model=str(path), max_tokens=64))
    return files, transformers.AutoTokenizer.from_pretrained(path)


def test_a_text_has_the_same_ids(pair):
    files, theirs = pair
    ours = files.renderer.tokenizer
    for text in TEXTS:
        ids = ours.encode(text)
        assert theirs(text, add_special_tokens=True)["input_ids"] == ids, text
        assert theirs.decode(ids) == ours.decode(ids), text


@settings(deadline=None, max_examples=60)
@given(text=st.text(max_size=60))
def test_any_text_has_the_same_ids(pair, text):
    files, theirs = pair
    ids = files.renderer.tokenizer.encode(text)
    if not any(name in text for name in theirs.get_added_vocab()):  # theirs reads these in a text
        assert theirs(text)["input_ids"] == ids


def test_special_tokens_are_the_same(pair):
    files, theirs = pair
    ours = files.renderer.tokenizer
    names = {ours.control_name(id_): id_ for id_ in ours.control_ids}
    assert {name: theirs.convert_tokens_to_ids(name) for name in names} == names
    for name, id_ in names.items():
        assert theirs(f"a{name}b")["input_ids"].count(id_) == 1
    config = json.loads((files.directory / "config.json").read_text())
    assert theirs.eos_token_id == config["eos_token_id"]
    assert theirs.pad_token == "<|endoftext|>" and len(theirs) == ours.vocab_size


@pytest.mark.parametrize("dialogue", DIALOGUES, ids=range(len(DIALOGUES)))
@pytest.mark.parametrize("form", ["own", "openai"])
def test_a_prompt_by_the_chat_template_has_the_renderers_ids(pair, dialogue, form):
    files, theirs = pair
    told = [message.to_dict() for message in dialogue]
    if form == "openai":
        for message in told:
            message["reasoning_content"] = message.pop("thinking", "")
            calls = message.get("tool_calls") or []
            message["tool_calls"] = [
                {"type": "function", "id": "1", "function": {
                    "name": call["name"], "arguments": json.loads(call["arguments"])
                }} for call in calls
            ]  # fmt: skip
    ids = theirs.apply_chat_template(told, add_generation_prompt=True, return_dict=False)
    assert theirs.decode(ids) == theirs.decode(files.renderer.render(dialogue))
    assert ids == files.renderer.render(dialogue)
