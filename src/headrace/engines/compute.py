"""What runs on the engine's compute thread: prefill, decode, recompute. No asyncio here, and no requests.

Every method is called from one thread, one at a time. A method either does all its work or raises, after which the
engine is dead: the store may hold half a step.

Legend: B rows, S lines, T packed tokens, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from headrace.engines.kv import DecodeLayout, Document, PrefillLayout, PrefixCache, RowStore
from headrace.engines.lines import Lines
from headrace.engines.sampling import Draws, Sampler
from headrace.model.routing import RouterRecorder, RouterShape
from headrace.types import Sampling


class Move(NamedTuple):
    """Copy the first ``length`` tokens of row ``source`` over row ``target``."""

    source: int
    target: int
    length: int


@dataclass(frozen=True, slots=True)
class Admission:
    """A request that gets a row: its prompt, the prompt's cache key, its first draw and its line (lines.py)."""

    key: Hashable
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    uniform: float
    line: Hashable


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """A running row: its newest id (not yet in the store), how many tokens are, its next draw, its line (lines.py)."""

    last_id: int
    length: int
    sampling: Sampling
    uniform: float
    line: Hashable


@dataclass(frozen=True, slots=True)
class StepResult:
    draws: Draws
    num_prefill_tokens: int
    num_cached_tokens: int
    duration_s: float
    routing: list[Tensor | None]
    """For each row what the routers chose for the tokens that this step gave it, [tokens, routers, experts of a token];
    None where it is not recorded."""


class Compute:
    """Runs one model over the rows of :class:`RowStore` objects; owns the prefix cache.

    ``model`` is any transformers causal language model with attention ``headrace``. It is called whole, with
    ``logits_to_keep``, so that whatever a model does after its last layer (scaling, soft caps) is done here too.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        vocab_size: int,
        max_prefill_tokens: int,
        prefix_cache_tokens: int,
        recorded: RouterShape | None = None,
    ) -> None:
        """``recorded``: the routers whose choices are recorded; None records nothing."""
        self._model = model
        self._recorded = recorded
        self._device = next(model.parameters()).device
        self._max_prefill_tokens = max_prefill_tokens
        self._sampler = Sampler(vocab_size)
        self._cache = PrefixCache(prefix_cache_tokens)

    @torch.no_grad()
    def admit(
        self,
        store: RowStore,
        moves: Sequence[Move],
        first_row: int,
        admissions: Sequence[Admission],
        pinned: Set[Hashable],
    ) -> StepResult:
        """Prefill what is not cached, each distinct prompt once; fill rows from ``first_row`` on; draw each request's
        first token. Prompts in ``pinned`` stay cached for requests that still wait."""
        started = time.perf_counter()
        for move in moves:
            store.move(*move)
        documents: dict[Hashable, Document] = {}
        missing: dict[Hashable, tuple[int, ...]] = {}
        for admission in admissions:
            document = self._cache.get(admission.key)
            if document is not None:
                documents[admission.key] = document
            else:
                missing[admission.key] = admission.prompt_ids
        new = self._prefill(list(missing.values()))
        for key, document in zip(missing, new, strict=True):
            documents[key] = document
            self._cache.put(key, document)

        longest = max(len(a.prompt_ids) for a in admissions)
        store.reserve(first_row + len(admissions), longest + 1)
        row = first_row
        for key, count in _runs([a.key for a in admissions]):
            store.write(row, count, documents[key])
            row += count
        lines = Lines([a.line for a in admissions])
        logits_SV = torch.stack([documents[admissions[i].key].logits_V for i in lines.first_S])
        samplings = [admissions[i].sampling for i in lines.first_S]
        draws = self._sampler(logits_SV, samplings, [a.uniform for a in admissions], lines.line_B)
        self._cache.trim(pinned)
        num_prefilled = sum(map(len, missing.values()))
        num_cached = sum(len(a.prompt_ids) for a in admissions) - num_prefilled
        routing = [documents[a.key].routing for a in admissions]
        return StepResult(draws, num_prefilled, num_cached, time.perf_counter() - started, routing)

    @torch.no_grad()
    def decode(self, store: RowStore, moves: Sequence[Move], rows: Sequence[DecodeRow]) -> StepResult:
        """Compact, then one new token for each row."""
        started = time.perf_counter()
        for move in moves:
            store.move(*move)
        lengths = [row.length for row in rows]
        store.reserve(len(rows), max(lengths) + 1)
        lines = Lines([row.line for row in rows])
        layout = DecodeLayout(store, lengths, lines, self._device)
        first = [rows[i] for i in lines.first_S]
        ids_S1 = torch.tensor([[row.last_id] for row in first], device=self._device)
        logits_S1V, routing = self._forward(ids_S1, layout.positions_S.unsqueeze(1), layout, 0)
        samplings = [row.sampling for row in first]
        draws = self._sampler(logits_S1V[:, 0], samplings, [row.uniform for row in rows], lines.line_B)
        by_row = [None if routing is None else routing[line : line + 1] for line in lines.line_B]
        return StepResult(draws, 0, 0, time.perf_counter() - started, by_row)

    def num_prefix_bytes(self) -> int:
        return self._cache.num_bytes()

    def drop_prefixes(self) -> None:
        """Forget all prompts: they belong to weights that are no longer served (F76)."""
        self._cache.clear()

    @torch.no_grad()
    def recompute(
        self, store: RowStore, moves: Sequence[Move], sequences: Sequence[tuple[int, ...]]
    ) -> tuple[int, float]:
        """Write the keys and values of row i anew from ``sequences[i]``; returns (tokens, seconds)."""
        started = time.perf_counter()
        for move in moves:
            store.move(*move)
        store.reserve(len(sequences), max(map(len, sequences)) + 1)  # all of it is gone after a lease
        row = 0
        for batch in self._batches(sequences):
            for document in self._prefill_batch(batch):
                store.write(row, 1, document)
                row += 1
        return sum(map(len, sequences)), time.perf_counter() - started

    def _prefill(self, sequences: Sequence[tuple[int, ...]]) -> list[Document]:
        return [document for batch in self._batches(sequences) for document in self._prefill_batch(batch)]

    def _batches(self, sequences: Sequence[tuple[int, ...]]) -> Iterator[list[tuple[int, ...]]]:
        """Runs of sequences of at most ``max_prefill_tokens``; a longer one is alone in its pass."""
        batch: list[tuple[int, ...]] = []
        num_tokens = 0
        for sequence in sequences:
            if batch and num_tokens + len(sequence) > self._max_prefill_tokens:
                yield batch
                batch, num_tokens = [], 0
            batch.append(sequence)
            num_tokens += len(sequence)
        if batch:
            yield batch

    def _prefill_batch(self, sequences: Sequence[tuple[int, ...]]) -> list[Document]:
        lengths = [len(sequence) for sequence in sequences]
        layout = PrefillLayout(lengths)
        ids_1T = torch.tensor([[i for sequence in sequences for i in sequence]], device=self._device)
        positions_1T = torch.cat([torch.arange(n, device=self._device) for n in lengths]).unsqueeze(0)
        last = torch.tensor(lengths, device=self._device).cumsum(0) - 1
        logits_1BV, routing = self._forward(ids_1T, positions_1T, layout, last)
        return [layout.document(i, logits_1BV[0, i].clone(), routing) for i in range(len(sequences))]

    def _forward(
        self, ids: Tensor, positions: Tensor, layout: object, keep: Tensor | int
    ) -> tuple[Tensor, Tensor | None]:
        """Logits, and what the routers chose for each token where that is recorded."""
        recorder = None if self._recorded is None else RouterRecorder(self._recorded)
        output = self._model(
            input_ids=ids,
            position_ids=positions,
            layout=layout,
            routing=recorder,
            use_cache=False,
            logits_to_keep=keep,
        )
        return output.logits, None if recorder is None else recorder.ids_TLK()


def _runs(keys: Sequence[Hashable]) -> Iterator[tuple[Hashable, int]]:
    """Equal neighbours with their count."""
    start = 0
    for i in range(1, len(keys) + 1):
        if i == len(keys) or keys[i] != keys[start]:
            yield keys[start], i - start
            start = i
