"""Every key of every family's config.json, changed alone: Lockstep computes what transformers does,
or refuses the config in one line that names the key. The fast profile tries a part of the changes.

    PYTHONPATH=src:tests python tests/parity/test_config_keys.py [CASE ...]   prints the whole table
"""

import json
import random
import re
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from full_counts import PROOF
from parity.test_decoder_parity import CASES, HYBRIDS, ROPE, SHAPE, our_logits

from lockstep.errors import CheckpointError
from lockstep.models.config import ModelConfig
from lockstep.models.hf_io import load_checkpoint

transformers = pytest.importorskip("transformers", reason="pip install 'lockstep-rl[transformers]'")

ABSENT = "absent"
IDS = torch.randint(90, (40,), generator=torch.Generator().manual_seed(3))

VALUES = json.loads(Path(__file__).with_suffix(".json").read_text())
NAMES = VALUES["names"]
"""Keys with names for values -> names that transformers knows."""
EXTRA = VALUES["extra"]
"""Keys that a config may lack -> values. Keys that a model's own code reads come beside them."""
ROPE_KEYS = VALUES["rope_keys"]

LONG_YARN = {  # so that rounding the ends of its ramp shows
    **ROPE["yarn-by-layer"]["full_attention"], "rope_theta": 100.0,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
WRONG_ONCE = {
    "deepseek_v3": [
        ("norm_topk_prob", None), ("rope_interleave", None), ("n_group", 8),
        ("rope_parameters.truncate", None),
    ],
    "glm4_moe": [("partial_rotary_factor", None)],
    "gpt_oss": [("rope_scaling", None), ("rope_scaling", {})],
    "olmo3": [
        ("rope_local_base_freq", 250000.0),
        ("rope_parameters.full_attention", {**LONG_YARN, "truncate": False}),
    ],
    "qwen3": [("is_causal", False), ("is_causal", None)],
    "qwen3_next": [("partial_rotary_factor", None), ("num_key_value_heads", ABSENT)],
}  # fmt: skip
"""case -> changes that other releases computed otherwise than transformers, or ended with a
traceback for. They are always tried."""

EXACT, HYBRID = 1e-5, 2e-4
"""Largest distance of two logits, of the largest one: a few hundred roundings of 6e-8 each. In a
hybrid, both sides are some 1e-4 from the exact numbers, since a norm follows a state that is almost
empty (`test_decoder_parity` compares it in float64)."""
FEW = 8
"""Changes of a case and a way of writing that the fast profile tries."""


class Base(NamedTuple):
    """A config before a change."""

    source: dict
    theirs: torch.Tensor
    ours: torch.Tensor
    """Logits."""
    weights: Path
    shapes: dict[str, torch.Size]
    model: type


def read_by(model):
    """Names that the model's own code, and the code it shares, reads of a config."""
    root = Path(transformers.__file__).parent
    files = [Path(sys.modules[model.__module__].__file__)]
    files += [root / "masking_utils.py", root / "modeling_rope_utils.py"]
    text = "".join(path.read_text() for path in files)
    found = re.findall(r"\bconfig\.(?!json)([a-z]\w+)\b(?!\()", text)
    found += re.findall(r"getattr\([\w.]*config, \"([a-z]\w+)\"", text)
    return sorted({*found})


def other_values(key, value):
    if key in NAMES:
        return NAMES[key]
    match value:
        case bool():
            return (not value, None)
        case int():
            return (value // 2, value * 2, value + 1, 0, -1, None)
        case float():
            large = (value * 1e4,) if value < 1e-3 else ()  # half of it moves no logit
            return (value / 2, value * 2, *large, 0.0, -1.0, None)
        case str():
            return ("other", None)
        case list():
            return (value[::-1], value[:-1], value[1:] + value[:1], [], None)
        case dict():
            return ({}, None)
        case None:
            return EXTRA.get(key, ROPE_KEYS.get(key, (True, 1, 0.5)))
    raise AssertionError(value)


def single_changes(source, names, path=()):
    """(keys from the outermost on, value) of each change; ABSENT takes the key away."""
    out = []
    for key, value in source.items():
        at = (*path, key)
        if key != "model_type":  # with another one it is another model
            values = [each for each in other_values(key, value) if each != value]
            out += [(at, each) for each in [*values, ABSENT]]
        if isinstance(value, dict):
            out += single_changes(value, ROPE_KEYS, at)
    for key, values in names.items():
        if key not in source:
            out += [((*path, key), value) for value in values]
    return out


def changes_of(base, way):
    names = dict.fromkeys(read_by(base.model), (True, False, None, 1, 0.5)) | EXTRA
    found = single_changes(base.source, names)
    return [x for x in found if way == "new" or any(part in x[0][0] for part in OLDER)]


def changed(source, path, value):
    out = json.loads(json.dumps(source))
    holder = out
    for key in path[:-1]:
        holder = holder[key]
    if value == ABSENT:
        del holder[path[-1]]
    else:
        holder[path[-1]] = value
    return out


OLDER = ("rope", "window", "layer", "interval", "original_max", "partial_rotary", "mscale")
"""Parts of the names of keys that depend on how a config is written."""


def sources_of(case, directory):
    """way of writing -> config.json of a case: as transformers 5 writes it, and as older releases
    did, with rotations under other names and kinds of layers by number."""
    name, rope, is_tied, extra = {**CASES, **HYBRIDS}[case]
    config = getattr(transformers, f"{name}Config")(
        **{**SHAPE, **extra}, rope_parameters=json.loads(json.dumps(ROPE[rope])),
        tie_word_embeddings=is_tied,
    )  # fmt: skip
    config.save_pretrained(directory)
    new = json.loads((directory / "config.json").read_text())
    old = {key: value for key, value in new.items() if key != "layer_types"}
    rope = dict(old.pop("rope_parameters"))
    if "full_attention" in rope:
        if name == "Gemma3Text":
            old["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = dict(rope["full_attention"])
    old["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        old["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    is_plain = rope == {"rope_type": "default"} and name != "GptOss"  # which then has YaRN
    old["rope_scaling"] = None if is_plain else rope
    return {"new": new, "old": old}


def seeded(model):
    """Fills a model with numbers that depend on a tensor's name and shape alone."""
    tensors = dict(model.named_parameters())
    tensors |= {n: b for n, b in model.named_buffers() if n.endswith("correction_bias")}
    with torch.no_grad():
        for name, tensor in tensors.items():
            generator = torch.Generator().manual_seed(sum(name.encode()) * 1009)
            numbers = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(0.2 * numbers + name.endswith("norm.weight"))
    return model.float().eval()


def in_transformers(source, directory, base=None):
    """(logits, config as saved again, shapes, class) of transformers' model with this config.

    Its checkpoint is saved, with the config as it is given. Returns the error where there is none.
    """
    directory.mkdir(exist_ok=True)
    file = directory / "config.json"
    file.write_text(json.dumps(source))
    try:
        config = transformers.AutoConfig.from_pretrained(directory)
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", dtype=torch.float32
        )
        seeded(model)
        with torch.no_grad():
            logits = model(input_ids=IDS[None], use_cache=False).logits[0]
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        if base is not None and shapes == base.shapes:  # then its numbers are the same
            shutil.copy(base.weights, directory)
            model.config.save_pretrained(directory)
        else:
            model.save_pretrained(directory)
    except Exception as error:
        return error
    saved = json.loads(file.read_text())
    file.write_text(json.dumps(source))
    return logits, saved, shapes, type(model)


def in_lockstep(directory):
    with torch.no_grad():
        return our_logits(load_checkpoint(directory), [len(IDS)], IDS)


def base_of(source, directory):
    logits, _, shapes, model = in_transformers(source, directory)
    ours, weights = in_lockstep(directory), directory / "model.safetensors"
    return Base(source, logits, ours, weights, shapes, model)


RIGHT = ("read", "refused", "no effect", "none there")


def outcome_of(base, path, value, directory):
    """(word, detail). Those in RIGHT are what a change should come to:

    read: logits change, as in transformers. refused: in one line that names the key. no effect: in
    transformers neither. none there: transformers refuses the config, or computes no number; ours
    does anything but end with a traceback.
    """
    source = changed(base.source, path, value)
    theirs = in_transformers(source, directory, base)
    try:
        if isinstance(theirs, Exception):
            shutil.copy(base.weights, directory)
            in_lockstep(directory)
            return "none there", f"{type(theirs).__name__}: {theirs}"
        wanted, saved, _, _ = theirs
        found = in_lockstep(directory)
    except CheckpointError as error:
        text = str(error)
        if isinstance(theirs, Exception):
            return "none there", text
        is_named = any(key in text for key in (*path, *(value if type(value) is dict else ())))
        return ("refused" if is_named and "\n" not in text else "refused without a name"), text
    except Exception as error:
        return "traceback", f"{type(error).__name__}: {error}"
    if not wanted.isfinite().all():
        return "none there", "logits that are no numbers"
    gap = distance(found, wanted)
    if not gap <= (HYBRID if "linear_num_key_heads" in base.source else EXACT):
        return "differs", f"{gap:.1e}"
    has_effect = distance(wanted, base.theirs) > 0
    if has_effect and distance(found, base.ours) == 0:
        return "ignored", f"{gap:.1e}"
    if saved["model_type"] == source["model_type"] and not is_read_alike(saved, found, directory):
        return "differs when saved again", json.dumps(saved)
    return ("read" if has_effect else "no effect"), f"{gap:.1e}"


def is_read_alike(saved, found, directory):
    """Whether a config that transformers has read and saved again means the same."""
    config = ModelConfig.from_directory(directory)
    (directory / "config.json").write_text(json.dumps(saved))
    return ModelConfig.from_directory(directory) == config or torch.equal(
        in_lockstep(directory), found
    )


def distance(found, wanted):
    """Of the largest logit; infinite for other shapes."""
    if found.shape != wanted.shape:
        return float("inf")
    return float((found - wanted).abs().max() / wanted.abs().max())


@pytest.fixture(autouse=True, scope="module")
def quiet():
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    yield
    transformers.logging.enable_progress_bar()
    transformers.logging.set_verbosity_warning()


FIRST = {CASES[case][0]: case for case in reversed(CASES)} | {
    HYBRIDS[case][0]: case for case in reversed(HYBRIDS)
}
"""Name of a family in transformers -> its first case."""


@pytest.mark.filterwarnings("ignore")  # of transformers and torch, about sizes of 0
@pytest.mark.parametrize("case", [*CASES, *HYBRIDS] if PROOF else FIRST.values())
def test_a_changed_key_is_read_or_refused_by_name(case, tmp_path):
    wrong = []
    for way, source in sources_of(case, tmp_path).items():
        base = base_of(source, tmp_path / way)
        changes = changes_of(base, way)
        if not PROOF:
            always = [
                (tuple(name.split(".")), value)
                for name, value in WRONG_ONCE.get(case, ())
                if name.partition(".")[0] in source or "." not in name
            ]
            changes = [*always, *random.Random(case + way).sample(changes, FEW)]
        for number, (path, value) in enumerate(changes):
            directory = tmp_path / f"{way}-{number}"
            word, detail = outcome_of(base, path, value, directory)
            if word not in RIGHT:
                wrong.append(f"{way}: {'.'.join(path)}={json.dumps(value)} {word}: {detail}")
            shutil.rmtree(directory)
    assert not wrong, "\n".join(wrong)


def main(cases):
    """Prints (case, way, key, value, word, detail) of each change as JSON, and counts."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    counts = Counter()
    for case in cases or [*CASES, *HYBRIDS]:
        with tempfile.TemporaryDirectory() as root:
            for way, source in sources_of(case, Path(root)).items():
                base = base_of(source, Path(root) / way)
                for path, value in changes_of(base, way):
                    word, detail = outcome_of(base, path, value, Path(root) / "changed")
                    shutil.rmtree(Path(root) / "changed")
                    counts[word] += 1
                    print(json.dumps([case, way, ".".join(path), value, word, detail[:300]]))
        print(case, dict(counts), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
