"""verl 0.9.1: what goes into its registries and onto its driver, called as it calls them. Its own
functions are in tests/parity/test_verl_integration.py; here its modules are stand-ins."""

import asyncio
import sys
from types import SimpleNamespace

import aiohttp
import numpy as np
import pytest
import torch

from lockstep.correction import Correction, correct
from lockstep.errors import CapabilityError, ConfigError
from lockstep.integrations import common, verl
from lockstep.types import Message

MASK = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 0], [1, 1, 1, 1]])


def agg_loss(*, loss_mat, loss_mask, loss_agg_mode, dp_size=1, **_):
    assert loss_agg_mode == "token-mean"
    return (loss_mat * loss_mask).sum() / loss_mask.sum() * dp_size


@pytest.fixture(autouse=True)
def run(monkeypatch):
    """Sets LOCKSTEP, and puts stand-ins in the places of verl's modules."""
    trainer = type("PPOTrainer", (), {"_update_actor": lambda self, batch, metrics: "updated"})
    modules = SimpleNamespace(
        algorithms=SimpleNamespace(agg_loss=agg_loss),
        trainer=SimpleNamespace(PPOTrainer=trainer, tq=None, **{verl.CORRECTION: agg_loss}),
    )
    monkeypatch.setitem(sys.modules, verl.ALGORITHMS, modules.algorithms)
    monkeypatch.setitem(sys.modules, verl.TRAINER, modules.trainer)

    def lockstep(words):
        for cached in (common.check_version, common.say_once, common.watch_of):
            cached.cache_clear()
        monkeypatch.setenv("LOCKSTEP", words)
        return modules

    return lockstep


def columns(seed=0):
    g = torch.Generator().manual_seed(seed)
    old = -2 * torch.rand(3, 4, generator=g) - 0.1
    rollout = (old + 0.4 * torch.randn(3, 4, generator=g)).clamp(max=0)
    new = (old + 0.05 * torch.randn(3, 4, generator=g)).clamp(max=0)
    return new.requires_grad_(), old, rollout, torch.randn(3, 4, generator=g)


def call(new, old, advantages, weights=None):
    config = SimpleNamespace(global_batch_info={"dp_size": 2, "batch_num_tokens": None})
    return verl.policy_loss(
        old_log_prob=old, log_prob=new, advantages=advantages, response_mask=MASK.bool(),
        loss_agg_mode="token-mean", config=config, rollout_is_weights=weights,
    )  # fmt: skip


def test_the_loss_is_weighed_by_the_drivers_weights(run):
    run("correction=tis objective=reinforce")
    new, old, _, advantages = columns()
    weights = torch.rand(3, 4)
    loss, metrics = call(new, old, advantages, weights)
    expected = 2 * (-advantages * new * weights * MASK).sum() / MASK.sum()
    assert torch.allclose(loss, expected) and all(isinstance(x, float) for x in metrics.values())
    assert metrics["actor/weight"] == pytest.approx(float((weights * MASK).sum() / MASK.sum()))
    loss.backward()
    assert new.grad[MASK == 0].abs().max() == 0
    with pytest.raises(ConfigError, match=r"no rollout_is_weights .*calculate_log_probs=True"):
        call(new, old, advantages)


def test_in_bypass_mode_the_forward_corrects_by_itself(run):
    run("""'correction.reject=[{"stat": "ratio", "low": 0.8}]'""")
    new, _, rollout, advantages = columns()
    loss, metrics = call(new, rollout, advantages)
    expected = correct(new.detach(), rollout, verl.settings().correction, layout=MASK)
    assert metrics["correction/kept_tokens"] == int(expected.keep.sum()) < int(MASK.sum())
    assert metrics["mismatch/k3"] == pytest.approx(expected.to_metrics()["mismatch/k3"])
    loss.backward()
    assert new.grad[~expected.keep].abs().max() == 0


def test_advantages_are_of_the_prompt_and_stand_at_every_token(run):
    run("advantage=rloo")
    rewards = torch.zeros(3, 4)
    rewards[0, 3], rewards[2, 3] = 1.0, 0.5
    index = np.array(["a", "b", "a"], object)
    found, returns = verl.advantages(rewards, MASK, config=None, index=index)
    assert found.tolist() == [[0.5, 0.5, 0.0, 0.5], [0.0] * 4, [-0.5] * 4]
    assert returns is found
    alone, _ = verl.advantages(rewards, MASK)
    assert alone[1].tolist() == [-0.75, 0, 0, 0]


@pytest.mark.parametrize("denominator", ["original", "kept"])
def test_the_drivers_correction_is_over_the_whole_batch(run, denominator):
    run(f"correction=mis correction.denominator={denominator}")
    _, old, rollout, _ = columns()
    rows = {"old_log_probs": old, "rollout_log_probs": rollout, "response_mask": MASK.clone()}
    batch, metrics = verl.correct_batch(SimpleNamespace(batch=rows), None)
    expected = correct(old, rollout, Correction.mis(), layout=MASK)
    assert torch.equal(batch.batch["rollout_is_weights"], expected.weights)
    assert metrics["correction/normalizer"] == expected.to_metrics()["correction/normalizer"]
    kept = expected.keep.long() if denominator == "kept" else MASK
    assert torch.equal(batch.batch["response_mask"], kept)
    assert batch.batch["response_mask"].dtype == MASK.dtype


def config_of(*, has_bypass):
    return {"algorithm": {"rollout_correction": {"bypass_mode": has_bypass}}}


def test_the_callback_replaces_verls_correction_where_the_settings_agree(run):
    modules = run("correction=tis")
    verl.Callback(config=config_of(has_bypass=False)).on_save(trainer=None, global_step=1)
    assert modules.trainer.compute_rollout_correction_and_add_to_batch is verl.correct_batch
    with pytest.raises(ConfigError, match=r"anchor=recomputed needs .*bypass_mode=False; found"):
        verl.Callback(config=config_of(has_bypass=True))
    run("correction.kl_penalty_coef=0.1 correction.anchor=recomputed")
    with pytest.raises(ConfigError, match="use_kl_in_reward"):
        verl.Callback(config={})
    modules = run("correction=tis")
    del modules.trainer.compute_rollout_correction_and_add_to_batch
    with pytest.raises(CapabilityError, match=rf"no {verl.CORRECTION}; version 0\.9\.1"):
        verl.Callback(config={})


class Queue:
    """The columns of the v1 trainer's queue."""

    def kv_batch_get(self, *, keys, partition_id):
        assert partition_id == "train"
        _, old, rollout, _ = columns()
        ids = torch.arange(12).reshape(3, 4) + 5
        rows = {"prompts": ids[:, :2], "responses": ids, "response_mask": MASK}
        rows |= {"rollout_log_probs": rollout, "old_log_probs": old}
        rows |= {"attention_mask": torch.ones(3, 6, dtype=torch.int64)}
        return {name: values[: len(keys)] for name, values in rows.items()}


def test_the_watch_looks_before_the_update_and_its_figures_are_logged(run, tmp_path):
    modules = run(f"watch={tmp_path}")
    modules.trainer.tq = Queue()
    verl.Callback(config={})
    trainer, metrics = modules.trainer.PPOTrainer(), {}
    trainer.global_steps = 4
    batch = SimpleNamespace(keys=["a_0_0", "a_1_0", "b_0_0"], tags=[{}] * 3, partition_id="train")
    assert trainer._update_actor(batch, metrics) == "updated"
    assert metrics["doctor/rows"] == 3
    once = modules.trainer.PPOTrainer._update_actor
    verl.Callback(config={}).on_save(trainer=trainer, global_step=4)
    assert modules.trainer.PPOTrainer._update_actor is once
    assert (tmp_path / "doctor.html").exists()


def test_a_queue_that_fails_ends_no_training_unless_strict(run, tmp_path, caplog):
    modules = run(f"watch={tmp_path}")
    verl.Callback(config={})
    trainer = modules.trainer.PPOTrainer()
    trainer.global_steps = 1
    assert trainer._update_actor(SimpleNamespace(keys=[], tags=[]), {}) == "updated"
    assert "the trainer has it" in caplog.text and "goes on without it" in caplog.text
    run(f"watch={tmp_path} strict=true")
    with pytest.raises(CapabilityError, match="has no tq"):
        trainer._update_actor(SimpleNamespace(keys=[], tags=[]), {})


# -- the agent loop --------------------------------------------------------------------------------


class AgentLoopBase:
    """The part of verl's base that the loop reads."""

    def __init__(self, trainer_config, server_manager, **_):
        self.config, self.server_manager = trainer_config, server_manager
        self.rollout_config = trainer_config.actor_rollout_ref.rollout


class Client:
    """verl's LLMServerClient: each reply is the text in `replies`, then the end of the turn."""

    def __init__(self, renderer, replies, *, has_logprobs=True):
        self.renderer, self.replies, self.has_logprobs = renderer, iter(replies), has_logprobs
        self.prompts, self.params = [], []

    async def generate(self, request_id, *, prompt_ids, sampling_params):
        self.prompts.append(prompt_ids)
        self.params.append(sampling_params)
        reply = Message(role="assistant", content=next(self.replies))
        ids = [int(id_) for id_ in self.renderer.render_reply(reply)]
        logprobs = [-0.5] * len(ids) if self.has_logprobs else None
        return SimpleNamespace(token_ids=ids, log_probs=logprobs)


async def polite_agent(*, base_url, api_key, row):
    """Asks, and asks again with the answer."""
    messages = [{"role": "user", "content": row["question"]}]
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {api_key}"}) as http:
        for _ in range(2):
            body = {"model": "tiny-qwen3", "messages": messages}
            async with http.post(f"{base_url}/chat/completions", json=body) as answered:
                found = await answered.json()
                assert answered.status == 200, found
            messages += [found["choices"][0]["message"], {"role": "user", "content": "Sure?"}]
    return 1.0


@pytest.fixture
def loop(run, monkeypatch):
    run("")
    verl._gateway_loop.cache_clear()
    verl._gateway_of.cache_clear()
    module = SimpleNamespace(
        AgentLoopBase=AgentLoopBase, AgentLoopOutput=SimpleNamespace, AgentLoopMetrics=dict
    )
    monkeypatch.setitem(sys.modules, "verl.experimental.agent_loop.agent_loop", module)
    monkeypatch.setitem(sys.modules, "my_agent", SimpleNamespace(run=polite_agent))
    rollout = SimpleNamespace(prompt_length=200, response_length=100)
    model = SimpleNamespace(path="tiny-qwen3")
    config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout, model=model))

    async def play(replies, **options):
        gateway, renderer = verl._gateway_of("tiny-qwen3")
        client = Client(renderer, replies, **options)
        made = verl.GatewayLoop(config, client, agent="my_agent.run", tokenizer=None)
        try:
            params = {"temperature": 0.7, "top_k": -1, "logprobs": True}
            return client, await made.run(params, question="What is 2 + 2?")
        finally:
            await gateway.close()

    return lambda *args, **options: asyncio.run(play(*args, **options))


def test_an_agent_that_speaks_http_gives_verl_its_rows_of_ids(loop):
    client, [output] = loop(["It is 4.", "Yes, 4."])
    assert output.prompt_ids == client.prompts[0]
    path = output.prompt_ids + output.response_ids[: output.response_mask.index(0)]
    assert len(output.prompt_ids) == len(client.prompts[0])
    assert path == client.prompts[1][: len(path)], "the second request continues the sampled ids"
    sampled = [i for i, kept in zip(output.response_ids, output.response_mask, strict=True) if kept]
    replies = [Message(role="assistant", content=text) for text in ("It is 4.", "Yes, 4.")]
    expected = [int(i) for reply in replies for i in client.renderer.render_reply(reply)]
    assert sampled == expected and output.reward_score == 1.0 and output.num_turns == 2
    by_mask = zip(output.response_logprobs, output.response_mask, strict=True)
    assert {(x, kept) for x, kept in by_mask} == {(-0.5, 1), (0.0, 0)}
    assert client.params[0]["temperature"] == 0.7 and client.params[0]["top_k"] == -1


def test_servers_without_log_probs_are_refused(loop):
    with pytest.raises(AssertionError, match="no log-probs"):
        loop(["It is 4."], has_logprobs=False)
