"""No vector of the blind oracle goes unjoined, except for those named here with a reason (issue 3, criterion 1)."""

from __future__ import annotations

import test_oracle_join_advantages
import test_oracle_join_corrections
import test_oracle_join_critic
import test_oracle_join_objectives
import test_oracle_join_parts
from oracle_vectors import EXPECTED

NO_COUNTERPART = {
    "whiten_biased": "ALGORITHMS.md fixes the unbiased variance for whitening; headrace has no other",
}

JOINS = (
    test_oracle_join_advantages,
    test_oracle_join_corrections,
    test_oracle_join_critic,
    test_oracle_join_objectives,
    test_oracle_join_parts,
)


def test_every_vector_is_joined() -> None:
    """A vector that nobody compares with the implementation guards nothing; no name is joined twice."""
    joined = [name for module in JOINS for name in module.JOINED]
    assert sorted([*joined, *NO_COUNTERPART]) == sorted(EXPECTED)
