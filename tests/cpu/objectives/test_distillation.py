"""Divergences from a teacher: against torch's own over the whole vocabulary, and by hand."""

import math

import pytest
import torch

from lockstep.errors import AlignmentError, ConfigError
from lockstep.objectives import distillation
from lockstep.objectives.config import PPOClip
from lockstep.objectives.distillation import top_k_kl, vocabulary_kl
from lockstep.objectives.losses import TokenBatch, make_loss, supervised_loss, with_teacher

N, V, D = 7, 19, 5


def distributions(seed=0, scale=2.0):
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(2, N, V, generator=generator, dtype=torch.float64)
    return torch.log_softmax(logits, -1)


def kl(of, other):
    """By torch: its target is the first of the two."""
    return torch.nn.functional.kl_div(other, of, log_target=True, reduction="none").sum(-1)


@pytest.mark.parametrize("order", ["reverse", "forward"])
def test_all_ids_but_one_give_the_kl_over_the_vocabulary(order):
    student, teacher = distributions()
    expected = kl(student, teacher) if order == "reverse" else kl(teacher, student)
    found = top_k_kl(student[:, :-1], teacher[:, :-1], order=order)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("order", ["reverse", "forward"])
def test_fewer_ids_never_give_more(order):
    student, teacher = distributions(1)
    listed = teacher.argsort(-1, descending=True)
    last = torch.zeros(N)
    for k in (1, 2, 4, 8, V - 1):
        ids = listed[:, :k]
        found = top_k_kl(student.gather(1, ids), teacher.gather(1, ids), order=order)
        assert (found >= last - 1e-6).all() and (found >= -1e-6).all()
        last = found


def test_two_outcomes_by_hand_and_no_gap_for_equal_ones():
    student, teacher = torch.tensor([[0.8]]).log(), torch.tensor([[0.5]]).log()
    reverse = 0.8 * math.log(0.8 / 0.5) + 0.2 * math.log(0.2 / 0.5)
    forward = 0.5 * math.log(0.5 / 0.8) + 0.5 * math.log(0.5 / 0.2)
    assert top_k_kl(student, teacher).item() == pytest.approx(reverse, abs=1e-6)
    assert top_k_kl(student, teacher, order="forward").item() == pytest.approx(forward, abs=1e-6)
    assert top_k_kl(student, student).item() == 0
    sure = torch.tensor([[0.0]], requires_grad=True)
    found = top_k_kl(sure, teacher, order="forward")
    found.sum().backward()
    assert torch.isfinite(found).all() and torch.isfinite(sure.grad).all()


def test_an_id_that_a_side_cannot_draw_adds_nothing_to_that_sides_mean():
    known, never = (
        torch.tensor([[0.5, 0.25]]).log(),
        torch.tensor([[0.5, 0.0]]).log().requires_grad_(),
    )
    found = top_k_kl(never, known)
    found.sum().backward()
    assert found.item() == pytest.approx(0.5 * math.log(2)) and never.grad.isfinite().all()
    assert top_k_kl(known, never, order="forward").item() == found.item()
    with pytest.raises(ConfigError, match="order='both' must be one of reverse, forward"):
        top_k_kl(known, known, order="both")


def test_other_shapes_are_named():
    with pytest.raises(AlignmentError, match=r"\[1, 2\].*teacher_logprobs \[1, 3\]"):
        top_k_kl(torch.zeros(1, 2), torch.zeros(1, 3))


@pytest.mark.parametrize("order", ["reverse", "forward"])
@pytest.mark.parametrize("rows", [1, 3, 100], ids="rows{}".format)
def test_the_vocabulary_in_chunks_has_the_value_and_gradient_of_the_whole(order, rows, monkeypatch):
    """The teacher is wider, and its vocabulary is padded by two more ids."""
    monkeypatch.setattr(distillation, "chunk_rows", lambda *_: rows)
    generator = torch.Generator().manual_seed(3)

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    hidden, head = random(N, D).requires_grad_(), random(V, D).requires_grad_()
    theirs, their_head, weights = random(N, D + 2), random(V + 2, D + 2), random(N)
    teacher = torch.log_softmax((theirs @ their_head[:V].t()).double() / 0.7, -1)
    student = torch.log_softmax((hidden @ head.t()).double() / 0.7, -1)
    expected = kl(student, teacher) if order == "reverse" else kl(teacher, student)
    wanted = torch.autograd.grad((expected * weights).sum(), (hidden, head))
    found = vocabulary_kl(hidden, head, theirs, their_head, temperature=0.7, order=order)
    torch.testing.assert_close(found.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    for mine, other in zip(
        torch.autograd.grad((found * weights).sum(), (hidden, head)), wanted, strict=True
    ):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
    frozen = vocabulary_kl(hidden, head.detach(), theirs, their_head, temperature=0.7, order=order)
    (alone,) = torch.autograd.grad((frozen * weights).sum(), hidden)
    torch.testing.assert_close(alone, wanted[0], rtol=1e-4, atol=1e-5)


def batch(**fields):
    columns = {"advantages": torch.tensor([1.0, -1.0]), "old_logprobs": torch.tensor([-0.5, -0.5])}
    return TokenBatch(
        logprobs=torch.tensor([-0.5, -0.5], requires_grad=True),
        entropy=torch.zeros(2),
        row=torch.tensor([0, 0]),
        num_rows=1,
        columns=columns | fields.pop("columns", {}),
        **fields,
    )


def test_a_teacher_adds_its_divergence_beside_the_correction_s_weights():
    plain, beside = make_loss(PPOClip()), make_loss(PPOClip(entropy_coef=0.1))
    tokens = batch(teacher_kl=torch.tensor([0.3, 0.7]), weights=torch.tensor([0.0, 5.0]))
    out = with_teacher(plain, coef=2.0, order="reverse")(tokens)
    assert out.loss.tolist() == plain(tokens).loss.tolist()
    assert out.regularizer.tolist() == pytest.approx([0.6, 1.4])
    assert out.mean["teacher_kl"].tolist() == pytest.approx([0.3, 0.7])
    both = with_teacher(beside, coef=2.0, order="reverse")(tokens)
    expected = beside(tokens).regularizer + torch.tensor([0.6, 1.4])
    torch.testing.assert_close(both.regularizer, expected)
    with pytest.raises(AlignmentError, match="no teacher has scored them"):
        with_teacher(plain, coef=1.0, order="reverse")(batch())


def test_soft_targets_replace_the_cross_entropy_and_keep_the_weights():
    listed = torch.tensor([[0.7], [0.2]]).log()
    teacher = torch.tensor([[0.5], [0.2]]).log()
    columns = {"teacher_ids_logprobs": teacher, "weights": torch.tensor([2.0, 3.0])}
    out = supervised_loss(batch(listed=listed, columns=columns))
    forward = 0.5 * math.log(0.5 / 0.7) + 0.5 * math.log(0.5 / 0.3)
    assert out.loss.tolist() == pytest.approx([2 * forward, 0.0], abs=1e-6)
