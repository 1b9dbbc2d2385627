"""Every notebook in examples/ runs, and shows what it computed."""

import ast
import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
SMALL = 'steps=2, groups_per_step=1, group_size=2, evaluation={"num_tasks": 1},'
"""In place of the steps that a notebook trains."""


def code_cells(path):
    """The code of a notebook, with training made small."""
    cells = json.loads(path.read_text())["cells"]
    found = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    return [re.sub(r"\bsteps=\d+,", SMALL, text) for text in found]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
async def test_the_cells_of_a_notebook_run_in_order_inside_an_event_loop(
    path, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    known, shown = {"__name__": "__main__"}, []
    for number, text in enumerate(code_cells(path)):
        tree = ast.parse(text)
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, f"cell {number}", "exec"), known)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), known)
            shown.append(value._repr_html_())
            assert len(repr(value)) < 400
    assert len(shown) >= 4 and all(page.startswith("<") for page in shown)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_runs_in_a_kernel_and_keeps_its_chart(path, tmp_path):
    if find_spec("nbclient") is None or find_spec("ipykernel") is None:
        pytest.skip("needs nbclient and ipykernel")
    import nbclient
    import nbformat

    cells = [nbformat.v4.new_code_cell(text) for text in code_cells(path)]
    book = nbformat.v4.new_notebook(cells=cells)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(book, timeout=120, resources=resources).execute()
    trained = next(cell for cell in book.cells if "lockstep.train(" in cell.source)
    *_, chart, outcome = trained.outputs
    assert "<svg" in chart.data["text/html"] and "step 2 of 2" in chart.data["text/html"]
    assert outcome.data["text/plain"].startswith("Outcome(done, 2 steps")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_is_stored_without_outputs(path):
    book = json.loads(path.read_text())
    assert book["nbformat"] == 4
    for cell in book["cells"]:
        assert not cell.get("outputs") and cell.get("execution_count") is None
