"""Chat templates that cannot do something: every check is made, or says why it cannot be."""

from itertools import combinations

import numpy as np
import pytest
from cpu.doctor.checks.text_dumps import played, rows_of
from full_counts import PROOF
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.doctor.checks.base import Check, Setting
from lockstep.doctor.checks.causes import CAUSES, Cause, add_cause
from lockstep.doctor.checks.examine import Stage, all_stages, examine
from lockstep.renderers.config import JinjaConfig
from lockstep.renderers.jinja.renderer import JinjaRenderer

_HEAD = """\
{%- for message in messages %}
{%- set before = messages[loop.index0 - 1].role if loop.index0 else '' %}
"""
_BODY = """\
{{- '<|im_start|>' ~ ('user' if message.role == 'tool' else message.role) ~ '\\n' }}
{%- if message.reasoning_content %}
{{- '<think>\\n' ~ message.reasoning_content ~ '\\n</think>\\n\\n' }}
{%- endif %}
{{- message.content }}
{%- for call in message.tool_calls %}
{{- '<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}
{{- call.function.arguments ~ '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
LACKS = {
    "tools": "tools",
    "a tool's reply": "message.role == 'tool'",
    "calls": "message.tool_calls",
    "a system message": "message.role == 'system'",
    "a late system message": "message.role == 'system' and not loop.first",
    "several replies": "message.role == 'tool' and before == 'tool'",
    "an empty reply": "message.role == 'tool' and not message.content",
    "a reply and a user": "message.role == 'user' and before == 'tool'",
    "two users in a row": "message.role == 'user' and before == 'user'",
    "a reply to come first": "loop.first and message.role == 'assistant'",
    "thinking": "message.reasoning_content",
}
"""Ability -> condition under which the template refuses."""

RENDERER, EPISODES = played("chatml", rows=12)
ROWS = {
    (engine, messages): rows_of(EPISODES, engine=engine, messages=messages)
    for engine in (False, True)
    for messages in (False, True)
}


def refusing(tmp_path, lacking):
    refusals = "".join(
        f'{{%- if {LACKS[name]} %}}{{{{ raise_exception("No {name}.") }}}}{{%- endif %}}\n'
        for name in lacking
    )
    path = tmp_path / "it.jinja"
    path.write_text(_HEAD + refusals + _BODY)
    return JinjaRenderer(RENDERER.tokenizer, JinjaConfig(template=str(path)))


def examined(rows, renderer):
    setting = Setting(
        tokenizer=renderer.tokenizer, renderer=renderer, stop_ids=frozenset(renderer.stop_ids)
    )
    stages = [Stage(checks=checks) for checks in all_stages().values()]
    has = frozenset(f for f in rows.__dataclass_fields__ if getattr(rows, f) is not None)
    return examine(lambda: [rows], stages, setting, has=has)


@settings(max_examples=200 if PROOF else 12, deadline=None)
@given(
    lacking=st.sets(st.sampled_from(sorted(LACKS)), min_size=1),
    engine=st.booleans(),
    messages=st.booleans(),
)
def test_whatever_a_template_refuses_no_check_fails_and_healthy_rows_have_no_cause(
    tmp_path_factory, lacking, engine, messages
):
    renderer = refusing(tmp_path_factory.mktemp("template"), sorted(lacking))
    findings = examined(ROWS[engine, messages], renderer).findings
    assert [f.measured for f in findings if "the check failed" in f.measured] == []
    assert [(f.check, f.measured) for f in findings if f.verdict == "differs"] == []
    assert all(f.measured for f in findings)
    assert len(findings) == sum(map(len, all_stages().values()))


@pytest.mark.parametrize(
    "lacking", [*((name,) for name in LACKS), *combinations(LACKS, len(LACKS))]
)
def test_a_shift_is_found_whatever_the_template_refuses(tmp_path, lacking):
    rows = ROWS[True, True]
    shifted = np.where(rows.loss_mask, np.roll(rows.rollout, 1), np.nan).astype(np.float32)
    moved = rows.with_(rollout_logprobs=shifted)
    findings = examined(moved, refusing(tmp_path, lacking)).findings
    assert "shifted" in [f.cause for f in findings if f.verdict == "differs"]


class Broken(Check):
    """A plugin's check with a bug in one of its methods."""

    name, claim, where = "tokens/broken", "nothing breaks", ""

    def __init__(self, setting):
        super().__init__(setting)
        self._break("init")

    def _break(self, method):
        if self.where == method:
            raise KeyError("a bug")

    def look(self, rows):
        self._break("look")

    def conclude(self):
        self._break("conclude")
        return self.differs("it differs")

    def repair(self, rows):
        self._break("repair")
        return rows


@pytest.mark.parametrize("method", ["init", "look", "conclude", "repair"])
def test_a_bug_in_a_check_of_a_plugin_is_told_in_its_row_and_the_others_go_on(method, request):
    add_cause(Cause(name="broken", title="It is broken.", remedy="Mend it."))
    request.addfinalizer(lambda: CAUSES.pop("broken"))
    kind = type("Broken", (Broken,), {"where": method, "cause": "broken"})
    setting = Setting(tokenizer=RENDERER.tokenizer, renderer=RENDERER)
    rows = ROWS[True, True]
    has = frozenset(f for f in rows.__dataclass_fields__ if getattr(rows, f) is not None)
    known = {*has, "tokenizer", "renderer"}
    makeable = [check for check in all_stages()["structure"] if set(check.needs) <= known]
    checks = [kind, *makeable]
    found = examine(lambda: [rows], [Stage(checks=checks)], setting, has=has)
    own, *others = found.findings
    assert own.verdict == ("differs" if method == "repair" else "not_checkable")
    assert "the check failed with KeyError: 'a bug'" in own.measured
    assert len(others) == len(makeable) > 5
    assert "not_checkable" not in {f.verdict for f in others}
