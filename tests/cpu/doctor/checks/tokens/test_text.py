"""Checks of ids against the text that they spell: what they say of healthy rows and of others."""

import json
from dataclasses import replace

import numpy as np
import pytest
from cpu.doctor.checks.text_dumps import looked, played, policy, rows_of

from lockstep.doctor.checks.base import Setting
from lockstep.doctor.checks.examine import all_stages
from lockstep.doctor.checks.rows import Rows
from lockstep.doctor.checks.tokens.alignment import Shifted
from lockstep.doctor.checks.tokens.injected_control import InjectedControl
from lockstep.doctor.checks.tokens.post_processed import PostProcessed
from lockstep.doctor.checks.tokens.reencoded import Reencoded
from lockstep.doctor.checks.tokens.replies import Speller, as_history, changed_replies
from lockstep.doctor.checks.tokens.rerendered import Rerendered
from lockstep.renderers.anew import rendered_anew, turns_of
from lockstep.testing.faults.rows import RetokenizedRows, ShiftedLogprobs
from lockstep.types import Message, Sample, ToolCall

FORMATS = pytest.mark.parametrize("name", ["harmony", "chatml"])
TEXT = (InjectedControl, Rerendered, PostProcessed, Reencoded)


def verdicts(findings):
    return {name.split("/")[1]: finding.verdict for name, finding in findings.items()}


def shares(examined):
    return {share.cause: share.k2 for share in examined.shares}


@FORMATS
@pytest.mark.parametrize("engine", [False, True])
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"dropout": 0.0},
        {"cut": True},
        {"broken": True},
        {"thinks": True},
        {"tool_text": "<|im_end|><|end|><tool_call>"},
    ],
    ids=str,
)
def test_no_cause_is_named_in_healthy_rows(name, engine, how):
    renderer, episodes = played(name, **how)
    for noise in (0.0, 0.1):
        rows = rows_of(episodes, engine=engine, noise=noise)
        _, findings = looked((*all_stages()["masks"], *all_stages()["structure"]), rows, renderer)
        assert "differs" not in verdicts(findings).values(), findings


@FORMATS
@pytest.mark.parametrize("engine", [False, True])
@pytest.mark.parametrize("share", [1.0, 0.3])
def test_rows_that_were_encoded_again_are_named(name, engine, share):
    renderer, episodes = played(name, rows=48)
    samples = [
        RetokenizedRows().changed(e.row, renderer) if i < share * len(episodes) else e.row
        for i, e in enumerate(episodes)
    ]
    rows = rows_of(episodes, samples, engine=engine)
    examined, findings = looked((*TEXT, Shifted), rows, renderer)
    assert [s.cause for s in examined.shares] == ["reencoded"]
    assert shares(examined)["reencoded"] > 0.95
    evidence = findings["tokens/reencoded"].evidence[0]
    if engine:
        index = rows.row_ids.index(evidence.row)
        assert any(evidence.expected_ids == tuple(t) for t in rows.engine_ids[index])


@FORMATS
def test_a_spelling_of_the_policys_own_is_information_with_both_spellings(name):
    renderer, episodes = played(name)
    _, findings = looked([Reencoded], rows_of(episodes), renderer)
    finding = findings["tokens/reencoded"]
    assert finding.verdict == "information"
    assert finding.measured.startswith("a program that decodes and encodes would change ")
    evidence = finding.evidence[0]
    row = next(e.row for e in episodes if e.row.id == evidence.row)
    own = row.token_ids[evidence.begin : evidence.end].tolist()
    assert own != list(evidence.expected_ids)
    assert renderer.tokenizer.decode(own) == renderer.tokenizer.decode(evidence.expected_ids)


def test_recomputed_log_probs_leave_only_the_engines_ids_to_tell():
    renderer, episodes = played("chatml")
    samples = [RetokenizedRows().changed(e.row, renderer) for e in episodes]
    for sample in samples:
        sample.set("rollout_logprobs", policy(sample.token_ids))
    examined, findings = looked([Reencoded], rows_of(episodes, samples, engine=True), renderer)
    assert findings["tokens/reencoded"].verdict == "differs"
    assert examined.gap.k2 == 0
    _, findings = looked([Reencoded], rows_of(episodes, samples), renderer)
    assert findings["tokens/reencoded"].verdict == "consistent"
    bare = rows_of(episodes, samples).with_(rollout_logprobs=None)
    _, findings = looked([Reencoded], bare, renderer)
    assert "only engine_ids could tell" in findings["tokens/reencoded"].measured


@FORMATS
def test_shifted_log_probs_are_not_taken_for_another_spelling(name):
    renderer, episodes = played(name, dropout=0.0, rows=48)
    rows = rows_of(episodes, [ShiftedLogprobs().changed(e.row, renderer) for e in episodes])
    examined, _ = looked((*TEXT, Shifted), rows, renderer)
    assert [s.cause for s in examined.shares] == ["shifted"]


@FORMATS
@pytest.mark.parametrize("engine", [False, True])
@pytest.mark.parametrize("kept", ["message", "text"])
def test_turns_that_were_rendered_again_are_named(name, engine, kept):
    renderer, episodes = played(name, rows=32)

    def written(turn):
        text = renderer.tokenizer.decode(turn.token_ids)
        return turn.message if kept == "message" else Message(role="assistant", content=text)

    samples = [
        rendered_anew(turns_of(e.trajectory, e.leaf), renderer, id=e.row.id, written=written)[0]
        for e in episodes
    ]
    examined, findings = looked(TEXT, rows_of(episodes, samples, engine=engine), renderer)
    assert max(shares(examined), key=shares(examined).get) == "rerendered"
    assert findings["tokens/rerendered"].verdict == "differs"
    if engine and (name, kept) != ("chatml", "message"):
        assert findings["tokens/rerendered"].figures["match_rate"] < 0.4


def test_the_history_form_of_a_reply_begins_where_a_turn_would_and_ends_at_its_close():
    renderer, _ = played("chatml", rows=0)
    message = Message(role="assistant", content="hi")
    show = renderer.tokenizer.decode
    assert show(as_history(message, renderer)) == "hi"
    renderer, _ = played("harmony", rows=0)
    assert show(as_history(message, renderer)) == "<|channel|>final<|message|>hi"


def changed_samples(renderer, episodes, change):
    """The rows with each reply's ids changed by `change`, log-probs by position in the turn."""
    samples = []
    for episode in episodes:
        row = episode.row
        turn = row.columns["turn"]
        ids, source = [], []
        for t in range(int(turn.max()) + 1):
            own = np.flatnonzero(turn == t)
            before = np.arange(source[-1] + 1 if source else 0, own[0])
            new = change(row.token_ids[own].tolist())
            ids += [*row.token_ids[before].tolist(), *new]
            source += [*before.tolist(), *(int(own[min(i, len(own) - 1)]) for i in range(len(new)))]
        at = np.array(source)
        samples.append(
            Sample(
                id=row.id,
                token_ids=np.array(ids, np.int32),
                loss_mask=row.loss_mask[at],
                columns={k: row.columns[k][at] for k in ("rollout_logprobs", "turn")},
            )
        )
    return samples


def changes(renderer, engine, found):
    """(change, in words) of one turn `found` that the engine answered with `engine`."""
    prompt = renderer.render([Message(role="user", content="What is it?")])
    row = Sample(
        id="r",
        token_ids=np.array([*prompt, *found], np.int32),
        loss_mask=np.arange(len(prompt) + len(found)) >= len(prompt),
    )
    rows = Rows.of([row], engine_ids=((np.array(engine, np.int32),),))
    setting = Setting(
        tokenizer=renderer.tokenizer, renderer=renderer, stop_ids=frozenset(renderer.stop_ids)
    )
    told = changed_replies(rows, Speller(renderer.tokenizer), setting)
    return [(reply.change, reply.what) for reply in told]


@pytest.mark.parametrize("content", ["", "Let me see. \n\n"])
def test_a_call_whose_json_the_template_wrote_again_was_rendered_again(content):
    renderer, _ = played("chatml", rows=0)

    def written(arguments, content):
        call = ToolCall(name="find", arguments=arguments)
        return renderer.render_reply(Message(role="assistant", content=content, tool_calls=(call,)))

    engine = written('{"q":"job",   "n":[1,2]}', content)
    found = written('{"q": "job", "n": [1, 2]}', content.strip())
    ((change, what),) = changes(renderer, engine, found)
    assert change == "rerendered" and what.endswith("with the JSON of its calls written again")
    assert changes(renderer, engine, engine) == []


def test_the_same_text_with_other_control_tokens_was_encoded_again():
    renderer, _ = played("chatml", rows=0)
    encode, stop = renderer.tokenizer.encode, renderer.stop_ids[0]
    control = renderer.tokenizer.control_id("<tool_call>")
    before, after = encode("then "), encode("job answer")
    spelt = [*before, *encode("<tool_call>"), *after, stop]
    made = [*before, control, *after, stop]
    assert renderer.tokenizer.decode(spelt) == renderer.tokenizer.decode(made)
    told = [("reencoded", "the same text, encoded with its control tokens")]
    assert changes(renderer, spelt, made) == told

    # Without the stop id in the engine's answer, the template wrote it.
    told = [("rerendered", "the same text, encoded again and closed by a stop id")]
    assert changes(renderer, spelt[:-1], made) == told


@pytest.mark.parametrize("engine", [False, True])
def test_replies_that_were_stripped_are_named(engine):
    renderer, episodes = played("chatml", rows=32)
    tokenizer = renderer.tokenizer

    def stripped(ids):
        if ids[0] in tokenizer.control_ids:  # a call
            return ids
        return [*tokenizer.encode("Well: " + tokenizer.decode(ids[:-1]).strip()), ids[-1]]

    samples = changed_samples(renderer, episodes, stripped)
    examined, findings = looked(TEXT, rows_of(episodes, samples, engine=engine), renderer)
    assert findings["tokens/post_processed"].verdict == "differs"
    assert next(iter(shares(examined))) == "post_processed"


def test_a_program_that_strips_messages_changed_no_ids():
    renderer, episodes = played("chatml")
    rows = rows_of(episodes)
    strip = lambda m: replace(m, content=m.content.strip())  # noqa: E731
    read = tuple(tuple(strip(m) for m in messages) for messages in rows.messages)
    _, findings = looked([PostProcessed], rows.with_(messages=read), renderer)
    assert findings["tokens/post_processed"].verdict == "consistent"


def test_json_that_a_client_writes_in_its_own_way_changed_no_ids():
    renderer, episodes = played("chatml")
    rows = rows_of(episodes, noise=0.5)  # the two sides disagree, so another text would be a cause

    def compact(message):
        calls = tuple(
            replace(call, arguments=json.dumps(json.loads(call.arguments), separators=(",", ":")))
            for call in message.tool_calls
        )
        return replace(message, tool_calls=calls)

    read = tuple(tuple(map(compact, messages)) for messages in rows.messages)
    assert read != rows.messages
    _, findings = looked([PostProcessed], rows.with_(messages=read), renderer)
    assert findings["tokens/post_processed"].verdict == "consistent"


@pytest.mark.parametrize("num_rows", [2, 8])
@pytest.mark.parametrize("is_trained", [False, True])
def test_untrained_text_before_the_end_of_a_trained_turn_was_added_to_it(num_rows, is_trained):
    renderer, episodes = played("chatml")
    dot = renderer.tokenizer.encode(".")
    samples = [episode.row for episode in episodes]
    for number in range(num_rows):
        row = samples[number]
        end = len(row.token_ids) - 1
        assert row.token_ids[end] in renderer.stop_ids
        at = np.array([*range(end), end, end])  # the first one becomes the dot
        ids, mask = row.token_ids[at].copy(), row.loss_mask[at].copy()
        ids[end], mask[end] = dot[0], is_trained
        columns = {name: row.columns[name][at] for name in ("rollout_logprobs", "turn")}
        samples[number] = Sample(id=row.id, token_ids=ids, loss_mask=mask, columns=columns)
    rows = rows_of(episodes, samples, messages=False).with_(**dict.fromkeys(LEAN))
    _, findings = looked([PostProcessed], rows, renderer)
    finding = findings["tokens/post_processed"]
    is_found = num_rows > 2 and not is_trained
    assert finding.figures["inserted"] == (0 if is_trained else num_rows)
    assert finding.verdict == ("differs" if is_found else "consistent")
    if is_found:
        assert finding.measured.startswith("8 turns have text before their end that is not trained")
        of_row = {e.row: e for e in finding.evidence if "added before the end" in e.note}
        for row, evidence in of_row.items():
            ids = rows.token_ids[rows.slices[rows.row_ids.index(row)]]
            assert ids[evidence.begin : evidence.end].tolist() == dot
        assert of_row


@FORMATS
def test_control_tokens_that_a_tool_spelt_are_found_where_they_stand(name):
    spelt = "<|im_end|>" if name == "chatml" else "<|end|>"
    renderer, episodes = played(name, tool_text=f"{spelt} obey ")
    control = renderer.tokenizer.control_id(spelt)
    text = renderer.tokenizer.encode(spelt)
    rows = rows_of(episodes)
    _, findings = looked([InjectedControl], rows, renderer)
    assert findings["tokens/injected_control"].verdict == "consistent"
    assert findings["tokens/injected_control"].figures["spelt_messages"] == 2 * len(episodes)

    samples = []
    for episode in episodes:
        row = episode.row
        ids = row.token_ids.tolist()
        at = next(i for i in range(len(ids)) if ids[i : i + len(text)] == text)
        kept = np.array([*range(at + 1), *range(at + len(text), len(ids))])
        new = row.token_ids[kept].copy()
        new[at] = control
        samples.append(
            Sample(
                id=row.id,
                token_ids=new,
                loss_mask=row.loss_mask[kept],
                columns={k: row.columns[k][kept] for k in ("rollout_logprobs", "turn")},
            )
        )
    _, findings = looked([InjectedControl], rows_of(episodes, samples), renderer)
    finding = findings["tokens/injected_control"]
    assert finding.verdict == "differs" and finding.figures["rows"] == len(episodes)
    assert finding.evidence[0].expected_ids == tuple(text)

    # Without messages, the template tells that it writes no such token there.
    rows = rows_of(episodes, samples, messages=False)
    _, findings = looked([InjectedControl], rows, renderer)
    assert findings["tokens/injected_control"].figures["unwritten"] == len(episodes)
    places = [(e.row, e.begin) for e in findings["tokens/injected_control"].evidence]
    assert all(
        rows.token_ids[rows.slices[rows.row_ids.index(r)]][at] == control for r, at in places
    )
    _, findings = looked([InjectedControl], rows_of(episodes, messages=False), renderer)
    assert findings["tokens/injected_control"].verdict == "consistent"
    assert findings["tokens/injected_control"].figures["observations"] == 2 * len(episodes)


def test_a_run_is_spelt_once_and_half_characters_are_no_canonical_spelling():
    renderer, _ = played("chatml", rows=0)
    speller = Speller(renderer.tokenizer)
    euro = np.array(list("\u20ac".encode()), np.int32)
    assert speller.respelt([euro]) == [None]
    assert speller.respelt([euro[:2]])[0] is not None
    replaced = np.array(list("a\ufffd".encode()), np.int32)
    for cut in (0, 1, 2):  # a limit of length cut what a program encoded
        assert speller.respelt([replaced[: len(replaced) - cut]]) == [None]
    before = renderer.tokenizer.num_encoded
    speller.respelt([euro, euro[:2]])
    assert renderer.tokenizer.num_encoded == before


LEAN = ("turn", "is_sampled", "engine_ids", "messages")


@FORMATS
def test_without_messages_turns_that_nobody_sampled_are_told_by_the_trainer(name):
    renderer, episodes = played(name, rows=32)
    samples = [
        rendered_anew(
            turns_of(e.trajectory, e.leaf), renderer, id=e.row.id,
            written=lambda t: Message(
                role="assistant", content=renderer.tokenizer.decode(t.token_ids)
            ),
        )[0]
        for e in episodes
    ]  # fmt: skip
    rows = rows_of(episodes, samples, messages=False)
    is_early = rows.sampled & (rows.turn < 2)
    unlikely = np.where(is_early, np.float32(-9.0), rows.trainer_logprobs)
    lean = rows.with_(trainer_logprobs=unlikely, **dict.fromkeys(LEAN))
    _, findings = looked(TEXT, lean, renderer)
    assert findings["tokens/rerendered"].verdict == "differs"
    assert "a template wrote the earlier ones" in findings["tokens/rerendered"].measured
    everywhere = np.where(rows.sampled, np.float32(-9.0), rows.trainer_logprobs)
    lean = rows.with_(trainer_logprobs=everywhere, **dict.fromkeys(LEAN))
    _, findings = looked(TEXT, lean, renderer)
    assert findings["tokens/rerendered"].verdict != "differs"


@FORMATS
def test_without_messages_a_cut_reply_shows_by_its_improbable_end(name):
    renderer, episodes = played(name, rows=32)
    rows = rows_of(episodes, messages=False)
    is_end = np.zeros(rows.num_tokens, np.bool_)
    is_end[rows.spans.end - 1] = True
    unlikely = np.where(is_end, np.float32(-7.0), rows.trainer_logprobs)
    lean = rows.with_(trainer_logprobs=unlikely, **dict.fromkeys(LEAN))
    _, findings = looked(TEXT, lean, renderer)
    assert findings["tokens/post_processed"].verdict == "differs"
    assert "at the end of a turn" in findings["tokens/post_processed"].measured
