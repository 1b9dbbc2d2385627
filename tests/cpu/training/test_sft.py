"""Supervised training: rows from dialogues and ids, their weights, and what is malformed."""

import json

import numpy as np
import pytest
from tiny_training import make_rows, make_trainer

from lockstep.doctor.rendering import read_dialogue_file
from lockstep.errors import ConfigError, DataError
from lockstep.objectives.losses import supervised_loss
from lockstep.renderers.chatml import ChatMLRenderer
from lockstep.renderers.config import ChatMLConfig, HarmonyConfig
from lockstep.renderers.harmony import HarmonyRenderer
from lockstep.renderers.origins import trace
from lockstep.testing.tokenizers import byte_tokenizer
from lockstep.training.config import HeldOutConfig, SFTConfig
from lockstep.training.sft import (
    held_out_loss,
    hold_out,
    load_examples,
    run_sft,
    sft_row,
    sft_rows,
    soft_record,
    token_weights,
)
from lockstep.types import Message, ToolCall

DIALOGUE = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Where is Bela?"},
    {"role": "assistant", "tool_calls": [{"name": "look", "arguments": '{"who": "Bela"}'}]},
    {"role": "tool", "name": "look", "content": "Bela is in Rome."},
    {"role": "assistant", "content": "Bela is in Rome."},
]
TOOLS = [{"type": "function", "function": {"name": "look", "description": "Looks."}}]


def write(tmp_path, *lines):
    path = tmp_path / "dialogues.jsonl"
    path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))
    return path


def renderers():
    tokenizer = byte_tokenizer()
    return ChatMLRenderer(tokenizer, ChatMLConfig()), HarmonyRenderer(tokenizer, HarmonyConfig())


@pytest.mark.parametrize("renderer", renderers(), ids=lambda r: type(r).__name__)
def test_a_dialogue_is_written_as_a_rollout_would_have_seen_it(tmp_path, renderer):
    (example,) = load_examples(write(tmp_path, {"messages": DIALOGUE, "tools": TOOLS}))
    row = sft_row(example, renderer)
    look = ToolCall(name="look", arguments='{"who": "Bela"}')
    call = Message(role="assistant", tool_calls=(look,))
    answer = Message(role="assistant", content="Bela is in Rome.")
    prompt = renderer.render([Message.from_dict(m) for m in DIALOGUE[:2]], example.tools)
    first, last = renderer.render_reply(call), renderer.render_reply(answer)
    between = renderer.extend(first, [Message.from_dict(DIALOGUE[3])])
    assert row.token_ids.tolist() == prompt + first + between + last
    lengths = [len(prompt), len(first), len(between), len(last)]
    assert row.loss_mask.tolist() == np.repeat([False, True, False, True], lengths).tolist()
    assert row.columns["weights"].tolist() == np.repeat([0.0, 1.0, 0.0, 1.0], lengths).tolist()
    assert row.id.endswith("dialogues.jsonl:1")


OPENAI = [
    {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
    {"role": "user", "content": "Where is Bela?"},
    {
        "role": "assistant", "content": None, "refusal": None, "tool_calls": [
            {"id": "a1", "type": "function",
             "function": {"name": "look", "arguments": '{"who": "Bela"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "a1", "content": [{"type": "text", "text": "In Rome."}]},
    {"role": "assistant", "content": [{"type": "text", "text": "Bela is in Rome."}], "weight": 1},
]  # fmt: skip
SHAREGPT = [
    {"from": "human", "value": "Where is Bela?"},
    {"from": "function_call", "value": '{"name": "look", "arguments": {"who": "Bela"}}'},
    {"from": "observation", "value": "In Rome."},
    {"from": "gpt", "value": "Bela is in Rome."},
]
RECORDS = {
    "OpenAI": {"messages": OPENAI, "tools": TOOLS, "parallel_tool_calls": True},
    "ShareGPT": {"conversations": SHAREGPT, "system": "Be brief.", "tools": json.dumps(TOOLS)},
}


@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)
@pytest.mark.parametrize("renderer", renderers(), ids=lambda r: type(r).__name__)
def test_training_and_render_read_a_file_alike(tmp_path, record, renderer):
    path = write(tmp_path, record)
    (example,) = load_examples(path)
    messages, tools = read_dialogue_file(path)
    assert (messages, tools) == (example.messages, example.tools)
    assert [m.role for m in messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert [m.content for m in messages] == [
        "Be brief.", "Where is Bela?", "", "In Rome.", "Bela is in Rome."
    ]  # fmt: skip
    assert messages[3].name == "look" and json.loads(messages[2].tool_calls[0].arguments)
    row = sft_row(example, renderer)
    ids = [token.id for token in trace(renderer, messages, tools).tokens]
    assert row.token_ids.tolist() == ids
    trained = [i for i, is_it in zip(row.token_ids, row.loss_mask, strict=True) if is_it]
    replies = [renderer.render_reply(m) for m in messages if m.role == "assistant"]
    assert trained == [i for reply in replies for i in reply]


def test_weights_of_messages_words_and_observed_tokens(tmp_path):
    renderer = renderers()[0]
    dialogue = [dict(m) for m in DIALOGUE]
    dialogue[2]["weight"] = 0.0
    dialogue[4]["weight"] = 2.0
    (example,) = load_examples(write(tmp_path, {"messages": dialogue}))
    row = sft_row(example, renderer, observed_weight=0.25, word_weights={"Rome": 3.0, "Bel": 9.0})
    weights = row.columns["weights"]
    last = renderer.render_reply(Message(role="assistant", content="Bela is in Rome."))
    in_last = weights[-len(last) :]
    at = next(i for i in range(len(last)) if last[i : i + 4] == list(b"Rome"))
    expected = np.full(len(last), 2.0)
    expected[at : at + 4] = 6.0
    assert in_last.tolist() == expected.tolist()  # "Bel" is no whole word anywhere
    call = renderer.render_reply(Message.from_dict(DIALOGUE[2]))
    assert set(weights[: -len(last)].tolist()) == {0.0, 0.25}
    assert weights[0] == 0.0 and not row.loss_mask[0]
    assert int((weights == 0.0).sum()) == 1 + len(call)


def test_a_word_is_found_however_it_is_cut_into_tokens():
    merged = byte_tokenizer(merges=[("R", "o"), ("m", "e"), ("Ro", "me")])
    word = merged.encode("Rome")
    assert len(word) == 1
    for ids in (word, list(b"Rome"), [*merged.encode("Ro"), *b"me"]):
        around = [*b"in ", *ids, *b"."]
        found = token_weights(merged, around, {"Rome": 3.0, "in Rome": 2.0})
        assert found.tolist() == [2.0] * 3 + [3.0] * len(ids) + [1.0]
    assert token_weights(merged, list(b"Romeo aRome"), {"Rome": 3.0}).tolist() == [1.0] * 11
    assert token_weights(merged, list(b"a b"), {"a": 0.5}).tolist() == [0.5, 1.0, 1.0]
    control = [*b"a", merged.control_id("<think>"), *b"b"]
    assert token_weights(merged, control, {"think": 9.0, "a": 2.0}).tolist() == [2.0, 1.0, 1.0]


def test_rows_of_ids_are_taken_as_they_are(tmp_path):
    path = write(
        tmp_path,
        {"token_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1], "weights": [9, 9, 0.5, 1]},
        "",
        {"token_ids": [5, 6, 7], "loss_mask": [False, True, False]},
    )
    first, second = (sft_row(e, None) for e in load_examples(path))
    assert first.columns["weights"].tolist() == [0, 0, 0.5, 1] and first.num_trained == 2
    assert second.id.endswith(":3") and second.loss_mask.tolist() == [False, True, False]
    with_observed = sft_row(load_examples(path)[1], None, observed_weight=0.1)
    assert with_observed.columns["weights"].tolist() == pytest.approx([0, 1, 0.1])


def file_of(tmp_path, num_rows):
    return write(tmp_path, *({"token_ids": [5, i], "loss_mask": [0, 1]} for i in range(num_rows)))


@pytest.mark.parametrize(
    ("num_rows", "settings", "num_held"),
    [(60, {}, 6), (9, {}, 0), (60, {"num_rows": 4}, 4), (60, {"share": 0}, 0)],
)
def test_a_part_of_the_rows_is_held_out_and_never_trained(tmp_path, num_rows, settings, num_held):
    examples = load_examples(file_of(tmp_path, num_rows))
    trained, held = hold_out(examples, HeldOutConfig(**settings), seed=0)
    assert len(held) == num_held and len(trained) == num_rows - num_held
    assert {e.id for e in trained} | {e.id for e in held} == {e.id for e in examples}
    again = hold_out(examples, HeldOutConfig(**settings), seed=0)[1]
    assert [e.id for e in again] == [e.id for e in held]
    other = hold_out(examples, HeldOutConfig(**settings), seed=1)[1]
    assert not num_held or [e.id for e in other] != [e.id for e in held]


def test_held_out_rows_of_one_task_are_together(tmp_path):
    examples = load_examples(file_of(tmp_path, 60))
    for at, example in enumerate(examples):
        example.group = 1 + at % 20
    trained, held = hold_out(examples, HeldOutConfig(share=0.1), seed=0)
    assert len(held) == 6 and not {e.group for e in trained} & {e.group for e in held}


def test_the_held_out_loss_is_the_loss_of_training_on_the_same_rows(tmp_path):
    trainer, rows = make_trainer(tmp_path), make_rows((12, 20, 9))
    for row in rows:
        row.set("weights", row.loss_mask * np.float32(1 + len(row) % 2))
    weight = sum(float(row.columns["weights"].sum()) for row in rows)
    trained = trainer.forward_backward(rows, supervised_loss, denominator=weight)
    assert held_out_loss(trainer, rows) == pytest.approx(trained["train/loss"], rel=1e-6)


def soft(ids=(6, 9), logprobs=(-0.5, -2.0), **changes):
    """A row of three tokens whose last is trained, with a teacher's two likeliest ids."""
    return {
        "token_ids": [5, 6, 7], "loss_mask": [0, 0, 1],
        "teacher_ids": [None, None, list(ids)], "teacher_logprobs": [None, None, list(logprobs)],
    } | changes  # fmt: skip


SOFT_ERRORS = [
    (soft(teacher_ids=[[6, 9]]), "teacher_ids"),
    (soft(teacher_ids=[None] * 3), r"teacher_ids\[2\]"),
    (soft(teacher_logprobs=None), "teacher_logprobs"),
    (soft(ids=(6,)), r"teacher_ids\[2\].*\b1\b.*\b2\b"),
    (soft(ids=(6, 6)), r"teacher_ids\[2\]"),
    (soft(ids=(6, -1)), r"teacher_ids\[2\]: token 1\b.*id -1"),
    (soft(logprobs=(-0.5, 0.5)), r"\b1\b.*2.2553"),
    (soft(ids=(6, 7, 8), logprobs=(-1, -2, -3)), r"\b3 teacher_ids"),
    ({"token_ids": [5, 6], "loss_mask": [0, 1]}, r"\b0 teacher_ids"),
]


@pytest.mark.parametrize(("line", "message"), SOFT_ERRORS)
def test_malformed_soft_targets_are_named_by_their_line(tmp_path, line, message):
    with pytest.raises(DataError, match=f"dialogues.jsonl:2: .*{message}"):
        load_examples(write(tmp_path, soft(), line))


def test_a_teacher_s_own_rows_are_no_loss_and_another_s_are_learned(tmp_path):
    """Rows go to the file and back; the divergence falls towards the teacher's."""
    teacher, student = (make_trainer(tmp_path / str(s), seed=s, lr=3e-2) for s in (0, 5))
    rows = make_rows((12, 20, 9, 16))
    student.list_likely(rows, teacher.model, top_k=8)
    path = write(tmp_path, *map(soft_record, rows))
    config = SFTConfig(steps=30, rows_per_step=4, observed_weight=0.1)
    examples = load_examples(path)
    for row, example in zip(rows, examples, strict=True):
        assert example.token_ids.tolist() == row.token_ids.tolist()
        at = row.loss_mask
        for name in ("teacher_ids", "teacher_ids_logprobs"):
            assert example.columns[name][at].tolist() == row.columns[name][at].tolist()

    def losses(trainer):
        endless = sft_rows(examples, None, config, max_tokens=64)
        return [metrics["train/loss"] for metrics in run_sft(trainer, endless, config)]

    assert losses(teacher)[0] == pytest.approx(0, abs=1e-6)
    found = losses(student)
    assert found[-1] < 0.1 * found[0] and found[0] > 0.5


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json", "not a JSON object"),
        ("[1]", "expected a JSON object, found list"),
        ({"text": "x"}, r"`messages`.*\['text'\]"),
        ({"messages": DIALOGUE, "extra": 1}, r"\['extra'\]"),
        ({"token_ids": [1, 2]}, "`loss_mask`"),
        ({"token_ids": [1, 2], "loss_mask": [0]}, "loss_mask"),
        ({"token_ids": [1, "2"], "loss_mask": [0, 1]}, "token_ids"),
        ({"token_ids": [1, -2], "loss_mask": [0, 1]}, r"token 1\b.*id -2"),
        ({"token_ids": [1, 2], "loss_mask": [0, 2]}, r"\b0 and 1.*\b2\b"),
        ({"token_ids": [1, 2], "loss_mask": [1, 1]}, r"loss_mask\[0\]"),
        ({"token_ids": [1, 2], "loss_mask": [0, 0]}, "nothing in this row would be trained"),
        (
            {"token_ids": [1, 2], "loss_mask": [0, 1], "weights": [0, -1]},
            r"weights\[1\].*\b0\b.*-1",
        ),
        (
            {"token_ids": [1, 2], "loss_mask": [0, 1], "weights": [0, 10**400]},
            r"weights\[1\]: expected a number of 0 to 1e30, found 10000",
        ),
        ({"messages": "hi"}, "messages is text that is not JSON"),
        ({"messages": []}, "assistant's.*none"),
        ({"messages": DIALOGUE[:2]}, "assistant's.*user's"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "message 0: .*'robot'"),
        ({"messages": [{"role": "user", "text": "x"}]}, r"message 0\b.*\['text'\]"),
        ({"messages": [{"role": "assistant", "content": "x", "weight": "a lot"}]}, r"message 0\b"),
        ({"messages": DIALOGUE, "tools": ["look"]}, "tool 0"),
    ],
)
def test_a_malformed_line_is_named_by_path_and_number(tmp_path, line, message):
    path = write(tmp_path, {"messages": DIALOGUE}, line)
    with pytest.raises(DataError, match=message) as caught:
        load_examples(path)
    assert str(caught.value).startswith(f"{path}:2: ")


def test_no_file_and_an_empty_one_are_refused(tmp_path):
    with pytest.raises(DataError, match="no such file or folder"):
        load_examples(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match="is empty"):
        load_examples(write(tmp_path, ""))


def test_what_a_renderer_cannot_write_is_named_by_its_line(tmp_path):
    two = [{"name": "f", "arguments": "{}"}] * 2
    dialogue = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": two}]
    (example,) = load_examples(write(tmp_path, {"messages": dialogue}))
    with pytest.raises(DataError, match=r"dialogues.jsonl:1: 2\b"):
        sft_row(example, renderers()[1])
    with pytest.raises(ConfigError, match="a renderer is needed"):
        sft_row(example, None)


@pytest.mark.parametrize("renderer", renderers(), ids=lambda r: type(r).__name__)
def test_a_reply_that_spells_control_tokens_is_not_trained_letter_by_letter(tmp_path, renderer):
    def row_of(content, **more):
        said = {"role": "assistant", "content": content, **more}
        last = [{"role": "user", "content": "So?"}, {"role": "assistant", "content": "4"}]
        messages = [{"role": "user", "content": "?"}, said, *last]
        return sft_row(*load_examples(write(tmp_path, {"messages": messages})), renderer)

    thought = Message(role="assistant", content="4", thinking="Add.")
    called = Message(role="assistant", tool_calls=(ToolCall(name="f", arguments="{}"),))
    for reply, part in ((thought, "thinking"), (called, "calls")):
        spelled = renderer.tokenizer.decode(renderer.render_reply(reply))
        with pytest.raises(DataError, match=f":1: message 1: content spells {part} in control"):
            row_of(spelled)
        assert row_of(spelled, weight=0).num_trained < row_of("4").num_trained
    assert row_of("A turn ends with <|im_end|>.").num_trained > row_of("4").num_trained


def ids_example_rows(tmp_path, lengths, **config):
    lines = [
        {"token_ids": [i] * n, "loss_mask": [0] + [1] * (n - 1)} for i, n in enumerate(lengths)
    ]
    return sft_rows(
        load_examples(write(tmp_path, *lines)), None, SFTConfig(**config), max_tokens=16, seed=3
    )


def test_each_pass_has_an_order_of_its_own(tmp_path):
    rows = ids_example_rows(tmp_path, [4] * 8)
    drawn = [int(next(rows).token_ids[0]) for _ in range(24)]
    passes = [drawn[:8], drawn[8:16], drawn[16:]]
    assert all(sorted(p) == list(range(8)) for p in passes)
    assert passes[0] != passes[1] != passes[2]
    in_order = ids_example_rows(tmp_path, [4] * 3, shuffle=False)
    assert [int(next(in_order).token_ids[0]) for _ in range(6)] == [0, 1, 2] * 2


def test_rows_that_are_too_long_are_an_error_or_left_out(tmp_path):
    with pytest.raises(DataError, match=r":2: 17.*16"):
        rows = ids_example_rows(tmp_path, [4, 17], shuffle=False)
        [next(rows) for _ in range(2)]
    rows = ids_example_rows(tmp_path, [4, 17, 5], shuffle=False, long_rows="drop")
    assert [len(next(rows)) for _ in range(4)] == [4, 5, 4, 5]
    with pytest.raises(DataError, match=r"\b1\b.*16"):
        next(ids_example_rows(tmp_path, [17], long_rows="drop"))


def test_training_lowers_the_loss_on_a_small_task(tmp_path):
    rng = np.random.default_rng(0)
    lines = []
    for _ in range(64):
        word = rng.integers(2, 20, 5).tolist()
        lines.append({"token_ids": [0, *word, 1, *word], "loss_mask": [0] * 7 + [1] * 5})
    config = SFTConfig(steps=60, rows_per_step=32, observed_weight=0.05)
    rows = sft_rows(load_examples(write(tmp_path, *lines)), None, config, max_tokens=64)
    trainer = make_trainer(
        tmp_path / "model", lr=2e-2, schedule="cosine", warmup_updates=5, total_updates=60
    )
    losses = [m["train/loss"] for m in run_sft(trainer, rows, config)]
    assert len(losses) == 60
    assert losses[-1] < 0.3 * losses[0] and losses[0] > 3.0


def test_the_loss_is_the_weighted_mean(tmp_path):
    trainer = make_trainer(tmp_path / "model")
    path = write(
        tmp_path,
        {"token_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1], "weights": [0, 0, 0.5, 3]},
        {"token_ids": [9, 6, 7], "loss_mask": [0, 1, 0]},
    )
    rows = [sft_row(e, None) for e in load_examples(path)]
    logprobs = trainer.forward(rows, column=None)
    total = sum(
        float(-(r.columns["weights"] * lp)[r.loss_mask].sum())
        for r, lp in zip(rows, logprobs, strict=True)
    )
    config = SFTConfig(steps=1, rows_per_step=2)
    (metrics,) = run_sft(trainer, iter(rows), config)
    assert metrics["train/loss"] == pytest.approx(total / 4.5, rel=1e-5)
    assert metrics["step"] == 0.0 and metrics["tokens/trained"] == 3.0
    assert not any(name.startswith("mismatch/") for name in metrics)
