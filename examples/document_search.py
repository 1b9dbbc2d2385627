"""A pretrained model learns to search documents over several turns: docs/tasks.md.

python document_search.py writes searches.jsonl: 60 dialogues about generated worlds.
"""

import json
import random

from tiny_models import CLEAN_SEARCH, demonstrate_search

from lockstep.agent.config import AgentConfig
from lockstep.envs.docsearch.config import DocSearchConfig
from lockstep.envs.docsearch.worlds import world_of


def demonstrations(count: int) -> list[dict]:
    """Dialogues of the task `docsearch`, each about a world of its own, whose searches find all
    facts that the answer needs."""
    config, draw, rows = DocSearchConfig(), random.Random(0), []
    for task in config.tasks(split="train", seed=1000):
        if len(rows) == count:
            break
        world = world_of(task.payload["world_seed"], config.two_hop_share)
        dialogue = demonstrate_search(world, draw, CLEAN_SEARCH, config)
        found = " ".join(message.content for message in dialogue if message.role == "tool")
        if not all(fact.text in found for fact in world.path):
            continue
        (tool,) = config.environment(task, AgentConfig()).tools
        schema = {key: getattr(tool, key) for key in ("name", "description", "parameters")}
        rows.append({"messages": [message.to_dict() for message in dialogue], "tools": [schema]})
    return rows


if __name__ == "__main__":
    with open("searches.jsonl", "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in demonstrations(60))
