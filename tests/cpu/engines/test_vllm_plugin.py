"""What decides whether vLLM runs Lockstep's decoder, and the installed plugin by which it can."""

import tomllib
from dataclasses import replace
from importlib.metadata import distributions
from pathlib import Path

import pytest
from engine_contexts import context_of

from lockstep.engines.config import VllmConfig
from lockstep.engines.vllm import plugin, started
from lockstep.errors import CapabilityError, CheckpointError
from lockstep.models.locate import locate_model
from lockstep.package import NAME, package_version

CONTEXT = context_of(locate_model("tiny-gpt-oss"))
NAMED = replace(CONTEXT, contract="true-on-policy")


@pytest.mark.parametrize(
    ("settings", "context", "expected"),
    [
        ({}, NAMED, True),
        ({}, CONTEXT, False),
        ({}, replace(CONTEXT, contract="auto"), False),
        ({"tensor_parallel": 2}, NAMED, False),
        ({"decoder": "vllm"}, NAMED, False),
        ({"decoder": "lockstep"}, CONTEXT, True),
    ],
)
def test_the_decoder_is_chosen_by_the_contract_unless_it_is_named(settings, context, expected):
    assert plugin.runs_decoder(VllmConfig(**settings), context) is expected


def test_an_architecture_that_vllm_alone_knows_is_refused_by_name(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "bloom"}')
    context = replace(NAMED, directory=tmp_path)
    assert not plugin.runs_decoder(VllmConfig(), context)
    with pytest.raises(CapabilityError, match=r"engine\.decoder=vllm"):
        plugin.runs_decoder(VllmConfig(decoder="lockstep"), context)


def test_quantised_weights_are_refused_before_vllm_starts(tmp_path):
    (tmp_path / "config.json").write_text(
        '{"model_type": "qwen3", "quantization_config": {"quant_method": "fp8"}}'
    )
    with pytest.raises(CheckpointError, match="'fp8'"):
        plugin.runs_decoder(VllmConfig(decoder="lockstep"), replace(NAMED, directory=tmp_path))


@pytest.mark.parametrize("version", ["0.31.2", "0.33.0+cpu", "1.0"])
def test_a_version_of_vllm_that_it_was_not_tested_in_is_refused_with_the_range(version):
    plugin.check_version("0.32.0+cpu")
    with pytest.raises(CapabilityError, match=rf"vLLM 0\.32\.x, and this is {version[:4]}"):
        plugin.check_version(version)


def test_a_server_of_another_model_or_version_is_refused():
    ours = {"fingerprint": "ops=invariant", "version": package_version()}
    url = "http://host:1"
    for decoder in ("auto", "lockstep"):
        plugin.check_attached(decoder, ours, url=url)
    for decoder in ("auto", "vllm"):
        plugin.check_attached(decoder, {"version": "0.0.1"}, url=url)
    with pytest.raises(CapabilityError, match=r"http://host:1.*vLLM's.*VLLM_USE_V2_MODEL"):
        plugin.check_attached("lockstep", {"fingerprint": ""}, url=url)
    with pytest.raises(CapabilityError, match=r"engine\.decoder"):
        plugin.check_attached("vllm", ours, url=url)
    with pytest.raises(CapabilityError, match=r"version 0\.0\.1"):
        plugin.check_attached("auto", ours | {"version": "0.0.1"}, url=url)


def test_a_server_finds_the_plugin_as_in_an_installed_package(tmp_path):
    folder = started._folder_of_package(tmp_path)
    (found,) = distributions(path=[str(folder)])
    assert (found.name, found.version) == (NAME, package_version())
    (entry,) = found.entry_points.select(group="vllm.general_plugins")
    assert entry.load() is plugin.register
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["vllm.general_plugins"] == {entry.name: entry.value}
    assert project["name"] == NAME
