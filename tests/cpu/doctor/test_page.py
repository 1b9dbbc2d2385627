"""The diagnosis as a page: one file that needs nothing, runs nothing foreign, within its size."""

import base64
import hashlib
import json
import re
from importlib.resources import files

import numpy as np
import pytest
from array_dumps import NUM_TOKENS, ArrayDump, make_rows
from html_pages import Page, drawn

import lockstep
from lockstep.doctor import html_page as doctor_page
from lockstep.doctor.html_page import row_document, rows_to_show, write_page
from lockstep.doctor.rows import Rows
from lockstep.errors import ConfigError
from lockstep.testing.tokenizers import byte_tokenizer
from lockstep.types import Message

HOSTILE = "</script><script>alert(1)</script><!-- <img src=x onerror=alert(2)>"


@pytest.fixture(scope="module")
def diagnosis():
    """Log-probs of six rows are shifted, whose names and dialogues are hostile."""
    rows = make_rows(shifted=range(6))
    dialogue = tuple(Message(role=m.role, name=m.name, content=HOSTILE) for m in rows.messages[0])
    names = tuple(f"{HOSTILE}{i}" if i < 6 else f"row-{i}" for i in range(len(rows)))
    ids, hostile = rows.token_ids.copy(), byte_tokenizer().encode(HOSTILE)
    ids.reshape(len(rows), NUM_TOKENS)[:, : len(hostile)] = hostile
    rows = rows.with_(row_ids=names, messages=(dialogue,) * len(rows), token_ids=ids)
    return lockstep.diagnose(ArrayDump(rows, trainer="verl"), tokenizer=byte_tokenizer())


@pytest.fixture(scope="module")
def written(diagnosis, tmp_path_factory):
    return write_page(diagnosis, tmp_path_factory.mktemp("page") / "sub" / "doctor.html")


def document_in(path):
    page = Page(path.read_text())
    return json.loads("".join(text for _, a, text in page.raw if a.get("type")))


def test_the_page_is_one_file_whose_policy_allows_its_own_script_and_style_alone(written):
    html = written.read_text("ascii")
    page = Page(html)
    for tag, attributes in page.tags:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base", "form"), tag
        assert "src" not in attributes and attributes.get("href", "#").startswith("#"), tag
    code = [text for _, attributes, text in page.raw if "type" not in attributes]
    for text in code:
        for word in ("http", "url(", "@import", "fetch(", "XMLHttpRequest", "innerHTML"):
            assert word not in text, word
    (policy,) = (a["content"] for _, a in page.tags if "http-equiv" in a)
    hashes = [base64.b64encode(hashlib.sha256(t.encode()).digest()).decode() for t in code]
    assert sorted(re.findall(r"'sha256-([^']+)'", policy)) == sorted(hashes)
    assert "connect-src" not in policy and "unsafe" not in policy
    assert [tag for tag, _ in page.tags].count("script") == 2 and "<img" not in html


def test_it_says_what_the_diagnosis_says_and_shows_the_proof(diagnosis, written):
    document = document_in(written)
    assert document["diagnosis"] == json.loads(json.dumps(diagnosis.to_json()))
    shown = {t["id"]: t for t in document["trajectories"]}
    for finding in diagnosis.examination.findings:
        for evidence in finding.evidence:
            assert finding.check in shown[evidence.row]["why"]
    first = document["trajectories"][0]
    assert first["evidence"] and "hypotheses/shifted" in first["why"]
    assert "hypotheses/shifted" not in shown["row-9"]["why"] and not shown["row-9"]["evidence"]
    assert document["num_stored_trajectories"] == 20 and len(shown) == 20
    used = {str(i) for t in document["trajectories"] for s in t["segments"] for i in s["token_ids"]}
    assert set(document["vocabularies"][0]["texts"]) >= used


def test_a_row_is_a_chain_of_segments_that_holds_every_token_with_both_sides():
    rows = make_rows(1)
    segments = row_document(rows, why=["sample"])["segments"]
    assert [s["is_sampled"] for s in segments] == [False, True, False, True, False]
    assert [i for s in segments for i in s["token_ids"]] == rows.token_ids.tolist()
    assert [s["parent"] for s in segments] == [None, 0, 1, 2, 3]
    assert [s["begin"] for s in segments] == [0, 10, 50, 70, 110]
    turn = segments[1]
    for name in ("rollout_logprobs", "trainer_logprobs"):
        assert np.array_equal(np.array(turn[name], np.float32), getattr(rows, name)[10:50])
    assert segments[0]["rollout_logprobs"] is None
    roles = [[m["role"] for m in s["messages"]] for s in segments]
    assert roles == [["user"], ["assistant"], ["tool"], ["assistant"], []]


def test_a_dialogue_that_is_not_the_row_is_not_laid_over_it():
    rows = make_rows(1)
    said = row_document(rows.with_(messages=(rows.messages[0][:2],)), why=[])
    assert all(s["messages"] == [] for s in said["segments"])


def test_rows_without_tokens_and_without_log_probs_are_shown_as_they_are():
    rows = make_rows(1).with_(rollout_logprobs=None, trainer_logprobs=None, messages=None)
    said = row_document(rows, why=[])
    assert all(s["trainer_logprobs"] is None for s in said["segments"])
    assert said["first_divergence"] is None
    none = np.array([], np.int32)
    empty = Rows(row_ids=("a",), offsets=np.array([0, 0]), token_ids=none, loss_mask=none > 0)
    assert row_document(empty, why=[])["segments"] == []


def test_a_row_that_is_too_long_is_cut_around_its_worst_token(monkeypatch):
    monkeypatch.setattr(doctor_page, "MAX_ROW_TOKENS", 30)
    rows = make_rows(1)
    rollout = rows.rollout_logprobs.copy()
    rollout[80] -= 9
    said = row_document(rows.with_(rollout_logprobs=rollout), why=[])
    assert said["cut"] == f"tokens 65 to 94 of {NUM_TOKENS}" and said["first_divergence"] == 80
    assert said["segments"][0]["begin"] == 65
    assert sum(len(s["token_ids"]) for s in said["segments"]) == 30


def test_the_budget_holds_and_what_is_left_out_is_counted(diagnosis, tmp_path, monkeypatch):
    rows, num_left_out = rows_to_show(diagnosis, 200, 5 * NUM_TOKENS)
    assert len(rows) == 5 and num_left_out == 15
    assert all(row["evidence"] for row in rows), "the proof comes first"
    whole = write_page(diagnosis, tmp_path / "whole.html").stat().st_size
    monkeypatch.setattr(doctor_page, "MAX_PAGE_BYTES", whole - 20_000)
    smaller = write_page(diagnosis, tmp_path / "smaller.html", num_rows=20)
    assert smaller.stat().st_size <= whole - 20_000
    assert len(document_in(smaller)["trajectories"]) == 10


def test_a_healthy_dump_and_one_that_could_not_be_checked_have_a_page(tmp_path):
    healthy = lockstep.diagnose(ArrayDump(make_rows(4)))
    assert document_in(write_page(healthy, tmp_path / "a.html"))["vocabularies"] == [None]
    rows = make_rows(4).with_(rollout_logprobs=None, trainer_logprobs=None)
    lacking = lockstep.diagnose(ArrayDump(rows), only=["hypotheses/shifted"])
    said = document_in(write_page(lacking, tmp_path / "b.html"))["diagnosis"]
    assert said["outcome"] == "not_judged" and said["not_checkable"]["hypotheses/shifted"]


def test_a_page_that_cannot_be_written_is_a_clear_error(diagnosis, tmp_path):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file" / "page.html", tmp_path):
        with pytest.raises(ConfigError, match="cannot be written there"):
            write_page(diagnosis, out)


def test_every_file_of_the_page_is_shipped_and_in_ascii():
    for name in ("doctor.html", "doctor.css", "doctor.js", "evidence.js"):
        files("lockstep.report").joinpath(name).read_text("ascii")


def test_a_browser_draws_the_page_without_an_error_and_runs_no_foreign_script(written, tmp_path):
    body = drawn(written.as_uri(), tmp_path / "profile")
    assert body.count('class="card cause"') == 1 and body.count('<table class="proof-table"') == 2
    assert body.count('class="bar-before"') >= 4 and body.count('class="bar-after"') >= 4
    assert body.count('role="option"') == 20 and "token sampled painted" in body
    assert "<img" not in body
