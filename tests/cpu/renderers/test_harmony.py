from lockstep.renderers.config import HarmonyConfig
from lockstep.renderers.harmony import HarmonyRenderer
from lockstep.testing.tokenizers import byte_tokenizer
from lockstep.types import Message, ToolCall

TOKENIZER = byte_tokenizer()
COMPACT = HarmonyConfig(system_message=False, developer_heading=False, tools_in_prompt=False)


def test_compact_prompt_is_the_developers_words_the_users_words_and_an_opening():
    ids = HarmonyRenderer(TOKENIZER, COMPACT).render(
        [
            Message(role="developer", content="Search, then answer."),
            Message(role="user", content="Who?"),
        ]
    )
    assert TOKENIZER.decode(ids) == (
        "<|start|>developer<|message|>Search, then answer.<|end|>"
        "<|start|>user<|message|>Who?<|end|><|start|>assistant"
    )


def test_parse_reads_back_what_render_reply_writes():
    renderer = HarmonyRenderer(TOKENIZER, COMPACT)
    call = ToolCall(name="find", arguments='{"q": "x"}')
    for message in (
        Message(role="assistant", content="Bela."),
        Message(role="assistant", thinking="Hm.", content="Bela."),
        Message(role="assistant", tool_calls=(call,)),
        Message(role="assistant", thinking="Hm.", content="I look.", tool_calls=(call,)),
    ):
        assert renderer.parse(renderer.render_reply(message)) == message
