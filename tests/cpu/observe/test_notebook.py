"""A run in a notebook: its panel is drawn anew while it trains, and stays when it ends."""

import sys
import types

from lockstep.observe.live import NotebookView, RunHeader, find_cell, open_view


def row(step, **metrics):
    return {"step": step, "reward/mean": 0.25, "time/step_seconds": 2.0, **metrics}


def test_the_panel_shows_step_phase_curve_table_and_folded_settings():
    drawn = []
    view = NotebookView(drawn.append)
    view.start(RunHeader(num_steps=100, lines=("model      tiny", "run        runs/a")))
    for step in range(8):
        view.step(row(step))
    view.phase("sampling", 3, 64)
    view.close()
    before, last = drawn[0]["text/html"], drawn[-1]["text/html"]
    assert "step 0 of 100<" in before and "step 8 of 100<" in last
    assert "<svg" in last and last.count("<tr>") == 6 and "<summary>settings" in last
    assert "step   7/100  reward 0.25" in drawn[-1]["text/plain"]


def test_a_warning_stays_in_sight_and_its_text_is_escaped():
    drawn = []
    view = NotebookView(drawn.append)
    view.start(RunHeader(num_steps=3))
    view.note("the server <b> is gone", "warning")
    for step in range(3):
        view.step(row(step))
    view.close()
    assert "warning: the server &lt;b&gt; is gone" in drawn[-1]["text/html"]


def test_drawing_costs_little_beside_steps_that_are_quick():
    drawn = []
    view = NotebookView(drawn.append)
    view.start(RunHeader(num_steps=1000))
    for step in range(1000):
        view.step(row(step))
    view.close()
    assert len(drawn) < 100 and "step 1000 of 1000" in drawn[-1]["text/html"]


def test_supervised_training_shows_its_loss():
    drawn = []
    view = NotebookView(drawn.append)
    view.start(RunHeader(num_steps=2))
    view.step({"step": 0, "train/loss": 2.0})
    view.close()
    assert "train/loss 2" in drawn[-1]["text/html"]


class FakeHandle:
    def __init__(self, updates):
        self.updates = updates

    def update(self, bundle, *, raw):
        self.updates.append((bundle, raw))


def fake_ipython(monkeypatch, *, has_kernel):
    """Puts a stand-in for IPython in place: what it was asked to display."""
    shell, shown = types.SimpleNamespace(), []
    if has_kernel:
        shell.kernel = object()

    def display(bundle, *, raw, display_id):
        shown.append((bundle, raw))
        assert display_id
        return FakeHandle(shown)

    package = types.ModuleType("IPython")
    package.get_ipython = lambda: shell
    package.display = types.ModuleType("IPython.display")
    package.display.display = display
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", package.display)
    return shown


def test_in_a_kernel_the_cell_shows_one_output_that_is_drawn_anew(monkeypatch):
    shown = fake_ipython(monkeypatch, has_kernel=True)
    view = open_view(name="first")
    view.start(RunHeader(num_steps=3))
    view.step(row(0))
    view.close()
    assert len(shown) >= 2 and all(raw for _, raw in shown)
    assert "first step 1 of 3" in shown[-1][0]["text/html"]


def test_in_ipythons_terminal_and_with_json_the_view_is_the_ordinary_one(monkeypatch, capsys):
    shown = fake_ipython(monkeypatch, has_kernel=False)
    assert find_cell() is None
    open_view().note("an address")
    assert capsys.readouterr().out == "an address\n" and not shown
    shown = fake_ipython(monkeypatch, has_kernel=True)
    open_view("json").note("an address")
    assert not shown
