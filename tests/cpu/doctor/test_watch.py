"""The watch beside other trainers: what it finds, says, keeps and costs, and what it ends."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from array_dumps import make_rows

import lockstep
from lockstep import diagnose
from lockstep.doctor.inputs.base import Facts
from lockstep.doctor.inputs.native import RowsDump
from lockstep.doctor.watch import MIN_ROWS, Watch, choose
from lockstep.errors import ConfigError, MismatchError
from lockstep.models.locate import locate_model

nan = np.nan


class Clock:
    """Seconds that pass when a test says so."""

    now = 100.0

    def __call__(self):
        return self.now


class Watching:
    """A watch with a clock, and the sentences that it said. A step takes `step_seconds`, a look
    `row_seconds` for each row."""

    def __init__(self, path, *, step_seconds=100.0, row_seconds=0.0, **options):
        self.clock, self.said = Clock(), []
        self.step_seconds, self.row_seconds = step_seconds, row_seconds
        self.watch = Watch(path, warn=self.said.append, clock=self.clock, **options)
        self.looked = []

    def __call__(self, step, rows):
        def made(limit):
            self.looked.append(limit)
            self.clock.now += self.row_seconds * limit
            return rows

        found = self.watch.look(step, made)
        self.clock.now += self.step_seconds
        return found


def healthy(seed=0):
    return make_rows(16, seed=seed).with_(messages=None, rewards=None)


def shifted(seed=0):
    return make_rows(16, seed=seed, shifted=range(16)).with_(messages=None, rewards=None)


def kept(path):
    return sorted(file.name for file in path.glob("*.parquet"))


def own_rows(rows):
    return [
        {
            "token_ids": rows.token_ids[at],
            "loss_mask": rows.loss_mask[at],
            "rollout_logprobs": torch.tensor(rows.rollout_logprobs[at]),
            "trainer_logprobs": rows.trainer_logprobs[at].tolist(),
        }
        for at in rows.slices
    ]


# -- what it finds, says and keeps -----------------------------------------------------------------


def test_a_healthy_run_is_silent_and_has_its_metrics(tmp_path):
    watching = Watching(tmp_path / "doctor")
    found = watching(0, healthy())
    assert found == {"doctor/rows": 16, "doctor/causes": 0, "time/doctor_seconds": 0.0}
    assert watching.said == [] and not (tmp_path / "doctor").exists()


def test_a_cause_is_said_once_with_its_share_its_proof_and_the_command(tmp_path):
    watching = Watching(tmp_path / "doctor")
    for step in range(3):
        assert watching(step, shifted(step))["doctor/shifted"] == 1.0
    [said] = watching.said
    assert said.startswith("step 0: doctor: shifted (98% of k2, likely): ")
    assert "Row row-" in said and "Remedy: " in said
    assert f"`lockstep doctor {tmp_path / 'doctor'}` shows the tokens." in said
    assert "shifted" in [cause.name for cause, _ in diagnose(tmp_path / "doctor").causes]


def test_a_wild_gap_without_a_cause_is_said_once(tmp_path):
    watching = Watching(tmp_path / "doctor")
    for step in range(3):
        rows, rng = healthy(step), np.random.default_rng(step)
        noise = rng.normal(0, 1, rows.num_tokens).astype(np.float32)
        rows = rows.with_(trainer_logprobs=rows.trainer_logprobs - np.abs(noise))
        assert watching(step, rows)["doctor/causes"] == 0
    [said] = watching.said
    assert said.startswith("step 0: doctor: unexplained: k2 is 0.")
    assert f"`lockstep doctor {tmp_path / 'doctor'} --model DIR`" in said


def test_rows_whose_masks_are_all_0_are_said_once(tmp_path):
    watching, rows = Watching(tmp_path / "doctor"), healthy()
    for step in range(2):
        watching(step, rows.with_(loss_mask=np.zeros_like(rows.loss_mask)))
    assert watching.said == ["step 0: doctor: loss_mask is 0 at every token."]


def test_rows_are_kept_for_at_most_eight_steps_of_a_cause(tmp_path):
    watching = Watching(tmp_path, has_page=False)
    for step in range(12):
        watching(step, shifted(step))
    assert kept(tmp_path) == [f"step-{step:06d}-rank-0.parquet" for step in range(8)]
    rows = next(iter(RowsDump(tmp_path / "step-000003-rank-0.parquet").chunks()))
    assert rows.steps.tolist() == [3] * 16


def test_an_error_names_the_cause_the_step_the_evidence_and_the_remedy(tmp_path):
    watching = Watching(tmp_path, on_cause="raise")
    watching(6, healthy())
    with pytest.raises(MismatchError, match=r"step 7\b") as caught:
        watching(7, shifted())
    error = caught.value
    assert (error.cause, error.step) == ("shifted", 7)
    assert error.evidence[0].row.startswith("row-") and error.remedy in str(error)
    assert (tmp_path / "doctor.html").exists(), "the page is there before training ends"


def test_a_function_gets_each_cause_once_and_may_end_training(tmp_path):
    causes = []
    watching = Watching(tmp_path, on_cause=causes.append)
    watching(0, shifted())
    watching(1, shifted(1))
    assert [error.cause for error in causes] == ["shifted"] and watching.said == []

    def stop(error):
        raise KeyError(error.cause)

    with pytest.raises(KeyError, match="shifted"):
        Watching(tmp_path / "other", on_cause=stop)(0, shifted())


def test_whole_groups_are_looked_at_and_others_in_each_step():
    groups = ["a"] * 4 + ["b"] * 4 + ["c"] * 4
    assert choose(groups, 4, step=1) == [4, 5, 6, 7]
    assert choose(groups, 6, step=2) == [8, 9, 10, 11, 0, 1]
    assert choose(groups, 100, step=0) == list(range(12))
    assert choose([], 4, step=0) == []


# -- what it costs ---------------------------------------------------------------------------------


def test_a_look_that_takes_too_long_is_followed_by_smaller_ones_within_the_share(tmp_path):
    watching = Watching(tmp_path, rows=32, step_seconds=10.0, row_seconds=0.02)
    began = watching.clock.now
    for step in range(100):
        watching(step, healthy())
    spent = 0.02 * sum(watching.looked)
    assert watching.looked[0] == 32 and set(watching.looked[1:]) == {9}
    assert len(watching.looked) > 80, "each of them fits into 2 % of a step"
    assert spent <= 0.02 * (watching.clock.now - began)


def test_where_the_fewest_rows_take_too_long_steps_are_left_out(tmp_path):
    watching = Watching(tmp_path, rows=32, step_seconds=1.0, row_seconds=0.01)
    began = watching.clock.now
    found = [watching(step, healthy()) for step in range(60)]
    assert watching.looked[0] == 32 and set(watching.looked[1:]) == {MIN_ROWS}
    assert 0.01 * sum(watching.looked) <= 0.02 * (watching.clock.now - began) + 0.08
    assert sum(bool(metrics) for metrics in found) == len(watching.looked) < 20


def test_more_rows_are_looked_at_again_when_there_is_time(tmp_path):
    watching = Watching(tmp_path, rows=32, step_seconds=10.0, row_seconds=0.02)
    for step in range(5):
        watching(step, healthy())
    watching.step_seconds = 100.0
    for step in range(5, 10):
        watching(step, healthy())
    assert watching.looked[-1] == 32


def test_one_step_in_so_many_can_be_looked_at(tmp_path):
    watching = Watching(tmp_path, every=3)
    looks = [bool(watching(step, healthy())) for step in range(7)]
    assert looks == [True, False, False] * 2 + [True]


# -- what must not happen --------------------------------------------------------------------------


def test_an_error_of_the_watch_is_said_once_and_training_goes_on(tmp_path):
    watching = Watching(tmp_path)

    def broken(limit):
        raise OSError("no space left")

    assert watching.watch.look(3, broken) == {}
    assert watching(4, shifted()) == {}
    assert watching.said == [
        "step 3: doctor: the watch ends here, training goes on: OSError: no space left"
    ]


def test_a_directory_that_cannot_be_written_ends_the_watch_alone(tmp_path):
    (tmp_path / "file").write_text("")
    watching = Watching(tmp_path / "file" / "doctor")
    assert watching(0, shifted()) == {}
    assert "training goes on" in watching.said[0] and len(watching.said) == 1


def test_an_error_of_the_watch_does_not_raise_where_causes_do(tmp_path):
    watching = Watching(tmp_path, on_cause="raise")
    assert watching.watch.trl({"prompt_ids": torch.zeros(2, 2)}, step=0) == {}
    assert "no batch of a GRPOTrainer: expected a dict with the tensors" in watching.said[0]


# -- the page, and a run that goes on --------------------------------------------------------------


def test_the_page_of_a_healthy_run_shows_its_newest_rows(tmp_path):
    watching = Watching(tmp_path)
    assert watching.watch.page() is None, "nothing was looked at"
    watching(0, healthy())
    watching(1, healthy(1))
    assert watching.watch.page() == tmp_path / "doctor.html"
    assert kept(tmp_path) == ["step-000001-rank-0.parquet"]
    diagnosis = diagnose(tmp_path)
    assert diagnosis.outcome == "consistent" and diagnosis.examination.num_rows == 16
    watching(2, healthy(2))
    watching.watch.page()
    assert kept(tmp_path) == ["step-000002-rank-0.parquet"], "in place of older ones"


def test_the_page_is_written_when_a_cause_is_found_and_shows_it(tmp_path):
    Watching(tmp_path)(4, shifted())
    page = (tmp_path / "doctor.html").read_text()
    assert '"cause":"shifted"' in page.replace(" ", "") and "Lockstep doctor" in page


def test_a_page_that_cannot_be_written_is_said_and_the_watch_goes_on(tmp_path):
    watching = Watching(tmp_path)
    (tmp_path / "doctor.html").mkdir()
    assert watching(0, shifted())["doctor/shifted"] == 1.0
    told = f"doctor: the page {tmp_path / 'doctor.html'} is not written"
    assert watching.said[1].startswith(told)
    assert watching(1, shifted(1))["doctor/shifted"] == 1.0


def test_a_run_that_is_resumed_forgets_the_steps_that_are_played_again(tmp_path):
    first = Watching(tmp_path, has_page=False)
    for step in range(6):
        first(step, shifted(step))
    (tmp_path / "step-000004-rank-1.parquet").write_bytes(b"of another process")
    resumed = Watching(tmp_path, has_page=False)
    resumed(3, healthy())
    assert kept(tmp_path) == [
        *(f"step-{step:06d}-rank-0.parquet" for step in range(3)),
        "step-000004-rank-1.parquet",
    ]
    for step in range(4, 12):
        resumed(step, shifted(step))
    assert len(kept(tmp_path)) == 8 + 1, "eight steps of a cause, those before included"
    assert len(resumed.said) == 1, "a new process says it again"


# -- input that is not as expected -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": 0}, r"watch\(rows=0\).*\b1\b"),
        ({"every": 2.5}, r"watch\(every=2.5\): expected a whole number from 1"),
        ({"facts": {"top_p": 1.0}}, r"watch\(facts={'top_p': 1.0}\): expected Facts of lock"),
        ({"max_share": 0}, r"watch\(max_share=0\).*0: 0.02.*\b2 %"),
        ({"on_cause": "stop"}, r"watch\(on_cause='stop'\): expected \"warn\", \"raise\" or"),
        ({"directory": "other"}, "directory="),
    ],
)
def test_options_that_cannot_be_are_refused(tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        lockstep.watch(tmp_path, **options)


def test_a_tokenizer_of_another_vocabulary_is_named_and_left_out(tmp_path):
    watching = Watching(tmp_path, tokenizer=str(locate_model("tiny-qwen3")))
    rows = healthy()
    foreign = rows.with_(token_ids=rows.token_ids + 200_000)
    assert watching(0, foreign)["doctor/causes"] == 0
    watching(1, foreign)
    [said] = watching.said
    assert "100% of the rows' ids, up to 2001" in said and "which has 550" in said
    assert "Give the tokenizer of the model that trains" in said and "text are not made." in said


def test_a_few_ids_of_a_padded_vocabulary_do_not_make_a_tokenizer_foreign(tmp_path):
    watching = Watching(tmp_path, tokenizer=str(locate_model("tiny-qwen3")))
    rows = healthy()
    ids = rows.token_ids.copy()
    ids[[10, 200, 1000]] = 100_000
    assert watching(0, rows.with_(token_ids=ids))["doctor/causes"] == 0
    assert watching.said == []


def test_a_tokenizer_that_cannot_be_read_is_said_at_the_beginning(tmp_path):
    said = []
    backend = SimpleNamespace(to_str=lambda: '{"model": {"type": "WordLevel", "vocab": {}}}')
    Watch(tmp_path, tokenizer=SimpleNamespace(backend_tokenizer=backend), warn=said.append)
    assert said[0].startswith("doctor: checks of text are not made: tokenizer of the trainer: ")


def test_missing_log_probs_are_said_once_with_the_setting_that_gives_them(tmp_path):
    watching = Watching(tmp_path)
    for step in range(2):
        found = watching.watch.trl(trl_batch(sampling_per_token_logps=None), step=step)
    assert found["doctor/rows"] == 2
    [said] = watching.said
    assert said.startswith("step 0: doctor: the rows have no log-probs of the sampler, so checks")
    assert "kept with use_vllm=True, or where a rollout_func returns logprobs" in said


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda w: w.trl(trl_batch(completion_mask=None), step=1), "of step 1 is no batch"),
        (lambda w: w.verl({"prompts": torch.zeros(1, 2)}, step=1), "is not a batch of verl with"),
        (lambda w: w.verl(verl_batch(attention_mask=None), step=1), "row 2: the batch has no att"),
        (lambda w: w.slime({"tokens": [[5, 6]]}, step=1), "response_length must be a whole number"),
        (lambda w: w.slime([{"index": 3}], step=1), "expected a dict with `tokens`"),
        (lambda w: w.tinker([datum(mask=None)], step=1), "datum 0: mask is missing. Give"),
        (lambda w: w.prime_rl({}, {"logprobs": torch.zeros(1)}, [1], step=1), "step 1: infer"),
        (lambda w: w.rows([{"token_ids": [5]}], step=1), "the rows of step 1 have no loss_mask"),
        (lambda w: w.rows([{"tokens": [5]}], step=1), "no token_ids. There is tokens: if that"),
        (lambda w: w.rows({"token_ids": [[5]]}, step=1), "step 1: expected a mapping for each row"),
        (lambda w: w.rows([{"token_ids": [5], "loss_mask": [1, 1]}], step=1), "row 0 of step 1"),
    ],
)  # fmt: skip
def test_a_batch_that_cannot_be_read_ends_the_watch_with_one_sentence(tmp_path, call, message):
    watching = Watching(tmp_path)
    assert call(watching.watch) == {}
    assert len(watching.said) == 1 and message in watching.said[0]
    assert watching.said[0].startswith("step 1: doctor: the watch ends here, training goes on: ")


# -- batches of each trainer -----------------------------------------------------------------------

NUM, SIZE = 6, 12
"""Rows, and tokens of a reply."""


def sides(seed=0):
    """[NUM, SIZE] log-probs of both sides that agree to 1e-3."""
    rng = np.random.default_rng(seed)
    trainer = -rng.exponential(1.0, (NUM, SIZE))
    sampler = np.minimum(trainer + rng.normal(0, 1e-3, trainer.shape), 0)
    return torch.tensor(sampler), torch.tensor(trainer)


def reply_ids(i):
    """Other ids in each row: the same ones must have the same log-probs."""
    return range(10 + i * SIZE, 10 + (i + 1) * SIZE)


def without_none(batch, changed):
    return {name: value for name, value in (batch | changed).items() if value is not None}


def trl_batch(**changed):
    prompts = torch.tensor([[0, 5, 6], [5, 6, 7]])
    completions = torch.tensor([[10, 20, 11, 0], [12, 0, 0, 0]])
    logprobs = torch.tensor([[-0.5, -0.75, -0.25, 0.0], [-1.0, 0.0, 0.0, 0.0]])
    batch = {
        "prompt_ids": prompts, "prompt_mask": prompts.ne(0).int(),
        "completion_ids": completions, "completion_mask": completions.ne(0).int(),
        "advantages": torch.tensor([1.0, -1.0]), "num_items_in_batch": torch.tensor(4),
        "old_per_token_logps": logprobs - 1e-3, "sampling_per_token_logps": logprobs,
    }  # fmt: skip
    return without_none(batch, changed)


def verl_batch(**changed):
    prompts, responses = torch.full((NUM, 2), 5), torch.arange(NUM * SIZE).reshape(NUM, SIZE) + 10
    rollout, trainer = sides()
    tensors = {
        "prompts": prompts, "responses": responses,
        "attention_mask": torch.ones(NUM, 2 + SIZE, dtype=torch.int64),
        "response_mask": torch.ones(NUM, SIZE, dtype=torch.int64),
        "rollout_log_probs": rollout, "old_log_probs": trainer.bfloat16(),
    }  # fmt: skip
    return SimpleNamespace(
        batch=without_none(tensors, changed),
        non_tensor_batch={"uid": np.array(["a", "a", "b", "b", "c", "c"], object)},
        meta_info={"temperature": 0.9, "eos_token_id": 3},
    )


class Datum(SimpleNamespace):
    """As Tinker's: inputs of the loss with a `tolist`, and an input with a `to_ints`."""


def datum(i=0, **changed):
    rollout, _ = sides()
    inputs = {
        "target_tokens": np.array([5, *reply_ids(i)]),
        "logprobs": np.append(0.0, rollout[i]),
        "mask": np.array([0.0] + [1.0] * SIZE),
        "advantages": np.array([0.0] + [0.5] * SIZE),
    }
    model_input = SimpleNamespace(to_ints=lambda: [4, 5, *reply_ids(i)[:-1]])
    return Datum(loss_fn_inputs=without_none(inputs, changed), model_input=model_input)


def last_rows(watch):
    """The rows of the last look, as the page shows them."""
    watch.page()
    return next(iter(RowsDump(watch.directory).chunks()))


def test_a_batch_of_trl_is_read_as_its_files_are(tmp_path):
    watching = Watching(tmp_path)
    assert watching.watch.trl(trl_batch(), step=7, group_size=2)["doctor/rows"] == 2
    rows = last_rows(watching.watch)
    assert rows.row_ids == ("7/0", "7/1") and rows.groups.tolist() == [0, 0]
    assert rows.token_ids.tolist() == [5, 6, 10, 20, 11, 5, 6, 7, 12]
    assert rows.gap[rows.loss_mask] == pytest.approx([-1e-3] * 4, abs=1e-6)
    assert watching.watch.facts.trainer == "trl" and watching.said == []


def test_a_batch_of_verl_is_read_as_its_files_are(tmp_path):
    watching = Watching(tmp_path, rows=2)
    assert watching.watch.verl(verl_batch(), step=1)["doctor/rows"] == 2
    rows = last_rows(watching.watch)
    assert rows.row_ids == ("1/2", "1/3"), "step 1 begins with the second group"
    assert rows.token_ids[:4].tolist() == [5, 5, 10 + 2 * SIZE, 11 + 2 * SIZE]
    assert len(rows.compared) == 2 * SIZE and np.abs(rows.gap[rows.compared]).max() < 0.02
    facts = watching.watch.facts
    assert (facts.trainer, facts.temperature, facts.stop_ids) == ("verl", 0.9, frozenset({3}))


def test_a_batch_of_verls_queue_is_read_with_its_tags_and_keys(tmp_path):
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]]).bool()

    def jagged(values):
        rows = [row[kept] for row, kept in zip(values, mask, strict=True)]
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    ids = torch.tensor([[10, 11, 12], [13, 0, 0]])
    logprobs = torch.tensor([[-0.5, -1.0, -0.25], [-2.0, 0.0, 0.0]])
    queue = {"prompts": jagged(ids - 5), "responses": jagged(ids), "response_mask": jagged(mask)}
    queue |= {"rollout_log_probs": jagged(logprobs), "old_log_probs": jagged(logprobs - 1e-3)}
    watching = Watching(tmp_path)
    tags = [{"min_global_steps": 4, "max_global_steps": 4}] * 2
    found = watching.watch.verl(queue, step=5, tags=tags, keys=["a_0_0", "b_0_0"])
    assert found["doctor/rows"] == 2 and watching.said == []
    rows = last_rows(watching.watch)
    by_name = {name: rows.token_ids[at].tolist() for name, at in zip(rows.row_ids, rows.slices)}  # noqa: B905
    assert by_name == {"5/0": [5, 6, 7, 10, 11, 12], "5/1": [8, 13]}
    assert set(rows.policy_version[rows.loss_mask].tolist()) == {4}


def slime_shard():
    rollout, trainer = sides()
    return {
        "partition": [NUM - 1 - i for i in range(NUM)],
        "tokens": [torch.tensor([5, *reply_ids(i)]) for i in range(NUM)],
        "total_lengths": [1 + SIZE] * NUM,
        "response_lengths": [SIZE] * NUM,
        "loss_masks": [torch.ones(SIZE, dtype=torch.int32) for _ in range(NUM)],
        "rollout_log_probs": list(rollout),
        "log_probs": list(trainer),
        "raw_reward": [float(i) for i in range(2 * NUM)],
        "micro_batch_indices": [[0, 1, 2]],
    }


def test_the_share_of_a_rank_of_slime_is_read_as_its_files_are(tmp_path):
    watching = Watching(tmp_path, rows=4)
    assert watching.watch.slime(slime_shard(), step=1)["doctor/rows"] == 4
    rows = last_rows(watching.watch)
    assert rows.row_ids == ("1/4", "1/3", "1/2", "1/1"), "named by the place in the rollout"
    assert rows.rewards.tolist() == [4.0, 3.0, 2.0, 1.0]
    assert len(rows.compared) == 4 * SIZE and watching.said == []


def test_samples_of_slime_are_read_without_the_trainers_log_probs(tmp_path):
    rollout, _ = sides()
    samples = [
        SimpleNamespace(
            group_index=i // 2,
            to_dict=lambda i=i: {
                "group_index": i // 2, "tokens": [5, *reply_ids(i)],
                "response_length": SIZE, "rollout_log_probs": rollout[i].tolist(), "reward": 1.0,
            },
        )
        for i in range(NUM)
    ]  # fmt: skip
    watching = Watching(tmp_path, rows=2)
    assert watching.watch.slime(samples, step=2)["doctor/rows"] == 2
    assert last_rows(watching.watch).row_ids == ("2/4", "2/5")
    assert "no log-probs of the trainer" in watching.said[0]
    assert "--save-debug-train-data" in watching.said[0]


def prime_batch(lengths, *, padding=3):
    """Packed sequences: a prompt of two ids and a reply; then padding of no environment."""
    total, at = sum(lengths) + padding, np.cumsum([0, *lengths])
    mask = torch.ones(1, total, dtype=torch.bool)
    mask[0, total - padding :] = False
    for begin in at[:-1]:
        mask[0, begin : begin + 2] = False
    rng = np.random.default_rng(1)
    trainer = torch.tensor(-rng.exponential(1.0, (1, total)), dtype=torch.float32)
    batch = {
        "input_ids": torch.arange(total).reshape(1, -1) + 10,
        "position_ids": torch.zeros(1, total, dtype=torch.int64),
        "loss_mask": mask,
        "advantages": torch.ones(1, total),
        "inference_logprobs": torch.where(mask, trainer - 1e-3, 0.0),
        "rl_weights": None,
        "env_names": ["math"] * (total - padding) + [""] * padding,
    }
    return batch, {"logprobs": trainer}, [*lengths[:-1], lengths[-1] + padding]


def test_sequences_of_prime_rl_are_looked_at_when_the_next_step_begins(tmp_path):
    watching = Watching(tmp_path, rows=3)
    prime_rl = watching.watch.prime_rl
    for _ in range(2):
        assert prime_rl(*prime_batch([6, 8]), step=4) == {}
    found = prime_rl(*prime_batch([6, 8]), step=5)
    assert found["doctor/rows"] == 3 and watching.said == []
    assert last_rows(watching.watch).row_ids == ("5/rank0/0", "5/rank0/1")
    rows = last_rows(watching.watch)
    assert rows.sizes.tolist() == [6, 8], "padding is left out"
    assert rows.loss_mask.tolist() == [False] * 2 + [True] * 4 + [False] * 2 + [True] * 6
    assert rows.gap[rows.compared] == pytest.approx([1e-3] * 10, abs=1e-6)


def test_a_step_of_prime_rl_that_waits_takes_nothing(tmp_path):
    watching = Watching(tmp_path, rows=3, every=2)
    for step in range(4):
        watching.watch.prime_rl(*prime_batch([6, 8]), step=step)
    assert watching.watch._sequences.lines == [], "step 3 is not looked at"
    assert watching.watch.prime_rl(*prime_batch([6, 8]), step=4) == {}


def test_datums_of_tinker_are_read_as_its_files_are(tmp_path):
    _, trainer = sides()
    datums = [datum(i) for i in range(NUM)]
    logprobs = [torch.cat([torch.zeros(1), row.float()]) for row in trainer]
    watching = Watching(tmp_path, rows=4)
    assert watching.watch.tinker(datums, logprobs, step=1)["doctor/rows"] == 4
    rows = last_rows(watching.watch)
    assert rows.row_ids == ("1/1", "1/2", "1/3", "1/4") and watching.said == []
    assert rows.token_ids[: SIZE + 2].tolist() == [4, 5, *reply_ids(1)]
    assert np.abs(rows.gap[rows.compared]).max() < 0.01 and len(rows.compared) == 4 * SIZE


def test_rows_of_your_own_may_be_lists_arrays_or_tensors(tmp_path):
    watching = Watching(tmp_path, facts=Facts(trainer="mine", temperature=1.0))
    said = {"messages": [{"role": "tool", "content": "of no function"}]}
    found = watching.watch.rows([row | said for row in own_rows(shifted())], step=2)
    assert found["doctor/rows"] == 16 and found["doctor/shifted"] == 1.0
    assert "messages are left out: row 2 of step 2: messages: message 0" in watching.said[0]
    assert diagnose(tmp_path / "step-000002-rank-0.parquet").setting.trainer == "mine"


@pytest.mark.parametrize("kind", [tuple, list])
def test_rows_may_be_sequences_of_numpys_numbers_and_a_step_may_have_none(tmp_path, kind):
    watching = Watching(tmp_path)
    rows = [{n: kind(np.asarray(v)) for n, v in row.items()} for row in own_rows(healthy())]
    assert watching.watch.rows([], step=0) == {}
    assert watching.watch.rows(iter(rows), step=1)["doctor/rows"] == 16 and not watching.said


def test_a_column_of_another_name_is_asked_about(tmp_path):
    watching = Watching(tmp_path)
    rows = [row | {"old_log_probs": row.pop("trainer_logprobs")} for row in own_rows(healthy())]
    watching.watch.rows(rows, step=0)
    assert watching.said[0].endswith(" There is old_log_probs: if that is it, rename it.")


# -- several processes -----------------------------------------------------------------------------


def test_each_rank_keeps_its_own_rows_and_rank_0_writes_the_page(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)
    watching = Watching(tmp_path)
    watching(0, shifted())
    assert kept(tmp_path) == ["step-000000-rank-1.parquet"]
    assert watching.watch.page() is None
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    first = Watching(tmp_path)
    first(0, healthy())
    first.watch.page()
    diagnosis = diagnose(tmp_path)
    assert diagnosis.examination.num_rows == 32
    assert diagnosis.causes[0][1].evidence[0].row.startswith("rank1/")
