"""One trajectory passes through eight files, and finds one verb in each: a real step, walked."""

import re
import sys
from pathlib import Path

import pytest
from quickstarts import quickstart_with

import lockstep
from lockstep.objectives.losses import TokenBatch, TokenLoss
from lockstep.run.train import train
from lockstep.training.packing import PackedBatch
from lockstep.types import Sample, Segment

ROOT = Path(lockstep.__file__).parent
WALK = Path(__file__).parents[2] / "docs" / "walk.md"

VERBS = {
    "sample": ("agent/turns.py", "TurnSampler.sample"),
    "score": ("agent/loop.py", "_Episode.set_score"),
    "align": ("training/rows.py", "rows_for_training"),
    "pack": ("training/packing.py", "pack"),
    "correct": ("training/correcting.py", "TokenJudge.keep_tokens"),
    "maximise": ("objectives/losses.py", "ppo_clip"),
    "update": ("training/trainer.py", "Trainer.update"),
    "record": ("store/run.py", "RunDirectory.write_trajectories"),
}
"""Verb -> its file, and the function that ends with it done."""

MADE_IN = {
    Segment: {"agent/turns.py", "agent/loop.py", "store/trajectories.py"},  # sampled, or read back
    Sample: {"training/rows.py"},
    PackedBatch: {"training/packing.py"},
    TokenBatch: {"training/correcting.py"},
    TokenLoss: {"objectives/losses.py"},
}
"""Container of tokens -> the files that make one, with the help of types.py."""


@pytest.fixture(scope="module")
def step(tmp_path_factory):
    """(functions in the order in which they first ended, container -> files that made one)."""
    ended, makers = {}, {kind: set() for kind in MADE_IN}
    kinds = {kind.__init__.__code__: kind for kind in MADE_IN}

    def look(frame, event, _):
        code = frame.f_code
        if event == "return" and code.co_filename.startswith(str(ROOT)):
            file = Path(code.co_filename).relative_to(ROOT).as_posix()
            ended.setdefault((file, code.co_qualname))
        elif event == "call" and code in kinds:
            maker = frame.f_back
            while not is_maker(maker.f_code.co_filename):
                maker = maker.f_back
            file = Path(maker.f_code.co_filename).relative_to(ROOT).as_posix()
            makers[kinds[code]].add(file)

    settings = [
        "steps=1", "groups_per_step=2", "group_size=2", "evaluation.at_start=false",
        "evaluation.num_tasks=2", "evaluation.num_samples=1", "evaluation.greedy=false",
    ]  # fmt: skip
    config = quickstart_with(*settings)
    sys.setprofile(look)
    try:
        train(config, out=tmp_path_factory.mktemp("walk") / "run", view="json")
    finally:
        sys.setprofile(None)
    return list(ended), makers


def is_maker(file: str) -> bool:
    return file.startswith(str(ROOT)) and file != str(ROOT / "types.py")


def test_the_eight_verbs_are_done_one_after_another(step):
    ended, _ = step
    assert len({file for file, _ in VERBS.values()}) == len(VERBS) == 8
    places = [ended.index(function) for function in VERBS.values()]
    assert places == sorted(places)


@pytest.mark.parametrize("kind", MADE_IN)
def test_a_container_of_tokens_is_made_in_the_file_of_its_verb(step, kind):
    assert step[1][kind] <= MADE_IN[kind]
    assert step[1][kind], "the step made none"


def test_the_page_has_the_same_verbs_and_files():
    rows = re.findall(r"^\| \d \| (\w+) \| `src/lockstep/([\w/]+\.py)`", WALK.read_text(), re.M)
    assert dict(rows) == {verb: file for verb, (file, _) in VERBS.items()}
