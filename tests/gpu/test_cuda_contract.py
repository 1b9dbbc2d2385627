"""The CUDA backend on a GPU, in float32 and bfloat16: a token has the same bits in a decode step,
in a chunk of its prompt and in a packed training row. Here the tensor cores are asked, which
tests/cpu/ops/test_cuda_ops_interpreted.py cannot do."""

import asyncio
import importlib.util

import numpy as np
import pytest
import torch

from lockstep.engines.config import EmbeddedConfig
from lockstep.engines.embedded.engine import EmbeddedEngine
from lockstep.models.hf_io import load_checkpoint
from lockstep.models.locate import locate_model
from lockstep.objectives.losses import TokenLoss
from lockstep.ops.context import AttentionSpec, PackedContext, PagedContext
from lockstep.ops.selftest import prove
from lockstep.training.config import TrainerConfig
from lockstep.training.trainer import Trainer
from lockstep.types import Request, Sample, SamplingParams

if not torch.cuda.is_available():
    pytest.skip("torch sees no GPU", allow_module_level=True)
if importlib.util.find_spec("triton") is None:
    pytest.skip("pip install 'lockstep-rl[cuda]'", allow_module_level=True)
from lockstep.ops.cuda import CudaOps

DEVICE = "cuda"
DTYPES = [torch.float32, torch.bfloat16]
ROWS = [1, 2, 7, 63, 64, 65, 128, 129, 300]  # both tiles of the GEMM, full and not


@pytest.fixture
def ops():
    return CudaOps()


def rand(*shape, seed=0, dtype=torch.float32):
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return values.to(DEVICE, dtype)


# -- functions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("N", "K"), [(96, 64), (1000, 200), (2880, 4096), (640, 2880)])
def test_a_product_has_the_same_bits_for_any_number_of_rows(ops, N, K, dtype):
    x, weight = rand(ROWS[-1], K, dtype=dtype), rand(N, K, seed=1, dtype=dtype)
    bias = rand(N, seed=2, dtype=dtype)
    whole = ops.linear(x, weight, bias)
    for count in ROWS:
        assert torch.equal(ops.linear(x[:count], weight, bias), whole[:count]), count
        assert torch.equal(ops.linear(x[-count:], weight, bias), whole[-count:]), count
    expected = x.double() @ weight.double().t() + bias.double()
    # One rounding of the result. The sum wanders to sqrt(K) and is rounded K times on its way, to
    # nearest (2 ** -24), or in tensor cores towards 0 (2 ** -23, all to one side).
    rounding = torch.finfo(dtype).eps * expected.abs()
    summing = K * 2.0 ** (-22 if dtype == torch.float32 else -19)
    assert ((whole.double() - expected).abs() <= rounding + summing).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_experts_rows_are_those_of_its_own_product(ops, dtype):
    weight, bias = rand(6, 500, 320, seed=1, dtype=dtype), rand(6, 500, seed=2, dtype=dtype)
    for counts in ([0, 3, 65, 1, 0, 200], [1, 0, 2, 0, 30, 0]):
        x = rand(sum(counts), 320, dtype=dtype)
        whole = ops.expert_linear(x, weight, bias, counts)
        at = 0
        for expert, count in enumerate(counts):
            rows = slice(at, at := at + count)
            assert torch.equal(whole[rows], ops.linear(x[rows], weight[expert], bias[expert]))


ROW_OPS = {
    "rms_norm": lambda ops, x: ops.rms_norm(x, x[0], 1e-5),
    "rms_norm by head": lambda ops, x: ops.rms_norm(x.view(-1, 15, 64), x[0].view(15, 64), 1e-5),
    "swiglu": lambda ops, x: ops.swiglu(x),
    "swiglu_clamped": lambda ops, x: ops.swiglu(x, alpha=1.702, limit=1.0),
    "rope": lambda ops, x: ops.rope(
        x.view(-1, 15, 64), x[:, None, :64].float(), x[:, None, 64:128].float()
    ),
    "route": lambda ops, x: torch.cat(ops.route(x[:, :128].round(), 4), -1),  # with ties
    "combine": lambda ops, x: ops.combine(x.view(-1, 4, 240), x[:, :4]),
    "log_softmax": lambda ops, x: ops.log_softmax(x.repeat(1, 40), temperature=0.7),
    "log_softmax of some": lambda ops, x: ops.log_softmax(x, kept=x > -1),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ROW_OPS)
def test_the_bits_of_a_row_depend_on_that_row_alone(ops, name, dtype):
    x = rand(ROWS[-1], 960, dtype=dtype)
    # Weights are taken from row 0, which every part begins with.
    whole = ROW_OPS[name](ops, x)
    for count in ROWS:
        assert torch.equal(ROW_OPS[name](ops, x[:count]), whole[:count]), count
    order = torch.cat([torch.zeros(1, dtype=torch.int64), 1 + torch.randperm(len(x) - 1)])
    order = order.to(DEVICE)
    assert torch.equal(ROW_OPS[name](ops, x[order]), whole[order])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [16, 48, 128])
@pytest.mark.parametrize(
    ("heads", "key_heads", "width", "window"), [(16, 2, 64, 128), (8, 8, 128, None), (4, 2, 16, 60)]
)
def test_attention_has_the_same_bits_in_steps_and_packed(
    ops, heads, key_heads, width, window, page_size, dtype
):
    length = 400
    q, k, v = (
        rand(length, n, width, seed=i, dtype=dtype)
        for i, n in enumerate((heads, key_heads, key_heads))
    )
    sinks = rand(heads, seed=3, dtype=dtype)
    spec = AttentionSpec(sinks, window, 0.2)
    packed = ops.attention(
        *(torch.cat([x[:50], x]) for x in (q, k, v)),
        spec,
        PackedContext.of([50, length], device=DEVICE),
    )
    assert torch.equal(packed[:50], packed[50:100])
    packed = packed[50:]
    num_pages = -(-length // page_size)
    pages = 1 + torch.randperm(num_pages, generator=torch.Generator().manual_seed(7)).numpy()
    shape = (1, key_heads, num_pages + 1, page_size, width)
    keys, values = (torch.full(shape, torch.nan, dtype=dtype, device=DEVICE) for _ in "kv")
    start = 0
    for count in (1, 1, 130, 5, 1, 200, 1, 61):
        part = slice(start, start + count)
        context = PagedContext.of(
            keys, values, pages[None], [part.start], [part.stop], num_heads=heads
        )
        found = ops.attention(q[part], k[part], v[part], spec, context)
        assert torch.equal(found, packed[part]), (start, count)
        start += count
    assert start == length


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["tiny-gpt-oss", "tiny-qwen3"])
def test_the_contract_starts(name, dtype):
    proof = prove(load_checkpoint(locate_model(name), dtype=dtype, device=DEVICE))
    assert proof.is_kept, proof.failure
    assert proof.ops.name == "cuda" and proof.num_checks > 100


# -- engine and trainer ---------------------------------------------------------------------------


async def sample_rows(engine, vocab_size):
    """Prompts of many lengths, half of them with a common beginning, all asked at once."""
    rng = np.random.default_rng(0)
    common = rng.integers(0, vocab_size, 150)

    async def one(index):
        own = rng.integers(0, vocab_size, 3 + 17 * index)
        prompt = np.concatenate([common, own] if index % 2 else [own]).astype(np.int32)
        request = Request(
            id=str(index), prompt_ids=prompt, sampling=SamplingParams(max_tokens=40), seed=index
        )
        deltas = [delta async for delta in engine.generate(request)]
        ids = np.concatenate([delta.token_ids for delta in deltas])
        logprobs = np.concatenate([delta.logprobs for delta in deltas])
        return Sample(
            id=f"t{index}/0",
            token_ids=np.concatenate([prompt, ids]),
            loss_mask=np.arange(len(prompt) + len(ids)) >= len(prompt),
            columns={
                "rollout_logprobs": np.concatenate(
                    [np.full(len(prompt), np.nan, np.float32), logprobs]
                )
            },
        )

    return await asyncio.gather(*(one(index) for index in range(16)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["tiny-gpt-oss", "tiny-qwen3"])
def test_no_sampled_token_differs_between_engine_and_trainer(name, dtype):
    directory = locate_model(name)
    model = load_checkpoint(directory, dtype=dtype, device=DEVICE, ops=CudaOps())
    # Fewer places than 16 requests need, short steps: chunks, ragged decode, preemption.
    config = EmbeddedConfig(
        page_size=48, kv_cache_tokens=48 * 50, max_num_sequences=8, max_step_tokens=64
    )
    engine = EmbeddedEngine(model, config)
    rows = asyncio.run(sample_rows(engine, model.config.vocab_size))
    trainer = Trainer(model, TrainerConfig(max_tokens_per_microbatch=1500), like=directory)
    trained = trainer.forward(rows, column=None)
    rollout = np.concatenate([r.columns["rollout_logprobs"][r.loss_mask] for r in rows])
    assert len(rollout) > 300
    found = np.concatenate(
        [logprobs[row.loss_mask] for row, logprobs in zip(rows, trained, strict=True)]
    )
    assert int((found != rollout).sum()) == 0

    seen = []

    def loss_fn(tokens):
        seen.append(tokens.logprobs.detach().cpu().numpy())
        return TokenLoss(loss=-tokens.logprobs)

    trainer.forward_backward(rows, loss_fn)
    assert np.array_equal(np.sort(np.concatenate(seen)), np.sort(rollout))
    for parameter in model.parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all()
