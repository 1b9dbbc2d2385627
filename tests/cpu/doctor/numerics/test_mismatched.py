"""A model or a tokenizer that is not the dump's is said to be one, and no cause is named for it."""

import json
import re
import shutil

import numpy as np
import pytest
from sampled_rows import ArrayDump, noisy, routed, sampled_rows, scored

from lockstep.doctor.checks.rows import Rows
from lockstep.doctor.diagnose import diagnose
from lockstep.doctor.inputs.base import Facts
from lockstep.doctor.inputs.native import write_rows
from lockstep.doctor.tokenization import settings_beside, why_unlike
from lockstep.errors import DataError
from lockstep.models.locate import locate_model
from lockstep.renderers.tokenizer import Tokenizer
from lockstep.testing.tokenizers import byte_tokenizer

MOE, DENSE = "tiny-gpt-oss", "tiny-qwen3"


def both_sides(model):
    return sampled_rows(model).with_(rollout_logprobs=scored(model), trainer_logprobs=scored(model))


def finding(diagnosis, name):
    return next(f for f in diagnosis.examination.findings if f.check == name)


def torn_weights(tmp_path, model):
    """A copy of the model whose weights cannot be loaded."""
    place = tmp_path / "model"
    shutil.copytree(locate_model(model), place)
    (place / "model.safetensors").write_bytes(b"")
    return place


# -- a model ---------------------------------------------------------------------------------------


def test_an_id_beyond_the_models_vocabulary_is_named_before_weights_are_loaded(tmp_path):
    rows = both_sides(DENSE)
    ids = rows.token_ids.copy()
    ids[rows.offsets[3] + 7] = 560
    place = torn_weights(tmp_path, DENSE)
    with pytest.raises(DataError) as caught:
        diagnose(ArrayDump(rows.with_(token_ids=ids)), model=place)
    assert str(caught.value) == (
        f"arrays: row row-3, token 7 has the id 560, and {place} has ids up to 549: it is another "
        "model than that of the rows. Give theirs (--model DIR), or leave --model out."
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda r: np.concatenate([r, r], 1),
            r"row row-0, token 0 has the experts \[\[\d, \d\], \[\d, \d\], \[\d, \d\]",
        ),
        (lambda r: r[..., :1], r"token 0 has the experts \[\[\d\], \[\d\]\]"),
        (lambda r: np.where(r == 3, 31, r), r"experts .*\b31\b"),
    ],
)
def test_routes_of_other_layers_or_experts_are_named(tmp_path, change, said):
    rows = both_sides(MOE).with_(routed_experts=change(routed(MOE)))
    with pytest.raises(DataError) as caught:
        diagnose(ArrayDump(rows), model=torn_weights(tmp_path, MOE))
    assert re.search(said, str(caught.value)), str(caught.value)
    assert "has 2 layers that send a token to 2 of 4 experts" in str(caught.value)


def test_a_dump_that_names_a_model_of_another_size_is_said_to_be_of_it(tmp_path):
    place = torn_weights(tmp_path, DENSE)
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    dump = ArrayDump(both_sides(DENSE), Facts(model=DENSE))
    with pytest.raises(
        DataError, match=rf"of {DENSE} \(arch.* num_layers 2, .* has arch.* num_layers 1, .*--model"
    ):
        diagnose(dump, model=place)


def test_other_weights_of_the_model_that_the_dump_names_are_taken(tmp_path):
    shutil.copytree(locate_model(DENSE), tmp_path / "step-7")
    dump = ArrayDump(both_sides(DENSE), Facts(model=DENSE))
    found = diagnose(dump, model=tmp_path / "step-7")
    assert "agrees with the model" in finding(found, "numerics/other_weights").measured


@pytest.mark.parametrize("gap", [0.0, 0.01])
def test_a_model_far_from_two_sides_that_agree_is_no_evidence(gap):
    other = noisy(DENSE, 0.5) - 0.1
    noise = np.random.default_rng(0).normal(0, gap, len(other)).astype(np.float32)
    rows = sampled_rows(DENSE).with_(rollout_logprobs=other, trainer_logprobs=other + noise)
    found = diagnose(ArrayDump(rows), model=DENSE)
    assert not found.causes
    of_model = [f for f in found.examination.findings if f.check.startswith("numerics/")]
    assert {f.verdict for f in of_model} == {"not_checkable"}
    [said] = {told for f in of_model for told in found.missing_for(f)}
    assert "tiny-qwen3 is another model than that of the rows, or another checkpoint" in said
    assert finding(found, "tokens/shifted").verdict == "consistent"


def test_two_sides_in_bfloat16_are_of_the_model():
    rows = sampled_rows(DENSE).with_(
        rollout_logprobs=scored(DENSE, "bfloat16"), trainer_logprobs=scored(DENSE, "bfloat16")
    )
    found = diagnose(ArrayDump(rows), model=DENSE)
    assert finding(found, "numerics/other_weights").verdict == "consistent"


# -- a tokenizer -----------------------------------------------------------------------------------


def test_ids_beyond_a_tokenizer_that_was_named_are_refused(tmp_path):
    rows = both_sides(DENSE)
    rows = rows.with_(token_ids=rows.token_ids + 700)
    dump = tmp_path / "rows.parquet"
    write_rows(dump, [rows], Facts(model=DENSE))
    with pytest.raises(DataError) as caught:
        diagnose(dump, tokenizer=DENSE)
    first = rows.token_ids[0]
    assert f"{dump}: 100% of the rows' ids, up to" in str(caught.value)
    assert f"which has 550: it is of another model. The first is {first}, row row-0, token 0." in (
        str(caught.value)
    )
    found = diagnose(dump)  # the dump's own word contradicts its ids: the rest can be told
    assert "which has 550" in found.lacks["tokenizer"]


def spelt(rows: Rows, tokenizer: Tokenizer) -> Rows:
    return rows.with_(texts=tuple(tokenizer.decode(rows.token_ids[t]) for t in rows.slices))


def test_a_tokenizer_by_which_rows_do_not_spell_their_texts_is_of_another_model():
    tokenizer = Tokenizer.from_file(locate_model(DENSE))
    rows = spelt(both_sides(DENSE), tokenizer)
    other = np.random.default_rng(0).permutation(550)  # the vocabulary of another model
    foreign = rows.with_(token_ids=other[rows.token_ids].astype(np.int32))
    assert why_unlike(tokenizer, rows) == ""
    why = why_unlike(tokenizer, foreign)
    assert "the ids of 36 of 36 rows do not spell the texts recorded with them" in why
    assert "row row-0 is '" in why
    dump = ArrayDump(foreign)
    found = diagnose(dump, tokenizer=tokenizer)
    checks = {f.check for f in found.with_verdict("not_checkable") if "tokenizer" in f.lacks}
    assert "tokens/reencoded" in checks and not found.causes
    assert "do not spell" in found.missing_for(finding(found, "tokens/reencoded"))[0]


def test_the_tokenizer_of_another_model_names_no_cause_of_text():
    found = diagnose("example", tokenizer="tiny-instructions")
    lacking = [f for f in found.with_verdict("not_checkable") if "tokenizer" in f.lacks]
    assert {"tokens/reencoded", "tokens/rerendered"} <= {f.check for f in lacking}
    assert all("ids of 96 of 96 rows do not spell" in found.missing_for(f)[0] for f in lacking)
    assert not {"reencoded", "wrong_template"} & {cause.name for cause, _ in found.causes}
    assert "reencoded" in [cause.name for cause, _ in diagnose("example").causes]


def test_texts_that_a_program_changed_or_mixed_up_do_not_make_a_tokenizer_foreign():
    tokenizer = byte_tokenizer()
    text = "the quick brown fox jumps over the lazy dog"
    ids = np.array(tokenizer.encode(text), np.int32)
    rows = Rows(
        row_ids=("a", "b"),
        offsets=np.array([0, len(ids), 2 * len(ids)]),
        token_ids=np.tile(ids, 2),
        loss_mask=np.ones(2 * len(ids), np.bool_),
        texts=(text.upper().replace(" ", "\n"), text[:30] + " and was cut off"),
    )
    assert why_unlike(tokenizer, rows) == ""
    assert why_unlike(tokenizer, rows.with_(texts=("short", None))) == ""


def test_settings_beside_a_model_are_read_or_missing(tmp_path):
    path = tmp_path / "generation_config.json"
    assert settings_beside(tmp_path, path.name) is None
    path.write_text("[1]")
    assert settings_beside(tmp_path, path.name) is None
    path.write_text('{"top_p": 0.9}')
    assert settings_beside(tmp_path, path.name) == {"top_p": 0.9}
