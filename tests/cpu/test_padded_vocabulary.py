"""A model with more rows in its head than its tokenizer has ids: none of those behind is drawn."""

import asyncio
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from quickstarts import AT_END, SHORT, run_with, steps_of
from safetensors.torch import load_file, save_file

from lockstep.config import resolve
from lockstep.doctor.diagnose import diagnose
from lockstep.doctor.monitor import train
from lockstep.engines.config import EmbeddedConfig
from lockstep.engines.embedded.engine import EmbeddedEngine
from lockstep.errors import EngineError
from lockstep.models.hf_io import WEIGHTS, load_checkpoint
from lockstep.models.locate import locate_model
from lockstep.ops.base import Ops
from lockstep.ops.context import Support
from lockstep.recipes import find_recipe
from lockstep.renderers.chatml import ChatMLRenderer
from lockstep.renderers.tokenizer import Tokenizer
from lockstep.store.run import load_run
from lockstep.types import Message, Ragged, Request, SamplingParams

SMALL = (*SHORT, *AT_END, "steps=2", "groups_per_step=3", "checkpoint.every=1")
NUM_PADDING = 37  # an odd number of columns: no row of logits is aligned


@pytest.fixture(scope="module")
def padded(tmp_path_factory):
    """tiny-qwen3 with rows behind those of its ids that would win nearly every draw."""
    directory, source = tmp_path_factory.mktemp("models") / "padded", locate_model("tiny-qwen3")
    shutil.copytree(source, directory)
    config = json.loads((source / "config.json").read_text())
    assert config["tie_word_embeddings"]
    tensors = load_file(source / WEIGHTS)
    name = "model.embed_tokens.weight"
    huge = 50 * torch.randn(NUM_PADDING, config["hidden_size"], generator=seeded(1))
    tensors[name] = torch.cat([tensors[name], huge])
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    config["vocab_size"] += NUM_PADDING
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def run_of(model, path, *overrides):
    return run_with(path, f"model={model}", *SMALL, *overrides)


@pytest.mark.parametrize(
    "settings",
    [[], ["lora.rank=4"], ["agent.top_k=8", "steps=1"], ["agent.top_p=0.9", "steps=1"]],
    ids=["plain", "lora", "top_k", "top_p"],
)
def test_a_run_draws_ids_of_the_tokenizer_alone_and_both_sides_have_one_distribution(
    padded, tmp_path, settings
):
    size = Tokenizer.from_file(padded).vocab_size
    run = run_of(padded, tmp_path / "run", "contract=true-on-policy", *settings)
    rows = [record.trajectory for step in run.steps() for record in run.trajectories(step)]
    ids = np.concatenate([s.token_ids for trajectory in rows for s in trajectory.segments])
    assert ids.max() < size
    steps = steps_of(run)
    assert steps
    for row in steps:
        assert row["mismatch/compared_tokens"] > 100
        assert row["mismatch/unequal_tokens"] == 0
    assert max(row["train/entropy"] for row in steps) <= np.log(size)
    found = diagnose(run.path, model="own")
    assert [cause.name for cause, _ in found.causes] == []


def test_rows_of_padding_keep_their_weights_and_a_resumed_run_goes_on(padded, tmp_path):
    run = run_of(padded, tmp_path / "run")
    last = run.path / "checkpoints" / "step-000002" / "policy"
    before, after = (load_checkpoint(place).head for place in (padded, last))
    assert torch.equal(before[-NUM_PADDING:], after[-NUM_PADDING:])
    assert not torch.equal(before[:-NUM_PADDING], after[:-NUM_PADDING])
    again = run_with(run.path, f"model={padded}", *SMALL, "steps=3", resume=True)
    assert len(steps_of(again)) == 3


@pytest.mark.parametrize("signal", ["sampled", "top_k", "full"])
def test_a_teacher_whose_head_has_more_rows_teaches_what_it_does_without_them(
    padded, tmp_path, signal
):
    """Its padding would take nearly all of the probability. Two steps: in the first, the student is
    the teacher."""

    def metrics(teacher):
        words = ["model=tiny-qwen3", f"distill.teacher.model={teacher}", f"distill.signal={signal}"]
        quick = ["steps=2", "groups_per_step=3", "evaluation=none", "checkpoint.every=0"]
        path = tmp_path / Path(teacher).name
        train(resolve(find_recipe("distill"), [*words, *quick]), out=path, view="json")
        rows = load_run(path).metrics
        return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]

    found = metrics(padded)
    assert found == metrics("tiny-qwen3")
    name = "distill/kl" if signal == "sampled" else "train/teacher_kl"
    assert found[0][name] == pytest.approx(0, abs=1e-6)


def test_without_the_tokenizer_the_same_weights_would_draw_the_rows_of_padding(padded):
    """What the tests above would show if nothing kept the rows out."""
    whole = load_checkpoint(padded)
    size = whole.config.vocab_size - NUM_PADDING
    assert max(drawn_by(whole)) >= size
    narrow = load_checkpoint(padded, vocab_size=size)
    assert narrow.config.num_rows == whole.config.num_rows
    assert max(drawn_by(narrow)) < size
    with pytest.raises(EngineError, match=f"0..{size - 1}"):
        drawn_by(narrow, prompt=[size])


def test_an_id_of_padding_that_another_engine_drew_is_no_text(padded):
    renderer = ChatMLRenderer(Tokenizer.from_file(padded))
    size, said = renderer.tokenizer.vocab_size, Message(role="assistant", content="Bela.")
    *words, end = renderer.render_reply(said)
    assert renderer.parse([*words, size, size + NUM_PADDING - 1, end]) == said
    assert renderer.tokenizer.decode([size]) == ""


def drawn_by(model, *, prompt=(5, 6, 7)):
    async def drawn():
        engine = EmbeddedEngine(model, EmbeddedConfig(kv_cache_tokens=256, max_num_sequences=2))
        sampling = SamplingParams(max_tokens=40)
        prompt_ids = np.array(prompt, np.int32)
        request = Request(id="one", prompt_ids=prompt_ids, sampling=sampling, seed=3)
        deltas = [delta async for delta in engine.generate(request)]
        await engine.close()
        return np.concatenate([delta.token_ids for delta in deltas])

    return asyncio.run(drawn())


@pytest.mark.parametrize("support", [None, [[3, 5, 9], [], [1, 2], [0, 4, 6, 7]]])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_the_head_gives_the_gradient_of_the_ids_alone(support, is_chunked, monkeypatch):
    V, P, D = 10, 3, 6
    weight = torch.randn(V + P, D, generator=seeded(2), dtype=torch.float64)
    hidden = torch.randn(4, D, generator=seeded(3), dtype=torch.float64)
    ids = torch.tensor([3, 8, 1, 4])
    of = None if support is None else Support.of(Ragged.of(support))
    if is_chunked:
        monkeypatch.setattr("lockstep.ops.head.CHUNK_BYTES", 4 * (V + P))

    def gradients(rows, **settings):
        h, w = hidden.clone().requires_grad_(), weight[:rows].clone().requires_grad_()
        logprobs, entropy = Ops().log_probs(h, w, ids, temperature=0.8, support=of, **settings)
        (logprobs.sum() + 0.3 * entropy.sum()).backward()
        assert h.grad is not None and w.grad is not None
        return [logprobs, entropy, h.grad, w.grad[:V]], w.grad[V:]

    (narrow, _), (wide, of_padding) = gradients(V), gradients(V + P, vocab_size=V)
    for mine, theirs in zip(wide, narrow, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6)
    assert torch.equal(of_padding, torch.zeros(P, D, dtype=torch.float64))
