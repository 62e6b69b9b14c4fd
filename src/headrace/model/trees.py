"""Sequences that begin alike, as a tree: what they have in common lies in it once.

A pass computes each token of the tree once, for all sequences that go through it. That is exact: what a causal model
makes of a token depends on the token and on those before it, and these are the same.

    sequences   a b c d    a b c    a b x y
    nodes       a b (inner: others continue it), c d and x y (leaves); the second sequence ends inside c d
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

Ids = tuple[int, ...]

_GALLOP = 1024
"""Tokens that are compared at once while two sequences are equal."""


@dataclass(frozen=True, slots=True)
class TreeShape:
    """Who continues whom. Nodes in the order in which they lie in a row: every node behind the one it continues, and
    those that others continue before those that end."""

    parents: tuple[int, ...]
    """-1 for the root, the first node."""
    lengths: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    def path(self, node: int) -> list[int]:
        """From the root to ``node``, itself included."""
        nodes = []
        while node >= 0:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]


@dataclass(frozen=True, slots=True)
class TokenTree:
    """Sequences, each a path from the root; a sequence may end inside a node."""

    shape: TreeShape
    sequences: tuple[Ids, ...]
    end_nodes: tuple[int, ...]
    """For each sequence the node of its last token."""

    @classmethod
    def of(cls, sequences: Sequence[Ids]) -> TokenTree:
        """The smallest tree. All sequences must begin with the same token, and none be empty."""
        parents: list[int] = []
        lengths: list[int] = []
        end_nodes = [0] * len(sequences)
        branches = [(sorted(range(len(sequences)), key=sequences.__getitem__), 0, -1)]
        while branches:
            members, start, parent = branches.pop()
            end, longer = start, members
            while longer:  # sorted, so what the first and the last have in common, all have
                end = common_length(sequences[longer[0]], sequences[longer[-1]], end)
                before, longer = longer, [m for m in longer if len(sequences[m]) > end]
                if len(before) == len(longer):
                    break
            for member in members:
                end_nodes[member] = len(parents)  # of those that go on, overwritten by their branch
            parts = [list(part) for _, part in groupby(longer, key=lambda m: sequences[m][end])]
            branches += [(part, end, len(parents)) for part in sorted(parts, key=min, reverse=True)]
            parents.append(parent)
            lengths.append(end - start)
        return cls._ordered(tuple(sequences), parents, lengths, end_nodes)

    @classmethod
    def _ordered(
        cls, sequences: tuple[Ids, ...], parents: list[int], lengths: list[int], end_nodes: list[int]
    ) -> TokenTree:
        """With inner nodes first: they are short and many where replies part, and attend together."""
        inner = set(parents)
        order = sorted(range(len(parents)), key=lambda node: (node not in inner, node))
        place = {node: i for i, node in enumerate(order)} | {-1: -1}
        shape = TreeShape(tuple(place[parents[node]] for node in order), tuple(lengths[node] for node in order))
        return cls(shape, sequences, tuple(place[node] for node in end_nodes))

    def stretches(self, number: int) -> list[range]:
        """Where in the tree the tokens of a sequence lie, one stretch of places after the other."""
        starts = list(accumulate(self.shape.lengths, initial=0))
        stretches: list[range] = []
        missing = len(self.sequences[number])
        for node in self.shape.path(self.end_nodes[number]):
            stretches.append(range(starts[node], min(starts[node + 1], starts[node] + missing)))
            missing -= len(stretches[-1])
        return stretches

    def places(self, number: int) -> list[int]:
        """Where in the tree each token of a sequence lies."""
        return [place for stretch in self.stretches(number) for place in stretch]


class DistinctTokens:
    """How many tokens the tree of some sequences has, without building it."""

    def __init__(self) -> None:
        self._sorted: list[Ids] = []
        self.num_tokens = 0

    def copy(self) -> DistinctTokens:
        other = DistinctTokens()
        other._sorted, other.num_tokens = list(self._sorted), self.num_tokens
        return other

    def add(self, ids: Ids) -> None:
        place = bisect_left(self._sorted, ids)  # its neighbours have most in common with it
        shared = max((common_length(ids, other, 0) for other in self._sorted[max(0, place - 1) : place + 1]), default=0)
        self._sorted.insert(place, ids)
        self.num_tokens += len(ids) - shared


def common_length(first: Ids, second: Ids, start: int) -> int:
    """How many tokens two sequences begin with in common, where the first ``start`` are known to be."""
    limit, step = min(len(first), len(second)), _GALLOP
    while start < limit and step:
        if first[start : start + step] == second[start : start + step]:
            start = min(start + step, limit)
        else:
            step //= 2
    return start
