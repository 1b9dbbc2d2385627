"""Foreign programs that sample tool dialogues, to judge the doctor from outside.

    python docs/proof/wild_players.py                  makes every player (about a minute each)
    python docs/proof/wild_players.py llama-chatml     one of them

A *player* is a model architecture of transformers, a tokenizer, a chat template and a trainer's
format. Dumps have the doctor's own columns; of a format, only whether it logs versions counts.
It samples, templates and scores with transformers, tokenizers, numpy and torch alone: nothing of
Lockstep takes part. Which parts no limit of the doctor may be set on is in doctor_split.json.
`docs/proof/doctor_wild.py` breaks what players do, and asks the doctor.

Players are kept in .cache/wild/NAME as transformers saves them.
"""

from __future__ import annotations

import copy
import json
import random
import re
import sys
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from wild_templates import TEMPLATES, TEXT_CALL, Template

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "parity"))
from real_tokenizers import directory_of  # noqa: E402

CACHE = ROOT / ".cache" / "wild"
PLAN = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
"""Texts, architectures and players."""
SPLIT = json.loads((Path(__file__).parent / "doctor_split.json").read_text())
"""Parts of players that are held out."""
KEPT_MERGES = 4000
"""Merges of a real tokenizer that are kept: tiny models train fast, and its rules stay."""
MAX_REPLY_TOKENS = 64
MAX_REPLIES = 4
NUM_TASKS, GROUP_SIZE = 8, 8
"""64 rows in a dump."""
NOISE_STD = 0.008
"""Noise on the sampler's logits in every dump, as between two engines."""
SPLIT_WORDS = 0.03
"""Share of the sampled tokens that training spells in two: sampled ids are then not always those
that encoding gives, as in real runs."""

Message = dict[str, Any]
Ids = list[int]


# -- tasks -----------------------------------------------------------------------------------------

FIELDS: Mapping[str, Sequence[str]] = PLAN["tasks"]["fields"]
TOOLS: Sequence[dict[str, Any]] = PLAN["tools"]


@dataclass(frozen=True)
class Task:
    """Questions that one dialogue asks in turn, and what is true of each."""

    number: int
    system: str
    questions: Sequence[tuple[str, str, str, str]]
    """(text, name, field, value) each."""


def said(rng: random.Random, kind: str, **words: str) -> str:
    """One of the texts of a kind."""
    return rng.choice(PLAN["tasks"][kind]).format(**words)


def make_task(seed: int, number: int, *, has_system: bool = True) -> Task:
    rng = random.Random(f"{seed}/{number}")
    asked: list[tuple[str, str, str, str]] = []
    for place in range(1 + (rng.random() < 0.4)):
        name, kind = said(rng, "names"), rng.choice(list(FIELDS))
        text = said(rng, "more_questions" if place else "questions", name=name, field=kind)
        asked.append((text, name, kind, rng.choice(FIELDS[kind])))
    system = said(rng, "systems") if has_system and rng.random() < 0.7 else ""
    return Task(number=number, system=system, questions=asked)


def tool_text(task: Task, arguments: Mapping[str, Any]) -> str:
    """What `lookup` answers."""
    for _, name, kind, value in task.questions:
        if (arguments.get("name"), arguments.get("field")) == (name, kind):
            return json.dumps({"name": name, kind: value})
    return '{"error": "no such record"}'


def call_message(content: str, thinking: str, name: str, arguments: Any) -> Message:
    call = {"type": "function", "id": "call00001", "function": {"name": name}}
    call["function"]["arguments"] = arguments
    message: Message = {"role": "assistant", "content": content, "tool_calls": [call]}
    return message | ({"reasoning_content": thinking} if thinking else {})


# -- tokenizers ------------------------------------------------------------------------------------


def _corpus() -> list[str]:
    """Texts that a vocabulary is trained on: all that templates and tasks write."""
    out: list[str] = []
    for number in range(300):
        rng = random.Random(number)
        task = make_task(1, number)
        text, name, kind, value = task.questions[0]
        words = {"name": name, "field": kind, "value": value}
        out += [task.system, text, said(rng, "openings"), said(rng, "answers", **words)]
        out += [said(rng, "tails"), said(rng, "thoughts", **words), tool_text(task, words)]
        out.append(json.dumps({"name": "lookup", "arguments": {"name": name, "field": kind}}))
        out.append(f"CALL lookup {json.dumps({'name': name, 'field': kind})}")
        if not number % 10:
            out += [re.sub(r"\{%.*?%\}|\{\{-?|\}\}", " ", t.jinja) for t in TEMPLATES.values()]
            out += [json.dumps(TOOLS[0]), json.dumps(TOOLS[0], indent=4)]
    return out


def own_bytelevel() -> Tokenizer:
    """A byte-level BPE, as GPT-2's."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator(_corpus(), trainer)
    return made


def own_metaspace() -> Tokenizer:
    """A BPE of pieces that begin with U+2581, with a space before every text, as Llama 2's."""
    made = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    prefix = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    made.normalizer = normalizers.Sequence(prefix)
    trainer = trainers.BpeTrainer(
        vocab_size=900, show_progress=False,
        special_tokens=["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))],
    )  # fmt: skip
    words = [piece for text in _corpus() for piece in re.findall(r"\S+|\n+", text)]
    made.train_from_iterator(words, trainer)
    # Bytes are text of the vocabulary, not control tokens: only the trainer needs them as such.
    state = json.loads(made.to_str())
    state["added_tokens"] = [t for t in state["added_tokens"] if t["content"] == "<unk>"]
    made = Tokenizer.from_str(json.dumps(state))
    made.decoder = decoders.Sequence([
        decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
        decoders.Strip(content=" ", left=1),
    ])  # fmt: skip
    return made


_UNUSED = re.compile(
    r"reserved|unused|place.holder|multimodal|vision|image|box|quad|object|repo|file"
)


def real(name: str) -> Tokenizer:
    """A published tokenizer with its first merges, its own rules and control tokens."""
    state = json.loads((directory_of(name) / "tokenizer.json").read_text("utf-8"))
    model = state["model"]
    # Gemma lists runs of white space as added tokens: here they are pieces like any other.
    is_byte_level = "ByteLevel" in json.dumps(state["pre_tokenizer"])
    special = {t["content"]: t for t in state["added_tokens"] if is_byte_level or t["special"]}
    merges = [tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in model["merges"]]
    # Runs of white space, which come first in some lists, would take all the places.
    wordy = [m for m in merges if len(set("".join(m))) > 1 or len("".join(m)) < 4]
    kept_merges: list[tuple[str, ...]] = []
    pieces: set[str] = set()
    alphabet = set(pre_tokenizers.ByteLevel.alphabet()) if is_byte_level else set()
    if not is_byte_level:
        alphabet = {chr(c) for c in range(32, 127)} | set("\n\t\u2581")
        alphabet |= {f"<0x{byte:02X}>" for byte in range(256)}
    pieces |= {a for a in alphabet if a in model["vocab"]}
    for merge in wordy:
        if all(part in pieces for part in merge) and "".join(merge) in model["vocab"]:
            kept_merges.append(merge)
            pieces.add("".join(merge))
            if len(kept_merges) == KEPT_MERGES:
                break
    pieces = {p for p in pieces if p not in special}
    ordered = sorted(pieces, key=model["vocab"].__getitem__)
    controls = [t for t in special.values() if not _UNUSED.search(t["content"])]
    of = {p: i for i, p in enumerate([*ordered, *(t["content"] for t in controls)])}
    model["vocab"] = {p: of[p] for p in ordered}
    if model.get("unk_token"):
        model["vocab"][model["unk_token"]] = of[model["unk_token"]]
    model["merges"] = [list(m) for m in kept_merges]
    state["added_tokens"] = [t | {"id": of[t["content"]]} for t in controls]
    state["post_processor"] = None  # templates write the first token themselves
    return Tokenizer.from_str(json.dumps(state))


TOKENIZER_MAKERS: Mapping[str, Callable[[], Tokenizer]] = {
    "own-bytelevel": own_bytelevel,
    "own-metaspace": own_metaspace,
    **{name: partial(real, name) for name in ("qwen3", "llama3_2", "deepseek_v3", "gemma3")},
}


def make_tokenizer(kind: str, template: Template) -> PreTrainedTokenizerFast:
    """A tokenizer that has every control token of the template, and the template."""
    made = TOKENIZER_MAKERS[kind]()
    known = made.get_vocab()
    pad = next((p for p in ("<|endoftext|>", "<\uff5c\u2581pad\u2581\uff5c>", "<pad>",
                            "<|finetune_right_pad_id|>") if p in known), "<pad>")  # fmt: skip
    for control in [*template.controls, pad]:
        if control not in known:
            # Tags of tools and thinking are added without being special, as in Qwen's files.
            tag = re.fullmatch(r"</?(tool_call|tool_response|think)>", control)
            made.add_tokens([AddedToken(control, special=not tag, normalized=False)])
    bos = {"bos_token": template.bos} if template.bos in made.get_vocab() else {}
    if kind == "own-metaspace":
        bos |= {"unk_token": "<unk>"}
    out = PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=template.ends[0], pad_token=pad,
        clean_up_tokenization_spaces=False, **bos,
    )  # fmt: skip
    out.chat_template = template.jinja.strip()
    return out


# -- models ----------------------------------------------------------------------------------------


def make_model(kind: str, tokenizer: PreTrainedTokenizerFast) -> Any:
    own = dict(PLAN["architectures"][kind])
    model_type, without = own.pop("model_type", kind), own.pop("without", ())
    settings = {k: v for k, v in (PLAN["small"] | own).items() if k not in without}
    config = AutoConfig.for_model(
        model_type, vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, **settings,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():  # a router of zeros (some architectures start so) would never learn
        for module in routers_of(model):
            module.weight.normal_(std=0.3)
    return model.float()


def layers_of(model: Any) -> Any:
    """The blocks of a model, whatever it calls them."""
    return max((m for m in model.modules() if isinstance(m, torch.nn.ModuleList)), key=len)


def routers_of(model: Any) -> list[Any]:
    return [m for m in model.modules() if type(m).__name__.lower().endswith("router")]


# -- players ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parts:
    """A player's name and parts."""

    name: str
    model: str
    tokenizer: str
    template: str
    format: str

    @property
    def is_held(self) -> bool:
        kinds = ("model", "tokenizer", "template", "format")
        return any(getattr(self, kind) in SPLIT[f"{kind}s"] for kind in kinds)

    @property
    def directory(self) -> Path:
        return CACHE / self.name


PLAYERS = {name: Parts(name, *words.split()) for name, words in PLAN["players"].items()}


@dataclass
class Program:
    """A player at work: everything that a program needs to talk with its model."""

    parts: Parts
    template: Template
    tokenizer: PreTrainedTokenizerFast
    model: Any

    @cached_property
    def end_ids(self) -> frozenset[int]:
        return frozenset(self.tokenizer.convert_tokens_to_ids(list(self.template.ends)))

    # -- text -------------------------------------------------------------------------------------

    def render(self, messages: Sequence[Message], *, is_open: bool = True, **variables: Any) -> str:
        tools = variables.pop("tools", TOOLS if self.template.has_tools else None)
        return self.tokenizer.apply_chat_template(
            list(messages), tools=tools, add_generation_prompt=is_open, tokenize=False, **variables
        )

    def encode(self, text: str) -> Ids:
        return self.tokenizer.encode(text, add_special_tokens=False) if text else []

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)

    def glue_text(self, new: Sequence[Message], **variables: Any) -> str:
        """What the template writes between the end of a reply and the next reply."""
        reply = {"role": "assistant", "content": "SENTINEL"}
        text = self.render([{"role": "user", "content": "x"}, reply, *new], **variables)
        rest = text.partition("SENTINEL")[2]
        return rest[self._end_in(rest)[1] :]

    def _end_in(self, text: str) -> tuple[int, int]:
        """(begin, end) of the first end of a reply."""
        ends = [*self.template.ends, *(["<|end|>"] if "<|call|>" in self.template.ends else [])]
        found = [(text.find(e), text.find(e) + len(e)) for e in ends if e in text]
        return min(found) if found else (len(text), len(text))

    def glue(self, new: Sequence[Message], *, is_ended: bool, **variables: Any) -> Ids:
        """Ids between a reply and the next. is_ended: whether the model wrote the end itself."""
        ids = self.encode(self.glue_text(new, **variables))
        if is_ended:
            return ids
        end = self.template.ends[0]
        if self.template.ends_by_role and new[0]["role"] == "tool":
            end = "<|observation|>"
        return [self.tokenizer.convert_tokens_to_ids(end), *ids]

    def reply_text(self, before: Sequence[Message], reply: Message) -> tuple[str, str]:
        """(text, end token) of a reply, as the template writes it."""
        head = self.render(before)
        text = self.render([*before, reply], is_open=False)
        assert text.startswith(head), f"{self.parts.name}: {head[-40:]!r} does not open {text!r}"
        text = text[len(head) :]
        begin, end = self._end_in(text)
        if self.template.ends_by_role:
            return text, "<|observation|>" if reply.get("tool_calls") else "<|user|>"
        if self.template.thinks and "<|call|>" in self.template.ends:  # harmony: two messages
            for marker in self.template.ends:
                if marker in text:
                    return text.partition(marker)[0], marker
        return text[:begin], text[begin:end]

    # -- messages ---------------------------------------------------------------------------------

    def parse(self, ids: Sequence[int]) -> Message:
        """The message that a reply is."""
        body = list(ids[:-1]) if len(ids) and ids[-1] in self.end_ids else list(ids)
        text, thinking, pattern = self.decode(body), "", ""
        if "<|call|>" in self.template.ends:
            pattern = r"<\|channel\|>analysis<\|message\|>(.*?)<\|end\|><\|start\|>assistant"
        elif self.template.thinks:
            pattern = r"<think>\n(.*?)\n</think>\n\n"
        if pattern and (found := re.match(pattern, text, re.S)):
            thinking, text = found[1], text[found.end() :]
        call = self._call_in(text)
        if call is not None and self.template.call:
            name, arguments, begin = call
            return call_message(text[:begin].strip(), thinking, name, arguments)
        text = text.removeprefix("<|channel|>final<|message|>")
        message = {"role": "assistant", "content": text}
        return message | ({"reasoning_content": thinking} if thinking else {})

    def _call_in(self, text: str) -> tuple[str, dict[str, Any], int] | None:
        found = re.search(self.template.call or TEXT_CALL, text, re.S)
        if found is None:
            return None
        groups = found.groupdict()
        try:
            if "body" in groups:
                body = json.loads(groups["body"])
                name = body.get("name", body.get("tool_name"))
                arguments = body.get("arguments", body.get("parameters"))
            else:
                name, arguments = groups["name"], json.loads(groups["arguments"])
        except (ValueError, AttributeError):
            return None
        is_call = isinstance(name, str) and isinstance(arguments, dict)
        return (name, arguments, found.start()) if is_call else None

    def answer(self, task: Task, reply: Message, *, injected: str = "") -> list[Message]:
        """What the tool says to a reply; nothing if it calls none. injected: text of a control
        token that the tool's text spells."""
        if self.template.call:
            calls = reply.get("tool_calls")
            call = None if not calls else (calls[0]["function"]["name"],
                                           calls[0]["function"]["arguments"])  # fmt: skip
        else:
            found = self._call_in(reply["content"])
            call = None if found is None else found[:2]
        if call is None:
            return []
        text = tool_text(task, call[1]) + injected
        if self.template.tool_role == "user":
            return [{"role": "user", "content": f"Result: {text}"}]
        return [{"role": "tool", "name": call[0], "content": text, "tool_call_id": "call00001"}]

    def first_messages(self, task: Task) -> list[Message]:
        system = [{"role": "system", "content": task.system}] if task.system else []
        return [*system, {"role": "user", "content": task.questions[0][0]}]


# -- training --------------------------------------------------------------------------------------


def scripted(program: Program, seed: int) -> tuple[Ids, list[bool]]:
    """A dialogue as a model should speak: (ids, true where the model speaks)."""
    rng = random.Random(f"script {seed}")
    task = make_task(10_000_000 + seed, seed)
    messages = program.first_messages(task)
    ids = program.encode(program.render(messages))
    mask = [False] * len(ids)

    def say(reply: Message) -> None:
        text, end = program.reply_text(messages, reply)
        own = _spelled_otherwise(program, program.encode(text), rng)
        own.append(program.tokenizer.convert_tokens_to_ids(end))
        ids.extend(own)
        mask.extend([True] * len(own))
        messages.append(reply)

    def hear(new: list[Message]) -> None:
        own = program.glue(new, is_ended=True)
        ids.extend(own)
        mask.extend([False] * len(own))
        messages.extend(new)

    for place, (text, name, kind, value) in enumerate(task.questions):
        if place:
            hear([{"role": "user", "content": text}])
        words = {"name": name, "field": kind, "value": value}
        arguments = {"name": name, "field": kind}
        tight = (",", ":") if rng.random() < 0.3 else (", ", ": ")
        spelled = json.dumps(arguments, separators=tight)
        opening = said(rng, "openings")
        thought = said(rng, "thoughts", **words) if program.template.thinks else ""
        if program.template.call:
            is_bare = "<|call|>" in program.template.ends or "parameters" in program.template.call
            content = "" if is_bare or program.template.ends_by_role else opening.strip()
            call = call_message(content, thought, "lookup", spelled)
            say(call)
            call["tool_calls"][0]["function"]["arguments"] = arguments
        else:
            say({"role": "assistant", "content": f"{opening}CALL lookup {spelled}"})
            call = messages[-1] | {"content": f"CALL lookup {json.dumps(arguments)}"}
        hear(program.answer(task, call))
        thought = said(rng, "afterthoughts", **words) if program.template.thinks else ""
        text = said(rng, "answers", **words) + said(rng, "tails")
        answer = {"role": "assistant", "content": text}
        say(answer | ({"reasoning_content": thought} if thought else {}))
    return ids, mask


def _spelled_otherwise(program: Program, ids: Ids, rng: random.Random) -> Ids:
    vocab = _vocab(program.tokenizer)
    added = program.tokenizer.added_tokens_decoder
    out: Ids = []
    for id_ in ids:
        piece = program.tokenizer.convert_ids_to_tokens(id_)
        if id_ not in added and len(piece) > 1 and rng.random() < SPLIT_WORDS:
            cut = rng.randrange(1, len(piece))
            if piece[:cut] in vocab and piece[cut:] in vocab:
                out += [vocab[piece[:cut]], vocab[piece[cut:]]]
                continue
        out.append(id_)
    return out


@cache
def _vocab(tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    return tokenizer.get_vocab()


def train(program: Program, *, steps: int = 180, batch: int = 16, lr: float = 4e-3) -> float:
    """Teaches the model to speak as `scripted` does. Returns the mean log-prob at the end."""
    pool = [scripted(program, seed) for seed in range(min(batch * steps, 800))]
    rng = random.Random(0)
    model, pad = program.model.train(), program.tokenizer.pad_token_id
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    plan = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, pct_start=0.1)
    loss = torch.zeros(())
    for _ in range(steps):
        # Rows of near lengths: less padding.
        rows = sorted(rng.sample(pool, 4 * batch), key=lambda row: len(row[0]))
        begin = rng.randrange(4) * batch
        rows = rows[begin : begin + batch]
        ids, there = padded([ids for ids, _ in rows], pad)
        on, _ = padded([mask for _, mask in rows], False)
        hidden = model.base_model(input_ids=ids, attention_mask=there, use_cache=False)[0]
        hidden = hidden[:, :-1][on[:, 1:]]  # logits of replies alone
        logits = model.get_output_embeddings()(hidden)
        loss = torch.nn.functional.cross_entropy(logits, ids[:, 1:][on[:, 1:]])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        plan.step()
    model.eval()
    return -float(loss.detach())


def ensure(name: str) -> Path:
    """The directory of a player's model, which is made where it is not there."""
    parts = PLAYERS[name]
    if (parts.directory / "made.json").is_file():
        return parts.directory
    began, cpu = time.perf_counter(), time.process_time()
    template = TEMPLATES[parts.template]
    tokenizer = make_tokenizer(parts.tokenizer, template)
    model = make_model(parts.model, tokenizer)
    program = Program(parts=parts, template=template, tokenizer=tokenizer, model=model)
    logprob = train(program)
    if len(program.end_ids) > 1:  # as published models of these families list them
        ends = sorted(program.end_ids)
        program.model.config.eos_token_id = program.model.generation_config.eos_token_id = ends
    program.model.save_pretrained(parts.directory)
    program.tokenizer.save_pretrained(parts.directory)
    made = {"logprob": round(logprob, 3), "vocabulary": len(program.tokenizer)}
    made |= {"cpu_seconds": round(time.process_time() - cpu, 1)}
    (parts.directory / "made.json").write_text(json.dumps(made) + "\n")
    print(f"{name:16} {made}  {time.perf_counter() - began:.0f} s", flush=True)
    return parts.directory


@cache
def program_of(name: str) -> Program:
    """A player that speaks, from its directory."""
    directory = ensure(name)
    parts = PLAYERS[name]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(
        directory, attn_implementation="eager", dtype=torch.float32
    )
    model.eval().requires_grad_(False)
    template = TEMPLATES[parts.template]
    return Program(parts=parts, template=template, tokenizer=tokenizer, model=model)


# -- sampling --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How an engine draws and what it records."""

    seed: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    is_raw: bool = False
    """Whether it records log-probs before temperature and top-p."""
    noise_std: float = NOISE_STD
    max_tokens: int = MAX_REPLY_TOKENS
    is_bfloat16: bool = False


class Sampler:
    """An engine that has loaded a program's model."""

    def __init__(self, program: Program, sampling: Sampling) -> None:
        model = program.model
        self._model = copy.deepcopy(model).bfloat16() if sampling.is_bfloat16 else model
        self._sampling = sampling
        self._pad = program.tokenizer.pad_token_id
        self._generator = torch.Generator().manual_seed(sampling.seed)

    @torch.inference_mode()
    def draw(
        self, prompts: Sequence[Ids], end_ids: frozenset[int]
    ) -> list[tuple[Ids, list[float]]]:
        """A reply to each prompt: (ids with the end, natural log-prob of each)."""
        sampling, generator = self._sampling, self._generator
        ids, there = padded(prompts, self._pad, is_left=True)
        places = (there.cumsum(1) - 1).clamp(min=0)
        past: Any = None
        replies: list[tuple[Ids, list[float]]] = [([], []) for _ in prompts]
        is_done = [False] * len(prompts)
        for _ in range(sampling.max_tokens):
            out = self._model(
                input_ids=ids, attention_mask=there, position_ids=places, past_key_values=past,
                use_cache=True, logits_to_keep=1,
            )  # fmt: skip
            past = out.past_key_values
            logits = out.logits[:, -1].float()
            if sampling.noise_std:
                noise = torch.randn(logits.shape, generator=generator)
                logits = logits + sampling.noise_std * noise
            scaled = logits / sampling.temperature
            if sampling.top_p < 1:
                order = scaled.sort(-1, descending=True)
                before = order.values.softmax(-1).cumsum(-1) - order.values.softmax(-1)
                drop = torch.zeros_like(before, dtype=torch.bool)
                drop.scatter_(-1, order.indices, before >= sampling.top_p)
                scaled = scaled.masked_fill(drop, -torch.inf)
            ids = torch.multinomial(scaled.softmax(-1), 1, generator=generator)
            recorded = (logits if sampling.is_raw else scaled).log_softmax(-1).gather(1, ids)
            drawn = zip(ids.flatten().tolist(), recorded.flatten().tolist(), strict=True)
            for number, (id_, logprob) in enumerate(drawn):
                if not is_done[number]:
                    replies[number][0].append(id_)
                    replies[number][1].append(logprob)
                    is_done[number] = id_ in end_ids
            if all(is_done):
                break
            there = torch.cat([there, torch.ones_like(ids)], 1)
            places = places[:, -1:] + 1
        return replies

    def score(self, ids: Ids) -> list[float]:
        """Natural log-prob of each given id, NaN at the first, with the noise of this engine."""
        [values] = score(self._model, [ids], pad=self._pad)
        generator = np.random.default_rng(self._sampling.seed)
        return (values + generator.normal(0, self._sampling.noise_std, len(values))).tolist()


@dataclass
class Episode:
    """One dialogue that was sampled, with everything that its engine saw and said."""

    task: int
    messages: list[Message]
    prompts: list[Ids] = field(default_factory=list)
    """Ids that the engine was sent for each reply."""
    replies: list[Ids] = field(default_factory=list)
    logprobs: list[list[float]] = field(default_factory=list)
    heads: list[int] = field(default_factory=list)
    """Number of messages before each reply."""
    reward: float = 0.0
    version: int = 3


def play(
    program: Program,
    sampling: Sampling,
    *,
    num_tasks: int = NUM_TASKS,
    group_size: int = GROUP_SIZE,
    has_system: bool = True,
    max_replies: int = MAX_REPLIES,
    injected: float = 0.0,
    forced: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> list[Episode]:
    """Samples dialogues, turn by turn: what an engine said is never encoded again.

    injected: share of the tasks whose tool spells a control token. forced: the program writes the
    first words of each reply itself. variables: of the template.
    """
    variables = dict(variables or {})
    rng = random.Random(sampling.seed)
    tasks = [make_task(sampling.seed, n, has_system=has_system) for n in range(num_tasks)]
    spelled = [rng.random() < injected for _ in tasks]
    if injected and not any(spelled):
        spelled[0] = True
    sampler = Sampler(program, sampling)
    episodes = [
        Episode(task=task.number, messages=program.first_messages(task))
        for task in tasks
        for _ in range(group_size)
    ]
    asked = [1] * len(episodes)
    prompts = {
        n: program.encode(program.render(episode.messages, **variables))
        for n, episode in enumerate(episodes)
    }
    forced_ids = program.encode(PLAN["tasks"]["openings"][2]) if forced else []
    for _ in range(max_replies):
        if not prompts:
            break
        order = sorted(prompts)
        sent = [prompts[n] + forced_ids for n in order]
        drawn = sampler.draw(sent, program.end_ids)
        prompts = {}
        for n, prompt, (ids, logprobs) in zip(order, sent, drawn, strict=True):
            episode, task = episodes[n], tasks[episodes[n].task]
            episode.heads.append(len(episode.messages))
            episode.prompts.append(prompt)
            episode.replies.append(ids)
            episode.logprobs.append(logprobs)
            reply = program.parse([*forced_ids, *ids])
            episode.messages.append(reply)
            is_ended = ids[-1] in program.end_ids
            token = program.template.controls[-1] if spelled[task.number] else ""
            new = program.answer(task, reply, injected=f" {token}" if token else "")
            if not new:
                value = task.questions[asked[n] - 1][3]
                episode.reward += float(value in reply["content"]) + 0.25 * is_ended
                if asked[n] < len(task.questions):
                    new = [{"role": "user", "content": task.questions[asked[n]][0]}]
                    asked[n] += 1
            if new and len(episode.replies) < max_replies:
                glue = program.glue(new, is_ended=is_ended, **variables)
                prompts[n] = prompt + ids + glue
                episode.messages += new
    return episodes


# -- scoring ---------------------------------------------------------------------------------------


def score(
    model: Any, rows: Sequence[Ids], *, pad: int, temperature: float = 1.0, is_left: bool = False
) -> list[np.ndarray]:
    """[T] float32 log-prob of each id of each row at its own place, NaN at the first, as a trainer
    computes them. is_left: pads on the left."""
    out: list[np.ndarray] = [np.empty(0)] * len(rows)
    for chosen in batches(rows):
        with torch.no_grad():
            logprobs = scored(model, [rows[n] for n in chosen], pad=pad, temperature=temperature,
                              is_left=is_left)  # fmt: skip
        for n, values in zip(chosen, logprobs, strict=True):
            out[n] = np.concatenate([[np.nan], values.float().numpy()]).astype(np.float32)
    return out


def batches(rows: Sequence[Ids], size: int = 16) -> list[list[int]]:
    """Numbers of rows of near lengths."""
    order = sorted(range(len(rows)), key=lambda n: len(rows[n]))
    return [order[begin : begin + size] for begin in range(0, len(order), size)]


def scored(
    model: Any, rows: Sequence[Ids], *, pad: int, temperature: float = 1.0, is_left: bool = False
) -> list[torch.Tensor]:
    """[T - 1] log-probs of each row from its second id on, with a graph."""
    ids, there = padded(rows, pad, is_left=is_left)
    places = (there.cumsum(1) - 1).clamp(min=0)
    logits = model(input_ids=ids, attention_mask=there, position_ids=places, use_cache=False).logits
    logits = logits[:, :-1].float() / temperature
    logprobs = logits.log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
    starts = [(ids.shape[1] - len(row)) * is_left for row in rows]
    return [logprobs[n, at : at + len(rows[n]) - 1] for n, at in enumerate(starts)]


def padded(
    rows: Sequence[Sequence[Any]], pad: Any, *, is_left: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows of one length, 1 where they are more than padding)."""
    width = max(map(len, rows))

    def filled(row: Sequence[Any], fill: Any) -> list[Any]:
        fills = [fill] * (width - len(row))
        return [*fills, *row] if is_left else [*row, *fills]

    ids = torch.tensor([filled(row, pad) for row in rows])
    return ids, torch.tensor([filled([1] * len(row), 0) for row in rows])


@contextmanager
def dropping(model: Any, attention: float = 0.0, hidden: float = 0.0):
    """The model in training mode, with dropout."""
    with ExitStack() as stack:
        for module in model.modules():
            if attention and isinstance(getattr(module, "attention_dropout", None), int | float):
                stack.enter_context(patch.object(module, "attention_dropout", attention))
        if hidden:
            for layer in layers_of(model):
                hook = layer.register_forward_hook(lambda _, __, out: _dropped(out, hidden))
                stack.callback(hook.remove)
        model.train()
        stack.callback(model.eval)
        yield model


def _dropped(out: Any, prob: float) -> Any:
    if isinstance(out, tuple):
        return (torch.nn.functional.dropout(out[0], prob), *out[1:])
    return torch.nn.functional.dropout(out, prob)


@contextmanager
def without_sinks(model: Any, layers: Sequence[int] = ()):
    """Attention without sinks, in these layers or in all."""
    names = [n for n, _ in model.named_parameters() if n.endswith(".sinks")]
    with ExitStack() as stack:
        for n in (n for k, n in enumerate(names) if not layers or k in layers):
            sinks = model.get_parameter(n).data
            stack.callback(sinks.copy_, sinks.clone())
            sinks.fill_(-1e4)
        yield model


@contextmanager
def without_window(model: Any):
    """Every layer sees the whole row."""
    with patch.object(model.config, "sliding_window", 100_000):
        yield model


@contextmanager
def noisy_routers(model: Any, std: float, seed: int):
    """Noise on what routers see: tokens near a tie go to other experts."""
    generator = torch.Generator().manual_seed(seed)

    def disturb(_: Any, args: Any) -> Any:
        x = args[0]
        noise = torch.randn(x.shape, generator=generator) * std * x.std()
        return (x + noise.to(x.dtype), *args[1:])

    with ExitStack() as stack:
        for module in routers_of(model):
            stack.callback(module.register_forward_pre_hook(disturb).remove)
        yield model


def updated(
    program: Program,
    rows: Sequence[Ids],
    masks: Sequence[np.ndarray],
    weights: Sequence[float],
    *,
    steps: int,
    lr: float,
) -> Any:
    """A copy of the model after optimizer steps that raise the log-probs of rows by weight."""
    model = copy.deepcopy(program.model).requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    for _ in range(steps):
        optimizer.zero_grad()
        for chosen in batches(rows):
            found = scored(model, [rows[n] for n in chosen], pad=program.tokenizer.pad_token_id)
            loss = sum(
                -(weights[n] * values[torch.from_numpy(masks[n][1:])]).sum()
                for n, values in zip(chosen, found, strict=True)
            )
            (loss / sum(map(np.sum, masks))).backward()
        optimizer.step()
    return model.eval().requires_grad_(False)


# -- dumps -----------------------------------------------------------------------------------------


@dataclass
class Line:
    """One training row as a trainer holds it, before it is written."""

    ids: np.ndarray
    mask: np.ndarray
    """[T] true where the token is trained."""
    sampler: np.ndarray
    """[T] float, NaN where there is none."""
    trainer: np.ndarray
    prompt_length: int
    turn: np.ndarray
    advantage: float
    reward: float
    group: int
    messages: list[Message]
    engine_ids: list[Ids]
    engine_prompt_ids: list[Ids]
    step: int = 4
    version: int | None = None
    """Version of the weights that sampled it; None if the program does not log it."""


def write_parquet(folder: Path, rows: Sequence[dict[str, Any]], facts: Mapping[str, Any]) -> Path:
    """Rows of the doctor's own columns, as docs/doctor-dumps.md lists them, written by pyarrow.
    Returns the file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    floats, ints = pa.list_(pa.float32()), pa.list_(pa.int32())
    kinds = {
        "token_ids": ints, "loss_mask": pa.list_(pa.bool_()), "rollout_logprobs": floats,
        "trainer_logprobs": floats, "advantages": pa.float32(), "prompt_length": pa.int64(),
        "reward": pa.float64(), "group": pa.int64(), "step": pa.int64(),
        "policy_version": pa.int32(), "trainer_version": pa.int64(), "messages": pa.string(),
        "turn": ints, "engine_ids": pa.list_(ints), "engine_prompt_ids": pa.list_(ints),
    }  # fmt: skip
    schema = pa.schema([(name, kinds[name]) for name in rows[0]])
    metadata = {"lockstep.doctor": json.dumps(facts)}
    pq.write_table(pa.Table.from_pylist(rows, schema.with_metadata(metadata)),
                   path := folder / "rows.parquet")  # fmt: skip
    return path


def columns_of(line: Line, trainer_version: int) -> dict[str, Any]:
    """A row of all columns."""
    versions = {"policy_version": line.version, "trainer_version": trainer_version}
    return {
        "token_ids": line.ids.tolist(), "loss_mask": line.mask.tolist(),
        "rollout_logprobs": _own(line.sampler, line.mask),
        "trainer_logprobs": _own(line.trainer, line.mask), "advantages": line.advantage,
        "prompt_length": line.prompt_length, "reward": line.reward, "group": line.group,
        "step": line.step, **(versions if line.version is not None else {}),
        "messages": json.dumps(_spoken(line.messages)), "turn": line.turn.tolist(),
        "engine_ids": line.engine_ids, "engine_prompt_ids": line.engine_prompt_ids,
    }  # fmt: skip


def _own(values: np.ndarray, mask: np.ndarray) -> list[float | None]:
    """null outside of the trained tokens, where there is no number."""
    pairs = zip(values.tolist(), mask.tolist(), strict=True)
    return [None if value != value and not is_on else value for value, is_on in pairs]


def _spoken(messages: Sequence[Message]) -> list[Message]:
    """Messages with the arguments of calls as text, as OpenAI's form has them."""
    out = copy.deepcopy(list(messages))
    for message in out:
        for call in message.get("tool_calls") or ():
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return out


if __name__ == "__main__":
    torch.set_num_threads(1)
    for asked in sys.argv[1:] or PLAYERS:
        ensure(asked)
