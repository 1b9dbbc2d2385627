"""How the gap is divided among causes that were found together."""

import numpy as np
import pytest
from made_rows import noisy, policy_rows

from lockstep.doctor.checks.base import Check, Setting
from lockstep.doctor.checks.examine import Stage, examine


class _Lost(Check):
    """The trainer's log-probs of rows from `first` to `last` are another's."""

    claim = ""
    first, last = 0, 0

    def look(self, rows):
        pass

    def conclude(self):
        return self.found("differs", "")

    def repair(self, rows):
        assert rows.trainer_logprobs is not None
        hit = (rows.row_of >= self.first) & (rows.row_of < self.last)
        values = np.where(hit, np.float32(np.nan), rows.trainer_logprobs)
        return rows.with_(trainer_logprobs=values)


class _Early(_Lost):
    name, cause = "tokens/early", "padding"
    first, last = 0, 40


class _Late(_Lost):
    name, cause = "tokens/late", "shifted"
    first, last = 20, 60


@pytest.mark.parametrize("checks", [(_Early, _Late), (_Late, _Early)])
def test_what_two_causes_have_both_hit_is_divided_alike_in_any_order(checks):
    rows = policy_rows(sampler=noisy(0.5))
    has = frozenset({"rollout_logprobs", "trainer_logprobs"})
    out = examine(lambda: [rows], [Stage(checks=checks)], Setting(), has=has)
    k2 = np.bincount(rows.row_of, np.nan_to_num(rows.gap) ** 2)
    shares = {share.cause: share.k2 for share in out.shares}
    shared = k2[20:40].sum() / 2
    assert shares["padding"] == pytest.approx((k2[:20].sum() + shared) / k2.sum())
    assert shares["shifted"] == pytest.approx((k2[40:60].sum() + shared) / k2.sum())
    assert out.unexplained_k2 == pytest.approx(k2[60:].sum() / k2.sum())
