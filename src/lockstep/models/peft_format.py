"""PEFT's form of an adapter on disk: names, layouts, settings, and the base model. No torch.

    adapter_config.json           rank, alpha, adapted modules
    adapter_model.safetensors     base_model.model.<module>.lora_A.weight and lora_B.weight
    base_model.json               written by Lockstep alone: a digest of the base model

Experts are adapted like PEFT's `target_parameters`: A is [experts * rank, inputs] with an expert's
rows adjacent; B is [outputs, rank * experts] with an expert's columns `experts` apart. A module
with two adapted parameters is wrapped twice, the first parameter in the inner wrapper
(`base_layer`). Source: peft 0.21, tuners/lora/layer.py ParamWrapper.   Guard:
tests/parity/test_peft_parity.py
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from lockstep.config import read_json
from lockstep.errors import CheckpointError, ConfigError
from lockstep.models.config import ModelConfig
from lockstep.models.lora_config import AdapterSite, LoraConfig, LoraShape, lora_shape, lora_sites
from lockstep.models.shapes import misfits
from lockstep.tables import tables_beside

CONFIG, WEIGHTS, BASE = "adapter_config.json", "adapter_model.safetensors", "base_model.json"
PREFIX = "base_model.model."

_SAMPLES, _SAMPLE_BYTES = 16, 1 << 16
"""Samples of each weight file. A few reads suffice: two trainings of one model differ in all
weights."""

_VOLATILE = {"dtype", "torch_dtype", "transformers_version", "_name_or_path"}
"""Keys of config.json that change when a model is saved again."""

_TABLES = tables_beside(__file__)
_WITHOUT_EFFECT = frozenset(_TABLES["without_effect"])
"""Settings that are read, or that do not change what the tensors mean. Dropout concerns PEFT's own
training. The tensors show which modules are adapted."""

_PLAIN = {"bias": ("none",), "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal")}
"""Setting -> accepted values. Other initialisations (pissa, olora, ...) change the base too."""


def is_adapter(directory: str | Path) -> bool:
    """Whether a directory holds an adapter in PEFT's format."""
    return (Path(directory) / CONFIG).is_file()


def read_shape(directory: str | Path, model: ModelConfig) -> LoraShape:
    """Shape of the adapter in `directory`, checked against the model.

    Raises CheckpointError naming every setting that is not implemented and every tensor that is
    missing, unexpected or misshapen.
    """
    root = Path(directory)
    settings = read_json(root / CONFIG, CheckpointError)
    problems = unknown_settings(settings)
    if not isinstance(settings.get("r"), int) or settings["r"] < 1:
        problems.append(f"r={settings.get('r')} must be a whole number of at least 1")
    if problems:
        raise CheckpointError(f"{root / CONFIG} cannot be read as LoRA: {'; '.join(problems)}.")
    header = _read_header(root / WEIGHTS)
    rank, sites = settings["r"], _sites_of(header, lora_sites(model))
    expected: dict[str, list[int]] = {}
    for site in sites:
        width = rank * max(site.num_experts, 1)
        key_a, key_b = tensor_keys(sites)[site.name]
        expected |= {key_a: [width, site.inputs], key_b: [site.outputs, width]}
    problems = misfits(expected, header)
    if problems or not sites:
        raise CheckpointError(
            f"{root / WEIGHTS} does not fit the model ({model.architecture}) at rank {rank}: "
            f"{'; '.join(problems) or 'it has no tensors'}. An adapter of another model?"
        )
    return LoraShape(
        rank=rank,
        alpha=float(settings.get("lora_alpha", 8)),
        sites=tuple(sites),
        rslora=bool(settings.get("use_rslora")),
    )


def resolve_shape(
    config: LoraConfig, model: ModelConfig, base: str | Path, *, name: str
) -> LoraShape:
    """The adapter that a run trains on the model in directory `base`, which the user calls `name`.

    Raises ConfigError where a setting contradicts the adapter at `config.path`, and CheckpointError
    where that adapter does not fit this model or belongs to another.
    """
    hub_name = "" if Path(name).expanduser().is_dir() or name.count("/") != 1 else name
    if not config.path:
        return lora_shape(config, model, base=hub_name)
    path = Path(config.path).expanduser()
    found = replace(read_shape(path, model), base=hub_name)
    wanted = {"rank": config.rank, "alpha": config.alpha, "rslora": config.rslora}
    differing = [
        f"lora.{key}={value} and {getattr(found, key)} there"
        for key, value in wanted.items()
        if value is not None and value != getattr(found, key)
    ]
    if config.targets and set(lora_shape(config, model).sites) != set(found.sites):
        differing.append(f"lora.targets={','.join(config.targets)} and other projections there")
    if differing:
        raise ConfigError(
            f"lora.path={config.path} contradicts these settings: {'; '.join(differing)}. Leave "
            "them out, or start a new adapter without lora.path."
        )
    check_base(path, base, name=hub_name)
    return found


def check_base(directory: str | Path, base: str | Path, *, name: str = "") -> None:
    """Raises CheckpointError if the adapter in `directory` belongs to another model than `base`.

    Adapters written by Lockstep hold a digest of the base. PEFT's own name a directory, whose
    digest is compared if it exists, or a model on the hub, compared with `name` if that is one.
    """
    directory, base = Path(directory), Path(base)
    if (directory / BASE).is_file():
        kept = read_json(directory / BASE, CheckpointError)
        theirs, is_same = kept.get("name", "?"), kept.get("digest") == digest_of(base)
    else:
        theirs = str(
            read_json(directory / CONFIG, CheckpointError).get("base_model_name_or_path") or ""
        )
        is_same = theirs == name or not (theirs.count("/") == 1 and name)
        if theirs and (Path(theirs) / "config.json").is_file():
            is_same = digest_of(theirs) == digest_of(base)
    if not is_same:
        raise CheckpointError(
            f"{directory} is an adapter of {theirs}, and this model is {name or base}, with other "
            "weights. Give the model that the adapter was trained on."
        )


def config_of(shape: LoraShape, model: ModelConfig, base: str | Path) -> dict[str, Any]:
    """Content of adapter_config.json, for an adapter of the model in directory `base`."""
    everywhere = lora_sites(model)
    alpha = int(shape.alpha) if shape.alpha == int(shape.alpha) else shape.alpha
    return {
        **_TABLES["written"],
        "base_model_name_or_path": shape.base or str(Path(base).resolve()),
        "r": shape.rank,
        "lora_alpha": alpha,
        "use_rslora": shape.rslora,
        "target_modules": _short_names(shape.sites, everywhere, of_parameters=False),
        "target_parameters": _short_names(shape.sites, everywhere, of_parameters=True),
    }


def identity_of(shape: LoraShape, base: str | Path) -> dict[str, str]:
    """Content of base_model.json."""
    return {"name": shape.base or str(Path(base).resolve()), "digest": digest_of(base)}


def tensor_keys(sites: Sequence[AdapterSite]) -> dict[str, tuple[str, str]]:
    """Site -> PEFT's names of its A and B, for an adapter of exactly these sites."""
    wrapped = [site.hf_name.rpartition(".")[0] for site in sites if site.num_experts]
    out: dict[str, tuple[str, str]] = {}
    for site in sites:
        stem = site.hf_name
        if site.num_experts:
            stem, _, parameter = stem.rpartition(".")
            if parameter == "gate_up_proj" and wrapped.count(stem) > 1:
                stem += ".base_layer"
        out[site.name] = (f"{PREFIX}{stem}.lora_A.weight", f"{PREFIX}{stem}.lora_B.weight")
    return out


def digest_of(directory: str | Path) -> str:
    """Hash of config.json and samples of each weight file: identifies a model's weights."""
    root = Path(directory)
    config = read_json(root / "config.json", CheckpointError)
    lasting = {key: config[key] for key in config.keys() - _VOLATILE}
    found = hashlib.sha256(json.dumps(lasting, sort_keys=True).encode())
    for path in sorted(root.glob("model*.safetensors")):
        size = path.stat().st_size
        found.update(f"{path.name} {size}".encode())
        with open(path, "rb") as file:
            for i in range(_SAMPLES):
                file.seek(max(size - _SAMPLE_BYTES, 0) * i // (_SAMPLES - 1))
                found.update(file.read(_SAMPLE_BYTES))
    return found.hexdigest()


# -- mechanism ------------------------------------------------------------------------------------


def unknown_settings(settings: Mapping[str, Any]) -> list[str]:
    """Settings of PEFT that are not implemented, in words."""
    problems: list[str] = []
    if settings.get("peft_type") != "LORA":
        problems.append(f"peft_type is {settings.get('peft_type')}, expected LORA")
    for key, value in settings.items():
        if key in _PLAIN:
            if value not in _PLAIN[key]:
                allowed = ", ".join(str(v) for v in _PLAIN[key])
                problems.append(f"{key}={value} is not implemented (only {allowed})")
        elif key not in _WITHOUT_EFFECT and value not in (None, False, "megatron.core", {}, []):
            problems.append(f"{key}={value} is not implemented")
    return problems


def _sites_of(header: Mapping[str, list[int]], sites: Sequence[AdapterSite]) -> list[AdapterSite]:
    """Sites that have a tensor. For experts with a single wrapped parameter, its sizes tell which
    parameter it is."""

    def is_there(stem: str) -> bool:
        return any(f"{PREFIX}{stem}.lora_{x}.weight" in header for x in "AB")

    out: list[AdapterSite] = []
    for site in sites:
        stem = site.hf_name.rpartition(".")[0]
        if not site.num_experts:
            is_found = is_there(site.hf_name)
        elif is_there(f"{stem}.base_layer"):
            is_found = True
        else:
            A, B = (header.get(f"{PREFIX}{stem}.lora_{x}.weight", [0, 0]) for x in "AB")
            sizes = {s: (s.inputs, s.outputs) for s in sites if s.hf_name.startswith(stem + ".")}
            found = (A[-1], B[0])
            is_found = is_there(stem) and (found == sizes[site] or found not in sizes.values())
        if is_found:
            out.append(site)
    return out


def _short_names(
    sites: Sequence[AdapterSite], everywhere: Sequence[AdapterSite], *, of_parameters: bool
) -> list[str]:
    """Names of modules, or of parameters, without the layer's number where all layers are adapted;
    else full names. In a mixture, PEFT takes a module gate_proj, up_proj or down_proj for one of an
    expert: there the weights of dense layers and shared experts are named as parameters."""
    is_mixture = any(site.num_experts for site in everywhere)

    def full(site: AdapterSite) -> str:
        is_module = of_parameters and not site.num_experts
        return f"{site.hf_name}.weight" if is_module else site.hf_name

    def short(site: AdapterSite) -> str:
        return ".".join(full(site).split(".")[-3 if of_parameters else -1 :])

    def is_named_here(site: AdapterSite) -> bool:
        return (is_mixture and site.group != "attention") == of_parameters

    mine = [site for site in sites if is_named_here(site)]
    partial = {short(site) for site in everywhere if is_named_here(site) and site not in mine}
    names = [full(site) if short(site) in partial else short(site) for site in mine]
    return list(dict.fromkeys(names))


def _read_header(path: Path) -> dict[str, list[int]]:
    """Name -> shape of every tensor of a safetensors file."""
    if not path.is_file():
        raise CheckpointError(
            f"{path} does not exist. An adapter saved as a pickle (adapter_model.bin) is not read: "
            "save it with safetensors."
        )
    try:
        with safe_open(path, framework="np") as file:
            return {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}). A torn copy?") from None
