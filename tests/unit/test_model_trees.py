"""Trees of sequences that begin alike: against a set of prefixes, which is what they stand for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.model.trees import DistinctTokens, TokenTree, TreeShape, common_length

sequences_strategy = st.lists(st.lists(st.integers(0, 2), max_size=6).map(lambda tail: (7, *tail)), min_size=1)


def prefixes(sequences: list[tuple[int, ...]]) -> set[tuple[int, ...]]:
    return {ids[: t + 1] for ids in sequences for t in range(len(ids))}


def test_the_drawing_of_the_docstring() -> None:
    """Inner nodes first; a sequence that ends inside a node has none of its own."""
    tree = TokenTree.of([tuple("abcd"), tuple("abc"), tuple("abxy")])  # type: ignore[arg-type]
    assert tree.shape == TreeShape((-1, 0, 0), (2, 2, 2))
    assert [tree.places(number) for number in range(3)] == [[0, 1, 2, 3], [0, 1, 2], [0, 1, 4, 5]]


def test_inner_nodes_come_before_all_that_end() -> None:
    """Where replies part again further on, the nodes between lie together, each behind its parent."""
    tree = TokenTree.of([(1, 2, 3), (1, 4, 5, 6), (1, 4, 5, 7), (1, 4, 8)])
    assert tree.shape == TreeShape((-1, 0, 1, 0, 2, 2, 1), (1, 1, 1, 2, 1, 1, 1))
    assert tree.shape.path(5) == [0, 1, 2, 5]


@given(sequences_strategy)
def test_one_place_for_each_prefix(sequences: list[tuple[int, ...]]) -> None:
    """Two tokens lie in one place exactly where all tokens up to them are equal, and no place is empty."""
    tree = TokenTree.of(sequences)
    place_of: dict[tuple[int, ...], int] = {}
    for number, ids in enumerate(sequences):
        places = tree.places(number)
        assert len(places) == len(ids)
        for t, place in enumerate(places):
            assert place_of.setdefault(ids[: t + 1], place) == place
    assert sorted(place_of.values()) == list(range(tree.shape.num_tokens))
    assert all(parent < node for node, parent in enumerate(tree.shape.parents))
    assert all(tree.shape.lengths)
    is_inner = [node in tree.shape.parents for node in range(len(tree.shape.parents))]
    assert is_inner == sorted(is_inner, reverse=True)
    assert all(tree.shape.parents.count(node) > 1 for node in range(sum(is_inner)))  # the smallest: no chains


@given(sequences_strategy)
def test_counting_without_building(sequences: list[tuple[int, ...]]) -> None:
    """One by one, in any order; a copy goes its own way."""
    counted, before = DistinctTokens(), DistinctTokens()
    for ids in sequences:
        before = counted.copy()
        counted.add(ids)
    assert counted.num_tokens == len(prefixes(sequences)) == TokenTree.of(sequences).shape.num_tokens
    assert before.num_tokens == len(prefixes(sequences[:-1]))


@given(st.integers(0, 5000), st.integers(0, 3), st.integers(0, 3))
def test_common_length_of_long_sequences(shared: int, more: int, less: int) -> None:
    """Compared in strides, also where one is the beginning of the other."""
    first, second = (5,) * shared + (1,) * more, (5,) * shared + (2,) * less
    assert common_length(first, second, 0) == common_length(second, first, shared // 2) == shared
