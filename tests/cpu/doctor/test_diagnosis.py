"""The verdict: worst cause first, with proof, remedy and command; what is ruled out, and what
could not be checked."""

import io
import json
from importlib.resources import files

import numpy as np
import pytest
from array_dumps import ArrayDump, make_rows
from rich.console import Console

import lockstep
from lockstep.cli import main
from lockstep.doctor.diagnosis import EXIT_CODES, evidence_to_json
from lockstep.doctor.examine import RowChoice
from lockstep.doctor.facts.base import FACTS, Contradiction, fact
from lockstep.doctor.findings import Evidence
from lockstep.errors import ConfigError
from lockstep.store.run import RunDirectory
from lockstep.testing.tokenizers import byte_tokenizer

EXAMPLE = str(files("lockstep.doctor").joinpath("example.parquet"))


def summary(diagnosis):
    """The screen as plain text."""
    out = io.StringIO()
    diagnosis.show(Console(file=out, width=80, highlight=False, no_color=True))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


@pytest.fixture(scope="module")
def broken():
    dump = ArrayDump(make_rows(shifted=range(6)), trainer="verl")
    return lockstep.diagnose(dump, tokenizer=byte_tokenizer())


def test_a_healthy_dump_is_consistent_and_what_was_tried_is_ruled_out():
    found = lockstep.diagnose(ArrayDump(make_rows()))
    assert found.outcome == "consistent" and EXIT_CODES[found.outcome] == 0
    assert found.causes == []
    (shifted,) = (f for f in found.with_verdict("consistent") if f.check == "hypotheses/shifted")
    assert shifted.verdict == "consistent"
    text = summary(found)
    assert text.startswith("CONSISTENT  dump.parquet")
    assert "ruled out" in text and "facts/mask_author" in text
    assert "hypotheses/shifted" in found.ruled_out
    # Nothing was predicted, so nothing was tested.
    assert "hypotheses/exchanged" not in found.ruled_out and "not shown" in text
    assert "kernel_noise" in found.cannot_show and "boundary" in found.cannot_show
    assert "fillers" not in found.cannot_show, "the numbers are there"
    assert "differs" not in text.lower()


@pytest.mark.parametrize("facts", [{}, {"is_one_process": True}, {"trainer": "lockstep"}])
def test_log_probs_that_are_equal_in_every_bit_are_asked_about(facts):
    rows = make_rows()
    dump = ArrayDump(rows.with_(trainer_logprobs=rows.rollout_logprobs), **facts)
    notes = lockstep.diagnose(dump).to_json()["notes"]
    assert [one for one in notes if "was one column copied" in one] == notes
    assert len(notes) == (not facts) and not lockstep.diagnose(ArrayDump(rows)).notes


def test_a_gap_that_no_cause_explains_differs_and_says_what_would_tell_more():
    rows = make_rows()
    wild = rows.trainer_logprobs.copy()
    wild[::7] *= 0.3
    wild[::11] -= 1.0
    found = lockstep.diagnose(ArrayDump(rows.with_(trainer_logprobs=wild)))
    assert found.causes == [] and found.outcome == "differs"
    assert found.examination.unexplained_k2 == 1
    assert "engine" in found.next_steps[0] and "--ladder" in found.next_steps[-1]
    assert found.headline.startswith("unexplained: k2 ")
    assert found.cannot_show == {} and "hypotheses/shifted" not in found.ruled_out
    assert "--ladder" in summary(found)
    one = lockstep.diagnose(ArrayDump(rows.with_(trainer_logprobs=wild)), only=["facts/after_stop"])
    assert one.next_steps == [] and one.outcome != "differs"


def test_a_cause_has_its_share_its_proof_its_remedy_and_its_command(broken):
    assert broken.outcome == "differs" and EXIT_CODES[broken.outcome] == 1
    cause, finding = broken.causes[0]
    assert cause.name == "shifted" and broken.share_of("shifted") > 0.95
    certainty, why = broken.certainty_of(cause, finding)
    assert certainty == "likely" and "beyond chance" in why
    least, most = broken.range_of("shifted")
    assert least <= broken.share_of("shifted") <= most
    assert broken.remedy_for(cause) == cause.in_trainers.get("verl", cause.remedy)
    assert broken.command_for(finding) == "lockstep doctor dump.parquet --only hypotheses/shifted"
    assert broken.examination.after.total.k2 < 0.05 * broken.examination.gap.k2  # ends of rows


def test_the_screen_shows_the_tokens_that_prove_it_with_both_sides(broken):
    text = summary(broken)
    (evidence, *_) = broken.causes[0][1].evidence
    rows = next(iter(broken.dump.find(names={evidence.row}).values()))
    worst = evidence.begin + int(np.nanargmax(abs(rows.gap[evidence.begin : evidence.end])))
    line = next(part for part in text.splitlines() if part.split()[:1] == [str(worst)])
    assert f"{rows.rollout_logprobs[worst]:.4f}" in line
    assert f"{rows.trainer_logprobs[worst]:.4f}" in line
    assert f"{rows.token_ids[worst]}" in line
    assert max(map(len, text.splitlines())) <= 80
    assert text.index("1. shifted") < text.index("unexplained")
    assert "--only hypotheses/shifted" in text


def test_a_terminal_gets_colours_and_a_pipe_gets_none(broken):
    out = io.StringIO()
    broken.show(Console(file=out, force_terminal=True, width=80, color_system="truecolor"))
    assert "\x1b[" in out.getvalue() and "\x1b[" not in summary(broken)


def test_sampled_and_expected_ids_stand_side_by_side_and_hostile_text_moves_nothing():
    @fact("substituted", claim="ids are as sampled")
    def substituted(rows, setting):
        begin = rows.offsets[:-1] + 10
        yield Contradiction(
            cause="reencoded", note="here\x1b[31m[bold]\u202e\r\n", begin=begin, end=begin + 4,
            expected=[(*rows.token_ids[b : b + 2].tolist(), 7, 8, 9) for b in begin],
            repair=lambda rows: rows,
        )  # fmt: skip

    try:
        dump = ArrayDump(make_rows())
        diagnosis = lockstep.diagnose(dump, tokenizer=byte_tokenizer())
    finally:
        del FACTS["facts/substituted"]
    out = io.StringIO()
    diagnosis.show(Console(file=out, width=80, no_color=True))
    text = out.getvalue()
    assert "\x1b" not in text and "\u202e" not in text and "\\x1b[31m[bold]" in text
    cause, finding = diagnosis.causes[0]
    row = next(iter(dump.find(names={finding.evidence[0].row}).values()))
    line = next(part for part in text.splitlines() if part.split()[:1] == ["12"])
    assert str(row.token_ids[12]) in line and " 7" in line
    certainty, why = diagnosis.certainty_of(cause, finding)
    assert certainty == "proved" and "records contradict" in why
    assert diagnosis.share_of(cause.name) == 0


def test_what_could_not_be_checked_says_what_it_lacks_and_how_to_get_it():
    rows = make_rows().with_(rollout_logprobs=None)
    why = "this format has no such column; set logger.logprobs=true"
    dump = ArrayDump(rows, lacks={"rollout_logprobs": why})
    found = lockstep.diagnose(dump, only=["hypotheses/shifted"])
    assert found.outcome == "not_judged" and EXIT_CODES[found.outcome] == 2
    (finding,) = found.with_verdict("not_checkable")
    assert found.missing_for(finding) == [f"rollout_logprobs: {why}"]
    text = summary(found)
    assert "NOT JUDGED" in text and "logger.logprobs=true" in " ".join(text.split())
    assert "not measured" in text


def test_a_check_by_itself_says_what_it_says_among_all(broken):
    alone = lockstep.diagnose(broken.dump, only=["hypotheses/shifted"], tokenizer=byte_tokenizer())
    assert [f.check for f in alone.examination.findings] == ["hypotheses/shifted"]
    among = next(f for f in broken.examination.findings if f.check == "hypotheses/shifted")
    assert alone.examination.findings[0] == among
    with pytest.raises(ConfigError, match="'hypotheses/shifted'"):
        lockstep.diagnose(broken.dump, only=["hypotheses/shiftet"])


def test_the_json_is_strict_and_says_what_the_screen_says(broken):
    said = json.loads(json.dumps(broken.to_json(), allow_nan=False))
    assert said["outcome"] == "differs" and said["causes"][0]["cause"] == "shifted"
    assert said["causes"][0]["share_k2"] == broken.share_of("shifted")
    assert said["unexplained"]["gap"]["k2"] == broken.examination.after.total.means()["k2"]
    labels = [p["label"] for p in said["where"]["before"]["parts"]["turn"]]
    assert labels == ["0", "1"]
    assert {s["step"] for s in said["where"]["before"]["steps"]} == {0, 1, 2, 3}
    assert set(said["ruled_out"]) == {f.check for f in broken.with_verdict("consistent")}


def test_an_empty_dump_could_not_be_checked_or_is_consistent_and_never_breaks():
    found = lockstep.diagnose(ArrayDump(make_rows(1).take([])))
    assert found.outcome != "differs"
    json.dumps(found.to_json(), allow_nan=False)
    assert "0 rows" in summary(found)


def test_of_evidence_with_very_many_tokens_the_first_are_given():
    piece = Evidence(row="a", begin=5, end=9005, note="all", expected_ids=tuple(range(9000)))
    said = evidence_to_json(piece)
    assert said["expected_ids"] == list(range(2000)) and said["end"] == 2005
    assert said["note"] == "all (the first 2000 tokens)"
    short = evidence_to_json(Evidence(row="a", begin=5, end=7, note="two", expected_ids=(1, 2)))
    assert (short["end"], short["expected_ids"]) == (7, (1, 2))


def test_a_gap_of_float_noise_is_not_divided():
    rows = make_rows()
    trainer = rows.rollout_logprobs * np.float32(1 + 1e-6)
    found = lockstep.diagnose(ArrayDump(rows.with_(trainer_logprobs=trainer)))
    assert found.is_float_noise and found.unexplained == []
    assert "both sides agree to float noise" in summary(found)
    assert found.to_json()["unexplained"]["is_float_noise"] is True


# -- rows to look at ----------------------------------------------------------------------------


def test_the_worst_rows_and_a_sample_of_all_are_chosen_in_bounded_memory():
    rows = make_rows(900, shifted=(3, 700))
    choice = RowChoice()
    for chunk in ArrayDump(rows, chunk=11).chunks():
        choice.add(chunk)
    numbers = choice.numbers
    assert {n for n, _ in numbers[:2]} == {3, 700}
    assert len({n for n, _ in numbers}) == len(numbers) <= 400
    sampled = [n for n, why in numbers if why == "sample"]
    assert len(sampled) > 100 and min(sampled) < 200 and max(sampled) > 700
    assert len(choice.worst) == 200
    assert sum(why == "sample" for _, why in numbers) <= 200
    found = ArrayDump(rows).find(numbers=[5, 700], names=["row-8"])
    assert {n: r.row_ids for n, r in found.items()} == {
        5: ("row-5",), 700: ("row-700",), 8: ("row-8",),
    }  # fmt: skip


def test_exit_codes_and_errors_of_the_verb(tmp_path, capsys):
    assert main(["doctor", str(tmp_path / "none")]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "does not exist. Expected the directory of a run" in said
    with RunDirectory.create(tmp_path / "run", {"recipe": "x"}):
        pass
    assert main(["doctor", str(tmp_path / "run"), "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"] == "DataError"
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"token_ids": [1], "loss_mask": [true]}\n')
    assert main(["doctor", str(rows), "--only", "hypotheses/shifted", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["rows"] == 1
    assert main(["doctor", str(rows), "--tokenizer", str(tmp_path)]) == 2
    assert "tokenizer.json" in capsys.readouterr().err


def test_the_verb_says_it_on_the_screen_as_json_and_as_a_page(tmp_path, capsys):
    page = tmp_path / "page.html"
    assert main(["doctor", EXAMPLE, "--out", str(page)]) == 1
    text = capsys.readouterr().out
    assert text.startswith("DIFFERS") and str(page)[:30] in text and page.stat().st_size > 50_000
    assert main(["doctor", EXAMPLE, "--json", "--only", "hypotheses/shifted"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert [c["cause"] for c in said["causes"]] == ["shifted"] and said["page"] == ""
    assert main(["doctor", EXAMPLE, "--only", "hypotheses/shift"]) == 2
