"""A model learns to use your function: python own_task.py (about two minutes on two CPU cores)."""

import random
import re

import lockstep


def python(code: str) -> str:
    """Computes an expression of whole numbers, such as 12*34."""
    if not re.fullmatch(r"\d+([-+*]\d+)*", code):  # eval is for nothing else
        return "error"
    return str(eval(code))


def tasks() -> list[dict[str, str]]:
    draw, rows = random.Random(0), []
    for _ in range(400):
        a, b, c = draw.randint(101, 999), draw.randint(11, 99), draw.randint(101, 999)
        question = f"Take {a} times {b}. Then add {c}. What is it?"
        rows.append({"question": question, "answer": f"#### {a * b + c}"})
    return rows


def reward(episode) -> float:
    return float(episode.answer == episode.task["answer"])


if __name__ == "__main__":
    task = {"instructions": "Use python."}
    lockstep.train(model="tiny-math", tools=[python], reward=reward, tasks=tasks, task=task)
