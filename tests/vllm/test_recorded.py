"""The record that the default tests answer from, made by a real server.

LOCKSTEP_RECORD=1 writes it anew; otherwise it is compared with what this vLLM answers.
"""

import json
import os
import sys
from pathlib import Path

from engine_contexts import context_of
from test_vllm_server import changed, dense  # noqa: F401  fixtures
from vllm_models import run

from lockstep.models.locate import locate_model

FOLDER = Path(__file__).parents[1] / "cpu" / "engines"
sys.path.insert(0, str(FOLDER))
from vllm_scenario import play, recorded  # noqa: E402

RECORD = FOLDER / "recorded" / "vllm.json"


def test_the_record_is_what_this_vllm_answers(dense, changed):  # noqa: F811
    context = context_of(locate_model("tiny-qwen3"), run="recorded")
    exchanges = []

    async def talk():
        await dense.wire.write_label("default")
        async with recorded(dense.wire.url, exchanges) as url:
            return await play(url, context, changed)

    found = json.loads(json.dumps(run(talk())))
    version = json.loads(exchanges[0]["answer"])["version"]
    record = {"vllm": version, "found": found, "exchanges": exchanges}
    if os.environ.get("LOCKSTEP_RECORD"):
        RECORD.parent.mkdir(exist_ok=True)
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
    before = json.loads(RECORD.read_text())
    assert [e["ask"] for e in before["exchanges"]] == [e["ask"] for e in exchanges]
    assert before["found"]["greedy"]["ids"] == found["greedy"]["ids"]
