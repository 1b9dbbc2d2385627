"""trainer.freeze: parameters that stay, by name."""

from fnmatch import fnmatchcase

import pytest
import torch
from tiny_training import KINDS, assert_same_bits, make_rows, make_trainer, snapshot
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lockstep.errors import ConfigError
from lockstep.objectives.config import Reinforce
from lockstep.objectives.losses import make_loss
from lockstep.ops.base import Ops
from lockstep.ops.invariant import InvariantOps
from lockstep.training.checkpoint import CheckpointStore

ROWS = [9, 20, 14]
FROZEN_TABLES = ("embedding", "untied_head")


def gradients(trainer):
    trainer.forward_backward(make_rows(ROWS), make_loss(Reinforce()))
    return {name: grad.clone() for name, grad in trainer.optimizer.gradients().items()}


@pytest.fixture(params=["plain", "invariant"])
def ops(request):
    return Ops() if request.param == "plain" else InvariantOps()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("more", [(), ("embedding",)], ids=["layers", "head"])
def test_frozen_parameters_keep_their_bits_and_the_others_their_gradients(
    tmp_path, kind, ops, more
):
    """Also the bits of the gradients: what is left out is the last step of its computation. The
    gradient through a frozen head is summed before it is scaled."""
    patterns = ("*.attention.*", "layers.1.mlp.*", *more)
    whole = gradients(make_trainer(tmp_path, kind, ops=ops))
    trainer = make_trainer(tmp_path, kind, ops=ops, freeze=patterns)
    before, found = snapshot(trainer), gradients(trainer)
    frozen = {n for n, p in trainer.model.named_parameters() if not p.requires_grad}
    assert frozen == {
        n for n in whole if ".attention." in n or n.startswith("layers.1.mlp.") or n in more
    }
    expected = {n: g for n, g in whole.items() if n not in frozen}
    if trainer.model.head.requires_grad:
        assert_same_bits(found, expected)
    else:
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)
    trainer.optim_step()
    after = snapshot(trainer)
    for name in whole:
        assert torch.equal(before[name], after[name]) == (name in frozen), name
        assert trainer.model.get_parameter(name).grad is None
    kept = {
        n
        for n in {t.name: t.view() for t in trainer.optimizer.state_tensors()}
        if n.rpartition("/")[2] in frozen
    }
    assert not kept


class Made(TorchDispatchMode):
    """Holds every tensor that comes with memory of its own."""

    def __init__(self, model):
        super().__init__()
        self.known = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.tensors = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            is_tensor = isinstance(x, torch.Tensor)
            if is_tensor and x.untyped_storage().data_ptr() not in self.known:
                self.tensors.append(x)
        return out

    def has(self, value):
        """Whether any of them holds these numbers, as they stand or transposed."""
        found = (x for x in self.tensors if x.is_floating_point() and x.dim() == value.dim())
        both = ((x, y) for x in found for y in (value, value.transpose(-1, -2)))
        return any(x.shape == y.shape and torch.allclose(x, y) for x, y in both)


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_of_a_frozen_parameter_is_never_computed(tmp_path, kind, ops):
    frozen = ("*.attention.*", "*.mlp.*", *FROZEN_TABLES)
    found = []
    for patterns in ((), frozen):
        trainer = make_trainer(
            tmp_path, kind, ops=ops, freeze=patterns, hf={"tie_word_embeddings": False}
        )
        (batch,) = trainer.pack(make_rows(ROWS))
        logprobs, _ = trainer.model.score(
            batch.ids,
            batch.positions,
            batch.context,
            predictors_N=batch.predictors,
            targets_N=batch.targets,
        )
        with Made(trainer.model) as made:
            logprobs.sum().backward()
        if not patterns:
            whole = {n: p.grad for n, p in trainer.model.named_parameters() if p.dim() > 1}
        names = [n for n in whole if any(fnmatchcase(n, p) for p in frozen)]
        found.append([n for n in names if made.has(whole[n])])
    assert found[0] == names and not found[1]


def test_a_run_with_frozen_parameters_resumes_to_the_same_bits(tmp_path):
    options = {"freeze": ("*.mlp.*", "*norm"), "dtype": torch.bfloat16}
    straight = make_trainer(tmp_path / "model", **options)
    for seed in range(2):
        straight.update(make_rows(ROWS, seed=seed), Reinforce())
    store = CheckpointStore(tmp_path / "checkpoints")
    path = store.save(2, straight, {})
    resumed = make_trainer(tmp_path / "model", seed=9, **options)
    store.load(path, resumed)
    for trainer in (straight, resumed):
        trainer.update(make_rows(ROWS, seed=5), Reinforce())
    assert_same_bits(snapshot(resumed), snapshot(straight))


def test_a_pattern_that_matches_nothing_is_an_error_with_names(tmp_path):
    with pytest.raises(ConfigError) as error:
        make_trainer(tmp_path, freeze=("*.attn.*", "embedding"))
    text = str(error.value)
    assert "trainer.freeze=*.attn.* matches no parameter" in text
    assert "names are embedding, final_norm, layers.0.input_norm, " in text
    assert "layers.1" not in text  # each kind once


def test_everything_frozen_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"trainer\.freeze=layers\.\*,\*"):
        make_trainer(tmp_path, freeze=("layers.*", "*"))


def test_with_an_adapter_patterns_freeze_parts_of_it(tmp_path):
    trainer = make_trainer(tmp_path, lora={"rank": 2}, freeze=("*.attention.*",))
    trained = [n for n, p in trainer.model.named_parameters() if p.requires_grad]
    assert trained and all(".mlp." in name and ".lora." in name for name in trained)
    with pytest.raises(ConfigError, match="leaves nothing to train"):
        make_trainer(tmp_path, lora={"rank": 2}, freeze=("*.lora.*",))
