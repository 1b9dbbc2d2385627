"""vLLM servers that a run starts: their arguments and environment."""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from lockstep.children import own_variables
from lockstep.engines.base import EngineContext
from lockstep.engines.config import VllmConfig
from lockstep.engines.http import HttpClient
from lockstep.engines.vllm import plugin
from lockstep.engines.vllm.checkpoint import check_readable, config_overrides, has_latents
from lockstep.errors import CapabilityError
from lockstep.launch.place import free_port
from lockstep.launch.workers import ServerProcess
from lockstep.package import NAME, package_version

WORKER_EXTENSION = plugin.arguments_of("server")["worker-extension-cls"]
CPU_CACHE_GIB = 1.0
"""GiB of keys and values without a GPU, where vLLM's default is most of the machine."""

CPU_STEP_TOKENS = 2048
"""Most tokens of one step without a GPU; vLLM's default."""

NOT_INHERITED = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "RANK", "WORLD_SIZE", "LOCAL_RANK")
"""Environment variables of this process alone: its packages, and its place among trainers."""

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts for the largest rank of an adapter."""


def engine_arguments(
    config: VllmConfig,
    context: EngineContext,
    directory: Path,
    *,
    has_gpu: bool,
    max_tokens: int,
    is_ours: bool,
) -> list[str]:
    """Arguments for every vLLM engine of a run, in a server or in this process, for the checkpoint
    in `directory` and texts of up to `max_tokens`. is_ours: it runs Lockstep's decoder. Raises
    CapabilityError for what vLLM has on GPUs only."""
    if config.deterministic and not has_gpu:
        raise CapabilityError(
            "engine.deterministic=true: vLLM's batch-invariant kernels are for GPUs, and there is "
            "none here. Leave it out: the effect of the batch is measured at every step."
        )
    cache_gib = config.kv_cache_gib or (0.0 if has_gpu else CPU_CACHE_GIB)
    settings: dict[str, Any] = {
        "model": directory,
        "dtype": context.dtype if config.dtype == "same" else config.dtype,
        "seed": context.seed,
        "max-model-len": max_tokens,
        "max-num-seqs": config.max_num_sequences,
        "tensor-parallel-size": config.tensor_parallel,
        **plugin.arguments_of("engine"),
    }
    settings["enable-prefix-caching" if config.prefix_cache else "no-enable-prefix-caching"] = True
    if has_gpu and (config.share_device or config.in_process):
        settings["enable-sleep-mode"] = True
    if config.memory_share:
        settings["gpu-memory-utilization"] = math.floor(config.memory_share * 1000) / 1000
    if cache_gib:
        settings["kv-cache-memory-bytes"] = int(cache_gib * 2**30)
    if is_ours:
        settings |= plugin.settings_for(getattr(context.model, "ops", None))
    elif overrides := config_overrides(directory):
        settings["hf-overrides"] = json.dumps(overrides)
    if not has_gpu and not is_ours:
        # A prompt that is computed in parts rolls back its request's draws, which torch's CPU
        # generator cannot: the engine ends ("CPU Generator does not use offset").
        settings["max-num-batched-tokens"] = max(CPU_STEP_TOKENS, max_tokens)
        settings |= {"no-enable-chunked-prefill": True, "enforce-eager": True}
        if has_latents(directory) and settings["dtype"] == "float32":
            settings["attention-backend"] = "CPU_MLA"  # the AMX kernel reads two-byte types alone
    if wanted := config.max_adapter_rank:
        settings["enable-lora"] = True
        fitting = (rank for rank in LORA_RANKS if rank >= wanted)
        settings["max-lora-rank"] = min(fitting, default=wanted)
    return plugin.written(settings)


class VllmServer:
    """A vLLM server of this run, which can be restarted from another checkpoint."""

    def __init__(self, config: VllmConfig, context: EngineContext) -> None:
        """Starts the server; returns when it answers. Raises CapabilityError for features that vLLM
        has on GPUs only, and what `start` raises."""
        self._config, self._context = config, context
        self._python = config.python or sys.executable
        self._has_gpu = torch.cuda.is_available()
        self._is_ours = plugin.runs_decoder(config, context)
        if not self._is_ours:
            check_readable(context.directory, fills_head=False)
        place = context.scratch or Path(tempfile.mkdtemp(prefix="lockstep-vllm-"))
        self._place = place.absolute() / "vllm"
        self._place.mkdir(parents=True, exist_ok=True)
        self._packages = _folder_of_package(self._place)
        self.start(context.directory)

    def start(self, directory: Path) -> None:
        """Starts a process from the checkpoint in `directory` and waits until it answers. Raises
        EngineError, with the end of its log, if it ends before or takes longer than
        engine.start_seconds."""
        port, on_wait = free_port(), self._context.on_wait
        self.process = ServerProcess(
            self._command(port, directory),
            log=self._place / "vllm.log",
            environment=self._environment(),
        )
        self.client = HttpClient(
            f"http://127.0.0.1:{port}",
            name="vllm",
            request_seconds=self._config.request_seconds,
            how_started=shlex.join(self.process.command),
        )
        on_wait(
            f"starting vLLM, which takes from half a minute to minutes; its log: {self.process.log}"
        )
        try:
            self.client.wait_until_up(
                "/health", self._config.start_seconds, on_wait, self.process.why_ended
            )
        except BaseException:  # Ctrl-C while it loads leaves no server either
            self.process.stop()
            raise

    def _command(self, port: int, directory: Path) -> list[str]:
        config, context = self._config, self._context
        arguments = plugin.arguments_of("server") | {"port": port}
        if not self._has_gpu and config.tensor_parallel == 1:
            # Runs in the engine's process: no other process to start and to send steps to.
            arguments["distributed-executor-backend"] = "uni"
        return [
            self._python,
            "-m",
            "vllm.entrypoints.openai.api_server",
            *engine_arguments(
                config,
                context,
                directory,
                has_gpu=self._has_gpu,
                max_tokens=context.max_tokens,
                is_ours=self._is_ours,
            ),
            *plugin.written(arguments),
            *config.args,
        ]

    def _environment(self) -> dict[str, str]:
        config = self._config
        variables = own_variables(has_others=True)
        inherited = {k: v for k, v in variables.items() if k not in NOT_INHERITED}
        if not self._has_gpu:
            threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 2) // 2))}
            inherited = plugin.environment_of("server_without_gpu") | threads | inherited
        own = {"PYTHONPATH": str(self._packages)} | plugin.environment_of("server")
        if self._is_ours:
            own |= plugin.environment_of("decoder")
        if config.deterministic:
            own["VLLM_BATCH_INVARIANT"] = "1"
        if gpus := self._context.gpus[self._context.replica : self._context.replica + 1]:
            own["CUDA_VISIBLE_DEVICES"] = gpus[0]
        if config.max_adapter_rank:
            own["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        return inherited | own | dict(value.split("=", 1) for value in config.env)


def _folder_of_package(place: Path) -> Path:
    """A directory with this package and nothing else: the server's interpreter may be another one,
    and must not find this one's packages. vLLM finds the plugin there as in an installed one."""
    folder = place / "python"
    about = folder / "lockstep_rl.dist-info"
    about.mkdir(parents=True, exist_ok=True)
    (about / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {package_version()}\n"
    )
    (about / "entry_points.txt").write_text(plugin.ENTRY_POINT)
    link = folder / "lockstep"
    link.unlink(missing_ok=True)
    link.symlink_to(Path(__file__).absolute().parents[2])
    return folder
