"""Names that stay, alarms where runs collapse, sinks that cannot stop a run, cheap views."""

import math
import re
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from urllib.request import urlopen

import pytest

from lockstep.correction.metrics import MismatchReport
from lockstep.errors import ConfigError, MissingExtraError
from lockstep.observe.alarms import mismatch, mismatch_alarm
from lockstep.observe.live import RunHeader, View, open_view
from lockstep.observe.loggers import Loggers
from lockstep.observe.metrics import METRICS, find_metric
from lockstep.store.config import RecordConfig

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
    assert all(map(find_metric, PROMISED))


def test_an_unknown_name_is_in_no_table():
    assert find_metric("rewards/mean") is None and find_metric("train/los") is None


def test_the_mismatch_report_uses_names_of_the_table():
    report = MismatchReport.empty()
    for prefix in ("mismatch", "mismatch_after"):
        assert all(map(find_metric, report.to_metrics(prefix)))


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
        "mismatch 0.02 is above 0.01 (normal for dense across engines: k3 up to 1e-03). The "
        "report's trajectories, sorted by mismatch, show where."
    )
    in_one_process = mismatch_alarm(row_of(), "moe", is_one_process=True).text
    assert "in one process: k3 up to 1e-11" in in_one_process


def test_old_tokens_have_no_normal_gap_and_the_alarm_says_how_old_they_are():
    row = {**row_of(k3=0.005), "staleness/max": 2.0}
    assert mismatch_alarm(row, "dense").level == "ok"
    row = {**row_of(k3=0.02), "staleness/max": 2.0}
    text = mismatch_alarm(row, "dense").text
    assert "up to 2 update(s) old" in text and "normal" not in text
    assert mismatch_alarm(row, "dense", is_one_process=True).text.endswith("show where.")


def test_mismatch_is_the_largest_of_the_three():
    assert mismatch(row_of(-0.5, 0.1, 0.2)) == 0.5
    assert math.isnan(mismatch({"mismatch/k1": 1.0}))


# -- loggers ----------------------------------------------------------------------------------


TRACKIO = """
class Run:
    rows = []
    def log(self, numbers, step):
        if step > 0:
            raise ConnectionError("the service is down")
        self.rows.append((step, numbers))
    def finish(self):
        self.rows.append("finished")
def init(**settings):
    return Run()
"""


def test_a_tracker_that_fails_is_reported_once_and_stops_nobody(tmp_path, monkeypatch):
    (tmp_path / "trackio.py").write_text(TRACKIO)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    warnings = []
    record = RecordConfig(loggers=("trackio",))
    loggers = Loggers(record, run_path=tmp_path, config={}, warn=warnings.append)
    for step in range(4):
        loggers.log({"step": step, "reward/mean": 0.5})
    loggers.close()
    assert sys.modules.pop("trackio").Run.rows == [(0, {"reward/mean": 0.5}), "finished"]
    assert warnings == [
        "the trackio logger failed: ConnectionError: the service is down. The run goes on and "
        "metrics.jsonl has every row; further failures are not shown."
    ]


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_a_logger_whose_package_is_missing_names_the_extra(name, tmp_path):
    try:
        __import__(name)
        pytest.skip(f"{name} is installed here, so its absence cannot be seen")
    except ModuleNotFoundError:
        pass
    with pytest.raises(MissingExtraError, match=rf"pip install 'lockstep-rl\[{name}\]'"):
        Loggers(RecordConfig(loggers=(name,)), run_path=tmp_path, config={}, warn=pytest.fail)


def test_tensorboard_gets_every_number(tmp_path):
    pytest.importorskip("tensorboard", reason="the extra `tensorboard` is not installed")
    record = RecordConfig(loggers=("tensorboard",))
    loggers = Loggers(record, run_path=tmp_path, config={}, warn=pytest.fail)
    loggers.log({"step": 3, "reward/mean": 0.5, "train/loss": math.nan, "health/line": "turns cut"})
    loggers.close()
    (events,) = Path(tmp_path, "tensorboard").iterdir()
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    found = {
        value.tag: (event.step, value.tensor, value.metadata.plugin_data.plugin_name)
        for event in loader.EventFileLoader(str(events)).Load()
        for value in event.summary.value
    }
    assert found["reward/mean"][0::2] == (3, "scalars")
    assert found["reward/mean"][1].float_val[:] == [0.5]
    assert found["health/line"][0::2] == (3, "text")
    assert found["health/line"][1].string_val[:] == [b"turns cut"]
    assert found.keys() == {"reward/mean", "train/loss", "health/line"}


def test_prometheus_reads_the_latest_row(tmp_path):
    pytest.importorskip("prometheus_client", reason="the extra `prometheus` is not installed")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = "{}:{}".format(*taken.getsockname())
    record = RecordConfig(loggers=("prometheus",), prometheus=address)
    loggers = Loggers(record, run_path=tmp_path / "a", config={}, warn=pytest.fail)
    held = {"health/alarms": 1, "health/cut_by_max_turns": 1, "health/line": "out of turns"}
    loggers.log({"step": 0, "reward/mean": 0.25, **held})
    healthy = {"health/alarms": 0, "health/line": 'a "quoted" line'}
    loggers.log({"step": 1, "reward/mean": 0.5, "eval/sampled/mean@4": 1.0, **healthy})
    wanted = {
        'lockstep_health_alarms{run="a"} 0.0',
        'lockstep_health_line{run="a",text="a \\"quoted\\" line"} 1.0',
        'lockstep_reward_mean{run="a"} 0.5',
        'lockstep_eval_sampled_mean_4{run="a"} 1.0',
        'lockstep_step{run="a"} 1.0',
    }
    ends = time.monotonic() + 30
    lines: set[str] = set()
    while not wanted <= lines and time.monotonic() < ends:
        with suppress(OSError), urlopen(f"http://{address}/metrics", timeout=5) as answer:
            lines = set(answer.read().decode().splitlines())
        time.sleep(0.05)
    loggers.close()
    assert {line for line in lines if not line.startswith("#")} == wanted
    with pytest.raises(OSError):
        urlopen(f"http://{address}/metrics", timeout=5)


# -- views ------------------------------------------------------------------------------------

HEADER = RunHeader(num_steps=110, architecture="dense", lines=("model tiny",))


def test_plain_lines_say_the_step_in_one_line_and_an_alarm_once():
    lines = []
    view = View(lines.append)
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
        "step   0/110  reward 0  loss 0.1  kl 3e-09  0.6 s  sample 4,000 tok/s  train 5,600 tok/s"
        "  left 1:08"
    )
    assert [line for line in lines if line.startswith("critical: mismatch 0.5")] == [lines[4]]
    assert lines[-1] == "checkpoint at step 3" and len(lines) == 7


def test_a_terminal_shows_the_phase_until_the_next_line(capsys):
    view = View(print, has_status=True)
    view.start(HEADER)
    view.phase("sampling", 12, 64)
    view.phase("sampling", 13, 64)  # too soon to draw again
    view.step(full_row(0))
    shown = capsys.readouterr()
    assert shown.err.count("> sampling 12/64") == 1 and "13/64" not in shown.err
    assert shown.err.endswith("\r\x1b[K") and "step   0/110" in shown.out


def test_a_silent_view_writes_nothing(capsys):
    view = open_view("json")
    view.start(HEADER)
    view.phase("sampling")
    view.step(full_row(0))
    view.note("a warning", "warning")
    view.close()
    assert capsys.readouterr() == ("", "")
    with pytest.raises(ConfigError, match=r"view='quiet'.*verbose"):
        open_view("quiet")


def test_observe_does_not_import_torch():
    check = (
        "import sys, lockstep.observe.live, lockstep.observe.loggers, lockstep.observe.metrics;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", check], timeout=60).returncode == 0


def test_the_start_of_a_run_has_a_row_of_words():
    lines = []
    View(lines.append).step({"step": -1, "eval/greedy/mean@1": 0.5})
    assert lines == ["eval  at the start: greedy 0.5"]
