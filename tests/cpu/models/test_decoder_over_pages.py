"""A decoder over a stranger's block tables: no engine of this library is needed."""

import subprocess
import sys

import numpy as np
import torch

from lockstep.models.config import ModelConfig
from lockstep.models.decoder import Decoder
from lockstep.models.tiny import hf_config
from lockstep.ops.context import PackedContext, PagedContext
from lockstep.ops.invariant import InvariantOps

LENGTHS = (21, 9)
STEPS = [((0, 0), (18, 7)), ((18, 7), (20, 8)), ((20, 8), (21, 9))]


def test_block_tables_and_row_lengths_give_the_bits_of_the_packed_forward():
    config = ModelConfig.from_hf(hf_config("gpt_oss", 97, None))
    model = Decoder(config, ops=InvariantOps())
    model.init_weights(std=0.2, seed=0)
    rows = [torch.arange(n) * 7 % 97 for n in LENGTHS]
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    with torch.no_grad():
        packed = model(torch.cat(rows), positions, PackedContext.of(LENGTHS)).split(LENGTHS)
    shape = (config.num_layers, config.num_kv_heads, 6, 8, config.head_dim)
    keys, values = torch.zeros(shape), torch.zeros(shape)
    tables = np.array([[4, 1, 5], [2, 0, 0]])
    for starts, stops in STEPS:
        parts = [slice(*span) for span in zip(starts, stops, strict=True)]
        context = PagedContext.of(keys, values, tables, starts, stops)
        ids = torch.cat([row[part] for row, part in zip(rows, parts, strict=True)])
        at = torch.cat([torch.arange(part.start, part.stop) for part in parts])
        with torch.inference_mode():
            hidden = model(ids, at, context)
        assert torch.equal(
            hidden, torch.cat([row[part] for row, part in zip(packed, parts, strict=True)])
        )


def test_decoder_and_ops_import_nothing_of_the_engines():
    code = (
        "import sys, lockstep.models.decoder, lockstep.models.hf_io, lockstep.ops.selftest; "
        "print([name for name in sys.modules if name.startswith('lockstep.engines')])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"
