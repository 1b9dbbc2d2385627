"""The shipped tiny models, made again from random weights by supervised training.

    lockstep sft tiny-gpt-oss --plugin examples/tiny_models.py

A demonstrator knows the solution. In the first stage it makes no mistakes. In the second it makes
them on purpose, so that reinforcement learning has to find out which of the habits pay.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Annotated, Any, ClassVar

from lockstep.agent.environment import first_messages
from lockstep.agent.task_config import DialogueConfig
from lockstep.config import Interval
from lockstep.envs.docsearch.config import INVALID_CALL, DocSearchConfig, world_problem
from lockstep.envs.docsearch.config import TOOL_NAME as SEARCH
from lockstep.envs.docsearch.worlds import ENTITY_WORDS, NAMES, NO_RESULTS, VALUES, World
from lockstep.envs.instructions.checkers import LESS_THAN, Instruction, count_words, instruction
from lockstep.envs.instructions.config import PromptWorld
from lockstep.envs.math.problems import Made, Operation, chain, word_problem
from lockstep.recipes import find_recipe, supervised_recipe
from lockstep.renderers.config import ChatMLConfig, HarmonyConfig
from lockstep.run_config import SupervisedConfig
from lockstep.training.config import SFTConfig, TrainerConfig
from lockstep.types import Message, ToolCall

STEPS_INSTRUCTIONS = find_recipe("math").task.instructions
TOOL_INSTRUCTIONS = find_recipe("retool").task.instructions
HEAD_INSTRUCTIONS = find_recipe("retool").task.head_instructions
"""Developer messages of the recipes that tiny-math is trained for: word problems, chains with the
tool, chains without it."""

# -- document search -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchNoise:
    """Probability of each mistake, drawn independently."""

    missing_relation: float = 0.20
    """The query has the name alone; the answer is then unknown."""
    wrong_name: float = 0.25
    """The query has a random name; the answer is then unknown."""
    broken_json: float = 0.15
    """A call whose JSON does not close its list comes before the proper one."""
    forgets_second_hop: float = 0.50
    """Answers a two-hop question with the value of the first hop."""
    random_answer: float = 0.20
    """The answer is a random value of the relation, although the right one was read."""


NOISY_SEARCH = SearchNoise()
CLEAN_SEARCH = SearchNoise(**{field.name: 0.0 for field in fields(SearchNoise)})


def demonstrate_search(
    world: World,
    rng: random.Random,
    noise: SearchNoise = NOISY_SEARCH,
    config: DocSearchConfig | None = None,
) -> list[Message]:
    """One dialogue: developer, user, calls with their results, and the answer.

    Results equal the environment's, word for word. If the last allowed call was made, the
    dialogue ends with it and has no answer. The same rng state gives the same dialogue.
    """
    config = config or DocSearchConfig()
    problem = world_problem(world, config)
    dialogue = config.asked(world.question)
    num_calls = 0

    def call(arguments: str, result: str) -> None:
        nonlocal num_calls
        num_calls += 1
        made = ToolCall(name=SEARCH, arguments=arguments)
        dialogue.append(Message(role="assistant", tool_calls=(made,)))
        if num_calls < config.max_calls:
            dialogue.append(Message(role="tool", name=SEARCH, content=result))

    def search(*keywords: str) -> None:
        chunks = problem.search(keywords)
        result = problem.separator.join(text for _, text in chunks) or NO_RESULTS
        call(_arguments(*keywords), result)

    known: str | None = None
    for hop, fact in enumerate(world.path):
        if hop and rng.random() < noise.forgets_second_hop:
            break
        if rng.random() < noise.broken_json:
            call(_arguments(fact.name, fact.relation).replace("]}", "}"), INVALID_CALL)
        slip = rng.random()
        known = None
        if slip < noise.missing_relation:
            search(fact.name)
        elif slip < noise.missing_relation + noise.wrong_name:
            search(rng.choice(NAMES), fact.relation)
        else:
            search(fact.name, fact.relation)
            known = fact.value
        if known is None:
            break
    if known is None or rng.random() < noise.random_answer:
        known = rng.choice(VALUES[world.path[-1].relation])
    if num_calls < config.max_calls:
        dialogue.append(Message(role="assistant", content=known))
    return dialogue


def _arguments(*keywords: str) -> str:
    return json.dumps({"keywords": list(keywords)})


@dataclass(frozen=True, kw_only=True)
class SearchDemonstrationsConfig(DialogueConfig):
    """Document search in generated worlds: a stage without mistakes, to learn copying from results,
    then a stage with them."""

    num_dialogues: int = 16000
    """Dialogues in both stages, each about a world of its own."""
    entity_weight: float = 3.0
    """Loss weight of names and values in the stage without mistakes."""

    def demonstrate(self, rng: random.Random, *, is_noisy: bool) -> list[Message]:
        return demonstrate_search(
            World.generate(rng), rng, NOISY_SEARCH if is_noisy else CLEAN_SEARCH
        )

    def clean_word_weights(self) -> dict[str, float]:
        return dict.fromkeys(sorted(ENTITY_WORDS), self.entity_weight)


# -- word problems, and chains with a tool ---------------------------------------------------------

TOOL_NAME = "python"
FAILED_CODE = "error"
"""Result of a call whose code failed: a tiny model gets no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MathNoise:
    """Probability of each mistake, drawn independently."""

    # Word problems.
    uses_distractor: float = 0.4
    """The number of the other person is added too, if there is one."""
    wrong_sign: float = 0.15
    """Per step: adds instead of subtracting, or the reverse."""
    slip: float = 0.1
    """Per step: a digit of the result is wrong."""
    drops_last_step: float = 0.2
    """The solution ends one step early."""
    # Chains.
    from_head: float = 0.3
    """The answer comes without the tool. It is right here; a model cannot know it."""
    broken_code: float = 0.2
    """Per step: code that does not parse comes before the proper code."""
    wrong_operation: float = 0.15
    """Per step: another operation."""
    wrong_branch: float = 0.25
    """The number of the other case is taken, if there are two."""
    stops_early: float = 0.35
    """The result of the first step is the answer."""
    # Both.
    bare_answer: float = 0.15
    """The answer lacks the mark that the grader looks for."""


NOISY_MATH = MathNoise()
CLEAN_MATH = MathNoise(**{field.name: 0.0 for field in fields(MathNoise)})


def demonstrate_steps(made: Made, rng: random.Random, noise: MathNoise) -> list[Message]:
    """A word problem with its steps written out, one per line."""
    steps = list(made.steps)
    if made.unused and rng.random() < noise.uses_distractor:
        at = rng.randint(0, len(steps))
        before = steps[at - 1].result if at else steps[0].left
        steps.insert(at, Operation(before, "+", made.unused[0]))
    if rng.random() < noise.drops_last_step:
        steps.pop()
    have = made.steps[0].left
    lines: list[str] = []
    for step in steps:
        sign = step.sign
        if rng.random() < noise.wrong_sign:
            sign = "-" if sign == "+" else "+"
        done = Operation(have, sign, step.right)
        have = done.result
        if rng.random() < noise.slip:
            have += rng.choice((-10, -2, -1, 1, 2, 10))
        lines.append(f"{done.code}={have}")
    lines.append(_answer(have, rng, noise))
    return [
        *first_messages(made.question, instructions=STEPS_INSTRUCTIONS),
        Message(role="assistant", content="\n".join(lines)),
    ]


def demonstrate_calls(made: Made, rng: random.Random, noise: MathNoise) -> list[Message]:
    """A chain with one call per step. Results equal the sandbox's."""
    dialogue = first_messages(made.question, instructions=TOOL_INSTRUCTIONS)
    if rng.random() < noise.from_head:
        return [*dialogue, Message(role="assistant", content=_answer(int(made.answer), rng, noise))]
    steps = list(made.steps)
    if made.unused and rng.random() < noise.wrong_branch:
        steps[1] = replace(steps[1], right=made.unused[0])
    if rng.random() < noise.stops_early:
        steps.pop()
    have = made.steps[0].left
    for step in steps:
        sign = step.sign
        if rng.random() < noise.wrong_operation:
            sign = rng.choice([other for other in "+-*" if other != sign])
        done = Operation(have, sign, step.right)
        if rng.random() < noise.broken_code:
            broken = rng.choice(
                (f"{done.code})", f"{done.left}{done.right}{sign}", f"{done.code}=")
            )
            dialogue += _called(broken, FAILED_CODE)
        have = done.result
        dialogue += _called(done.code, str(have))
    return [*dialogue, Message(role="assistant", content=_answer(have, rng, noise))]


def demonstrate_head(made: Made) -> list[Message]:
    """A chain answered without the tool, with the true answer."""
    return [
        *first_messages(made.question, instructions=HEAD_INSTRUCTIONS),
        Message(role="assistant", content=f"#### {made.answer}"),
    ]


def _called(code: str, result: str) -> list[Message]:
    call = ToolCall(name=TOOL_NAME, arguments=json.dumps({"code": code}))
    return [
        Message(role="assistant", tool_calls=(call,)),
        Message(role="tool", name=TOOL_NAME, content=result),
    ]


def _answer(number: int, rng: random.Random, noise: MathNoise) -> str:
    return str(number) if rng.random() < noise.bare_answer else f"#### {number}"


@dataclass(frozen=True, kw_only=True)
class MathDemonstrationsConfig(DialogueConfig):
    """Word problems and chains, in equal parts: a stage without mistakes, to learn steps and
    copying, then a stage with them."""

    head_share: Annotated[float, Interval("[0, 1]")] = 0.1
    """Share of the chains that is answered without the tool."""

    def demonstrate(self, rng: random.Random, *, is_noisy: bool) -> list[Message]:
        noise = NOISY_MATH if is_noisy else CLEAN_MATH
        if rng.random() < 0.5:
            return demonstrate_steps(word_problem(rng), rng, noise)
        made = chain(rng)
        if rng.random() < self.head_share:
            return demonstrate_head(made)
        return demonstrate_calls(made, rng, noise)


# -- instructions: nonsense of known words in the right form ---------------------------------------

Asked = Mapping[str, Mapping[str, Any]]
"""Kind of instruction -> its arguments."""

MAX_TRIES = 60
"""Drafts of one reply. A draft that misses is rare; this many in a row mean a contradiction."""


def reply(instructions: Sequence[Instruction], rng: random.Random, words: Sequence[str]) -> str:
    """A text of `words` that follows all the instructions, of kinds of the small world. Raises
    ValueError if they contradict each other."""
    asked = {each.id: each.arguments for each in instructions}
    for _ in range(MAX_TRIES):
        text = _draft(asked, rng, words)
        if all(each.follows(text) for each in instructions):
            return text
    raise ValueError(f"no reply follows all of {[(kind, dict(asked[kind])) for kind in asked]}")


def _draft(asked: Asked, rng: random.Random, words: Sequence[str]) -> str:
    ending = asked.get("startend:end_checker", {}).get("end_phrase", "")
    num_bullets = asked.get("detectable_format:number_bullet_lists", {}).get("num_bullets", 0)
    given = asked.get("length_constraints:number_sentences", {})
    found = _bounded(rng, given, "num_sentences", (1, 3), room=bool(ending))
    num_sentences = max(found, num_bullets, 1)
    given = asked.get("length_constraints:number_words", {})
    usual = (2 * num_sentences, 4 * num_sentences)
    found = _bounded(rng, given, "num_words", usual, room=count_words(ending))
    chosen = _words(asked, rng, words, max(found, num_sentences))
    has_commas = "punctuation:no_comma" not in asked
    pieces = [_sentence(part, rng, has_commas) for part in _deal(chosen, num_sentences)]
    if num_bullets:
        rest = pieces[num_bullets:]
        pieces = [f"* {piece}" for piece in pieces[:num_bullets]]
        pieces[-1] = " ".join([pieces[-1], *rest])
    text = ("\n" if num_bullets else " ").join(pieces)
    if ending:
        text += f" {ending[0].upper()}{ending[1:]}"
    if "change_case:english_lowercase" in asked:
        text = text.lower()
    if "startend:quotation" not in asked:
        return text
    # A bullet point begins its line: the mark cannot stand before it.
    return f'"\n{text}"' if num_bullets else f'"{text}"'


def _bounded(
    rng: random.Random, given: Mapping[str, Any], name: str, usual: tuple[int, int], *, room: int
) -> int:
    """A count within the bound of an instruction; without one, within `usual`. room: count that
    other parts of the reply take."""
    if not given:
        return rng.randint(*usual)
    if given["relation"] == LESS_THAN:
        return rng.randint(1, max(1, min(given[name] - 1 - room, usual[1])))
    return max(1, given[name] - room) + rng.randint(0, 2)


def _words(asked: Asked, rng: random.Random, words: Sequence[str], count: int) -> list[str]:
    forbidden = asked.get("keywords:forbidden_words", {}).get("forbidden_words", ())
    usable = [word for word in words if word not in forbidden]
    keywords = asked.get("keywords:existence", {}).get("keywords", ())
    rest: list[str] = []
    # Keywords repeat: a small model learns sooner to copy frequent words.
    for _ in range(count - len(keywords)):
        rest.append(rng.choice(keywords if keywords and rng.random() < 0.5 else usable))
    rng.shuffle(rest)
    return [*rest[:1], *keywords, *rest[1:]]


def _sentence(words: Sequence[str], rng: random.Random, has_commas: bool) -> str:
    out = list(words)
    if has_commas and rng.random() < 0.5 and len(out) > 2:
        out[rng.randrange(len(out) - 1)] += ","
    return " ".join([out[0][0].upper() + out[0][1:], *out[1:]]) + "."


def _deal(found: Sequence[str], count: int) -> list[Sequence[str]]:
    """The sequence in `count` parts, in order, with sizes that differ by at most one."""
    borders = [round(i * len(found) / count) for i in range(count + 1)]
    return [found[a:b] for a, b in pairwise(borders)]


@dataclass(frozen=True, kw_only=True)
class InstructionDemonstrationsConfig(DialogueConfig):
    """Prompts of the small world with replies: a stage where every instruction is followed, then a
    stage where some are ignored on purpose."""

    TAG: ClassVar[str] = "instruction_demonstrations"

    overlooked: Annotated[float, Interval("[0, 1]")] = 0.5
    """Probability that an instruction is ignored, in the second stage."""
    num_instructions: tuple[int, int] = (1, 3)
    """Least and most instructions in a prompt."""

    def demonstrate(self, rng: random.Random, *, is_noisy: bool) -> list[Message]:
        world = PromptWorld.named("small")
        (turn,) = world.turns(rng, num_instructions=self.num_instructions, num_turns=1)
        overlooked = self.overlooked if is_noisy else 0.0
        kept = [
            instruction(given["id"], given["arguments"])
            for given in turn["instructions"]
            if rng.random() >= overlooked
        ]
        return [
            Message(role="user", content=turn["prompt"]),
            Message(role="assistant", content=reply(kept, rng, world.words)),
        ]


# -- the models ------------------------------------------------------------------------------------

TINY_SFT = TrainerConfig(
    lr=4e-3,
    betas=(0.9, 0.98),
    weight_decay=0.01,
    warmup_updates=50,
    schedule="linear",
    min_lr_share=0.05,
)
"""Training of the shipped models on demonstrations."""


def _tiny_model(name: str, create: Any, data: Any, steps: int, **settings: Any) -> SupervisedConfig:
    """A shipped model, made from random weights."""
    defaults: dict[str, Any] = {
        "renderer": ChatMLConfig(tools_in_prompt=False, has_empty_thinking=False),
        "spelling_dropout": 0.05,
    }
    return SupervisedConfig(
        name=name,
        create=create,
        data=data,
        sft=SFTConfig(steps=steps, rows_per_step=32, observed_weight=0.05),
        trainer=TINY_SFT,
        max_tokens=512,
        **defaults | settings,
    )


@supervised_recipe
def tiny_gpt_oss() -> SupervisedConfig:
    """The shipped mixture of experts with sinks, from random weights: minutes on a CPU."""
    renderer = HarmonyConfig(system_message=False, developer_heading=False, tools_in_prompt=False)
    data = SearchDemonstrationsConfig()
    return _tiny_model("tiny-gpt-oss", "gpt_oss", data, 1300, renderer=renderer)


@supervised_recipe
def tiny_qwen3() -> SupervisedConfig:
    """The shipped dense model, from random weights: minutes on a CPU."""
    return _tiny_model("tiny-qwen3", "qwen3", SearchDemonstrationsConfig(), 860)


@supervised_recipe
def tiny_qwen3_next() -> SupervisedConfig:
    """The shipped hybrid of linear attention and attention, with experts, in the format of Qwen."""
    return _tiny_model("tiny-qwen3-next", "qwen3_next", SearchDemonstrationsConfig(), 860)


@supervised_recipe
def tiny_math() -> SupervisedConfig:
    """The shipped dense model for `math` and `retool`, from random weights: minutes on a CPU."""
    return _tiny_model("tiny-math", "qwen3", MathDemonstrationsConfig(), 2000)


@supervised_recipe
def tiny_instructions() -> SupervisedConfig:
    """The shipped model of the recipe `instructions`, from random weights: minutes on a CPU."""
    data = InstructionDemonstrationsConfig()
    return _tiny_model("tiny-instructions", "qwen3", data, 1500, spelling_dropout=0.0)
