"""Sleep and wake against vLLM's own source, from the engine down to the allocator: a fake driver
fails where memory is mapped twice, or written while it is not mapped."""

import asyncio
from types import SimpleNamespace
from urllib.parse import parse_qs, urlsplit

import pytest
import torch
from vllm.device_allocator import AllocationData, cumem, sleep_mode_backend
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor
from vllm.v1.worker.gpu_worker import Worker
from vllm_models import run

from lockstep.engines.base import Capabilities
from lockstep.engines.config import VllmConfig
from lockstep.engines.http_wire import HttpWire
from lockstep.engines.served import ServedEngine
from lockstep.engines.vllm.local import LocalWire
from lockstep.engines.vllm.wire import VllmWire

TAGS = ("weights", "weights", "kv_cache", "runtime")


class Driver:
    """The driver's part of CuMemAllocator."""

    def __init__(self):
        self.mapped = {}
        self.log = []

    def create_and_map(self, handle):
        assert not self.mapped[handle], f"{handle} is mapped twice"
        self.mapped[handle] = True
        self.log.append(TAGS[handle[2]])

    def unmap_and_release(self, handle):
        assert self.mapped[handle], f"{handle} is not mapped"
        self.mapped[handle] = False

    def write(self, tag):
        for handle, is_mapped in self.mapped.items():
            assert TAGS[handle[2]] != tag or is_mapped, f"a write to unmapped {tag}"
        self.log.append(f"write {tag}")


class OneWorker(Executor):
    """vLLM's executor over one worker, without processes or a model."""

    def __init__(self, driver):
        self.sleeping_tags, self.driver = set(), driver
        self.worker = object.__new__(Worker)
        self.worker.__dict__ |= {
            "_sleep_mode_backend": sleep_mode_backend.CuMemBackend(),
            "vllm_config": SimpleNamespace(
                model_config=SimpleNamespace(enable_nccl_comm_suspend=False)
            ),
            "_sleep_saved_parameters": {},
            "_sleep_saved_buffers": {},
            "_sleep_saved_draft_buffers": {},
            "synchronize_device": lambda: None,
        }

    def collective_rpc(self, method, kwargs):
        if method == "sleep":  # the worker's own measures free memory around this call
            return self.worker.sleep_mode_backend.suspend(**kwargs)
        return getattr(self.worker, method)(**kwargs)

    def _init_executor(self): ...

    def check_health(self): ...


class Engine:
    """As much of vLLM's engine as sleeps and wakes."""

    vllm_config = None

    def __init__(self, driver):
        self.driver, self.is_running = driver, True
        self.model_executor = OneWorker(driver)

    def pause_scheduler(self, **_):
        self.is_running = False

    def resume_scheduler(self):
        self.is_running = True

    sleep, wake_up = EngineCore.sleep, EngineCore.wake_up

    def apply_model(self, call):
        self.driver.write("weights")

    def add_lora(self, adapter):
        self.driver.write("weights")

    def reset_prefix_cache(self):
        self.driver.write("kv_cache")
        return True

    def abort_request(self, names, internal): ...


class Server:
    """The routes that a wire calls, over `Engine`. What they do is vLLM's api_router.py."""

    url = "http://fake"

    def __init__(self, engine):
        self.engine = engine

    async def post(self, path, body=None, **_):
        route, asked = urlsplit(path).path, parse_qs(urlsplit(path).query)
        if route == "/sleep":
            self.engine.sleep(int(asked["level"][0]), asked["mode"][0])
        elif route == "/wake_up":
            self.engine.wake_up(asked.get("tags"))
        elif route in ("/collective_rpc", "/v1/load_lora_adapter"):
            self.engine.driver.write("weights")
        elif route == "/resume":
            self.engine.resume_scheduler()
        return {"success": True}


CAN = Capabilities(
    name="vllm", vocab_size=8, max_tokens=8, distributions=("sampled",), has_sleep=True,
    has_adapters=True, weight_sources=("directory",),
)  # fmt: skip


class OverHttp(VllmWire):
    def __init__(self, engine):
        HttpWire.__init__(self, VllmConfig(), SimpleNamespace(run="r"), Server(engine))
        self.server, self._why_not_in_place, self.capabilities = None, "", CAN
        self.lease = None


class InProcess(LocalWire):
    def __init__(self, engine):
        self._engine, self._why_not_in_place, self.capabilities = engine, "", CAN
        self._calls, self._is_paused, self._named = {}, False, {}
        self._weights = SimpleNamespace(update_weights=None)
        self._numbers = iter(range(1, 9))

    def _drive(self): ...


@pytest.fixture(params=[OverHttp, InProcess])
def started(request, monkeypatch):
    """(engine over vLLM's source, its driver)."""
    driver, allocator = Driver(), cumem.CuMemAllocator()
    for at, tag in enumerate(TAGS):
        handle = (0, 64, at, 0)
        driver.mapped[handle] = True
        allocator.pointer_to_data[at] = AllocationData(handle, tag)
    monkeypatch.setattr(cumem, "create_and_map", driver.create_and_map)
    monkeypatch.setattr(cumem, "unmap_and_release", driver.unmap_and_release)
    monkeypatch.setattr(cumem, "libcudart", SimpleNamespace(cudaMemcpy=lambda *_: None))
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    monkeypatch.setattr("vllm.device_allocator.get_mem_allocator_instance", lambda: allocator)
    return ServedEngine(request.param(Engine(driver))), driver


def test_an_update_wakes_weights_before_the_load_and_the_cache_after_it(started, tmp_path):
    engine, driver = started

    async def updates():
        for version in (1, 2):
            await engine.sleep()
            assert not any(driver.mapped.values())
            await engine.load_weights(str(tmp_path), version=version)
            await engine.wake()
            assert all(driver.mapped.values())

    run(updates())
    own = [line for line in driver.log if line != "write kv_cache"]
    assert own == ["weights", "weights", "runtime", "write weights", "kv_cache"] * 2


def test_a_wake_without_a_load_maps_everything_once(started):
    engine, driver = started

    async def turns():
        await engine.sleep()
        await engine.wake()
        await engine.wake()

    run(turns())
    assert all(driver.mapped.values())
    assert [line for line in driver.log if "write" not in line].count("kv_cache") == 1


def test_an_adapter_is_loaded_into_mapped_weights(started, tmp_path):
    engine, driver = started

    async def load():
        await engine.sleep()
        await engine.load_adapter("a", str(tmp_path), version=1)
        await engine.wake()

    run(load())
    assert all(driver.mapped.values()) and "write weights" in driver.log


def test_the_fake_driver_fails_where_a_load_comes_before_the_weights(started, tmp_path):
    engine, _ = started
    wire = engine.wire

    async def broken():
        await wire.sleep()
        await wire.load_weights(str(tmp_path), version=1)

    with pytest.raises(AssertionError, match="unmapped weights"):
        asyncio.run(broken())
