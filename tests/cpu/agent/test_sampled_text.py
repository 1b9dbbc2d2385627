"""No text that was read from sampled ids is ever encoded again between sampling and the loss."""

import asyncio

import pytest
from playing import all_groups

from lockstep.agent.config import AgentConfig
from lockstep.agent.environment import Environment, Observation, Score
from lockstep.objectives.config import GRPO
from lockstep.renderers.config import ChatMLConfig, HarmonyConfig, Llama3Config, MistralConfig
from lockstep.renderers.llama3 import LLAMA3_TOKENS
from lockstep.renderers.mistral import MISTRAL_TOKENS, V7_TOKENS
from lockstep.renderers.origins import rendered_anew, turns_of
from lockstep.renderers.registry import make_renderer
from lockstep.renderers.tokenizer import Tokenizer
from lockstep.testing.engines import FakeEngine
from lockstep.testing.tokenizers import byte_tokenizer_json
from lockstep.training.rows import rows_for_training
from lockstep.types import Message, Task, ToolCall

SECRET = "zqxw"
"""Only the model says it."""


class Watched(Tokenizer):
    """Keeps what it encodes and what it reads."""

    def __init__(self, *args, **options):
        self.encoded: list[str] = []
        self.read: list[str] = []
        super().__init__(*args, **options)

    def encode(self, text):
        self.encoded.append(text)
        return super().encode(text)

    def encode_batch(self, texts):
        self.encoded += texts
        return super().encode_batch(texts)

    def decode_bytes(self, ids):
        found = super().decode_bytes(ids)
        self.read.append(found.decode(errors="replace"))
        return found

    def decode(self, ids):
        self.read.append(super().decode(ids))
        return self.read[-1]


class Talks(Environment):
    """Answers calls and words alike, twice; says nothing that the model said."""

    def __init__(self):
        self.num_steps = 0

    async def reset(self):
        return [Message(role="user", content="go")]

    async def step(self, message):
        self.num_steps += 1
        if self.num_steps == 3:
            return Observation(done=True)
        if message.tool_calls:
            replies = [Message(role="tool", name="find", content="seen")]
        else:
            replies = [Message(role="user", content="go on")]
        return Observation(messages=replies)

    async def score(self):
        return Score(reward=float(self.num_steps))


BYTES = byte_tokenizer_json()
FORMATS = {
    "harmony": (HarmonyConfig(), BYTES),
    "harmony, thinking=drop": (HarmonyConfig(thinking="drop"), BYTES),
    "chatml": (ChatMLConfig(), BYTES),
    "chatml, thinking=drop": (ChatMLConfig(thinking="drop"), BYTES),
    "llama3": (Llama3Config(), byte_tokenizer_json(control_tokens=LLAMA3_TOKENS)),
    "mistral": (MistralConfig(), byte_tokenizer_json(control_tokens=(*MISTRAL_TOKENS, *V7_TOKENS))),
}


def batch(kind):
    """One batch of three-turn episodes: a call, words, and words that are cut off."""
    config, file = FORMATS[kind]
    renderer = make_renderer(config, Watched.from_json(file))
    thinking = f"I {SECRET}." if isinstance(config, (HarmonyConfig, ChatMLConfig)) else ""
    call = ToolCall(name="find", arguments=f'{{"q": "{SECRET}"}}')
    turns = [
        renderer.render_reply(Message(role="assistant", tool_calls=(call,), thinking=thinking)),
        renderer.render_reply(Message(role="assistant", content=SECRET, thinking=thinking)),
        renderer.render_reply(Message(role="assistant", content=SECRET))[:-2],
    ]
    renderer.tokenizer.encoded.clear()
    # Which turn comes next is seen at the prompt's id of the request: "0-...", "1-...", "2-...".
    engine = FakeEngine(lambda request: turns[int(request.id.rpartition("/")[2].split("-")[0])])
    groups = asyncio.run(
        all_groups(
            engine, renderer, lambda task: Talks(), [Task(id="a"), Task(id="b")], group_size=2,
            config=AgentConfig(max_turns=3, continue_cut_turns=True),
        )
    )  # fmt: skip
    return renderer, groups


@pytest.mark.parametrize("kind", FORMATS)
def test_what_the_model_said_is_read_and_never_encoded_between_sampling_and_loss(kind):
    renderer, groups = batch(kind)
    rows = rows_for_training(groups, GRPO(), control_ids=renderer.tokenizer.control_ids)
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    assert [trajectory.status for trajectory in trajectories] == ["finished"] * 4
    sampled = sum(trajectory.num_sampled_tokens for trajectory in trajectories)
    assert sum(int(row.loss_mask.sum()) for row in rows) == sampled > 0
    assert sum(SECRET in text for text in renderer.tokenizer.read) >= 8  # two turns of four each
    assert any("go on" in text for text in renderer.tokenizer.encoded)
    assert not [text for text in renderer.tokenizer.encoded if "z" in text or "q" in text]


def test_a_program_that_renders_the_history_anew_is_seen():
    renderer, groups = batch("chatml")
    trajectory = groups[0].trajectories[0]
    rendered_anew(turns_of(trajectory, trajectory.leaves()[0]), renderer)
    assert any(SECRET in text for text in renderer.tokenizer.encoded)
