"""The plan of a run's memory: against what autograd keeps, and as a refusal."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from quickstarts import quickstart_with
from tiny_configs import tiny_config

from lockstep import model_server
from lockstep.cli import main
from lockstep.config import resolve
from lockstep.engines.config import CPU_CACHE_TOKENS, GPU_SHARE, EmbeddedConfig
from lockstep.engines.embedded import engine
from lockstep.errors import ConfigError
from lockstep.memory import (
    DTYPE_BYTES,
    EXPERT_CHUNK_ROWS,
    GIB,
    HEAD_CHUNK_BYTES,
    LEAST_EXPERT_CHUNK,
    MIB,
    PROCESS_BYTES,
    PlanFacts,
    kept_per_token,
    plan_memory,
    predict_memory,
)
from lockstep.models import experts
from lockstep.models.attention_config import LatentShape, LinearShape
from lockstep.models.config import ModelConfig
from lockstep.models.decoder import Decoder
from lockstep.models.lora_config import LoraConfig, adapter_shapes, lora_shape
from lockstep.models.shapes import num_elements
from lockstep.ops import head
from lockstep.ops.base import Ops
from lockstep.ops.context import PackedContext
from lockstep.ops.contract import DELTA_WORK_BYTES
from lockstep.ops.invariant import InvariantOps
from lockstep.recipes import find_recipe, find_supervised_recipe
from lockstep.recipes.memory_fit import FIT_SHARE, fit_memory, ways_to_fit
from lockstep.run.preflight import (
    ModelFiles,
    Numerics,
    check_memory,
    internals,
    memory_plan,
    plan,
    preflight,
    read_model_files,
    sized_engine,
)
from lockstep.supervised import check_supervised
from lockstep.system import available_bytes
from lockstep.training.config import TrainerConfig

QWEN3 = tiny_config("qwen3", vocab_size=512, hidden_size=128, intermediate_size=256, head_dim=32)
GPT_OSS = tiny_config(
    "gpt_oss", vocab_size=512, hidden_size=128, intermediate_size=256, head_dim=32, num_experts=8,
    windows=(None, 32),
)  # fmt: skip
HYBRID = tiny_config(
    "qwen3_5_text", vocab_size=64, hidden_size=64, intermediate_size=160, head_dim=16,
    tie_embeddings=False,
    linear=LinearShape(
        layers=(0,), key_heads=2, value_heads=4, key_dim=16, value_dim=24, conv_width=4,
        is_grouped=False,
    ),
)  # fmt: skip
LATENT = replace(
    QWEN3, architecture="deepseek_v3", has_qk_norm=False, num_kv_heads=1, head_dim=24,
    latent=LatentShape(
        query_rank=40, kv_rank=48, nope_dim=16, rope_dim=8, value_dim=20, is_interleaved=True
    ),
)  # fmt: skip
MODELS = {"qwen3": QWEN3, "gpt_oss": GPT_OSS, "latent": LATENT}

TEACHER = ("distill.teacher.model=tiny-qwen3",)

HUB = json.loads((Path(__file__).parent / "models" / "hub_configs.json").read_text())


def facts(model, **settings):
    defaults = {"dtype": "float32", "device": "cpu", "max_update_tokens": 8192}
    trainer = TrainerConfig(max_tokens_per_microbatch=4096, **settings.pop("trainer", {}))
    return PlanFacts(model=model, trainer=trainer, **{**defaults, **settings})


def plan_run(config, model, *, is_kept=False):
    """The plan of a run of a model that has no files."""
    numerics = Numerics(fingerprint=None, is_kept=is_kept, line="")
    model_files = ModelFiles(Path(), model, renderer_config=None, renderer=None)
    return memory_plan(replace(config, device="cpu"), model_files, numerics=numerics)


def part(found, name):
    return found.parts.get(name, 0)


# -- against what happens -------------------------------------------------------------------------


def kept_bytes(model, num_tokens):
    """What autograd holds after a forward of one row, weights left out."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages, alive = {}, []

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)  # its place must not be taken by another that is counted too
        return tensor

    ids = torch.arange(num_tokens) % model.config.vocab_size
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(ids, torch.arange(num_tokens), PackedContext.of([num_tokens]))
    return sum(storages.values())


@pytest.mark.parametrize("backend", ["plain", "invariant"])
@pytest.mark.parametrize("dtype", DTYPE_BYTES)
@pytest.mark.parametrize("kind", MODELS)
def test_a_block_keeps_what_is_planned_for_it(kind, dtype, backend):
    """From the difference of two depths; an op that keeps more is to be planned for."""
    is_invariant = backend == "invariant"
    ops = InvariantOps() if is_invariant else Ops()
    kept = []
    for layers in (1, 2):
        config = replace(MODELS[kind], num_layers=layers, windows=(32,) * layers)
        kept.append(kept_bytes(Decoder(config, ops=ops).to(getattr(torch, dtype)), 256))
    planned = kept_per_token(config, 0, DTYPE_BYTES[dtype], is_invariant=is_invariant)
    assert planned == pytest.approx((kept[1] - kept[0]) / 256, rel=0.05)


def test_a_gpu_runs_as_many_requests_as_their_states_leave_room_for():
    states = 1 << 28
    few = EmbeddedConfig().sized(8 << 30, token_bytes=1 << 15, sequence_bytes=states, longest=4096)
    assert few.max_num_sequences == (8 << 30) // (states + (4096 << 15)) == 21
    held = few.kv_cache_tokens * (1 << 15) + few.max_num_sequences * states
    assert held <= 8 << 30
    assert HYBRID.cached_per_sequence(4) > 4 * HYBRID.linear.state_size
    assert QWEN3.cached_per_sequence(4) == 0


@pytest.mark.parametrize("backend", ["plain", "invariant"])
@pytest.mark.parametrize("dtype", DTYPE_BYTES)
@pytest.mark.parametrize("kind", ["linear", "attention"])
def test_a_block_of_a_hybrid_keeps_what_is_planned_for_it(kind, dtype, backend):
    ops = InvariantOps() if backend == "invariant" else Ops()
    kept, settings = [], {"is_invariant": backend == "invariant"}
    for more in (0, 1):
        layers = tuple(range(1 + more)) if kind == "linear" else (0,)
        config = replace(
            HYBRID, num_layers=2 + more, windows=(None,) * (2 + more),
            linear=replace(HYBRID.linear, layers=layers, key_heads=4, key_dim=32, value_dim=16),
        )  # fmt: skip
        kept.append(kept_bytes(Decoder(config, ops=ops).to(getattr(torch, dtype)), 256))
    layer = 0 if kind == "linear" else 1
    planned = kept_per_token(config, layer, DTYPE_BYTES[dtype], **settings)
    assert planned == pytest.approx((kept[1] - kept[0]) / 256, rel=0.05)


def test_sizes_that_other_files_decide_are_theirs():
    assert {"cpu": head.CHUNK_BYTES, "cuda": head.GPU_CHUNK_BYTES} == HEAD_CHUNK_BYTES
    assert experts.ROWS_PER_EXPERT == EXPERT_CHUNK_ROWS
    assert experts.LEAST_CHUNK == LEAST_EXPERT_CHUNK


# -- what settings change -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MODELS)
def test_every_setting_that_saves_memory_lowers_the_plan(kind):
    wide = replace(MODELS[kind], hidden_size=512, num_layers=8, windows=(None,) * 8)
    before = plan_memory(facts(wide)).num_bytes
    saving = (
        facts(wide, trainer={"recompute": "blocks"}),
        facts(wide, trainer={"freeze": ("*.mlp.*",)}),
        facts(wide, lora=lora_shape(LoraConfig(rank=4), wide)),
        facts(wide, dtype="bfloat16", lora=lora_shape(LoraConfig(rank=4), wide)),
        replace(facts(wide), trainer=TrainerConfig(max_tokens_per_microbatch=512)),
    )
    for cheaper in saving:
        assert plan_memory(cheaper).num_bytes < before, cheaper


def test_each_adapter_over_the_model_has_weights_and_moments_of_its_own():
    lora = lora_shape(LoraConfig(rank=4), QWEN3)
    size = num_elements(adapter_shapes(lora))
    one, two = (plan_memory(replace(facts(QWEN3, lora=lora), num_adapters=n)) for n in (1, 2))
    assert part(two, "AdamW moments") == 2 * part(one, "AdamW moments") == 2 * 8 * size
    assert part(two, "weights") - part(one, "weights") == 4 * size


def test_a_teacher_that_is_compared_over_the_vocabulary_is_planned():
    wide = replace(QWEN3, hidden_size=1024, intermediate_size=4096)
    before = plan_memory(facts(QWEN3, teachers=(QWEN3,)))
    compared, by_a_wider_one = (
        plan_memory(facts(QWEN3, teachers=(teacher,), compares_vocabulary=True))
        for teacher in (QWEN3, wide)
    )
    gradient = 4 * QWEN3.num_rows * QWEN3.hidden_size
    assert part(compared, "log-prob head") >= part(before, "log-prob head") + gradient
    assert part(by_a_wider_one, "one block at work") > part(compared, "log-prob head")
    config = resolve(find_recipe("distill"), ["model=tiny-qwen3", *TEACHER, "distill.signal=full"])
    sampled = resolve(config, ["distill.signal=sampled"])
    more, less = (plan_run(config, QWEN3) for config in (config, sampled))
    assert part(more, "log-prob head") > part(less, "log-prob head")


def test_layers_of_linear_attention_at_work_are_planned():
    """However many rows a micro-batch has: what chunks hold at once is bounded."""
    attention = replace(HYBRID, linear=None)
    found, without = (part(plan_memory(facts(c)), "one block at work") for c in (HYBRID, attention))
    assert found > without + DELTA_WORK_BYTES["cpu"]


def test_state_is_counted_to_the_byte():
    model = Decoder(QWEN3)
    size = sum(p.numel() for p in model.parameters())
    found = plan_memory(facts(QWEN3, dtype="bfloat16"))
    assert part(found, "float32 masters") == 4 * size
    assert part(found, "AdamW moments") == 8 * size
    assert part(found, "gradients") == (4 + 2) * size
    assert part(plan_memory(facts(QWEN3)), "float32 masters") == 0
    offloaded = plan_memory(facts(QWEN3, device="cuda", trainer={"offload": "optimizer"}))
    assert sum(offloaded.host_parts.values()) == (4 + 8 + 4) * size
    assert part(offloaded, "AdamW moments") == 0


def test_an_engine_a_reference_and_the_contract_are_in_the_plan():
    config = quickstart_with("objective.kl_coef=0.1", "dtype=bfloat16")
    found = plan_run(config, GPT_OSS, is_kept=True)
    names = set(found.parts)
    assert {"reference policy", "KV cache", "packed weights"} <= names
    assert isinstance(config.engine, EmbeddedConfig)
    cache = 2 * 2 * 2 * 32 * 2  # keys and values, layers, key heads, head width, bytes
    in_rows = cache * CPU_CACHE_TOKENS
    assert part(found, "KV cache") == cache * (CPU_CACHE_TOKENS + 128) + in_rows
    beside = plan_run(resolve(config, ["engine.replicas=1"]), GPT_OSS)
    assert part(beside, "KV cache") == 0
    assert part(beside, "engines in processes of their own") > part(found, "KV cache")
    critic = quickstart_with("advantage=gae")
    found = plan_run(critic, GPT_OSS)
    assert {"critic's weights", "critic's AdamW moments"} <= set(found.parts)
    frozen = resolve(critic, ["critic.freeze=body.*"])
    found = plan_run(frozen, GPT_OSS)
    assert part(found, "critic's weights") and not part(found, "critic's AdamW moments")
    frozen = resolve(critic, ["critic.freeze=body.*"])
    names = set(plan_run(frozen, GPT_OSS).parts)
    assert "critic's weights" in names and "critic's AdamW moments" not in names


def test_an_engine_that_shares_the_device_has_no_memory_while_the_trainer_trains():
    facts = PlanFacts(
        model=QWEN3, dtype="float32", device="cuda", trainer=TrainerConfig(),
        engine=EmbeddedConfig(kv_cache_tokens=4096), max_update_tokens=1 << 20,
    )  # fmt: skip
    shared = replace(facts, engine=EmbeddedConfig(kv_cache_tokens=4096, share_device=True))
    kv = part(plan_memory(facts), "KV cache")
    assert kv > 0 and plan_memory(shared).num_bytes == plan_memory(facts).num_bytes - kv


def test_an_engine_is_sized_for_what_the_plan_leaves_of_a_gpu():
    """memory_limit_gib stands for the GPU's free memory."""
    files = ModelFiles(Path(), QWEN3, renderer_config=None, renderer=None)
    token_bytes = 2 * 2 * 2 * 32 * 2  # keys and values, layers, key heads, head width, bytes

    def sized(*settings):
        config = quickstart_with("device=cuda", "max_tokens=500", *settings)
        return config, sized_engine(config, files)

    config, roomy = sized("memory_limit_gib=8")
    assert roomy.kv_cache_tokens == 256 * 500 // 128 * 128  # agent.max_in_flight bounds it
    assert roomy.max_num_sequences == 256
    tight, small = sized("memory_limit_gib=1.1")
    settled = replace(tight, engine=small)
    found = memory_plan(settled, files)
    free = 1.1 * GIB * GPU_SHARE - found.num_bytes
    assert 512 < small.kv_cache_tokens < roomy.kv_cache_tokens
    # At most a page is left over, besides the page that nobody reads.
    assert -128 * token_bytes <= free <= 128 * token_bytes
    assert small.max_num_sequences == max(64, small.kv_cache_tokens // 500)
    _, shared = sized("memory_limit_gib=1.1", "engine.share_device=true")
    assert shared.kv_cache_tokens > small.kv_cache_tokens  # an update's memory is free meanwhile
    _, least = sized("memory_limit_gib=0.1")
    assert least.kv_cache_tokens == 512, "an episode in whole pages: the plan refuses it then"
    _, beside = sized("memory_limit_gib=8", "engine.replicas=1")
    assert beside.kv_cache_tokens == 0, "its process has a GPU of its own, and sizes it there"
    _, given = sized("memory_limit_gib=8", "engine.kv_cache_tokens=4096")
    assert (given.kv_cache_tokens, given.max_num_sequences) == (4096, 64)
    assert "256 requests at once, keys and values of 128,000 tokens" in " ".join(
        internals(replace(config, engine=roomy), preflight(find_recipe("quickstart")))
    )


def test_vllm_on_the_trainers_gpu_gets_the_share_that_the_plan_leaves(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10 * GIB, 10 * GIB))
    files = ModelFiles(Path(), QWEN3, renderer_config=None, renderer=None)

    def sized(*settings):
        own = ["device=cuda", "engine=vllm", "memory_limit_gib=8", *settings]
        config = quickstart_with(*own)
        return config, sized_engine(config, files).memory_share

    config, share = sized("engine.share_device=true")
    found = memory_plan(config, files)
    assert part(found, "engines that sleep") == PROCESS_BYTES["cuda"]
    updating = ("gradients", "activations", "log-prob head", "one block at work")
    resting = found.num_bytes - sum(part(found, name) for name in updating)
    assert share == pytest.approx((8 * GPU_SHARE * GIB - resting) / (10 * GIB), abs=1e-6)
    assert sized("engine.share_device=true", "engine.replicas=2")[1] < share / 2
    turns = sized("engine.in_process=true", "engine.share_device=true")[1]
    assert sized("engine.in_process=true")[1] < turns  # else an update needs its memory as well
    assert sized()[1] == 0, "a GPU of its own"
    assert sized("engine.share_device=true", "engine.memory_share=0.3")[1] == 0.3
    assert sized("engine.urls=http://a:1", "engine.share_device=true")[1] == 0
    with pytest.raises(ConfigError, match="weights alone"):
        sized("engine.share_device=true", "memory_limit_gib=0.5")


def test_an_engine_on_a_cpu_has_fixed_sizes_that_hold_the_longest_episode():
    found = EmbeddedConfig().sized(longest=512)
    assert (found.kv_cache_tokens, found.max_num_sequences) == (65536, 64)
    assert EmbeddedConfig().sized(longest=100_000).kv_cache_tokens == 100_096
    assert EmbeddedConfig(max_step_tokens=8).sized().max_num_sequences == 8


def test_an_engine_that_has_a_gpu_alone_takes_nine_tenths_of_what_is_free(monkeypatch):
    """Tinker's base takes a quarter: the same process trains."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8 * GIB, 80 * GIB))
    weight = SimpleNamespace(device=torch.device("cuda"), element_size=lambda: 2)
    model = SimpleNamespace(config=QWEN3, embedding=weight)
    token_bytes = QWEN3.cached_per_token * 2
    alone = engine.sized(EmbeddedConfig(), model)
    assert alone.kv_cache_tokens == int(0.9 * 8 * GIB) // token_bytes // 128 * 128
    assert alone.max_num_sequences == 256
    share = model_server.CACHE_SHARE
    beside = engine.sized(EmbeddedConfig(), model, share=share, longest=512)
    assert beside.kv_cache_tokens == 2 * GIB // token_bytes // 128 * 128


def test_a_card_too_small_is_refused_with_the_settings_that_help(monkeypatch):
    """The other process on the card is named too: tests/cpu/launch/test_gpu.py."""
    config = quickstart_with("device=cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (GIB // 4, GIB // 4))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)
    with pytest.raises(ConfigError, match=r"0.25 GiB.*GPU"):
        check_memory(config, read_model_files(config))


def test_ranks_divide_state_and_tokens_and_the_engine_has_a_copy():
    wide = replace(QWEN3, num_layers=8, windows=(None,) * 8)
    one, two = (
        plan_memory(facts(wide, num_ranks=n, is_sharded=n > 1, max_update_tokens=1 << 20))
        for n in (1, 2)
    )
    for name in ("AdamW moments", "gradients"):
        assert part(two, name) == part(one, name) // 2
    assert part(two, "activations") == part(one, "activations")  # as many tokens, other rows
    halved = plan_memory(facts(wide, num_ranks=2, sequence=2, max_update_tokens=1 << 20))
    assert part(halved, "activations") == part(one, "activations") // 2
    assert part(halved, "gradients") == part(one, "gradients")
    found = plan_run(quickstart_with("parallel.processes=2"), GPT_OSS)
    assert "of each of 2 processes" in found.describe()
    assert part(found, "the engine's copy of the weights") > 0


def test_an_adapter_on_gpt_oss_20b_with_a_long_row_is_planned():
    """8k of prompt and 16k of response, in bfloat16, on a GPU: predicted, not run."""
    model = ModelConfig.from_hf(HUB["gpt-oss-20b"])
    lora = lora_shape(LoraConfig(rank=16, targets=("attention",)), model)
    trainer = TrainerConfig(max_tokens_per_microbatch=24576, recompute="blocks")
    found = plan_memory(
        PlanFacts(
            model=model, dtype="bfloat16", device="cuda", trainer=trainer, lora=lora,
            max_update_tokens=24576,
        )
    )  # fmt: skip
    # 20.9 billion parameters in 2 bytes
    assert part(found, "weights") / 1e9 == pytest.approx(41.9, abs=0.2)
    assert 40 * GIB < found.num_bytes < 60 * GIB


# -- refusals -------------------------------------------------------------------------------------


def test_a_plan_that_exceeds_memory_is_refused_with_the_parts_and_the_settings(capsys):
    settings = ["memory_limit_gib=0.25", "dtype=float32"]
    with pytest.raises(ConfigError) as error:
        preflight(quickstart_with(*settings))
    text = str(error.value)
    assert "there are 0.25 GiB (memory_limit_gib=0.25)" in text and "The largest parts: " in text
    assert "GiB (less with trainer.recompute=blocks or a smaller" in text
    for extra in ([], ["--dry-run"]):
        assert main(["train", "quickstart", *settings, *extra]) == 2
        assert "predicted to need" in " ".join(capsys.readouterr().err.split())


def dense(width, layers, mlp, vocabulary, heads, kv_heads):
    return replace(
        QWEN3, num_experts=0, num_active_experts=0, vocab_size=vocabulary, hidden_size=width,
        intermediate_size=mlp, num_layers=layers, num_heads=heads, num_kv_heads=kv_heads,
        head_dim=128 if width > 4000 else 64, max_positions=32768, windows=(None,) * layers,
    )  # fmt: skip


PUBLISHED = {
    "10M": dense(256, 6, 768, 8192, 4, 2),
    "135M": dense(576, 30, 1536, 49152, 9, 3),
    "0.6B": dense(1024, 28, 3072, 151936, 16, 8),
    "8B": dense(4096, 36, 12288, 151936, 32, 8),
    "70B": dense(8192, 80, 28672, 128256, 64, 8),
}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("gib", [8, 16, 24, 80])
@pytest.mark.parametrize("size", PUBLISHED)
def test_defaults_fit_or_the_refusal_names_the_memory_that_would_do(size, gib, device):
    model = PUBLISHED[size]
    settings = [f"memory_limit_gib={gib}", f"device={device}", "max_tokens=2048"]
    config = resolve(find_recipe("custom"), settings)
    given = ["memory_limit_gib", "device", "max_tokens"]
    fitted = fit_memory(config, given, model, Path(), may_adapt=True)
    found = peak(fitted, model)
    if found <= gib * GIB:
        assert found <= FIT_SHARE * gib * GIB, "other programs need some too"
        return
    sentence = ways_to_fit(fitted, model, Path(), gib * GIB)
    needed = float(sentence.partition("still needs ")[2].partition(" GiB")[0])
    roomy = replace(config, memory_limit_gib=needed / FIT_SHARE + 0.2)
    assert peak(fit_memory(roomy, given, model, Path(), may_adapt=True), model) <= (
        roomy.memory_limit_gib * GIB
    )


def peak(config, model):
    lora = config.lora and lora_shape(config.lora, model)
    found = predict_memory(config, model, lora, is_invariant=True)
    return found.num_bytes


def test_a_setting_of_the_user_stays_and_the_refusal_names_its_largest_value():
    settings = ["trainer.max_tokens_per_microbatch=50000", "trainer.recompute=none"]
    config = resolve(find_recipe("custom"), [*settings, "memory_limit_gib=12", "device=cpu"])
    given = [text.partition("=")[0] for text in settings]
    model = PUBLISHED["135M"]
    fitted = fit_memory(config, given, model, Path(), may_adapt=False)
    assert fitted.trainer == config.trainer and fitted.engine != config.engine
    sentence = ways_to_fit(fitted, model, Path(), 12 * GIB)
    number = int(sentence.partition("trainer.max_tokens_per_microbatch=")[2].split()[0].rstrip("."))

    def fits(tokens):
        trainer = replace(fitted.trainer, max_tokens_per_microbatch=tokens)
        return peak(replace(fitted, trainer=trainer), model) <= 12 * GIB

    assert fits(number) and not fits(number + 1)


def test_offloading_what_is_on_the_cpu_is_refused_before_a_model_is_loaded(capsys):
    settings = ["trainer.offload=optimizer", "device=cpu"]
    assert main(["train", "quickstart", *settings, "--dry-run"]) == 2
    assert "it is there already" in " ".join(capsys.readouterr().err.split())


def test_a_supervised_run_is_refused_too(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"token_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}) + "\n")
    settings = [f"sft.path={file}", "model=tiny-qwen3"]
    check_supervised(resolve(find_supervised_recipe("sft"), settings))
    with pytest.raises(ConfigError, match="predicted to need"):
        check_supervised(
            resolve(find_supervised_recipe("sft"), [*settings, "memory_limit_gib=0.1"])
        )


def test_the_plan_says_what_it_takes_and_what_there_is():
    recipe = find_recipe("quickstart")
    lines = plan(recipe, read_model_files(recipe))
    (line,) = (text for text in lines if text.startswith("memory     "))
    assert "GiB at the peak" in line and "are there): process 0.39" in line


def test_the_least_of_the_machine_and_its_control_groups_is_what_there_is(tmp_path):
    def write(path, text):
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    assert available_bytes(tmp_path) is None
    write("proc/meminfo", "MemTotal: 9 kB\nMemAvailable:  2048 kB\n")
    assert available_bytes(tmp_path) == (2 * MIB, "MemAvailable of this machine")
    write("proc/self/cgroup", "4:memory:/outer/inner\n0::/a/b\n")
    write("sys/fs/cgroup/memory/outer/memory.limit_in_bytes", f"{3 * MIB}\n")
    write("sys/fs/cgroup/a/b/memory.max", "max\n")
    assert available_bytes(tmp_path) == (2 * MIB, "MemAvailable of this machine")
    write("sys/fs/cgroup/a/memory.max", f"{MIB}\n")
    assert available_bytes(tmp_path) == (MIB, "memory.max of this control group")


def test_this_machine_says_how_much_it_has():
    if not Path("/proc/meminfo").exists():
        pytest.skip("only Linux says so")
    found = available_bytes()
    assert found is not None and found[0] > 64 * MIB
