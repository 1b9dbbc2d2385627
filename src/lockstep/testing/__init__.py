"""For tests: fakes, faults, and assertions about the rows of any trainer."""

from lockstep.testing.assertions import (
    assert_aligned,
    assert_incremental,
    assert_physical,
    assert_prefix,
    assert_token_exact,
)
from lockstep.testing.renderers import check_renderer

__all__ = [
    "assert_aligned",
    "assert_incremental",
    "assert_physical",
    "assert_prefix",
    "assert_token_exact",
    "check_renderer",
]
