"""Writes recorded/sglang-VERSION.json: the names that SGLang's requests and responses have.

    pip download --no-deps sglang && unzip -d DIR sglang-*.whl && python record_sglang.py DIR

It reads the source and imports nothing: SGLang installs only beside a GPU. The fake server of
fake_sglang.py takes and gives these names and no others.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path

TYPES = {
    "srt/managers/io_struct.py": (
        "GenerateReqInput", "AbortReq", "PauseGenerationReqInput", "ContinueGenerationReqInput",
        "UpdateWeightFromDiskReqInput", "UpdateWeightFromDiskReqOutput",
        "UpdateWeightsFromTensorReqInput", "UpdateWeightsFromTensorReqOutput",
        "UpdateWeightVersionReqInput", "ReleaseMemoryOccupationReqInput",
        "ResumeMemoryOccupationReqInput", "LoadLoRAAdapterReqInput", "UnloadLoRAAdapterReqInput",
    ),
    "api/v1/api_types.py": ("SamplingParams", "GenerateResponse", "WeightVersionSpan"),
}  # fmt: skip
BASE_FIELDS = ["rid", "http_worker_ipc"]
"""Of BaseReq, which the types of io_struct.py derive from."""


def record(package: Path) -> dict:
    version = re.search(
        r"sglang-(\d[\d.]*\d)", next(package.parent.glob("sglang-*.dist-info")).name
    )
    assert version is not None
    types = {}
    for file, names in TYPES.items():
        tree = ast.parse((package / file).read_text())
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name in names:
                fields = [
                    part.target.id
                    for part in node.body
                    if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
                ]
                if any(isinstance(b, ast.Name) and b.id == "BaseReq" for b in node.bases):
                    fields += BASE_FIELDS
                types[node.name] = sorted(set(fields))
    missing = {name for names in TYPES.values() for name in names} - set(types)
    assert not missing, f"SGLang has no {missing}"
    manager = (package / "srt/managers/tokenizer_manager.py").read_text()
    about = set(re.findall(r'meta_info\["(\w+)"\]', manager))
    about |= set(re.findall(r'^ {16}"(\w+)": ', _between(manager, "meta_info = {", "}"), re.M))
    about |= {"reasoning_tokens", "completion_tokens", "cached_tokens"} & set(
        re.findall(r'"(\w+)": recv_obj', manager)
    )
    weights = (package / "srt/utils/weight_versions.py").read_text()
    about |= set(re.findall(r'meta_info\["(\w+)"\]', weights))
    server = (package / "srt/entrypoints/http_server.py").read_text()
    routes = sorted(set(re.findall(r'@app\.\w+\(\s*"(/\w+)"', server)))
    model = _between(server, "async def model_info()", "return ")
    scheduler = (package / "srt/managers/scheduler.py").read_text()
    settings = (package / "srt/arg_groups/field_order.py").read_text()
    return {
        "version": version.group(1),
        "types": dict(sorted(types.items())),
        "meta_info": sorted(about),
        "routes": routes,
        "model_info": sorted(set(re.findall(r'^ {8}"(\w+)":', model, re.M))),
        "server_info": sorted(
            set(re.findall(r'^    "(\w+)",', settings, re.M))
            | set(re.findall(r'"(\w+)": self', _between(scheduler, "def get_init_info", "return ")))
            | {"version"}
        ),
    }


def _between(text: str, start: str, end: str) -> str:
    text = text[text.index(start) :]
    return text[: text.index(end, len(start))]


if __name__ == "__main__":
    found = record(Path(sys.argv[1]) / "sglang")
    place = Path(__file__).parent / "recorded" / f"sglang-{found['version']}.json"
    place.write_text(json.dumps(found, indent=1) + "\n")
    print(place)
