"""Places on a cluster: what is asked for, and what cannot be."""

import pytest

from lockstep.config import resolve
from lockstep.errors import ConfigError
from lockstep.launch.placement import RayPlacement
from lockstep.recipes import find_recipe
from lockstep.run.plan import plan
from lockstep.run.preflight import preflight, read_model_files

RAY = ("placement=ray", "parallel.processes=2", "engine.replicas=4")


def test_engines_apart_have_places_of_their_own():
    placement = RayPlacement(trainer_gpus=1, replica_gpus=1, trainer_cpus=4)
    bundles = placement.bundles(2, 3)
    assert [b.resources for b in bundles[:2]] == [{"CPU": 4, "GPU": 1}] * 2
    assert [b.resources for b in bundles[2:]] == [{"CPU": 1, "GPU": 1}] * 3
    assert [b.ranks for b in bundles] == [(0,), (1,), (), (), ()]
    assert [b.engines for b in bundles] == [(), (), (0,), (1,), (2,)]


def test_engines_beside_ranks_share_their_gpu():
    bundles = RayPlacement(trainer_gpus=1, colocate=True, trainer_cpus=4).bundles(2, 4)
    assert [b.resources for b in bundles] == [{"CPU": 6, "GPU": 1}] * 2
    assert [b.engines for b in bundles] == [(0, 1), (2, 3)]
    assert bundles[0].gpus_each * 3 == pytest.approx(1)


def test_the_plan_shows_the_places():
    config = resolve(find_recipe("quickstart"), (*RAY, "placement.address=auto"))
    lines = plan(config, read_model_files(config))
    at = next(i for i, line in enumerate(lines) if line.startswith("placement"))
    assert "the Ray cluster of this machine, pack" in lines[at]
    assert lines[at + 2].strip() == "rank 1: 1 CPUs" and "engine 3" in lines[at + 6]


@pytest.mark.parametrize(
    "settings, message",
    [
        (("placement.trainer_gpus=2",), r"placement\.trainer_gpus=2 must be 0 or 1"),
        (("placement.wait_seconds=0",), "must be a finite number above 0"),
        (("placement.trainer_gpus=1",), "Give both GPUs, or neither"),
        (
            ("placement.trainer_gpus=1", "placement.colocate=true"),
            r"Set engine\.share_device=true",
        ),
        (
            ("placement.replica_gpus=1", "placement.colocate=true"),
            r"leave placement\.replica_gpus at 0",
        ),
        (("engine.replicas=1",), r"engine\.replicas has 1 for 2 processes that train"),
    ],
)
def test_what_cannot_be_placed_is_refused_before_ray_is_started(settings, message):
    with pytest.raises(ConfigError, match=message):
        preflight(resolve(find_recipe("quickstart"), (*RAY, *settings)))
