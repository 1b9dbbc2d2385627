"""Episodes over several ranks: each plays whole groups with its own engine, all have them after."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from lockstep.launch.ranks import Ranks
from lockstep.types import Group, Task


def deal_tasks(tasks: Sequence[Task], num_ranks: int) -> list[list[int]]:
    """Returns the indices of the tasks for each rank. A task that occurs twice stays on one rank,
    which numbers its samples through.

    >>> deal_tasks([Task(id=name) for name in "abac"], 2)
    [[0, 2], [1, 3]]
    """
    owner: dict[str, int] = {}
    out: list[list[int]] = [[] for _ in range(num_ranks)]
    for index, task in enumerate(tasks):
        rank = owner.setdefault(task.id, len(owner) % num_ranks)
        out[rank].append(index)
    return out


def own_tasks(ranks: Ranks | None, tasks: Sequence[Task]) -> list[Task]:
    """Returns the tasks that this rank plays."""
    if ranks is None:
        return list(tasks)
    return [tasks[i] for i in deal_tasks(tasks, ranks.world)[ranks.rank]]


def gather_groups(ranks: Ranks | None, tasks: Sequence[Task], own: Sequence[Group]) -> list[Group]:
    """The groups of all tasks, in their order, on every rank. own: those of `own_tasks`.

    An episode depends on its task, its sample and the weights alone, so under the contract these
    are the groups that one process would have played. Collective.
    """
    if ranks is None:
        return list(own)
    shares = deal_tasks(tasks, ranks.world)
    played = ranks.gather(own)
    at = {
        i: group
        for share, groups in zip(shares, played, strict=True)
        for i, group in zip(share, groups, strict=True)
    }
    return [at[i] for i in range(len(tasks))]


async def collect_over(
    ranks: Ranks | None,
    tasks: Sequence[Task],
    play: Callable[[Sequence[Task]], Awaitable[list[Group]]],
) -> list[Group]:
    """Returns `gather_groups` of the groups that each rank plays. play: makes the groups of some
    tasks."""
    return gather_groups(ranks, tasks, await play(own_tasks(ranks, tasks)))
