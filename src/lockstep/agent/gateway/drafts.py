"""The ids of a request: finds its place in the session's tree, and encodes the new messages.

Recorded ids are reused. An altered reply keeps its sampled ids where its words are the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import numpy as np

from lockstep.agent.gateway.exchange import Refusal
from lockstep.agent.gateway.tree import Answer, History, Input, Reason, Tree, altered_from
from lockstep.agent.turns import Observed, TurnSampler, count, fork_without_thinking
from lockstep.errors import RendererError
from lockstep.renderers.base import Renderer
from lockstep.renderers.pieces import first_difference
from lockstep.renderers.tokenizer import Tokenizer
from lockstep.types import Int32Array, Message


@dataclass(slots=True, eq=False)
class Draft:
    """Additions of one request to its session."""

    place: Input
    """Place where the request asks for a turn."""
    reason: Reason
    """Reason of the turn."""
    new: list[Input | Answer] = field(default_factory=list["Input | Answer"])
    """Additions to the tree, parents first; the first gets the reason."""
    counts: Counter[str] = field(default_factory=Counter[str])
    """Additions to the metrics of the trajectory."""
    stage: str = ""
    """Step of the sampling that is under way, for the text of a failure."""


class Drafts:
    """Drafts the additions of requests to a tree, and records them."""

    def __init__(self, tree: Tree, sampler: TurnSampler) -> None:
        self._tree, self._sampler = tree, sampler
        self._trajectory, self._renderer = sampler.trajectory, sampler.renderer

    def draft(self, dialogue: History) -> Draft:
        """Finds the place where the request asks, and encodes the new messages before it.

        Nothing of the session changes. Raises Refusal for messages that the renderer cannot write.
        """
        found = self._tree.find(dialogue)
        place, reason = found.place, self._tree.reason(dialogue, found)
        if place is not None and found.num_batches > len(dialogue.replies):
            return Draft(place, reason)
        try:
            try:
                if place is not None:
                    return self._grow(
                        Draft(place, reason), dialogue, found.num_batches, found.answer
                    )
            except RendererError:
                if found.num_replies == len(dialogue.replies):
                    raise
                # A reply that no model samples in one turn: as a history it may be written.
            return self._draft_root(dialogue, reason)
        except RendererError as error:
            raise Refusal(400, "cannot_render", str(error), parameter="messages") from error

    def _draft_root(self, dialogue: History, reason: Reason) -> Draft:
        """Makes a new root. Its prompt is everything before the first reply that was sampled here,
        written by the template; after that, ids are reused."""
        known = (at for at, reply in enumerate(dialogue.replies) if self._tree.known(reply))
        size = 1 + next(known, len(dialogue.replies))
        messages = dialogue.messages(size)
        ids = np.asarray(self._renderer.render(messages, dialogue.tools), np.int32)
        key, num_messages = dialogue.root_key(size), dialogue.num_messages(size)
        place = Input(None, [Observed(ids, messages)], num_messages, key, is_forked=True)
        draft = Draft(place, reason, [place])
        draft.counts["tokens/encoded"] += len(ids)
        return self._grow(draft, dialogue, size, None)

    def _grow(self, draft: Draft, dialogue: History, first: int, above: Answer | None) -> Draft:
        """Adds the places of the batches from `first` on. above: the known reply before it."""
        for at in range(first, len(dialogue.batches)):
            if above is None or at > first:
                above = self._copy(draft, draft.place, dialogue.replies[at - 1])
            draft.place = self._extend(draft, above, dialogue, at)
        return draft

    def _copy(self, draft: Draft, place: Input, reply: Message) -> Answer:
        """Copies a reply that the agent sent and that was not sampled at this place, as observed
        ids."""
        was = altered_from(place, reply)
        known = self._tree.known(reply)
        if known is not None:
            ids, reply = self._ids_of(known), known.message
        else:
            thought = "" if was is None else was[0].message.thinking
            if not reply.thinking:  # left out, as clients do
                reply = replace(reply, thinking=thought)
            written = self._renderer.render_reply(reply)
            num_encoded = len(written)
            if was is not None:
                written, num_encoded = splice_reply(
                    self._renderer,
                    self._ids_of(was[0]).tolist(),
                    written,
                    is_thinking_kept=reply.thinking.strip() == thought.strip(),
                )
            ids = np.asarray(written, np.int32)
            draft.counts["tokens/encoded"] += num_encoded
        if was is not None:
            draft.counts["gateway/altered_replies"] += 1
            draft.counts["gateway/altered_tokens"] += _num_changed(self._ids_of(was[0]), ids)
        answer = Answer(place, reply, parts=[Observed(ids, (reply,))])
        draft.new.append(answer)
        return answer

    def _extend(self, draft: Draft, above: Answer, dialogue: History, at: int) -> Input:
        """Makes the place of batch `at`, after the reply `above`."""
        batch = dialogue.batches[at]
        place = Input(above, [], dialogue.num_messages(at + 1), dialogue.batch_keys[at])
        tail = self._ids_of(above)
        if self._renderer.forgets(batch):
            leaf, behind = self.recorded_part(above)
            fork = fork_without_thinking(self._trajectory, leaf, self._renderer, behind=behind)
            if fork is not None:
                place.is_forked, (place.base, place.parts) = True, fork
                tail = place.parts[-1].ids
                draft.reason = draft.reason or "dropped_thinking"
        ids = np.asarray(self._renderer.extend(tail.tolist(), batch), np.int32)
        draft.counts["tokens/encoded"] += len(ids)
        place.parts.append(Observed(ids, batch))
        draft.new.append(place)
        return place

    def insert(self, draft: Draft) -> None:
        """Links what a draft adds into the tree."""
        for at in draft.new:
            if isinstance(at, Answer):
                at.place.add(at)
            elif at.above is None:
                self._tree.insert_root(at)
            else:
                at.above.places[at.key] = at
        if draft.new:
            draft.new[0].reason = draft.reason
        for name, value in draft.counts.items():
            count(self._trajectory, name, value)

    def _missing(self, node: Input | Answer) -> tuple[int | None, list[Input | Answer]]:
        """Returns (last recorded segment of the node's path, nodes after it)."""
        missing: list[Input | Answer] = []
        at: Input | Answer | None = node
        while at is not None and at.segment is None:
            missing.insert(0, at)
            if isinstance(at, Answer):
                at = at.place
            elif at.is_forked:
                return at.base, missing
            else:
                at = at.above
        return (None if at is None else at.segment), missing

    def recorded_part(self, node: Input | Answer) -> tuple[int | None, list[Observed]]:
        """Returns (last recorded segment of the node's path, unrecorded parts after it)."""
        leaf, missing = self._missing(node)
        return leaf, [part for each in missing for part in each.parts]

    def record_prompt(self, draft: Draft) -> tuple[int, str]:
        """Records the missing part of the prompt; see `Prompt.record`."""
        place = draft.place
        if place.segment is not None:
            draft.reason = draft.reason or "concurrent"
            return place.segment, draft.reason
        draft.reason = place.why or ""  # the branch begins with the place
        leaf, missing = self._missing(place)
        for each in missing:
            leaf = self._sampler.observe(leaf, each.parts, reason=each.reason)
            each.segment, each.parts = leaf, []
        assert leaf is not None, "a first prompt has ids"
        return leaf, ""

    def _ids_of(self, answer: Answer) -> Int32Array:
        if answer.segment is None:
            return answer.parts[0].ids
        return self._trajectory.ids_of(self._trajectory.turn_of(answer.segment))

    def prompt_ids(self, place: Input) -> Int32Array:
        leaf, parts = self.recorded_part(place)
        return np.concatenate([self._trajectory.path_ids(leaf), *(part.ids for part in parts)])


def _num_changed(before: Int32Array, after: Int32Array) -> int:
    """Counts removed and added ids, between a common beginning and a common end."""
    left, right = before.tolist(), after.tolist()
    head = first_difference(left, right)
    tail = first_difference(left[head:][::-1], right[head:][::-1])
    return len(left) + len(right) - 2 * (head + tail)


# -- altered replies ------------------------------------------------------------------------------


def splice_reply(
    renderer: Renderer, sampled: Sequence[int], altered: Sequence[int], *, is_thinking_kept: bool
) -> tuple[list[int], int]:
    """Builds the ids of an altered reply, and counts the newly encoded ids.

    sampled: the turn. altered: the altered reply as `Renderer.render_reply` writes it.
    is_thinking_kept: the agent repeated the turn's thinking or left it out, so its sampled ids
    stay, however the model spelled the tags around it. If those ids are not one run before the
    rest, the thinking is treated like any other words.
    """
    sampled, altered = list(sampled), list(altered)
    thought: list[int] = []
    if is_thinking_kept:
        rest = renderer.without_thinking(sampled)
        size = len(sampled) - len(rest)
        if size >= 0 and sampled[size:] == rest:
            thought, sampled, altered = sampled[:size], rest, renderer.without_thinking(altered)
    head, tail = common_ends(renderer.tokenizer, sampled, altered)
    new = altered[head[1] : len(altered) - tail[1]]
    kept = sampled[len(sampled) - tail[0] :]
    return [*thought, *sampled[: head[0]], *new, *kept], len(new)


def common_ends(
    tokenizer: Tokenizer, left: Sequence[int], right: Sequence[int]
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Counts the ids that spell the same at the beginning, and at the end, of two sequences: up to
    the last place where both have a token border. The two ends do not overlap.

    >>> from lockstep.testing.tokenizers import byte_tokenizer
    >>> tokenizer = byte_tokenizer()
    >>> common_ends(tokenizer, tokenizer.encode("it is 4. "), tokenizer.encode("it is 4."))
    ((8, 8), (0, 0))
    """
    units = [[_units(tokenizer, int(id_)) for id_ in ids] for ids in (left, right)]
    head = _common(*units)
    rest = [[each[::-1] for each in ids[at:][::-1]] for ids, at in zip(units, head, strict=True)]
    return head, _common(*rest)


def _common(left: list[list[int]], right: list[list[int]]) -> tuple[int, int]:
    flat = [[unit for token in tokens for unit in token] for tokens in (left, right)]
    same = first_difference(*flat)
    borders = [
        {0: 0, **{end: at for at, end in enumerate(accumulate(map(len, tokens)), start=1)}}
        for tokens in (left, right)
    ]
    end = max(at for at in borders[0].keys() & borders[1].keys() if at <= same)
    return borders[0][end], borders[1][end]


def _units(tokenizer: Tokenizer, id_: int) -> list[int]:
    """Bytes of text; one number that no byte has for a control token, and for an id that spells
    nothing: it is equal to itself alone."""
    spelled = b"" if id_ in tokenizer.control_ids else tokenizer.token_bytes(id_)
    return list(spelled) or [256 + id_]
