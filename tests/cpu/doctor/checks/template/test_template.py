"""The check of rows against the thinking that their turns were sampled with."""

import numpy as np
from cpu.doctor.checks.text_dumps import looked, played, rows_of

from lockstep.doctor.checks.tokens.template import ThinkingDropped
from lockstep.types import Sample


def without_early_thinking(renderer, row):
    """`row` without what stands between the thinking tags of its first two turns."""
    return without_thinking(renderer, row, {0, 1})


def without_thinking(renderer, row, turns):
    """`row` without what stands between the thinking tags of these turns."""
    think, end = map(renderer.tokenizer.control_id, ("<think>", "</think>"))
    kept, inside = [], False
    for at, id_ in enumerate(row.token_ids.tolist()):
        turn = row.columns["turn"][at]
        inside |= id_ == think and turn in turns
        if not inside:
            kept.append(at)
        inside &= id_ != end
    return Sample(
        id=row.id,
        token_ids=row.token_ids[kept],
        loss_mask=row.loss_mask[kept],
        columns={k: row.columns[k][np.array(kept)] for k in ("rollout_logprobs", "turn")},
    )


def test_thinking_that_is_not_in_its_row_is_named_with_what_was_thought():
    renderer, episodes = played("chatml", thinks=True)
    _, findings = looked([ThinkingDropped], rows_of(episodes), renderer)
    assert findings["template/thinking_dropped"].verdict == "consistent"
    assert findings["template/thinking_dropped"].figures["thoughts"] == 2 * len(episodes)
    samples = [without_early_thinking(renderer, e.row) for e in episodes]
    examined, findings = looked([ThinkingDropped], rows_of(episodes, samples), renderer)
    finding = findings["template/thinking_dropped"]
    assert finding.verdict == "differs"
    assert finding.figures["dropped_thoughts"] == 2 * len(episodes)
    assert "search for" in renderer.tokenizer.decode(finding.evidence[0].expected_ids)
    assert examined.shares[0].k2 > 0.9


def test_rows_without_messages_tell_it_by_their_last_reply_that_alone_thinks():
    renderer, episodes = played("chatml", thinks=True)
    whole = rows_of(episodes, messages=False)
    _, findings = looked([ThinkingDropped], whole, renderer)
    assert findings["template/thinking_dropped"].verdict == "not_checkable"
    samples = [without_early_thinking(renderer, e.row) for e in episodes]
    bare = rows_of(episodes, samples, messages=False)
    examined, findings = looked([ThinkingDropped], bare, renderer)
    assert findings["template/thinking_dropped"].verdict == "differs"
    assert findings["template/thinking_dropped"].figures["bare"] == len(episodes)
    assert examined.shares[0].k2 > 0.9


def test_a_model_that_thinks_now_and_then_drops_no_thinking():
    renderer, episodes = played("chatml", thinks=True)
    samples = [without_thinking(renderer, e.row, {0, 1}) for e in episodes[:12]]
    samples += [without_thinking(renderer, e.row, {n % 3}) for n, e in enumerate(episodes[12:])]
    _, findings = looked([ThinkingDropped], rows_of(episodes, samples, messages=False), renderer)
    assert findings["template/thinking_dropped"].verdict == "not_checkable"


def test_rows_that_train_the_last_turn_alone_may_have_dropped_what_was_thought_before():
    renderer, episodes = played("chatml", thinks=True)
    samples = []
    for episode in episodes:
        row = without_early_thinking(renderer, episode.row)
        is_last = row.columns["turn"] == 2
        row.columns["turn"] = np.where(is_last, 0, -1).astype(np.int32)
        row.loss_mask = row.loss_mask & is_last
        samples.append(row)
    _, findings = looked([ThinkingDropped], rows_of(episodes, samples), renderer)
    assert findings["template/thinking_dropped"].verdict == "consistent"
