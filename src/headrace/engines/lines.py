"""Lines: rows of a running batch whose tokens have all been the same so far.

The members of a group start from one prompt, and the surer the policy is, the longer their replies agree. A step
computes such rows once, and each draws its own token from their common distribution; where tokens differ, rows part.

Legend: B rows, S lines.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor


class Lines:
    """Which of B rows are one line, by equal ``keys``."""

    def __init__(self, keys: Sequence[Hashable]) -> None:
        first_of: dict[Hashable, int] = {}
        for row, key in enumerate(keys):
            first_of.setdefault(key, row)
        number_of = {key: number for number, key in enumerate(first_of)}
        self.first_S = list(first_of.values())
        """The first row of each line."""
        self.line_B = [number_of[key] for key in keys]
        """The line of each row."""

    @property
    def are_single(self) -> bool:
        """Every row is a line of its own."""
        return len(self.first_S) == len(self.line_B)

    def tensors(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """(line of each row [B], first row of each line [S])."""
        return torch.tensor(self.line_B, device=device), torch.tensor(self.first_S, device=device)
