"""Rows of dialogues with text, and both sides' log-probs of a policy that is a function."""

import zlib
from dataclasses import dataclass

import numpy as np

from lockstep.doctor.checks.base import Setting
from lockstep.doctor.checks.examine import Stage, examine
from lockstep.doctor.checks.rows import Rows
from lockstep.renderers.chatml import ChatMLRenderer
from lockstep.renderers.config import ChatMLConfig, HarmonyConfig
from lockstep.renderers.harmony import HarmonyRenderer
from lockstep.testing.tokenizers import byte_tokenizer
from lockstep.types import Message, Sample, ToolCall, Trajectory

_WORDS = ("baker", "nurse", "pilot", "Sara", "Ivan", "job", "pet", "search", "then", "answer")
_LIMIT = 150
"""Tokens of a turn that is cut off: more than the others have."""
_READ = 3
"""Ids before a token that its log-prob depends on."""


def words_tokenizer():
    """Bytes, and merges that spell the words: each has many other spellings."""
    merges = {}
    for word in (*_WORDS, "name", "arguments", "find", "final", "commentary", "analysis", "to="):
        left = word[0]
        for letter in word[1:]:
            merges[left, letter] = None
            left += letter
    return byte_tokenizer(merges=list(merges))


def make_renderer(name, tokenizer):
    if name == "harmony":
        return HarmonyRenderer(tokenizer, HarmonyConfig(system_message=False))
    return ChatMLRenderer(tokenizer, ChatMLConfig(has_empty_thinking=False))


def policy(ids):
    """[T] float32: what a policy gives each id, decided by the ids just before it."""
    out = np.empty(len(ids), np.float32)
    for at in range(len(ids)):
        near = np.asarray(ids[max(at - _READ, 0) : at + 1], np.int32).tobytes()
        out[at] = -(((zlib.crc32(near) % 1000) / 1000) ** 4) * 5
    return out


@dataclass
class Played:
    """One episode, and the ids that its turns were sampled as."""

    trajectory: Trajectory
    leaf: int

    @property
    def row(self) -> Sample:
        row = self.trajectory.row(self.leaf)
        return row

    @property
    def engine_ids(self):
        path = [self.trajectory.segments[i] for i in self.trajectory.path(self.leaf)]
        return tuple(segment.token_ids for segment in path if segment.is_sampled)

    @property
    def messages(self):
        return tuple(self.trajectory.messages(self.leaf))


def split_tokens(ids, tokenizer, draw, share=0.1):
    """`ids` with a share of the tokens of text spelt in two pieces."""
    out = []
    for id_ in ids:
        text = tokenizer.token_bytes(id_).decode("utf-8", errors="ignore")
        if id_ in tokenizer.control_ids or len(text) < 2 or draw.random() > share:
            out.append(id_)
            continue
        at = int(draw.integers(1, len(text)))
        out += [*tokenizer.encode(text[:at]), *tokenizer.encode(text[at:])]
    return out


def play(renderer, loose, *, seed, thinks=False, cut=False, tool_text="", broken=False, split=0.0):
    """Two calls and an answer, spelt by `loose`, which is a renderer over another spelling."""
    draw = np.random.default_rng(seed)
    word = lambda: str(draw.choice(_WORDS))  # noqa: E731
    trajectory = Trajectory(id=f"play/{seed}")
    user = Message(role="user", content=f"What is the {word()} of {word()}?")
    prompt = renderer.render([user])
    leaf = trajectory.observe(prompt, messages=[user])
    for turn in range(3):
        thinking = f"I should search for {word()} and {word()}." if thinks else ""
        if turn < 2:
            arguments = f'{{"q": "{word()} {word()}"}}'
            if broken and not turn:
                arguments = '{"q": '
            call = ToolCall(name="find", arguments=arguments)
            message = Message(role="assistant", thinking=thinking, tool_calls=(call,))
        else:
            words = " ".join(word() for _ in range(_LIMIT if cut else 2))
            message = Message(role="assistant", thinking=thinking, content=f"{words} ")
        ids = split_tokens(loose.render_reply(message), renderer.tokenizer, draw, split)
        reason = "stop"
        if cut and turn == 2:
            ids, reason = ids[:_LIMIT], "length"
        path = trajectory.path_ids(leaf)
        logprobs = policy([*path, *ids])[len(path) :]
        parsed = renderer.parse(ids)
        leaf = trajectory.record(
            ids, logprobs=logprobs, parent=leaf, prompt_ids=path, messages=[parsed],
            finish_reason=reason,
        )  # fmt: skip
        if turn < 2:
            reply = Message(
                role="tool", name="find", content=f"{tool_text}The {word()} is {word()}."
            )
            glue = renderer.extend(ids, [reply])
            leaf = trajectory.observe(glue, parent=leaf, messages=[reply])
    return Played(trajectory, leaf)


def played(name, *, rows=24, dropout=0.15, **how):
    """(renderer, episodes) of a policy that spells `dropout` of its merges in another way."""
    tokenizer = words_tokenizer()
    renderer = make_renderer(name, tokenizer)
    loose = make_renderer(name, tokenizer.with_dropout(dropout, seed=1))
    return renderer, [play(renderer, loose, seed=seed, **how) for seed in range(rows)]


def rows_of(episodes, samples=None, *, engine=False, messages=True, noise=0.0, seed=0):
    """Rows of `samples` (the episodes' own by default), the trainer's log-probs computed for the
    ids that stand there."""
    samples = samples or [episode.row for episode in episodes]
    draw = np.random.default_rng(seed)
    trainer = [policy(sample.token_ids) for sample in samples]
    trainer = np.concatenate(trainer)
    if noise:
        trainer = np.minimum(trainer + draw.normal(0, noise, len(trainer)), 0).astype(np.float32)
    more = {"trainer_logprobs": trainer}
    if engine:
        more["engine_ids"] = tuple(episode.engine_ids for episode in episodes)
    if messages:
        more["messages"] = tuple(episode.messages for episode in episodes)
    return Rows.of(samples, **more)


def looked(kinds, rows, renderer, **facts):
    """(examination, finding by check) of some checks over `rows`."""
    setting = Setting(
        tokenizer=renderer.tokenizer,
        renderer=renderer,
        stop_ids=frozenset(renderer.stop_ids),
        **facts,
    )
    has = frozenset(f for f in rows.__dataclass_fields__ if getattr(rows, f) is not None)
    examined = examine(lambda: [rows], [Stage(checks=kinds)], setting, has=has)
    return examined, {finding.check: finding for finding in examined.findings}
