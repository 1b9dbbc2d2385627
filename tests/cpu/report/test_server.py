"""The served report: runs that grow, end and go away, and search over everything stored."""

import base64
import contextlib
import json
import shutil
import socket
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote, urlsplit

import pytest
from command_line import refusal
from html_pages import drawn
from synthetic_runs import HOSTILE, write_run

from lockstep import report
from lockstep.errors import CheckpointError, RunError
from lockstep.report.server import MAX_CONNECTIONS, MAX_FOUND, ReportServer
from lockstep.store.run import RunDirectory, find_runs


def no_tokenizer(config):
    raise CheckpointError("the model is not on this machine")


def server_of(paths, **place):
    place = {"host": "127.0.0.1", "port": 0, **place}
    return ReportServer(paths, **place, tokenizer_of=no_tokenizer, recipe_of=lambda run: None)


@contextmanager
def served(*paths, **place):
    """(function that gets a path as text) of a server of these runs."""
    server = server_of(paths, **place)
    with server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()

        def get(path, **headers):
            request = urllib.request.Request(server.url + path, headers=headers)
            with urllib.request.urlopen(request) as answer:
                return answer.read().decode()

        get.url = server.url
        try:
            yield get
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("served")
    write_run(place / "first", seed=0, is_hostile=True)
    write_run(place / "beside" / "second", seed=1, noise=0.2, num_steps=24)
    return place


def test_the_list_shows_every_run_of_a_directory_with_its_state(place):
    with served(place) as get:
        rows = {row["key"]: row for row in json.loads(get("runs.json"))["runs"]}
        assert set(rows) == {"first", "beside/second"}
        first, second = rows["first"], rows["beside/second"]
        assert first["status"] == "finished" and (first["step"], first["num_steps"]) == (11, 12)
        assert first["level"] == "ok" and second["level"] == "warning"
        last = find_runs(place / "first")[0].metrics[-1]
        assert first["reward"] == last["reward/mean"] and first["k3"] == last["mismatch/k3"]
        page = get("")
        assert "runs.json" in page and "first" in page
        assert "connect-src 'self'" in page and "script-src 'sha256-" in page
        assert "report-data" in get(f"run/{quote('beside/second', safe='')}/")


def test_a_run_is_followed_while_it_grows_ends_and_goes_away(tmp_path):
    with served(tmp_path) as get:
        assert json.loads(get("runs.json")) == {"runs": []}
        with RunDirectory.create(tmp_path / "run", {"name": "quickstart", "steps": 3}) as run:
            (row,) = json.loads(get("runs.json"))["runs"]
            assert (row["status"], row["step"], row["verdict"]) == ("running", None, "")
            seen = json.loads(get("run/run/figures.json"))["live"]["version"]
            assert json.loads(get(f"run/run/figures.json?seen={seen}")) == {}, "nothing changed"
            run.log({"step": 0, "reward/mean": 0.25, "doctor/rows": 4, "doctor/causes": 0})
            fresh = json.loads(get(f"run/run/figures.json?seen={seen}"))
            assert fresh["runs"][0]["columns"]["reward/mean"] == [0.25]
            assert fresh["live"]["status"] == "running" and fresh["live"]["step"] == 0
            assert fresh["live"]["verdict"] == "consistent"
            run.log({"step": 1, "doctor/rows": 4, "doctor/causes": 1, "doctor/shifted": 1.0})
            seen = fresh["live"]["version"]
        fresh = json.loads(get(f"run/run/figures.json?seen={seen}"))
        assert fresh["live"]["status"] == "ended early", "the lock is free, and steps are missing"
        assert fresh["live"]["verdict"] == "shifted"
        with RunDirectory.open(tmp_path / "run") as run:
            assert json.loads(get("runs.json"))["runs"][0]["status"] == "running"
            run.rewind(0)
            assert json.loads(get("run/run/figures.json"))["live"]["step"] == 0
        shutil.rmtree(tmp_path / "run")
        with pytest.raises(urllib.error.HTTPError, match="404"):
            get("run/run/figures.json")


def test_search_finds_text_of_every_stored_trajectory(place):
    (run,) = find_runs(place / "beside")
    with served(place) as get:

        def search(text, key="beside/second"):
            return json.loads(get(f"run/{quote(key, safe='')}/search.json?text={quote(text)}"))

        stored = [record for split in run.splits() for record in run.trajectories(split=split)]
        found = search("i think LIMA.")
        wanted = [r for r in stored if "I think Lima." in str(r.trajectory.segments)]
        assert found["is_whole"] is (len(wanted) <= MAX_FOUND)
        assert len(found["trajectories"]) == min(len(wanted), MAX_FOUND) > 0
        steps = [each["step"] for each in found["trajectories"]]
        assert steps == sorted(steps, reverse=True), "the latest first"

        one = search(stored[5].trajectory.id)
        assert stored[5].trajectory.id in [each["id"] for each in one["trajectories"]]
        assert one["num_searched"] == len(stored) and one["is_whole"]
        assert search("assistant")["trajectories"] == [], "a name of the format is no text"
        assert search('{"keywords": ["')["trajectories"], "calls as the model wrote them"
        assert search(HOSTILE, "first")["trajectories"]
        assert search("")["trajectories"] == []


def test_a_damaged_run_is_said_and_the_others_are_shown(place, tmp_path):
    root = shutil.copytree(place, tmp_path / "runs")
    (root / "first" / "metrics.jsonl").write_text("broken\n")
    with served(root) as get:
        rows = {row["key"]: row for row in json.loads(get("runs.json"))["runs"]}
        assert "not a metrics row" in rows["first"]["error"]
        assert rows["beside/second"]["status"] == "finished"
        with pytest.raises(urllib.error.HTTPError, match="500") as raised:
            get("run/first/")
        assert "not a metrics row" in raised.value.read().decode()


def test_another_sites_page_cannot_read_the_runs(place):
    with served(place) as get:
        with pytest.raises(urllib.error.HTTPError, match="403"):
            get("runs.json", Host="example.com:80")
        assert get("runs.json", Host="localhost:1234")


@pytest.mark.parametrize(
    "address", ["nothing", "run/first/nothing", "run/none/", "run/../first/", "run/first"]
)
def test_what_does_not_exist_is_not_found(place, address):
    with served(place) as get, pytest.raises(urllib.error.HTTPError, match="404"):
        get(address)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::1", "::", "localhost"])
def test_a_key_opens_the_runs_to_those_who_have_it(place, host):
    def basic(password):
        return f"Basic {base64.b64encode(f':{password}'.encode()).decode()}"

    with served(place, host=host, key="k:1") as get:
        for given in ("Bearer k:1", basic("k:1"), "basic " + basic("k:1")[6:]):
            assert json.loads(get("runs.json", Authorization=given))["runs"]
        assert json.loads(get("runs.json", Authorization=basic("k:1"), Host="any.name"))["runs"]
        for given in ("", "Bearer", "Bearer k", basic("k"), "Basic k:1", "Basic !", "k:1"):
            with pytest.raises(urllib.error.HTTPError, match="401") as raised:
                get("runs.json", Authorization=given)
            assert raised.value.headers["WWW-Authenticate"] == "Basic"
            assert "LOCKSTEP_KEY" in raised.value.read().decode()


@pytest.mark.parametrize(
    "request_of", [b"", b"GET", b"GET / HTTP/1.1\r\n", b"GET / HTTP/1.1\r\nA: b"]
)
def test_half_requests_hold_no_thread(place, request_of, monkeypatch):
    monkeypatch.setattr(report.server, "READ_SECONDS", 1.0)
    before = threading.active_count()
    with served(place) as get:
        address = urlsplit(get.url).hostname, urlsplit(get.url).port
        held = [socket.create_connection(address) for _ in range(MAX_CONNECTIONS + 40)]
        for each in held:
            with contextlib.suppress(OSError):
                each.sendall(request_of)
        assert json.loads(get("runs.json"))["runs"], "answered while they wait"
        most, until = MAX_CONNECTIONS + 8, time.monotonic() + 5
        while threading.active_count() - before > most and time.monotonic() < until:
            time.sleep(0.1)  # threads of connections that were turned away end late
        assert threading.active_count() - before <= most
        until = time.monotonic() + 60  # a busy machine closes them late
        while threading.active_count() - before > 2 and time.monotonic() < until:
            with contextlib.suppress(OSError):
                held[-1].sendall(b"x")  # however slowly it goes on
            time.sleep(0.1)
        assert threading.active_count() - before <= 2
        for each in held:
            each.close()


def test_wrong_arguments_are_one_sentence(place, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("LOCKSTEP_KEY", raising=False)
    with pytest.raises(RunError, match="is no directory: expected a run"):
        server_of([tmp_path / "no"])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        busy = str(taken.getsockname()[1])
        for words, text in (
            (
                ["--host", "0.0.0.0"],
                "--host 0.0.0.0 can be reached from other machines, so it needs",
            ),
            (["--host", "::"], "--host :: can be reached from other machines, so it needs a key"),
            (["--host", "no.such.host.invalid"], "needs a key: set LOCKSTEP_KEY"),
            (["--port", "99999"], "--host 127.0.0.1 --port 99999: "),
            (["--port", "-1"], "--host 127.0.0.1 --port -1: "),
            (["--port", busy], f"--host 127.0.0.1 --port {busy}: Address already in use. Another"),
        ):
            said = refusal("report", place, "--serve", *words, capsys=capsys)
            assert text in said and "Traceback" not in said
        monkeypatch.setenv("LOCKSTEP_KEY", "k")
        for host in ("no.such.host.invalid", "a..b", "192.0.2.1"):
            said = refusal("report", place, "--serve", "--host", host, capsys=capsys)
            assert f"--host {host} --port 0: " in said
    said = refusal("report", place, "--serve", "--out", "x.html", capsys=capsys)
    assert "--serve writes no file" in said
    said = refusal("report", place / "first", "--port", "80", capsys=capsys)
    assert "--host and --port belong to --serve" in said


def test_a_browser_follows_a_run_without_an_error(place, tmp_path):
    with served(place) as get:
        runs = drawn(get.url, tmp_path / "profile", waits="--timeout=2500")
        assert runs.count('href="run/') == 2 and "finished" in runs
        page = drawn(f"{get.url}run/first/", tmp_path / "profile", waits="--timeout=2500")
    assert page.count('class="curve"') >= 10 and "Search all stored" in page
    assert "Shown first: " in page and "step 12 of 12" in page


def test_every_part_of_the_served_pages_is_in_ascii():
    for name in ("runs.html", "runs.js", "live.js"):
        (Path(find_runs.__code__.co_filename).parents[1] / "report" / name).read_text("ascii")
