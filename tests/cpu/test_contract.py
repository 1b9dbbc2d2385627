"""The contract true-on-policy in a run and in the trainer: taken, refused, checked and broken."""

import asyncio
import json
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from cpu.training.tiny_training import (
    assert_same_bits,
    make_rows,
    make_trainer,
    set_rollout,
    snapshot,
)  # fmt: skip
from quickstarts import SHORT, quickstart_with, run_with

from lockstep.correction.config import Correction
from lockstep.engines.config import EmbeddedConfig, EngineConfig
from lockstep.engines.registry import make_engine
from lockstep.errors import ConfigError, ContractError
from lockstep.objectives.config import PPOClip
from lockstep.ops.base import Ops
from lockstep.ops.contract import Fingerprint, check_rows, check_same
from lockstep.ops.invariant import InvariantOps
from lockstep.ops.selftest import fingerprint
from lockstep.run.build import build
from lockstep.run.preflight import preflight
from lockstep.store.run import load_run
from lockstep.testing.engines import FakeEngine
from lockstep.types import Request, SamplingParams

SMALL = (*SHORT, "steps=2", "evaluation.at_start=false")
MINE = Fingerprint(ops="invariant", dtype="float32", device="cpu", key_block=128, row_quantum=4)


def run(path, *overrides):
    return [row for row in run_with(path, *SMALL, *overrides).metrics if "train/loss" in row]


def numerics_of(*overrides):
    config = quickstart_with(*SMALL, *overrides)
    return build(config, preflight(config)).numerics


# -- fingerprints ----------------------------------------------------------------------------------


def test_a_fingerprint_reads_back_and_says_where_it_differs():
    assert Fingerprint.from_text(MINE.text) == MINE
    other = replace(MINE, dtype="bfloat16", row_quantum=8)
    assert MINE.differences(other) == {"dtype": ("float32", "bfloat16"), "row_quantum": (4, 8)}
    assert MINE.differences(MINE) == {}


def test_a_text_that_is_no_fingerprint_is_refused_with_what_is_unknown():
    with pytest.raises(ContractError, match="unknown color"):
        Fingerprint.from_text(MINE.text + ";color=red")
    with pytest.raises(ContractError, match="'fp'"):
        Fingerprint.from_text("fp")


def test_rows_of_other_numerics_are_refused_by_row_field_and_both_values():
    other = replace(MINE, isa="AVX2").text
    with pytest.raises(ContractError) as caught:
        check_rows(MINE, [("t0/0", (MINE.text,)), ("t1/3", (MINE.text, other))])
    for part in ("sample t1/3", "isa is 'AVX2' there and '' here", "contract=none"):
        assert part in str(caught.value)
    with pytest.raises(ContractError, match="sample t2/0"):
        check_rows(MINE, [("t2/0", ())])


def test_keys_kept_over_an_update_are_another_numerics():
    with pytest.raises(ContractError, match=r"'kept'.*'fresh'.*kv='drop'"):
        check_same(MINE, replace(MINE, kv="kept").text, what="sample t0/0")


# -- a run -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["tiny-gpt-oss", "tiny-qwen3"])
def test_auto_takes_the_contract_and_no_token_differs(tmp_path, model):
    path = tmp_path / "run"
    rows = run(path, f"model={model}")
    assert len(rows) == 2 and all(row["mismatch/compared_tokens"] > 50 for row in rows)
    for name in ("unequal_tokens", "max_abs_diff", "k1", "k2", "k3"):
        assert [row[f"mismatch/{name}"] for row in rows] == [0, 0], name
    environment = json.loads((path / "environment.json").read_text())
    assert environment["contract"] == "true-on-policy"
    found = Fingerprint(**environment["fingerprint"])
    assert found.ops == "invariant" and found.row_quantum >= 4 and found.key_block == 128
    stored = {
        segment.fingerprint
        for record in load_run(path).trajectories(0)
        for segment in record.trajectory.segments
        if segment.is_sampled
    }
    assert stored == {found.text}


def test_none_says_that_nothing_is_promised_and_its_fingerprint_is_stored_all_the_same(tmp_path):
    path = tmp_path / "run"
    run(path, "contract=none")
    environment = json.loads((path / "environment.json").read_text())
    assert environment["contract"] == "none"
    assert environment["numerics"].startswith("stock ops; sampler and trainer agree to rounding")
    assert Fingerprint(**environment["fingerprint"]).ops == "plain"


@dataclass(frozen=True, kw_only=True)
class ElsewhereConfig(EngineConfig):
    """An engine that does not say what computes its numbers."""


@make_engine.register
def _(config: ElsewhereConfig, context):
    return FakeEngine(lambda request: [1], vocab_size=context.vocab_size)


def with_engine(config, **changes):
    return replace(config, engine=ElsewhereConfig(), **changes)


def test_an_engine_that_cannot_tell_its_numerics_goes_on_without_under_auto():
    config = with_engine(quickstart_with(*SMALL))
    parts = build(config, preflight(config))
    assert not parts.numerics.is_kept and parts.trainer.contract is None
    assert "engine fake cannot keep it: it does not say" in parts.numerics.line
    assert type(parts.model.ops) is Ops


def test_an_engine_that_cannot_tell_its_numerics_is_refused_by_name():
    config = with_engine(quickstart_with(*SMALL, "contract=true-on-policy"))
    with pytest.raises(ConfigError, match=r"engine .* cannot keep it: .*no fingerprint"):
        build(config, preflight(config))


def test_an_engine_of_another_dtype_is_refused_with_both():
    with pytest.raises(ConfigError, match=r"engine\.dtype=bfloat16.*float32"):
        numerics_of("contract=true-on-policy", "engine.dtype=bfloat16")
    assert "engine.dtype=float16" in numerics_of("engine.dtype=float16").line


def test_auto_does_not_stop_a_run_that_is_broken_on_purpose(tmp_path):
    (first, _) = run(tmp_path / "run", "--fault=kernel_noise,std=0.01")
    assert first["mismatch/unequal_tokens"] > 0


def test_tokens_drawn_from_an_unrecorded_support_are_outside_of_the_contract():
    cut = ["agent.top_k=8", "agent.record_support=false"]
    assert "agent.top_k=8" in numerics_of(*cut).line
    config = quickstart_with(*SMALL, *cut, "contract=true-on-policy")
    with pytest.raises(ConfigError, match=r"agent\.record_support=true"):
        preflight(config)
    assert numerics_of("agent.top_k=8").is_kept


@pytest.mark.parametrize("fault", ["kernel_noise", "router_noise"])
def test_the_first_unequal_token_stops_the_run_before_the_update(tmp_path, fault):
    path = tmp_path / "run"
    settings = [f"--fault={fault},std=0.001", "contract=true-on-policy"]
    with pytest.raises(ContractError) as caught:
        run(path, *settings)
    text = str(caught.value)
    for part in (
        "break the contract: sampled and trained by policy version 0",
        "of sample train/0/world-",
        "was recorded when it was sampled",
        f"Nothing was updated; {path} holds the trajectory",
    ):
        assert part in text, part
    assert "train/loss" not in (path / "metrics.jsonl").read_text()
    broken = text.split("of sample ")[1].split(" ")[0]
    stored = [record.trajectory.id for record in load_run(path).trajectories(0)]
    assert broken.rpartition("/")[0] in stored


# -- the trainer -----------------------------------------------------------------------------------


@pytest.fixture
def kept(tmp_path):
    """(make(name) -> a trainer under the contract, rows that it sampled)."""
    ops = InvariantOps()
    contract = fingerprint(ops, torch.float32, torch.device("cpu"))

    def make(name, **settings):
        trainer = make_trainer(tmp_path / name, "gpt_oss", ops=ops, **settings)
        trainer.contract = contract
        return trainer

    rows = make_rows([12, 19, 25, 30], seed=1)
    for row in rows:
        row.set("policy_version", np.zeros(len(row), np.int32))
        row.fingerprints = (contract.text,)
    set_rollout(make("sampler"), rows)
    return make, rows


def copies(rows):
    return [replace(row, columns=dict(row.columns)) for row in rows]


CORRECTIONS = {
    "decoupled": Correction.decoupled(),
    "tis": Correction.tis(),
    "mis": Correction.mis(),
    "normalized": replace(Correction.tis(), normalize=True),
}


@pytest.mark.parametrize("name", CORRECTIONS)
@pytest.mark.parametrize("updates", [1, 2])
def test_the_recorded_log_probs_save_the_forward_and_change_no_bit(kept, name, updates):
    make, rows = kept
    saving, computing = make("a", updates_per_batch=updates), make("b", updates_per_batch=updates)
    computing.contract = None
    found = saving.update(copies(rows), PPOClip(), CORRECTIONS[name])
    expected = computing.update(copies(rows), PPOClip(), CORRECTIONS[name])
    assert_same_bits(snapshot(saving), snapshot(computing))
    assert found["tokens/recomputed"] == 0 == saving.num_recomputed
    assert found["mismatch/unequal_tokens"] == 0 < found["mismatch/compared_tokens"]
    for metric in ("train/loss", "train/grad_norm", "train/entropy"):
        assert found[metric] == expected[metric], metric


def test_decoupled_ppo_computes_every_sampled_token_again_without_the_contract(kept):
    make, rows = kept
    trainer = make("a")
    trainer.contract = None
    found = trainer.update(copies(rows), PPOClip(), Correction.decoupled())
    assert found["tokens/recomputed"] == sum(row.num_trained for row in rows)


def test_one_changed_bit_is_found_by_row_and_token(kept):
    make, rows = kept
    rows = copies(rows)
    at = int(np.flatnonzero(rows[2].loss_mask)[3])
    column = rows[2].columns["rollout_logprobs"].copy()
    column[at] = np.nextafter(column[at], np.float32(0))
    rows[2].set("rollout_logprobs", column)
    trainer = make("a")
    before = snapshot(trainer)
    with pytest.raises(ContractError, match=f"1 of .* token {at} of sample {rows[2].id} "):
        trainer.update(rows, PPOClip())
    assert_same_bits(snapshot(trainer), before)
    # Nor is anything of it in the next update.
    found, expected = (t.update(copies(kept[1]), PPOClip()) for t in (trainer, make("b")))
    assert found["train/grad_norm"] == expected["train/grad_norm"]


def test_tokens_of_older_versions_may_differ_and_those_of_this_one_may_not(kept):
    """An asynchronous batch: equal wherever the version is equal, an old token is corrected."""
    make, rows = kept
    rows = copies(rows)
    trainer = make("a")
    trainer.num_updates = 3
    versions = [3, 2, 3, 1]
    for row, version in zip(rows, versions, strict=True):
        row.set("policy_version", np.full(len(row), version, np.int32))
        if version != 3:
            row.set("rollout_logprobs", row.columns["rollout_logprobs"] - np.float32(0.01))
    found = trainer.update(rows, PPOClip(), Correction.tis())
    old = sum(row.num_trained for row, version in zip(rows, versions, strict=True) if version != 3)
    assert found["mismatch/unequal_tokens"] == old
    assert found["tokens/recomputed"] > 0, "what an older version recorded is not the old log-prob"
    column = rows[0].columns["rollout_logprobs"].copy()
    rows[0].set("rollout_logprobs", column + np.float32(0.01))
    rows[0].set("policy_version", np.full(len(rows[0]), trainer.version, np.int32))
    with pytest.raises(ContractError, match=r"version 4\b"):
        trainer.update(rows, PPOClip(), Correction.tis())


def test_rows_of_another_machine_are_refused_before_a_forward(kept):
    make, rows = kept
    rows = copies(rows)
    rows[1].fingerprints = (replace(make("c").contract, isa="AVX2", row_quantum=16).text,)
    with pytest.raises(ContractError, match=f"sample {rows[1].id} .*row_quantum.*16.*4"):
        make("a").update(rows, PPOClip())


# -- the engine ------------------------------------------------------------------------------------


def test_keys_kept_over_new_weights_label_what_is_sampled_from_them(tmp_path):
    from lockstep.engines.embedded.engine import EmbeddedEngine

    model = make_trainer(tmp_path / "a", "gpt_oss").model
    engine = EmbeddedEngine(model, EmbeddedConfig())
    request = Request(
        id="r", prompt_ids=np.arange(9, dtype=np.int32), sampling=SamplingParams(max_tokens=12),
        stream=True,
    )  # fmt: skip

    async def play(kv):
        deltas = []
        async for delta in engine.generate(replace(request, id=kv)):
            deltas.append(delta)
            if len(deltas) == 3:
                await engine.pause()
                await engine.load_weights(None, version=engine.version + 1)
                await engine.resume(kv=kv)
        return [
            Fingerprint.from_text(delta.fingerprint).kv for delta in deltas if len(delta.token_ids)
        ]

    fresh, kept = asyncio.run(play("drop")), asyncio.run(play("keep"))
    assert set(fresh) == {"fresh"}
    assert kept[0] == "fresh" and kept[-1] == "kept"
    assert Fingerprint.from_text(engine.capabilities.fingerprint).kv == "fresh"


def test_two_runs_with_two_contracts_in_one_process_keep_their_numbers(tmp_path):
    """Built both before either samples, and stepped in turn."""

    async def replies(parts):
        requests = [
            Request(
                id=f"r{i}",
                prompt_ids=np.arange(5 + i, dtype=np.int32),
                sampling=SamplingParams(max_tokens=12),
                seed=i,
            )
            for i in range(3)
        ]
        found = await asyncio.gather(*(_reply(parts.engine, request) for request in requests))
        return [np.concatenate([delta.logprobs for delta in deltas]) for deltas in found]

    def built(contract):
        config = quickstart_with(*SMALL, f"contract={contract}")
        return build(config, preflight(config))

    async def interleaved(first, second):
        return await asyncio.gather(replies(first), replies(second))

    alone = [asyncio.run(replies(built(contract))) for contract in ("true-on-policy", "none")]
    kept, free = built("true-on-policy"), built("none")
    assert kept.model.ops.name == "invariant" and free.model.ops.name == "plain"
    found = asyncio.run(interleaved(kept, free))
    for ours, theirs in zip(found, alone, strict=True):
        for left, right in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(left, right)
    assert kept.trainer.model.ops is kept.model.ops
    assert kept.engine.capabilities.fingerprint == kept.numerics.fingerprint.text


async def _reply(engine, request):
    return [delta async for delta in engine.generate(request)]
