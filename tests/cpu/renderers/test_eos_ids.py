"""The ids of generation_config.json end a turn, in every renderer and in an episode."""

import asyncio
import json

import pytest
from made_up_templates import NO_TOOLS, template

from lockstep.agent.environment import Score
from lockstep.agent.loop import run_episode
from lockstep.agent.tools import ToolEnvironment
from lockstep.agent.turns import Budget
from lockstep.errors import RendererError
from lockstep.renderers.config import (
    ChatMLConfig,
    HarmonyConfig,
    JinjaConfig,
    Llama3Config,
    MistralConfig,
)
from lockstep.renderers.harmony import HARMONY_TOKENS
from lockstep.renderers.jinja.marks import Marks
from lockstep.renderers.llama3 import LLAMA3_TOKENS
from lockstep.renderers.mistral import MISTRAL_TOKENS
from lockstep.renderers.pieces import encode_pieces
from lockstep.renderers.registry import make_renderer
from lockstep.renderers.tokenizer import Tokenizer
from lockstep.testing.engines import FakeEngine
from lockstep.testing.tokenizers import CHATML_TOKENS, byte_tokenizer_json
from lockstep.types import Message, SamplingParams, Task

TOKENS = ("<|endoftext|>", *CHATML_TOKENS, *HARMONY_TOKENS, *LLAMA3_TOKENS, *MISTRAL_TOKENS)
EOS = 256
LINE_BREAK = 10  # a model may end with a token of text
RENDERERS = {
    "chatml": (ChatMLConfig(), "", ""),
    "qwen2.5": (ChatMLConfig(variant="qwen2.5"), "", ""),
    "harmony": (HarmonyConfig(), "", "<|channel|>final<|message|>"),
    "llama3": (Llama3Config(), "", ""),
    "mistral": (MistralConfig(), "", ""),
    "a template": (JinjaConfig(), template(), ""),
    "a template without tools": (JinjaConfig(), NO_TOOLS, ""),
}


def tokenizer_of(directory, eos, source=""):
    (directory / "tokenizer.json").write_text(byte_tokenizer_json(control_tokens=TOKENS))
    (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"}))
    (directory / "chat_template.jinja").write_text(source)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    return Tokenizer.from_file(directory)


@pytest.mark.parametrize("name", RENDERERS)
@pytest.mark.parametrize(
    ("eos", "added"),
    [
        (None, ()),
        (EOS, (EOS,)),
        ([EOS], (EOS,)),
        ([258, EOS], (258, EOS)),  # the first is ChatML's own
        ([EOS, 10**6], (EOS,)),  # of no tokenizer: never drawn
        ([EOS, LINE_BREAK], (EOS, LINE_BREAK)),
    ],
)
def test_the_ids_join_those_of_the_format(tmp_path, name, eos, added):
    config, source, before = RENDERERS[name]
    own = make_renderer(config, tokenizer_of(tmp_path, None, source))
    renderer = make_renderer(config, tokenizer := tokenizer_of(tmp_path, eos, source))
    assert renderer.stop_ids == tuple(dict.fromkeys((*own.stop_ids, *added)))
    words = encode_pieces(tokenizer, Marks(tokenizer).pieces(f"{before}It is 12.", ""))
    asked = [Message(role="user", content="?")]
    for id_ in added:
        read = renderer.parse([*words, id_])
        assert (read.content, read.parse_error) == ("It is 12.", "")
        # The turn has ended: no end is added.
        assert renderer.extend([*words, id_], asked) == own.extend([*words, own.stop_ids[0]], asked)


@pytest.mark.parametrize("eos", ["<|im_end|>", [1, "2"], True, [[1]], 1.5, {"id": 1}])
def test_what_is_no_id_is_refused_in_one_line(tmp_path, eos):
    with pytest.raises(RendererError, match="eos_token_id") as caught:
        tokenizer_of(tmp_path, eos)
    assert "\n" not in str(caught.value)


def test_an_episode_ends_its_turn_there(tmp_path):
    class Ask(ToolEnvironment):
        async def reset(self):
            return [Message(role="user", content="6+6?")]

        async def score(self):
            return Score(reward=float(self.answer == "12"))

    renderer = make_renderer(ChatMLConfig(), tokenizer_of(tmp_path, [EOS]))
    engine = FakeEngine(lambda request: [*b"12", EOS, *b"and so on"])
    sampling = SamplingParams(max_tokens=50, stop_ids=renderer.stop_ids)
    played = run_episode(
        engine, renderer, Ask(), Task(id="t"), trajectory_id="t", seed=0, sampling=sampling,
        budget=Budget(max_tokens=500, max_turns=1),
    )  # fmt: skip
    trajectory = asyncio.run(played)
    assert trajectory.segments[-1].finish_reason == "stop"
    assert list(trajectory.rewards.values()) == [1.0]
