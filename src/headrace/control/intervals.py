"""A set of integers that costs memory by its holes, not by its members: closed group ids of a long run."""

from __future__ import annotations

from bisect import bisect_right


class IntervalSet:
    """Integers kept as disjoint half-open intervals; adding and asking cost O(log of the number of intervals)."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    @property
    def num_intervals(self) -> int:
        return len(self._starts)

    def __contains__(self, value: int) -> bool:
        position = bisect_right(self._starts, value) - 1
        return position >= 0 and value < self._ends[position]

    def add(self, value: int) -> None:
        if value in self:
            return
        position = bisect_right(self._starts, value)
        joins_left = position > 0 and self._ends[position - 1] == value
        joins_right = position < len(self._starts) and self._starts[position] == value + 1
        if joins_left and joins_right:
            self._ends[position - 1] = self._ends.pop(position)
            del self._starts[position]
        elif joins_left:
            self._ends[position - 1] = value + 1
        elif joins_right:
            self._starts[position] = value
        else:
            self._starts.insert(position, value)
            self._ends.insert(position, value + 1)
