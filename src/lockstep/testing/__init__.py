"""For tests: fakes, faults, and assertions about the rows of any trainer."""

from lockstep.testing.assertions import assert_aligned as assert_aligned
from lockstep.testing.assertions import assert_incremental as assert_incremental
from lockstep.testing.assertions import assert_physical as assert_physical
from lockstep.testing.assertions import assert_prefix as assert_prefix
from lockstep.testing.assertions import assert_token_exact as assert_token_exact
from lockstep.testing.renderers import check_renderer as check_renderer
