"""The engine's key-value rows and prefix cache."""

from __future__ import annotations

import torch

from headrace.engines.kv import Document, PrefixCache, RowStore


def document(value: float, num_tokens: int) -> Document:
    key = torch.full((2, num_tokens, 4), value)
    return Document({0: key, 1: key + 0.5}, {0: -key, 1: -key - 0.5}, torch.zeros(3), num_tokens)


def row(store: RowStore, layer: int, index: int, length: int) -> torch.Tensor:
    """The stored keys of one row, read through the public way in: an append of a marked token."""
    slots = store.slots(torch.full((index + 1,), length))
    marks = torch.full((index + 1, 2, 1, 4), 9.0)
    keys, _ = store.append(layer, slots, marks, marks)
    return keys[index, :, : length + 1]


def test_rows_keep_their_content_while_store_grows():
    """Capacity growth: rows and columns double in place of others' content, which stays."""
    store = RowStore()
    store.reserve(1, 5)
    store.write(0, 1, document(1.0, 4))
    first_capacity = store.capacity
    store.reserve(3, first_capacity + 1)
    assert store.num_rows >= 3
    assert store.capacity >= 2 * first_capacity
    store.write(1, 2, document(2.0, 6))
    assert torch.equal(row(store, 0, 0, 4)[:, :4], torch.full((2, 4, 4), 1.0))
    assert torch.equal(row(store, 1, 2, 6)[:, :6], torch.full((2, 6, 4), 2.5))
    assert torch.equal(row(store, 0, 2, 6)[:, 6:], torch.full((2, 1, 4), 9.0))


def test_move_copies_the_used_part():
    """Compaction: a moved row reads the same in its new place."""
    store = RowStore()
    store.reserve(3, 8)
    for index in range(3):
        store.write(index, 1, document(float(index), 3 + index))
    store.move(2, 0, 5)
    assert torch.equal(row(store, 0, 0, 5)[:, :5], torch.full((2, 5, 4), 2.0))
    assert torch.equal(row(store, 0, 1, 4)[:, :4], torch.full((2, 4, 4), 1.0))


def test_prefix_cache_is_bounded_least_recently_used_first():
    """The bound counts tokens; a prompt that was just read outlives an older one."""
    cache = PrefixCache(10)
    for name in "abc":
        cache.put(name, document(0.0, 4))
        cache.get("a")
        cache.trim(set())
    assert cache.num_tokens == 8
    assert cache.get("b") is None
    assert cache.get("a") is not None and cache.get("c") is not None


def test_pinned_prompts_outlive_the_bound():
    """A prompt that waiting group members need is kept even with no cache at all, and goes when they do."""
    cache = PrefixCache(0)
    cache.put("a", document(0.0, 4))
    cache.trim({"a"})
    assert cache.get("a") is not None
    cache.trim(set())
    assert len(cache) == 0 and cache.num_tokens == 0
