"""Names that stay, alarms where runs collapse, sinks that cannot stop a run, cheap views."""

import io
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from lockstep.correction.metrics import MismatchReport
from lockstep.errors import ConfigError, DataError, MissingExtraError
from lockstep.observe.alarms import mismatch, mismatch_alarm
from lockstep.observe.live import (
    LiveView,
    PlainView,
    RunHeader,
    SilentView,
    open_view,
    sparkline,
)
from lockstep.observe.loggers import GuardedLoggers, open_loggers
from lockstep.observe.metrics import METRICS, check_row, find_metric, unknown_names

# The names that the design promises: dashboards stand on them.
PROMISED = [
    "step", "policy_version", "reward/mean", "reward/correctness", "response_length/mean",
    "perplexity", "mismatch/k1", "mismatch/k2", "mismatch/k3", "mismatch/max_abs_diff",
    "mismatch/unequal_tokens", "mismatch/compared_tokens", "mismatch/forced_share",
    "mismatch/nonfinite_tokens", "mismatch/ess", "mismatch/log_ppl_abs_diff_max",
    "mismatch_after/k3", "train/loss", "train/grad_norm", "train/clip_fraction", "train/entropy",
    "train/lr", "train/skipped_updates", "time/step_seconds", "time/sample_seconds",
    "time/train_seconds", "tokens/sampled", "tokens/trained", "tokens/encoded",
    "tokens/prefilled", "eval/greedy/mean@1",
]  # fmt: skip


def row_of(k1=1e-9, k2=1e-13, k3=3e-9, **more):
    return {"mismatch/k1": k1, "mismatch/k2": k2, "mismatch/k3": k3, **more}


def full_row(step):
    return {
        "step": step,
        "reward/mean": step / 100,
        **row_of(),
        "train/loss": 0.1,
        "train/grad_norm": 1.5,
        "train/entropy": 0.4,
        "train/clip_fraction": 0.01,
        "tokens/sampled": 1400,
        "tokens/trained": 1400,
        "time/sample_seconds": 0.35,
        "time/train_seconds": 0.25,
        "time/step_seconds": 0.62,
    }


# -- names ------------------------------------------------------------------------------------


def test_every_promised_name_is_in_the_table():
    assert unknown_names(PROMISED) == []
    check_row(dict.fromkeys(PROMISED, 0))


def test_an_unknown_name_is_refused():
    with pytest.raises(DataError, match=r"unknown metric names: rewards/mean, train/los\."):
        check_row({"step": 0, "rewards/mean": 1, "train/los": 2, "train/loss": 3})
    with pytest.raises(DataError, match="needs `step`; found reward/mean"):
        check_row({"reward/mean": 1})


def test_the_mismatch_report_uses_names_of_the_table():
    report = MismatchReport.empty()
    for prefix in ("mismatch", "mismatch_after"):
        assert unknown_names(report.to_metrics(prefix)) == []


def test_each_line_of_the_table_is_complete_and_stands_once():
    assert len({m.name for m in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert re.fullmatch(r"[a-z0-9_/*]+", metric.name), metric.name
        assert metric.unit and metric.meaning.endswith("."), metric.name


def test_an_exact_name_wins_over_its_family():
    assert find_metric("reward/mean").meaning != find_metric("reward/format_penalty").meaning
    assert find_metric("reward/format_penalty").name == "reward/format_penalty"
    assert find_metric("reward/") is None and find_metric("time/step") is None


# -- alarms -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "architecture", "is_one_process", "level"),
    [
        (row_of(), "dense", False, "ok"),
        (row_of(5e-9, 7e-14, 9e-12), "moe", True, "ok"),
        (row_of(5e-9, 7e-14, 3e-9), "moe", True, "notice"),
        (row_of(k3=5e-3), "dense", False, "notice"),
        (row_of(k3=5e-3), "moe", False, "ok"),
        (row_of(k1=-0.011), "dense", False, "warning"),
        (row_of(k2=0.011), "dense", False, "warning"),
        (row_of(k3=0.011), "moe", False, "warning"),
        (row_of(0.0009, 1.18, 676.0), "dense", False, "critical"),
        (row_of(-0.11), "dense", False, "critical"),
        (row_of(k3=math.inf), "dense", False, "critical"),
        (row_of(k1=math.nan), "dense", False, "critical"),
        (row_of(**{"mismatch/nonfinite_tokens": 2}), "dense", False, "critical"),
        ({"step": 1}, "dense", False, "unmeasured"),
        (row_of(0, 0, 0, **{"mismatch/compared_tokens": 0}), "dense", False, "unmeasured"),
    ],
)
def test_alarm_levels(row, architecture, is_one_process, level):
    assert mismatch_alarm(row, architecture, is_one_process=is_one_process).level == level


def test_an_alarm_says_the_value_and_what_is_normal():
    assert mismatch_alarm(row_of(k3=0.02), "dense").text == (
        "mismatch 0.02 is above 0.01, and above what is normal "
        "(normal for dense across engines: k3 1e-05..1e-03). The report's "
        "trajectories, sorted by mismatch, show where."
    )
    assert "though inside what is normal" in mismatch_alarm(row_of(k3=0.02), "moe").text
    assert (
        "in one process: k3 up to 1e-11"
        in mismatch_alarm(row_of(), "moe", is_one_process=True).text
    )


def test_old_tokens_have_no_normal_gap_and_the_alarm_says_how_old_they_are():
    row = {**row_of(k3=0.005), "staleness/max": 2.0}
    assert mismatch_alarm(row, "dense").level == "ok"
    row = {**row_of(k3=0.02), "staleness/max": 2.0}
    text = mismatch_alarm(row, "dense").text
    assert "up to 2 update(s) old" in text and "normal" not in text
    assert mismatch_alarm(row, "dense", is_one_process=True).text.endswith("show where.")


def test_mismatch_is_the_largest_of_the_three():
    assert mismatch(row_of(-0.5, 0.1, 0.2)) == 0.5
    assert mismatch({"mismatch_after/k1": 1, "mismatch_after/k2": 2, "mismatch_after/k3": 3},
                    prefix="mismatch_after") == 3  # fmt: skip
    assert math.isnan(mismatch({"mismatch/k1": 1.0}))


# -- loggers ----------------------------------------------------------------------------------


class Recorder:
    """A sink that remembers, and raises from its `fail_from`-th row on."""

    def __init__(self, fail_from=None):
        self.rows, self.fail_from, self.is_closed = [], fail_from, False

    def log(self, row):
        if self.fail_from is not None and len(self.rows) >= self.fail_from:
            raise ConnectionError("the service is down")
        self.rows.append(row)

    def close(self):
        self.is_closed = True


def test_a_sink_that_raises_is_reported_once_and_stops_nobody():
    broken, healthy, warnings = Recorder(fail_from=1), Recorder(), []
    loggers = GuardedLoggers({"broken": broken, "healthy": healthy}, warn=warnings.append)
    for step in range(4):
        loggers.log({"step": step})
    loggers.close()
    assert len(broken.rows) == 1 and len(healthy.rows) == 4
    assert loggers.num_failed_rows == 3
    assert warnings == [
        "the broken logger failed: ConnectionError: the service is down. The run goes on and "
        "metrics.jsonl has every row; further failures are counted, not shown."
    ]
    assert broken.is_closed and healthy.is_closed


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_a_logger_whose_package_is_missing_names_the_extra(name, tmp_path):
    try:
        __import__(name)
        pytest.skip(f"{name} is installed here, so its absence cannot be seen")
    except ModuleNotFoundError:
        pass
    with pytest.raises(MissingExtraError, match=rf"pip install 'lockstep-rl\[{name}\]'"):
        open_loggers([name], run_path=tmp_path, project="p", config={}, warn=pytest.fail)


def test_an_unknown_logger_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="unknown logger 'mlflow'; known are tensorboard"):
        open_loggers(["mlflow"], run_path=tmp_path, project="p", config={}, warn=pytest.fail)


def test_tensorboard_gets_every_number(tmp_path):
    pytest.importorskip("tensorboard", reason="the extra `tensorboard` is not installed")
    loggers = open_loggers(
        ["tensorboard"], run_path=tmp_path, project="p", config={}, warn=pytest.fail
    )
    loggers.log({"step": 0, "reward/mean": 0.5, "train/loss": math.nan})
    loggers.close()
    (events,) = Path(tmp_path, "tensorboard").iterdir()
    assert b"reward/mean" in events.read_bytes()


# -- views ------------------------------------------------------------------------------------

HEADER = RunHeader(name="demo", num_steps=110, architecture="dense", lines=("model tiny",))


def terminal(width=100):
    return Console(
        file=io.StringIO(), force_terminal=True, width=width, height=40, color_system="truecolor"
    )


def text_of(view, width=100):
    return view._panel(view._progress, width).plain


def test_the_view_fits_where_it_writes():
    assert isinstance(open_view(console=terminal()), LiveView)
    assert isinstance(open_view(console=Console(file=io.StringIO())), PlainView)
    assert isinstance(open_view(console=terminal(), plain=True), PlainView)
    assert isinstance(open_view(console=terminal(), is_json=True), SilentView)


def test_plain_lines_say_the_step_in_one_line_and_an_alarm_once():
    lines = []
    view = PlainView(lines.append)
    view.start(HEADER)
    view.phase("sampling", 3, 64)
    for step in range(4):
        view.step(full_row(step) | (row_of(k3=0.5) if step >= 2 else {}))
    view.step({"step": 4, "eval/greedy/mean@1": 0.5, "eval/sampled/pass@4": 0.75})
    view.note("checkpoint at step 3")
    view.close()
    assert lines.pop(-2) == "eval  step 4: greedy 0.5, sampled pass@4 0.75"
    assert lines[0] == "model tiny"
    assert lines[1] == (
        "step   0/110  reward 0  loss 0.1  kl 3e-09  0.6 s  sample 4000 tok/s  train 5600 tok/s"
        "  left 1:08"
    )
    assert [line for line in lines if line.startswith("critical: mismatch 0.5")] == [lines[4]]
    assert lines[-1] == "checkpoint at step 3" and len(lines) == 7


def test_the_panel_shows_progress_curves_speed_alarms_evaluation_and_phase():
    view = LiveView(terminal())
    view.start(HEADER)
    for step in range(30):
        view.step(full_row(step) | (row_of(k3=0.5) if step == 20 else {}))
        view.phase("sampling", 12, 64)
    view.step({"step": 30, "eval/greedy/mean@1": 0.1})
    view.step(full_row(30) | {"eval/greedy/mean@1": 0.91, "eval/greedy/mean@1/low": 128})
    shown = text_of(view)
    view.close()
    for piece in (
        "demo  step 31/110", "0 s gone, 49 s left", "\u2501", "reward   0.3", "kl       3e-09",
        "sample 4000 tok/s   train 5600 tok/s", "loss 0.1", "eval     step 30: greedy 0.91",
        "!! step 20: mismatch 0.5 is above 0.1", "> sampling 12/64", "\u2581", "\u2588",
    ):  # fmt: skip
        assert piece in shown.replace("0.0 s gone", "0 s gone"), piece


@pytest.mark.parametrize("width", [20, 40, 200])
def test_the_panel_never_wraps(width):
    console = terminal(width)
    view = LiveView(console)
    view.start(HEADER)
    for step in range(40):
        view.step(full_row(step))
    rows = console.render_lines(view._panel(view._progress, width), pad=False)
    view.close()
    assert len(rows) == text_of(view, width).count("\n") + 1
    assert all(sum(segment.cell_length for segment in row) <= width for row in rows)


def test_a_sparkline_shows_zero_and_gaps_on_a_log_scale():
    assert sparkline([0.0, 1e-9, 1e-5, math.nan, 1e-1], is_log=True) == "\u2581\u2581\u2585 \u2588"
    assert sparkline([0.0, 0.0], is_log=True) == "\u2581\u2581"
    assert sparkline([2.0, 2.0]) == "\u2584\u2584"
    assert sparkline([]) == ""


def test_observe_does_not_import_torch():
    check = (
        "import sys, lockstep.observe.live, lockstep.observe.loggers, lockstep.observe.metrics;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", check], timeout=60).returncode == 0
