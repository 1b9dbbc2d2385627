"""Prefixes from vLLM's cache for scored texts.

vLLM computes the whole prompt of a request that asks for its log-probs, since positions from the
cache have none. A request of ours wants the log-probs of a reply alone, so the prompt before it may
come from the cache, up to the first wanted id.

Guard: tests/vllm/test_local.py::test_a_scored_reply_takes_its_prompt_from_the_cache
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.outputs import LogprobsTensors


def read_cached_prefixes(argument: str) -> None:
    """Makes vLLM in this process read the cache for requests that name their first wanted id by
    this one of their `extra_args`. Log-probs before that id are 0. Idempotent."""
    plain, empty = KVCacheManager.get_computed_blocks, LogprobsTensors.empty_cpu
    if plain.__name__ == "computed_blocks":
        return

    def computed_blocks(manager: Any, request: Any) -> Any:
        params = request.sampling_params
        first = ((params and params.extra_args) or {}).get(argument)
        if first is None:
            return plain(manager, request)
        coordinator = manager.coordinator
        find = coordinator.find_longest_cache_hit
        # The first wanted id is predicted at the position before it.
        coordinator.find_longest_cache_hit = lambda hashes, longest: find(
            hashes, min(longest, first - 1)
        )
        request.skip_reading_prefix_cache = False
        try:
            return plain(manager, request)
        finally:
            request.skip_reading_prefix_cache = True
            del coordinator.find_longest_cache_hit

    def empty_cpu(num_positions: int, num_tokens: int) -> LogprobsTensors:
        """Zeros: what no step writes must be a number in the answer."""
        found = empty(num_positions, num_tokens)
        for tensor in (found.logprob_token_ids, found.logprobs, found.selected_token_ranks):
            tensor.zero_()
        return found

    KVCacheManager.get_computed_blocks = computed_blocks
    LogprobsTensors.empty_cpu = staticmethod(empty_cpu)
