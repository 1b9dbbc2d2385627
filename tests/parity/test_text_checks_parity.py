"""The checks of ids against text on the vocabularies of gpt-oss and Qwen3."""

import numpy as np
import pytest
from cpu.doctor.checks.text_dumps import looked, play, policy, rows_of
from real_tokenizers import o200k_harmony, tokenizer_of

from lockstep.doctor.checks.examine import all_stages
from lockstep.doctor.rows import Rows
from lockstep.doctor.checks.tokens.alignment import Shifted
from lockstep.doctor.checks.tokens.injected_control import InjectedControl
from lockstep.doctor.checks.tokens.post_processed import PostProcessed
from lockstep.doctor.checks.tokens.reencoded import Reencoded
from lockstep.doctor.checks.tokens.replies import Speller
from lockstep.doctor.checks.tokens.rerendered import Rerendered
from lockstep.renderers.anew import rendered_anew, turns_of
from lockstep.renderers.chatml import ChatMLRenderer
from lockstep.renderers.harmony import HarmonyRenderer
from lockstep.testing.faults.rows import RetokenizedRows
from lockstep.types import Message, Trajectory

MODELS = {
    "gpt-oss": lambda: HarmonyRenderer(o200k_harmony()),
    "qwen3": lambda: ChatMLRenderer(tokenizer_of("qwen3")),
}
TEXT = (InjectedControl, Rerendered, PostProcessed, Reencoded)


@pytest.fixture(params=MODELS)
def renderer(request):
    return MODELS[request.param]()


def episodes_of(renderer, *, split=0.1, **how):
    return [play(renderer, renderer, seed=seed, split=split, **how) for seed in range(16)]


@pytest.mark.parametrize("engine", [False, True])
@pytest.mark.parametrize("split", [0.0, 0.1])
def test_no_cause_is_named_in_healthy_rows(renderer, split, engine):
    for how in ({}, {"thinks": True}, {"cut": True}, {"tool_text": "<|im_end|><|end|><think>"}):
        rows = rows_of(episodes_of(renderer, split=split, **how), engine=engine, noise=0.05)
        _, findings = looked((*all_stages()["masks"], *all_stages()["structure"]), rows, renderer)
        differing = [f.check for f in findings.values() if f.verdict == "differs"]
        assert not differing, how


@pytest.mark.parametrize("engine", [False, True])
def test_rows_that_were_encoded_again_are_named(renderer, engine):
    episodes = episodes_of(renderer)
    samples = [RetokenizedRows().changed(e.row, renderer) for e in episodes]
    examined, findings = looked(
        (*TEXT, Shifted), rows_of(episodes, samples, engine=engine), renderer
    )
    assert [share.cause for share in examined.shares] == ["reencoded"], findings
    assert examined.shares[0].k2 > 0.9


@pytest.mark.parametrize("engine", [False, True])
def test_turns_that_were_rendered_again_are_named(renderer, engine):
    episodes = episodes_of(renderer, thinks=True)
    controls = renderer.tokenizer.control_ids

    def written(turn):  # the text without its control tokens, kept as the assistant's words
        text = renderer.tokenizer.decode([i for i in turn.token_ids.tolist() if i not in controls])
        return Message(role="assistant", content=text)

    samples = [
        rendered_anew(turns_of(e.trajectory, e.leaf), renderer, id=e.row.id, written=written)[0]
        for e in episodes
    ]
    examined, findings = looked(TEXT, rows_of(episodes, samples, engine=engine), renderer)
    assert examined.shares[0].cause == "rerendered", findings
    if engine:
        assert findings["tokens/rerendered"].figures["match_rate"] < 0.2


def test_the_published_turn_keeps_a_few_per_cent_of_its_ids():
    """The seed's: analysis that was sampled stands as a final answer in the next prompt."""
    renderer = MODELS["gpt-oss"]()
    tokenizer = renderer.tokenizer
    user = Message(role="user", content="What is 2+2?")
    turn = Message(role="assistant", thinking="The user asks for a sum. 2+2 is 4.", content="4")
    trajectory = Trajectory(id="seed")
    leaf = trajectory.observe(renderer.render([user]), messages=[user])
    for new in ([Message(role="user", content="And 3+3?")], []):
        path = trajectory.path_ids(leaf)
        ids = renderer.render_reply(turn)
        leaf = trajectory.record(
            ids, logprobs=policy([*path, *ids])[len(path) :], parent=leaf, prompt_ids=path,
            messages=[renderer.parse(ids)],
        )  # fmt: skip
        if new:
            leaf = trajectory.observe(renderer.extend(ids, new), parent=leaf, messages=new)
    plain = [
        Message(role="assistant", content=tokenizer.decode(t.token_ids))
        for t in turns_of(trajectory, leaf)
    ]
    contents = iter(plain)
    row, same = rendered_anew(
        turns_of(trajectory, leaf), renderer, id="seed/3", written=lambda _: next(contents)
    )
    assert same[0] < 0.1 * len(renderer.render_reply(turn))
    answered = tuple(s.token_ids for s in trajectory.segments if s.is_sampled)
    rows = Rows.of([row], trainer_logprobs=policy(row.token_ids), engine_ids=(answered,))
    _, findings = looked([Rerendered], rows, renderer)
    finding = findings["tokens/rerendered"]
    assert finding.verdict == "differs"
    assert finding.figures["match_rate"] < 0.1
    assert list(finding.evidence[0].expected_ids) == answered[0].tolist()


def test_a_tag_that_was_sampled_in_pieces_comes_back_as_other_ids():
    """Nothing is said of what a tag in pieces becomes but that it is text: `<`, `think`, `>`."""
    tokenizer = tokenizer_of("qwen3")
    pieces = np.array([tokenizer.encode(p)[0] for p in ("<", "th", "ink", ">")], np.int32)
    (again,) = Speller(tokenizer).respelt([pieces])
    assert again is not None and len(again) < len(pieces)
    assert tokenizer.decode(again) == "<think>"
    assert not set(again.tolist()) & tokenizer.control_ids
