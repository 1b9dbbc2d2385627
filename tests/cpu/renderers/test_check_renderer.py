"""check_renderer itself: every kind of broken renderer is caught, by the dialogue that shows it."""

from dataclasses import replace

import pytest

from lockstep.errors import RendererError
from lockstep.renderers.chatml import ChatMLRenderer
from lockstep.renderers.tokenizer import Tokenizer
from lockstep.testing.renderers import check_renderer
from lockstep.testing.tokenizers import byte_tokenizer
from lockstep.types import Message


class LeakyTokenizer(Tokenizer):
    """Turns the text <|im_end|> into the control token, as shipped tokenizers do."""

    def __init__(self):
        source = byte_tokenizer()
        end = source.control_id("<|im_end|>")

        def encode(text):
            parts = text.split("<|im_end|>")
            ids = source.encode(parts[0])
            for part in parts[1:]:
                ids += [end, *source.encode(part)]
            return ids

        names = {source.control_name(id_): id_ for id_ in source.control_ids}
        text_tokens = {id_: source.token_bytes(id_) for id_ in range(256)}
        super().__init__(encode, text_tokens=text_tokens, control_tokens=names)


class NoStop(ChatMLRenderer):
    stop_ids = property(lambda self: (), lambda self, ids: None)


class TextStop(ChatMLRenderer):
    stop_ids = property(lambda self: (97,), lambda self, ids: None)


class LosesReplies(ChatMLRenderer):
    def extend(self, sampled_ids, messages):
        return super().extend(sampled_ids, [m for m in messages if m.role != "tool"])


class LeavesTurnsOpen(ChatMLRenderer):
    def extend(self, sampled_ids, messages):
        return super().extend([self.stop_ids[0]], messages)


class ContinuesDifferently(ChatMLRenderer):
    def extend(self, sampled_ids, messages):
        is_closed = list(sampled_ids[-1:]) == list(self.stop_ids)
        extra = [Message(role="system", content="cut off")] if not is_closed else []
        return super().extend(sampled_ids, [*messages, *extra])


class OpensDifferently(ChatMLRenderer):
    def extend(self, sampled_ids, messages):
        return [*super().extend(sampled_ids, messages), *self.tokenizer.encode(" ")]


class EncodesThePast(ChatMLRenderer):
    def extend(self, sampled_ids, messages):
        self.tokenizer.encode(self.tokenizer.decode(sampled_ids) * 20)
        return super().extend(sampled_ids, messages)


class TakesAssistants(ChatMLRenderer):
    def extend(self, sampled_ids, messages):
        return super().extend(sampled_ids, [m for m in messages if m.role != "assistant"])


class ForgetsTheStop(ChatMLRenderer):
    def render_reply(self, message):
        return super().render_reply(message)[:-1]


class LosesThinking(ChatMLRenderer):
    def parse(self, sampled_ids):
        return replace(super().parse(sampled_ids), thinking="")


class HidesErrors(ChatMLRenderer):
    def parse(self, sampled_ids):
        return replace(super().parse(sampled_ids), parse_error="")


class Raises(ChatMLRenderer):
    def parse(self, sampled_ids):
        if any(id_ >= self.tokenizer.vocab_size for id_ in sampled_ids):
            raise IndexError("no such id")
        return super().parse(sampled_ids)


class LosesText(ChatMLRenderer):
    def parse(self, sampled_ids):
        if self.stop_ids[0] in sampled_ids:
            return super().parse(sampled_ids)
        return Message(role="assistant", parse_error="cut off")


class Changes(ChatMLRenderer):
    count = 0

    def render(self, messages, tools=()):
        self.count += 1
        return super().render([Message(role="system", content=str(self.count)), *messages], tools)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (NoStop, "stop_ids"),
        (TextStop, r"stop_ids.*\(97,\)"),
        (Changes, "'simple'"),
        (LosesReplies, "'tool call'.*'The"),
        (LeavesTurnsOpen, "'simple'"),
        (ContinuesDifferently, "'tool call'"),
        (OpensDifferently, "'simple'"),
        (EncodesThePast, "'simple'"),
        (TakesAssistants, "'simple'.*RendererError"),
        (ForgetsTheStop, "'simple'"),
        (LosesThinking, r"'with thinking'.*parse\(render_reply\(m\)\)"),
        (HidesErrors, "'simple'.*parse_error"),
        (Raises, "random ids: .*parse"),
        (LosesText, "'plain words'"),
    ],
)
def test_a_broken_renderer_is_caught_and_the_dialogue_named(broken, message):
    with pytest.raises(RendererError, match=message):
        check_renderer(broken(byte_tokenizer()))


def test_text_that_becomes_a_control_token_is_caught():
    with pytest.raises(RendererError, match="control tokens"):
        check_renderer(ChatMLRenderer(LeakyTokenizer()))


def test_a_user_can_bring_dialogues_and_they_are_named():
    with pytest.raises(RendererError, match=r"check_renderer\(chatml\).*'mine'"):
        mine = {"mine": [Message(role="user", content="hi"), Message(role="assistant")]}
        check_renderer(OpensDifferently(byte_tokenizer()), dialogues=mine)
