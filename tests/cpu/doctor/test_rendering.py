"""`lockstep render`: what it reads, prints and refuses."""

import json

import pytest

from lockstep.cli import BAD_INPUT, OK, main

CALL = {"id": "1", "function": {"name": "find", "arguments": "{}"}}
MESSAGES = [
    {"role": "user", "content": "What is the job of Sara?"},
    {"role": "assistant", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "The job of Sara is baker."},
]


@pytest.fixture
def place(tmp_path):
    path = tmp_path / "messages.json"
    path.write_text(json.dumps(MESSAGES, indent=1))
    return path


def run(*words, capsys):
    code = main(["render", *map(str, words)])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_tokens_are_printed_with_their_origin_ids_and_the_prefix_property(place, capsys):
    code, out, _ = run("tiny-gpt-oss", place, capsys=capsys)
    assert code == OK
    assert "tiny-gpt-oss (harmony)" in out and "1 assistant" in out and "2 tool" in out
    assert "The prefix property does not hold" in out
    code, out, _ = run("tiny-qwen3", place, capsys=capsys)
    assert code == OK
    assert "prefix property" not in out


def test_json_has_every_token_and_both_renderings_where_they_differ(place, capsys):
    code, out, _ = run("tiny-gpt-oss", place, "--json", capsys=capsys)
    found = json.loads(out)
    assert code == OK and found["has_prefix_property"] is False
    assert sum(found["counts"][o] for o in ("template", "user", "tool", "assistant")) == len(
        found["tokens"]
    )
    text = "".join(t["text"] for t in found["tokens"] if t["origin"] == "user")
    assert text == MESSAGES[0]["content"]
    same, other = found["prompts"]
    assert same["same"] and not other["same"]
    assert other["extended_ids"][0] != other["whole_ids"][0]


def test_a_jsonl_file_is_read_to_its_first_line_with_the_tools_of_it(tmp_path, capsys):
    tools = [{"type": "function", "function": {"name": "find", "description": "Finds."}}]
    line = json.dumps({"messages": MESSAGES, "tools": tools})
    path = tmp_path / "dialogues.jsonl"
    path.write_text(f"{line}\n{line}\n")
    settings = '{"type": "chatml"}'
    words = ("tiny-qwen3", path, "--renderer", settings, "--json")
    code, out, err = run(*words, capsys=capsys)
    assert code == OK, err
    assert "<tools>" in "".join(token["text"] for token in json.loads(out)["tokens"])
    bare = tmp_path / "messages.json"
    bare.write_text(json.dumps(MESSAGES))
    declared = tmp_path / "tools.json"
    declared.write_text(json.dumps(tools))
    words = ("tiny-qwen3", bare, "--tools", declared, "--renderer", settings, "--json")
    assert json.loads(run(*words, capsys=capsys)[1]) == json.loads(out)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is not JSON"),
        ("[]", "There is nothing to render"),
        ('{"text": 1}', "expected a list of messages, or an object with `messages`"),
        ('[{"role": "user", "contents": "hi"}]', "message 0: message has unknown keys"),
        ('[{"role": "tool", "content": "hi"}]', "message 0: a tool message needs `name`"),
        ('{"messages": [{"role": "user", "content": "a"}], "tools": [3]}', "tool 0 must be"),
    ],
)
def test_what_is_no_dialogue_is_refused_by_its_place(tmp_path, capsys, text, said):
    path = tmp_path / "messages.json"
    path.write_text(text)
    code, _, err = run("tiny-qwen3", path, capsys=capsys)
    assert code == BAD_INPUT
    assert said in " ".join(err.split())


def test_a_model_that_is_not_there_is_named(place, capsys):
    code, _, err = run("tiny-gpt", place, capsys=capsys)
    assert code == BAD_INPUT
    assert "MODEL tiny-gpt: expected a directory with a tokenizer.json" in " ".join(err.split())
