"""Every row of a run or a dump over HTTP: sorted, filtered, opened; only read, and only here."""

import http.client
import json
import re
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from contextlib import contextmanager
from importlib.resources import files

import numpy as np
import pytest
from array_dumps import ArrayDump, make_rows
from test_page import Page, draw

import lockstep
from lockstep.cli import main
from lockstep.doctor import browse
from lockstep.doctor import html_page as doctor_page
from lockstep.doctor.browse import PAGE_ROWS, BrowsedRows
from lockstep.report.server import RowServer
from lockstep.store.run import RunDirectory
from lockstep.testing.tokenizers import byte_tokenizer
from lockstep.types import Group, Message, Sample, Task, Trajectory


@contextmanager
def serving(rows):
    with RowServer(rows) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def get(server, path):
    with urllib.request.urlopen(server.url + path, timeout=10) as answer:
        return json.loads(answer.read())


def status_of(server, path):
    try:
        urllib.request.urlopen(server.url + path, timeout=10).close()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())["error"]
    return 200, ""


@pytest.fixture(scope="module")
def dump():
    return ArrayDump(make_rows(130, shifted=range(6)))


@pytest.fixture(scope="module")
def server(dump):
    rows = BrowsedRows(lockstep.diagnose(dump, tokenizer=byte_tokenizer()))
    with serving(rows) as server:
        yield server


def test_lists_are_paged_and_sorted(server, dump):
    first = get(server, "rows")
    assert (first["total"], first["pages"], len(first["rows"])) == (130, 3, PAGE_ROWS)
    sizes = [
        row["largest"] for page in range(3) for row in get(server, f"rows?page={page}")["rows"]
    ]
    assert len(sizes) == 130 and sizes == sorted(sizes, reverse=True)
    assert {row["number"] for row in first["rows"][:6]} == set(range(6))
    assert get(server, "rows?page=99")["rows"] == []
    rewards = [row["reward"] for row in get(server, "rows?sort=low")["rows"]]
    assert rewards == sorted(rewards)
    assert [r["number"] for r in get(server, "rows?sort=order")["rows"][:3]] == [0, 1, 2]


def test_rows_are_found_by_check_turn_kind_and_name(server, dump):
    touched = get(server, "rows?check=shifted")
    assert {row["number"] for row in touched["rows"]} == set(range(6))
    assert get(server, "rows?check=tokens/shifted")["total"] == 6
    of_turn = [get(server, f"rows?turn={turn}")["total"] for turn in (0, 1)]
    assert sum(of_turn) == 130 and min(of_turn) > 10
    for row in get(server, "rows?turn=1")["rows"][:3]:
        gap = np.abs(dump.rows.take([row["number"]]).gap)
        assert 70 <= int(np.nanargmax(gap)) < 110
    kinds = {row["kind"] for row in get(server, "rows?kind=number")["rows"]}
    assert kinds <= {"number"}
    assert {r["id"] for r in get(server, "rows?text=ROW-12")["rows"]} == {
        "row-12", *(f"row-{i}" for i in range(120, 130)),
    }  # fmt: skip
    assert get(server, "rows?check=none")["total"] == get(server, "rows?kind=none")["total"] == 0


def test_a_row_is_served_whole_with_the_text_of_its_ids(server, dump):
    found = get(server, "row/2")
    assert [i for s in found["row"]["segments"] for i in s["token_ids"]] == (
        dump.rows.take([2]).token_ids.tolist()
    )
    assert found["row"]["evidence"] and "shifted" in found["row"]["why"]
    assert set(found["vocabulary"]["texts"]) >= {str(i) for i in dump.rows.take([2]).token_ids}
    before = dump.num_read
    get(server, "row/2")
    assert dump.num_read == before, "what was just seen is kept"


def test_a_row_that_is_too_long_is_served_in_pieces(server, monkeypatch):
    monkeypatch.setattr(doctor_page, "MAX_ROW_TOKENS", 50)
    shown = [get(server, f"row/2?first={first}")["row"] for first in (0, 50, 100, 10**9, -5)]
    sizes = [sum(len(s["token_ids"]) for s in row["segments"]) for row in shown]
    assert sizes == [50, 50, 20, 1, 50]
    assert [row["cut"] for row in shown[:3]] == [
        "tokens 0 to 49 of 120", "tokens 50 to 99 of 120", "tokens 100 to 119 of 120",
    ]  # fmt: skip
    assert status_of(server, "row/2?first=x")[0] == 400


def test_what_is_not_there_is_404_and_what_means_nothing_400(server):
    for path in ("row/130", "row/-1", "row/x", "row/", "row/1e3", "row/" + "9" * 40, "secret",
                 "../etc/passwd", "row/%2e%2e", "rows/"):  # fmt: skip
        assert status_of(server, path)[0] == 404, path
    for query in ("sort=evil", "page=x", "turn=x"):
        assert status_of(server, f"rows?{query}")[0] == 400, query
    assert get(server, "rows?page=-3")["page"] == 0


def test_it_answers_this_machine_alone_reads_only_and_sends_nothing_to_others(server):
    host, port = server.server_address[:2]
    for name, code in ((f"127.0.0.1:{port}", 200), (f"localhost:{port}", 200),
                       (f"[::1]:{port}", 200), ("evil.example", 403), ("", 403)):  # fmt: skip
        connection = http.client.HTTPConnection(host, port, timeout=10)
        connection.request("GET", "/rows", headers={"Host": name})
        answer = connection.getresponse()
        assert answer.status == code, name
        answer.read()
        assert answer.headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert answer.headers.get("Access-Control-Allow-Origin") is None
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        connection.close()
    for method in ("POST", "PUT", "DELETE"):
        connection = http.client.HTTPConnection(host, port, timeout=10)
        connection.request(method, "/rows")
        assert connection.getresponse().status == 501
        connection.close()


def test_the_page_may_ask_its_own_server_and_nobody_else(server):
    with urllib.request.urlopen(server.url, timeout=10) as answer:
        html = answer.read().decode("ascii")
    (policy,) = (a["content"] for _, a in Page(html).tags if "http-equiv" in a)
    assert policy.startswith("default-src 'none'; ") and policy.endswith("connect-src 'self'")
    assert "unsafe" not in policy and not re.findall(r"https?://", policy)


def test_a_browser_draws_the_list_and_the_worst_row(server, tmp_path):
    class Url:
        def as_uri(self):
            return server.url

    errors, body = draw(Url(), tmp_path)
    assert "CONSOLE" not in errors, errors
    assert body.count('role="option"') == PAGE_ROWS and "token sampled painted" in body


# -- a run --------------------------------------------------------------------------------------


def episode(name, *, gap, status="finished"):
    """(trajectory, its training row with the trainer's log-probs)."""
    out = Trajectory(id=name, task_id="world-7", status=status)
    prompt = out.observe([1, 2, 3], messages=[Message(role="user", content="Where?")])
    leaf = out.record([4, 5], logprobs=[-0.5, -0.25], parent=prompt, prompt_ids=[1, 2, 3])
    out.rewards = {leaf: 0.5}
    row: Sample = out.row(leaf)
    rollout = row.columns["rollout_logprobs"]
    row.set("logprobs", np.where(row.loss_mask, rollout - gap, np.nan).astype(np.float32))
    row.set("advantages", np.zeros(len(row), np.float32))
    return out, row


def test_of_a_run_every_trajectory_is_served_evaluations_too(tmp_path, monkeypatch):
    with RunDirectory.create(tmp_path / "run", {"recipe": "x", "model": ""}) as run:
        for step in range(2):
            played = [episode(f"train/{step}/world-7/{i}", gap=0.1 * (i + 1)) for i in range(3)]
            group = Group(task=Task(id="world-7"), trajectories=[t for t, _ in played])
            run.write_trajectories(step, [group], samples=[row for _, row in played])
        test, _ = episode("greedy/0/world-9/0", gap=0.0, status="truncated")
        group = Group(task=Task(id="world-9"), trajectories=[test])
        run.write_trajectories(0, [group], split="greedy")
    rows = BrowsedRows(lockstep.diagnose(tmp_path / "run"))
    with serving(rows) as server:
        found = get(server, "rows")
        assert found["total"] == 7
        worst = found["rows"][0]
        assert worst["id"].endswith("/2") and worst["turn"] == 0
        assert worst["largest"] == pytest.approx(0.3, rel=1e-3)
        (tested,) = get(server, "rows?split=greedy")["rows"]
        assert tested["status"] == "truncated" and tested["largest"] is None
        assert get(server, "rows?status=truncated&split=train")["total"] == 0
        monkeypatch.setattr(browse, "MAX_ROW_TOKENS", 4)
        longest = get(server, f"row/{worst['number']}")["row"]
        assert [s["token_ids"] for s in longest["segments"]] == [[1, 2, 3], [4, 5]]
        assert longest["segments"][1]["trainer_logprobs"] == pytest.approx([-0.8, -0.55])
        monkeypatch.undo()
        whole = get(server, f"row/{tested['number']}")["row"]
        assert whole["id"] == test.id and whole["segments"][0]["messages"][0]["content"] == "Where?"


def test_the_command_says_where_and_ends_on_an_interrupt(tmp_path):
    example = str(files("lockstep.doctor").joinpath("example.parquet"))
    process = subprocess.Popen(
        [sys.executable, "-m", "lockstep.cli", "report", example, "--serve", "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        url = json.loads(process.stdout.readline())["url"]
        with urllib.request.urlopen(f"{url}rows", timeout=20) as answer:
            assert json.loads(answer.read())["total"] == 96
        process.send_signal(2)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.communicate()


def test_wrong_uses_are_named(tmp_path, capsys):
    assert main(["report", "a", "b", "--serve"]) == 2
    assert "serves one run or one dump" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "none"), "--serve"]) == 2
    assert main(["report", "example", "--serve", "--port", "99999"]) == 2
    assert "--port 99999" in capsys.readouterr().err
