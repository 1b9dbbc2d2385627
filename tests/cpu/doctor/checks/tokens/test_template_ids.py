"""What is learnt of a template is counted, and the counts do not grow with the dump."""

import numpy as np

from lockstep.doctor.checks.base import Setting
from lockstep.doctor.checks.rows import Rows
from lockstep.doctor.checks.tokens.context import MAX_OPENINGS, TemplateIds


def test_openings_that_are_never_the_same_are_not_kept_without_end():
    draw = np.random.default_rng(0)
    ids = TemplateIds(Setting())
    for _ in range(4):
        num = 3000
        mask = np.tile([False, False, True], num)
        ids.add(
            Rows(
                row_ids=tuple(map(str, range(num))),
                offsets=np.arange(num + 1, dtype=np.int64) * 3,
                token_ids=draw.integers(0, 2**31 - 1, 3 * num).astype(np.int32),
                loss_mask=mask,
            )
        )

        assert len(ids._openings) <= MAX_OPENINGS
    assert ids.openings == ()
