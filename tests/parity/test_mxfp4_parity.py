"""MXFP4 weights against transformers' own unpacking, bit for bit."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_decoder_parity import make_hf

from lockstep.models.hf_io import WEIGHTS, dequantize_mxfp4, load_checkpoint, save_checkpoint

transformers = pytest.importorskip("transformers", reason="pip install 'lockstep-rl[transformers]'")
mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")


def packed(E, N, K, *, scales, seed):
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(256, (E, N, K // 32, 16), dtype=torch.uint8, generator=generator)
    low, high = scales
    return blocks, torch.randint(low, high, blocks.shape[:3], dtype=torch.uint8,
                                 generator=generator)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_byte_under_every_scale_is_unpacked_to_the_same_bits(dtype):
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 256, 16, 16)
    scales = torch.arange(256, dtype=torch.uint8)[None, :, None].expand(1, 256, 16)
    wanted = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    found = dequantize_mxfp4(blocks, scales).to(dtype).transpose(1, 2).contiguous()
    same = found.view(torch.int16 if dtype == torch.bfloat16 else torch.int32)
    assert torch.equal(same[~found.isnan()], wanted.view(same.dtype)[~wanted.isnan()])
    assert torch.equal(found.isnan(), wanted.isnan())


@pytest.fixture
def checkpoint(tmp_path):
    """A tiny gpt-oss as OpenAI ships it: experts packed, everything else bfloat16."""
    model = make_hf("gpt_oss-mxfp4").bfloat16()
    model.save_pretrained(tmp_path / "packed")
    path = tmp_path / "packed" / WEIGHTS
    tensors = load_file(path)
    for i, name in enumerate(n for n in sorted(tensors) if n.endswith(("up_proj", "down_proj"))):
        E, K, N = tensors.pop(name).shape
        blocks, scales = packed(E, N, K, scales=(118, 126), seed=i)
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((tmp_path / "packed" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (tmp_path / "packed" / "config.json").write_text(json.dumps(config))
    return tmp_path / "packed"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_checkpoint_is_loaded_and_saved_as_transformers_unpacks_it(checkpoint, dtype):
    packed = load_file(checkpoint / WEIGHTS)
    target = checkpoint.with_name("saved")
    save_checkpoint(load_checkpoint(checkpoint, dtype=dtype), target, like=checkpoint)
    saved = load_file(target / WEIGHTS)
    for name in [n.removesuffix("_blocks") for n in packed if n.endswith("_blocks")]:
        wanted = mxfp4.convert_moe_packed_tensors(
            packed.pop(f"{name}_blocks"), packed.pop(f"{name}_scales"), dtype=dtype
        )
        assert torch.equal(saved.pop(name), wanted), name
    assert saved.keys() == packed.keys()
    assert all(torch.equal(saved[n], packed[n].to(dtype)) for n in saved)
    config = json.loads((target / "config.json").read_text())
    assert "quantization_config" not in config
    unpacked, again = (
        transformers.GptOssForCausalLM.from_pretrained(path, dtype=dtype, **settings).state_dict()
        for path, settings in (
            (checkpoint, {"quantization_config": transformers.Mxfp4Config(dequantize=True)}),
            (target, {}),
        )
    )
    assert all(torch.equal(unpacked[n], again[n]) for n in unpacked | again)
