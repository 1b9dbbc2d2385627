"""A pretrained model learns when and how to call a calculator: docs/tasks.md.

python calculator.py writes demonstrations.jsonl (60 dialogues) and tasks.jsonl (1,000 questions).
"""

import json
import random
import re

from lockstep.agent.tools import tool

PROBLEMS = {
    "What is {a} plus {b}?": "{a} + {b}",
    "What is {a} minus {b}?": "{a} - {b}",
    "What is {a} times {b}?": "{a} * {b}",
    "What is {a} times {b} plus {c}?": "{a} * {b} + {c}",
    "Add {b} to {a}.": "{a} + {b}",
    "Multiply {a} by {b}, then take away {c}.": "{a} * {b} - {c}",
    "Take {b} away from {a}.": "{a} - {b}",
    "What is the sum of {a}, {b} and {c}?": "{a} + {b} + {c}",
    "Each of {b} boxes holds {a} pens. How many pens is that?": "{b} * {a}",
    "Nora has {a} coins and gives {b} away. How many are left?": "{a} - {b}",
}


def calculator(expression: str) -> str:
    """Computes an expression of whole numbers.

    Args:
        expression: for example 12 * 34 - 5
    """
    if not re.fullmatch(r"\s*\d{1,9}(\s*[-+*]\s*\d{1,9}){0,9}\s*", expression):
        return "error: use whole numbers with + - *"  # eval is for nothing else
    return str(eval(expression))


def reward(episode) -> float:
    """1 where the answer is the number alone."""
    return float(episode.answer.strip() == episode.task["answer"])


def problem(draw: random.Random) -> tuple[str, str]:
    """A question and its expression."""
    question, expression = draw.choice(list(PROBLEMS.items()))
    given = {name: draw.randint(1001, 99999) for name in "abc"}
    return question.format(**given), expression.format(**given)


def task(draw: random.Random) -> dict[str, str]:
    question, expression = problem(draw)
    return {"question": question, "answer": calculator(expression)}


def demonstration(draw: random.Random) -> dict[str, object]:
    """OpenAI's form of a dialogue with one call."""
    question, expression = problem(draw)
    arguments, result = json.dumps({"expression": expression}), calculator(expression)
    function = {"name": "calculator", "arguments": arguments}
    shown = tool(calculator)  # demonstrations show the tool in the words of training
    schema = {"name": shown.name, "description": shown.description, "parameters": shown.parameters}
    return {
        "messages": [
            {"role": "user", "content": question},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "1", "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": "1", "content": result},
            {"role": "assistant", "content": result},
        ],
        "tools": [{"type": "function", "function": schema}],
    }


def write(path: str, rows: list[dict[str, object]]) -> None:
    with open(path, "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    draw = random.Random(0)
    write("demonstrations.jsonl", [demonstration(draw) for _ in range(60)])
    write("tasks.jsonl", [task(draw) for _ in range(1000)])
