"""prime-rl 0.8: a loss with the signature of `[trainer.loss] type = "custom"`, on inputs made like
`prime_rl.trainer.rl.loss.LossInputs`. prime-rl itself is not installed."""

import sys
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from remote_tensors import RemoteDevice

from lockstep.correction import Correction, Layout, correct
from lockstep.errors import ConfigError
from lockstep.integrations import common, prime_rl
from lockstep.objectives import losses

SIZE = 8


@dataclass
class LossOutputs:
    loss: torch.Tensor
    metrics: dict


class Exporter:
    """The methods that the trainer calls on either of its exporters."""

    def __init__(self):
        self.exported, self.is_closed = [], False

    def export(self, step, micro_step, micro_batch, model_output, sequence_lengths, loss_config):
        self.exported.append(step)

    def close(self):
        self.is_closed = True


@pytest.fixture(autouse=True)
def trainer(monkeypatch):
    """Stand-ins for the two modules of the trainer."""
    common.check_version.cache_clear()
    common.say_once.cache_clear()
    common.watch_of.cache_clear()
    prime_rl._settings.cache_clear()
    exports = SimpleNamespace(
        TokenExporter=type("TokenExporter", (Exporter,), {}),
        DisabledTokenExporter=type("DisabledTokenExporter", (Exporter,), {}),
    )
    monkeypatch.setitem(
        sys.modules, "prime_rl.trainer.rl.loss", SimpleNamespace(LossOutputs=LossOutputs)
    )
    monkeypatch.setitem(sys.modules, prime_rl.EXPORT, exports)
    return exports


def inputs(**changed):
    g = torch.Generator().manual_seed(0)
    rollout = -2 * torch.rand(SIZE, generator=g) - 0.1
    given = {
        "trainer_logprobs": (rollout + 0.4 * torch.randn(SIZE, generator=g)).clamp(max=0),
        "inference_logprobs": rollout,
        "ref_logprobs": None,
        "advantages": torch.randn(SIZE, generator=g),
        "loss_mask": torch.tensor([False, False, True, True, True, False, True, True]),
        "loss_weights": None,
    }
    return SimpleNamespace(**given | changed)


def test_the_loss_is_the_objectives_with_the_corrections_weights():
    given = inputs()
    given.trainer_logprobs.requires_grad_()
    out = prime_rl.loss(given, correction="icepop", objective="reinforce")
    new, mask = given.trainer_logprobs.detach(), given.loss_mask
    expected = correct(
        new, given.inference_logprobs, Correction.icepop(), layout=Layout.packed([SIZE], mask)
    )
    per_token = losses.reinforce(given.trainer_logprobs, given.advantages, mask=mask).loss
    torch.testing.assert_close(out.loss, (per_token * expected.weights).sum())
    out.loss.backward()
    assert given.trainer_logprobs.grad[~mask].abs().max() == 0
    assert float(out.metrics["lockstep/weight"]) == pytest.approx(
        float(expected.weights.sum() / mask.sum())
    )


def test_without_a_correction_the_ratio_to_the_sampler_corrects():
    given = inputs(loss_weights=torch.linspace(0, 2, SIZE))
    out = prime_rl.loss(given, objective="dppo")
    expected = losses.dppo(
        given.trainer_logprobs, given.inference_logprobs, given.advantages, mask=given.loss_mask
    ).loss
    torch.testing.assert_close(out.loss, (expected * given.loss_weights).sum())


def test_settings_come_nested_or_dotted_and_wrong_ones_raise():
    one = prime_rl.loss(inputs(), **{"correction": "tis", "correction.limits": [0.0, 1.1]})
    other = prime_rl.loss(inputs(), correction="tis")
    assert float(one.metrics["lockstep/weight"]) < float(other.metrics["lockstep/weight"])
    with pytest.raises(ConfigError, match="correction"):
        prime_rl.loss(inputs(), corection="tis")
    with pytest.raises(ConfigError, match=r"correction\.normalize=false"):
        prime_rl.loss(inputs(), correction="mis")


def test_the_host_waits_for_nothing():
    prime_rl.loss(inputs(), correction="icepop")
    with RemoteDevice() as device:
        given = {k: device.put(v) for k, v in vars(inputs()).items() if v is not None}
        prime_rl.loss(inputs(**given), correction="icepop", objective="gspo")
        assert not device.waits


def test_the_watch_gets_what_the_token_export_gets(trainer, tmp_path):
    exporter = trainer.DisabledTokenExporter()
    prime_rl.loss(inputs(), watch=str(tmp_path))
    watching = common.watch_of(str(tmp_path), "")
    batch = {
        "input_ids": torch.arange(SIZE)[None] + 5, "position_ids": torch.zeros(1, SIZE).long(),
        "loss_mask": inputs().loss_mask[None], "advantages": inputs().advantages[None],
        "inference_logprobs": inputs().inference_logprobs[None], "env_names": ["math"] * SIZE,
    }  # fmt: skip
    output = {"logprobs": inputs().trainer_logprobs[None]}
    for step in (1, 2):
        exporter.export(step, 0, batch, output, [SIZE], None)
    assert exporter.exported == [1, 2], "the trainer's own export goes on"
    assert watching._latest.steps.tolist() == [1] and watching.facts.trainer == "prime-rl"
    exporter.close()
    assert exporter.is_closed and (tmp_path / "doctor.html").exists()


def test_a_missing_exporter_is_named_and_training_goes_on(trainer, tmp_path, caplog):
    del trainer.DisabledTokenExporter
    assert torch.isfinite(prime_rl.loss(inputs(), watch=str(tmp_path)).loss)
    assert "has no DisabledTokenExporter; version 0.8" in caplog.text
