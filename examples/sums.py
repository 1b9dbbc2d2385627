"""A pretrained model learns to add without a tool: lockstep fetch smollm2-135m; python sums.py"""

import random
import re

import lockstep

SYSTEM = "Reply with the sum alone. 4 + 9 is 13. 12 + 7 is 19."


def tasks() -> list[dict]:
    draw, rows = random.Random(0), []
    for _ in range(2000):
        a, b = draw.randint(2, 40), draw.randint(2, 40)
        messages = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"{a} + {b} is"},
        ]
        rows.append({"messages": messages, "answer": str(a + b)})
    return rows


def reward(episode) -> dict[str, float]:
    """1 if the last number of the reply is the sum, and 0.1 if the reply ends."""
    is_right = re.findall(r"\d+", episode.answer)[-1:] == [episode.task["answer"]]
    return {"right": float(is_right), "ended": 0.1 * bool(episode.answer)}


if __name__ == "__main__":
    lockstep.train(
        model="smollm2-135m",
        reward=reward,
        tasks=tasks,
        steps=20,
        max_tokens=128,
        groups_per_step=8,
        lora={"rank": 16},
        trainer={"lr": 5e-4, "warmup_updates": 0},
        agent={"max_turn_tokens": 48},
    )
