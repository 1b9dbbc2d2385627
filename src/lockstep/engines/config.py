"""Settings of the engines. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, ClassVar, Literal

from lockstep.config import ABOVE_0, Checked, Form, Interval, at_least, conflicts_in
from lockstep.errors import ConfigError
from lockstep.launch.config import share_of
from lockstep.tables import tables_beside

CPU_CACHE_TOKENS, CPU_SEQUENCES = 65536, 64
"""Sizes of an engine on a CPU, where a step of 64 requests costs little more than one of 1."""
GPU_SEQUENCES = (64, 256)
"""Least and most of an engine on a GPU. In between: the number of longest episodes that fit its
cache. Guesses until measured."""
GPU_SHARE = 0.9
"""Share of a GPU's free memory that is planned for; the rest is for fragments of torch's allocator
and workspaces of libraries. A guess until measured."""

_CONFLICTS: dict[str, dict[str, str]] = tables_beside(__file__)
SampleDtype = Literal["same", "float32", "bfloat16", "float16"]
_URL = Form("https?://.*[^/]", "http://HOST:PORT each, without a path or a slash at its end")


@dataclass(frozen=True, kw_only=True)
class PoolConfig(Checked):
    """How several replicas serve one run (docs/engines.md). Without effect on a single engine."""

    update: Literal["together", "rolling"] = "together"
    """together: all replicas load new weights at once. rolling: one after the other, while the
    others keep sampling, so that for a moment two versions sample."""
    frozen_seconds: Annotated[float, ABOVE_0] = 120.0
    """A replica with requests counts as frozen after this silence and is taken out. After half of
    the time it is asked for one token, and a twelfth lies between two pings. One that is out is
    tried again after a twelfth, then after twice as long each time, up to half of it. When all are
    out, requests wait as long as that half, and while one is brought back."""
    reply_seconds: ClassVar[float] = 600.0
    """A request without a token for this time counts as lost and is sent again, if its replica
    serves others."""
    load_seconds: ClassVar[float] = 600.0
    """Limit for loading weights; a replica that takes longer is taken out."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig(Checked):
    """Base of the kinds of the setting `engine`; `registry.open_engine` makes the engine, or a pool
    of several."""

    can_record_routes: ClassVar[bool] = False
    """True if the engine can return the experts of each token of a mixture."""

    share_device: bool = False
    """Engine and trainer take turns on one device: the engine frees the memory of its keys and
    values before an update, and allocates it again afterwards. Costs the cached prefixes, which an
    update drops anyway."""
    pool: PoolConfig = field(default_factory=PoolConfig)
    """How several replicas share requests, and what happens when one fails."""

    def replica_configs(self) -> tuple[EngineConfig, ...]:
        """The settings of each replica; this one alone for a single engine."""
        count = self.num_workers
        return (replace(self, replicas=1),) * count if count else (self,)

    @property
    def is_pool(self) -> bool:
        """True if a pool serves the requests: several replicas, or a single replica with
        restarts."""
        return len(self.replica_configs()) > 1

    @property
    def num_workers(self) -> int:
        """Number of engines that the run starts in processes of their own."""
        return 0

    @property
    def gpus_each(self) -> int:
        """GPUs of each of these engines, where there are any."""
        return 1

    def for_rank(self, rank: int, world: int) -> EngineConfig:
        """The settings for one of `world` processes that train together: each samples with engines
        of its own. Raises ConfigError if there are too few."""
        if not self.num_workers:
            return self
        share = share_of(self.num_workers, rank, world, "engine.replicas")
        return replace(self, replicas=len(share))

    def gpus_of_rank(
        self, rank: int, world: int, *, local_rank: int, local_world: int, gpus: Sequence[str]
    ) -> list[str]:
        """CUDA_VISIBLE_DEVICES of each of a rank's engines that the run starts in processes of
        their own: the rank's own GPU if they share it.

        local_rank, local_world: place on this machine, whose first `gpus` the ranks train on.
        Raises ConfigError if there are too few.

        >>> EmbeddedConfig(replicas=4).gpus_of_rank(
        ...     1, 2, local_rank=1, local_world=2, gpus="abcdef"
        ... )
        ['e', 'f']
        """
        if not (count := self.num_workers):
            return []
        shares = [share_of(count, each, world, "engine.replicas") for each in range(world)]
        if self.share_device:
            return [gpus[local_rank]] * len(shares[rank])
        first = shares[rank - local_rank].start
        here = shares[rank - local_rank + local_world - 1].stop - first
        if local_world + here * self.gpus_each > len(gpus):
            raise ConfigError(
                f"engine.replicas={count}: {here} of them on this machine, each with "
                f"{self.gpus_each} GPU(s) of its own beside the {local_world} that train, and it "
                f"has {len(gpus)}. Lower engine.replicas, or set engine.share_device=true: they "
                "then take turns with the trainer."
            )
        begins = (local_world + (at - first) * self.gpus_each for at in shares[rank])
        return [",".join(gpus[at : at + self.gpus_each]) for at in begins]


@dataclass(frozen=True, kw_only=True)
class EmbeddedConfig(EngineConfig):
    """The trainer's own decoder, sampling inside the training process or in processes beside it."""

    can_record_routes: ClassVar[bool] = True
    CONFLICTS = _CONFLICTS["embedded"]

    replicas: Annotated[int, at_least(0)] = 0
    """Processes that sample, each with a copy of the weights, and a GPU of its own if there are
    any. 0 samples inside the training process, from its weights."""
    restarts: ClassVar[int] = 3
    """Times that each of these processes is started again after it has died."""
    dtype: SampleDtype = "same"
    """Dtype of the sampler; same is the trainer's. Another one samples from a copy of the weights,
    cast at every sync: the contract is then off, and the gap is measured."""
    max_num_sequences: Annotated[int, at_least(0)] = 0
    """Requests that run at the same time; more wait. 0 is 64 on a CPU. On a GPU it is the number of
    longest episodes that fit kv_cache_tokens, 64 to 256; fewer in a model with linear attention,
    where each request also has states."""
    max_step_tokens: Annotated[int, at_least(1)] = 2048
    """Most tokens that one step computes. Longer prompts are prefilled in chunks beside the sampled
    tokens, so that a long prompt never blocks the other requests."""
    kv_cache_tokens: Annotated[int, at_least(0)] = 0
    """Tokens whose keys and values are held: running requests first, then cached prefixes. Bytes
    = tokens x 2 x layers x key heads x head width x bytes of the dtype. 0 is 65536 on a CPU; on a
    GPU the rest of its memory plan, up to agent.max_in_flight episodes of max_tokens."""
    page_size: Annotated[int, at_least(1)] = 128
    """Tokens per page of the cache."""
    prefix_cache: bool = True
    """Keep the keys and values of finished requests, so that the next turn computes only its new
    tokens."""

    lookup_tokens: Annotated[int, at_least(0)] = 0
    """Longest guess at a request's next tokens: what followed its last three tokens earlier in its
    text. A step computes it whole and keeps the part that was drawn: same tokens and log-probs, in
    fewer steps where replies repeat their prompt. 0 guesses nothing."""
    resident_rows: bool = True
    """Hold the keys and values of running requests a second time, contiguous per request, so that
    decoding reads them in place and gathers no pages. Takes at most as much memory again as
    kv_cache_tokens; batches that do not fit gather pages. Without effect on a GPU, whose attention
    reads pages in place."""
    cuda_graphs: bool = True
    """Replay a step of sampled tokens as a CUDA graph, captured once per size of batch. Off, a GPU
    waits for Python between its kernels. Without effect on a CPU."""

    @property
    def paged_tokens(self) -> int:
        """`kv_cache_tokens` in whole pages."""
        return self.kv_cache_tokens // self.page_size * self.page_size

    @property
    def is_pool(self) -> bool:
        return self.replicas > 0

    @property
    def num_workers(self) -> int:
        return self.replicas

    def check_lookup(self, *, has_states: bool, has_graphs: bool) -> None:
        """Raises ConfigError if guesses are asked for and cannot be taken back."""
        if self.lookup_tokens and (has_states or has_graphs):
            raise ConfigError(
                f"engine.lookup_tokens={self.lookup_tokens}: guesses cannot be taken back from a "
                "state of linear attention, nor computed in a CUDA graph. Leave it out, or set "
                "engine.cuda_graphs=false."
            )

    def sized(
        self,
        room: int | None = None,
        *,
        token_bytes: int = 1,
        sequence_bytes: int = 0,
        longest: int = 1,
        most_tokens: int | None = None,
    ) -> EmbeddedConfig:
        """These settings with numbers in place of 0. room: bytes of a GPU for keys and values;
        None: a CPU. token_bytes: cached bytes per token. sequence_bytes: bytes of a running
        request's states in layers of linear attention. longest: tokens of the longest episode,
        which always fits the cache. most_tokens: upper limit.

        >>> EmbeddedConfig().sized(32 << 30, token_bytes=147456, longest=4096).kv_cache_tokens
        232960
        """
        tokens, count = self.kv_cache_tokens, self.max_num_sequences
        if not tokens:
            shared = token_bytes + -(-sequence_bytes // longest)
            tokens = CPU_CACHE_TOKENS if room is None else max(room, 0) // shared
            if room is not None and most_tokens is not None:
                tokens = min(tokens, most_tokens)
            num_pages = max(tokens // self.page_size, -(-longest // self.page_size))
            tokens = num_pages * self.page_size
        if not count:
            least, most = GPU_SEQUENCES
            least = 1 if sequence_bytes else least
            count = CPU_SEQUENCES if room is None else min(max(tokens // longest, least), most)
            count = min(count, self.max_step_tokens)
        return replace(self, kv_cache_tokens=tokens, max_num_sequences=count)


@dataclass(frozen=True, kw_only=True)
class ServedConfig(EngineConfig):
    """Base of engines behind HTTP."""

    IS_BASE: ClassVar[bool] = True

    urls: Annotated[tuple[str, ...], _URL] = ()
    """Addresses of servers, as http://HOST:PORT, one for each replica."""
    start_seconds: Annotated[float, ABOVE_0] = 600.0
    """Longest wait for the first answer of a server."""
    request_seconds: Annotated[float, ABOVE_0] = 600.0
    """A server counts as frozen if a request gets no byte for this time."""
    api_key_env: str = ""
    """Environment variable with the servers' key; the key itself is never stored."""
    deterministic: bool = False
    """Replies that do not depend on the batch. vLLM: VLLM_BATCH_INVARIANT=1, slower kernels for
    GPUs only. SGLang: a server without --enable-deterministic-inference is refused."""
    take_over: bool = False
    """Use servers that another run holds, or held when it crashed. If that run is alive, it stops
    with an error."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(set(self.urls)) < len(self.urls):
            raise ConfigError("engine.urls names a server twice: each is one replica.")

    def for_rank(self, rank: int, world: int) -> EngineConfig:
        if not self.urls:
            return super().for_rank(rank, world)
        share = share_of(len(self.urls), rank, world, "engine.urls")
        return replace(self, urls=self.urls[share.start : share.stop])

    def replica_configs(self) -> tuple[EngineConfig, ...]:
        if len(self.urls) < 2:
            return super().replica_configs()
        return tuple(replace(self, urls=(url,)) for url in self.urls)


@dataclass(frozen=True, kw_only=True)
class SGLangConfig(ServedConfig):
    """SGLang, on running servers. docs/engines.md lists the tests on a GPU."""

    TAG: ClassVar[str] = "sglang"
    can_record_routes: ClassVar[bool] = True
    CONFLICTS = _CONFLICTS["sglang"]


DecoderChoice = Literal["auto", "lockstep", "vllm"]


@dataclass(frozen=True, kw_only=True)
class VllmConfig(ServedConfig):
    """vLLM: on servers that are up (engine.urls), on servers that the run starts and ends, or in
    this process (engine.in_process=true). See docs/engines.md."""

    can_record_routes: ClassVar[bool] = True
    CONFLICTS = _CONFLICTS["vllm"]

    decoder: DecoderChoice = "auto"
    """Model that computes the tokens: vllm is vLLM's own, lockstep the trainer's decoder inside
    vLLM, which gives the trainer's bits. auto is lockstep with contract=true-on-policy, where there
    is a decoder of the architecture and the settings allow it; else vllm."""
    in_process: bool = False
    """Run vLLM inside the training process, whose environment must have it."""
    python: str = ""
    """Interpreter of an environment with vLLM, for servers that the run starts; empty is this
    one."""
    replicas: Annotated[int, at_least(1)] = 1
    """Servers that the run starts."""
    dtype: Literal["same", "float32", "bfloat16", "float16"] = "same"
    """Dtype of the engine; same is the trainer's."""
    max_num_sequences: Annotated[int, at_least(1)] = 64
    """Requests that one replica runs at the same time; more wait."""
    kv_cache_gib: Annotated[float, at_least(0)] = 0.0
    """GiB of keys and values per replica; 0 is the rest of its share of the GPU's memory, and 1 GiB
    without a GPU."""
    memory_share: Annotated[float, Interval("[0, 1]")] = 0.0
    """Share of a GPU's memory that one replica takes for everything, up to 1. 0 is vLLM's default;
    on the trainer's GPU it is the rest of the memory plan."""
    prefix_cache: bool = True
    """Keep the keys and values of finished requests, so that the next turn computes only its new
    tokens."""
    tensor_parallel: Annotated[int, at_least(1)] = 1
    """GPUs that one replica is spread over."""
    delta_sync: bool = False
    """Send only the numbers that changed since the load before, with a checksum of all. The trainer
    and each worker of a server then keep a copy of the weights in the host's memory."""
    max_adapter_rank: Annotated[int, at_least(0)] = 0
    """Load the weights of a run with lora as an adapter of at most this rank; 0 loads them merged
    into the model."""
    args: Annotated[tuple[str, ...], Form("--.*", "--NAME or --NAME=VALUE each")] = ()
    """Further arguments of vLLM, as --NAME=VALUE."""
    env: Annotated[tuple[str, ...], Form(r"[^\W\d]\w*=.*", "NAME=VALUE each")] = ()
    """Environment variables of the engine's processes, as NAME=VALUE."""

    def __post_init__(self) -> None:
        ServedConfig.__post_init__(self)
        if self.urls:
            self._check_attached()
        if self.decoder == "lockstep" and (reason := self.why_no_decoder):
            raise ConfigError(f"engine.decoder=lockstep: {reason}, or set engine.decoder=vllm.")

    @property
    def num_workers(self) -> int:
        return 0 if self.urls or self.in_process else self.replicas

    @property
    def gpus_each(self) -> int:
        return self.tensor_parallel

    def sized(self, room: int, *, total: int, weights: int) -> VllmConfig:
        """These settings with a share of the trainer's GPU. room: bytes that are left for one
        replica, of `total`. weights: bytes of its own copy. Raises ConfigError if the copy does not
        fit."""
        if self.memory_share:
            return self
        if room <= weights:
            raise ConfigError(
                f"engine=vllm on the trainer's GPU has {room / 2**30:.2f} GiB beside it, and its "
                f"weights alone take {weights / 2**30:.2f} GiB. Give it a GPU of its own "
                "(engine.share_device=false), or set trainer.offload=optimizer."
            )
        return replace(self, memory_share=room / total)

    @property
    def why_no_decoder(self) -> str:
        """Why Lockstep's decoder cannot run under these settings, and what to do; empty if it
        can."""
        return next(conflicts_in(self, _CONFLICTS["decoder"], at="engine."), "")

    @property
    def quantization(self) -> str:
        """The arguments that make vLLM quantise its weights; empty without."""
        return " ".join(x for x in self.args if x.startswith(("--quantization", "-q")))

    def _check_attached(self) -> None:
        applies = {"decoder", *(entry.name for entry in fields(ServedConfig))} - {"deterministic"}
        for entry in fields(self):
            value = getattr(self, entry.name)
            if entry.name not in applies and value != entry.default:
                raise ConfigError(
                    f"engine.{entry.name}={value} with engine.urls: those servers run already, "
                    f"and it would do nothing. Start them with it, or leave one of the two out."
                )
