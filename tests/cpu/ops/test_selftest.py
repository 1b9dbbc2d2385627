"""The self-test at start: it finds every op that depends on company, and the rules that cure it."""

import pytest
import torch
from cpu.engines.engine_models import make_model

from lockstep.ops import selftest
from lockstep.ops.base import Ops
from lockstep.ops.context import PackedContext
from lockstep.ops.invariant import InvariantOps, Packing, Rules
from lockstep.ops.selftest import fingerprint, first_failure, prove

FEW = 6  # rows that a defect below notices
ARCHITECTURES = {
    "qwen3": "linear rms_norm swiglu rope attention log_softmax",
    "gpt_oss": "linear expert_linear route combine rms_norm swiglu rope attention log_softmax",
    "hybrid": "delta_rule short_conv",
}


class Dependent(InvariantOps):
    """One op gives few rows another last bit."""

    def __init__(self, op, *, cured_by=None, **rules):
        super().__init__(Rules(**rules))
        self.op, self.cured_by = op, cured_by

    def __getattribute__(self, name):
        function = super().__getattribute__(name)
        if name.startswith("_") or name in ("op", "cured_by", "rules", "name"):
            return function
        if name != self.op:
            return function

        def call(*args, **kwargs):
            out = function(*args, **kwargs)
            cured_by = self.cured_by
            is_cured = cured_by is not None and cured_by(self.rules)
            rows = out[0] if isinstance(out, tuple) else out
            if len(rows) >= FEW or is_cured:
                return out
            changed = torch.nextafter(rows, torch.full_like(rows, torch.inf))
            return (changed, *out[1:]) if isinstance(out, tuple) else changed

        return call


@pytest.mark.parametrize(
    ("kind", "op"), [(kind, op) for kind, ops in ARCHITECTURES.items() for op in ops.split()]
)
def test_an_op_that_depends_on_its_company_is_named(kind, op):
    model = make_model(kind, max_positions=512)
    model.ops = Dependent(op)
    failed, text, num_checks = first_failure(model)
    assert failed == op
    assert text.startswith(f"{op}: float32 [") and num_checks > 0


@pytest.mark.parametrize("kind", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_architecture_is_proved_in_both_dtypes(kind, dtype):
    model = make_model(kind, max_positions=512).to(dtype)
    before, proof = model.ops, prove(model)
    assert proof.is_kept and isinstance(proof.ops, InvariantOps)
    assert proof.num_checks > 300
    assert model.ops is before, "proving changes nothing in the model"


def test_the_row_quantum_is_raised_until_nothing_changes():
    backend = Dependent("linear", cured_by=lambda rules: rules.row_quantum >= 16)
    proof = prove(make_model(), ops=backend)
    assert proof.is_kept and proof.ops is backend
    assert backend.rules.row_quantum == 16 and backend.rules.head_quantum == 4


def test_the_quantum_of_attention_is_raised_by_itself():
    backend = Dependent("attention", cured_by=lambda rules: rules.head_quantum >= 8)
    assert prove(make_model(), ops=backend).is_kept
    assert backend.rules.row_quantum == 4 and backend.rules.head_quantum == 8
    assert backend.rules.key_quantum == 128, "tried first: whole blocks of keys"


def test_packed_weights_that_give_other_bits_are_not_used():
    class OtherPacking(InvariantOps):
        def linear(self, x, weight, bias=None):
            out = super().linear(x, weight, bias)
            is_fed = torch.is_inference_mode_enabled() and self.rules.packed
            return torch.nextafter(out, torch.full_like(out, torch.inf)) if is_fed else out

    backend = OtherPacking(Rules(packed={(320, 512): Packing(torch.float32)}))
    assert prove(make_model(), ops=backend).is_kept
    assert backend.rules == Rules()


def test_rows_that_share_tokens_are_compared_with_rows_by_themselves():
    class Sharing(InvariantOps):
        def attention(self, q, k, v, spec, context):
            out = super().attention(q, k, v, spec, context)
            shares = isinstance(context, PackedContext) and context.starts.any()
            return torch.nextafter(out, torch.full_like(out, torch.inf)) if shares else out

    model = make_model(max_positions=512)
    model.ops = Sharing()
    assert first_failure(model)[0] == "attention"


def test_on_a_gpu_experts_and_products_are_tried_with_as_many_rows_as_training_has():
    class Many(InvariantOps):
        def reads_work(self, device):
            return True

        def expert_linear(self, x, weight, bias, tokens_per_expert):
            out = super().expert_linear(x, weight, bias, tokens_per_expert)
            return out * (1 + 2.0**-20) if len(x) >= 1024 * len(weight) else out

        def linear(self, x, weight, bias=None):
            out = super().linear(x, weight, bias)
            return out * (1 + 2.0**-20) if len(x) >= 1024 else out

    x, weight = torch.randn(1100, 16), torch.randn(2, 512, 16)
    experts = selftest._Call("expert_linear", (x, weight, None, []), {})
    assert selftest._first_failure(Many(), [experts])[0] == "expert_linear"
    # Too much for a core, and little for a GPU.
    product = selftest._Call("linear", (x[:500], torch.randn(40_000, 16)), {})
    assert selftest._first_failure(Many(), [product])[0] == "linear"


@pytest.mark.parametrize("kind", ["qwen3", "gpt_oss"])
def test_sums_that_bfloat16_nearly_always_rounds_alike_are_found_apart(kind):
    class LastBit(InvariantOps):
        def linear(self, x, weight, bias=None):
            out = super().linear(x.float(), weight.float(), None if bias is None else bias.float())
            if len(x) < FEW:
                out = torch.nextafter(out, torch.full_like(out, torch.inf))
            return out.to(x.dtype)

    model = make_model(kind, max_positions=512).to(torch.bfloat16)
    model.ops = LastBit()
    failed, text, _ = first_failure(model)
    assert failed == "linear" and text.startswith("linear: float32 [")


def test_an_attention_whose_sums_bfloat16_nearly_always_rounds_alike_is_found_apart():
    class LastBit(InvariantOps):
        def attention(self, q, k, v, spec, context):
            out = super().attention(q, k, v, spec, context)
            if len(q) == 1 and q.dtype == torch.float32:
                out = torch.nextafter(out, torch.full_like(out, torch.inf))
            return out

    model = make_model(max_positions=512).to(torch.bfloat16)
    model.ops = LastBit()
    failed, text, _ = first_failure(model)
    assert failed == "attention" and text.startswith("attention: float32 [")


@pytest.mark.parametrize("threads", [2, 4])
def test_several_threads_need_no_other_rules_than_one(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for dtype in (torch.float32, torch.bfloat16):
            proof = prove(make_model("gpt_oss", max_positions=512).to(dtype))
            assert proof.is_kept and proof.ops.rules == Rules()
    finally:
        torch.set_num_threads(before)


def test_a_machine_that_no_quantum_helps_is_told_the_op_and_the_shape():
    proof = prove(make_model(), ops=Dependent("linear"))
    assert not proof.is_kept and type(proof.ops) is Ops
    # 305 rows of the recorded forward, width 32, and the fused q, k, v of 4 + 2 + 2 heads of 8
    assert proof.failure.startswith("linear: float32 [")
    assert "x [64, 32], 1 threads" in proof.failure


def test_stock_ops_do_not_pass():
    """The control: what the invariant backend replaces does depend on the batch."""
    assert first_failure(make_model("gpt_oss", max_positions=512))[0]


def test_a_dtype_that_the_contract_does_not_cover_is_declined():
    proof = prove(make_model().to(torch.float64))
    assert proof.failure == "dtype float64 is not covered; covered are float32, bfloat16, float16"


def test_the_fingerprint_says_what_the_bits_depend_on():
    cpu = torch.device("cpu")
    stock = fingerprint(Ops(), torch.float32, cpu)
    assert (stock.ops, stock.dtype, stock.device, stock.key_block) == ("plain", "float32", "cpu", 0)
    assert stock == fingerprint(Ops(), torch.float32, cpu), "the same in the same process"
    kept = fingerprint(InvariantOps(Rules(row_quantum=8)), torch.bfloat16, cpu)
    assert (kept.ops, kept.row_quantum, kept.key_block) == ("invariant", 8, 128)
    assert f"torch {torch.__version__}" in kept.libraries and len(kept.probe) == 12
    assert kept.probe != fingerprint(Ops(), torch.float32, cpu).probe


def test_a_backend_that_cannot_run_here_is_declined_with_what_it_says():
    class Unlaunchable(InvariantOps):
        def linear(self, x, weight, bias=None):
            raise RuntimeError("out of resource: shared memory")

    proof = prove(make_model(), ops=Unlaunchable())
    assert proof.failure == "RuntimeError: out of resource: shared memory"
    assert type(proof.ops) is Ops
