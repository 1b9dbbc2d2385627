"""A pretrained model learns to add without a tool: lockstep fetch smollm2-135m; python sums.py"""

import random
import re

import lockstep


def tasks() -> list[dict[str, str]]:
    draw, rows = random.Random(0), []
    for _ in range(2000):
        a, b = draw.randint(10, 99), draw.randint(10, 99)
        rows.append({"question": f"What is {a} + {b}?", "answer": str(a + b)})
    return rows


def reward(episode) -> float:
    """1 for a reply whose last number is the sum."""
    numbers = re.findall(r"\d+", episode.answer)
    return float(numbers[-1:] == [episode.task["answer"]])


if __name__ == "__main__":
    lockstep.train(
        model="smollm2-135m",
        reward=reward,
        tasks=tasks,
        lora={"rank": 16},
        groups_per_step=8,
        group_size=8,
        agent={"max_turn_tokens": 24},
        steps=20,
    )
