"""A lane: the queue and the rows of one running batch. Belongs to the event loop; no tensors are touched here.

The engine has one lane for its requests and makes another, with a store of its own, for each probe, so that probes
run while the engine's rows are held.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from headrace.engines.compute import Admission, DecodeRow, Move
from headrace.engines.kv import RowStore
from headrace.engines.request import Running
from headrace.types import GenerationRequest


@dataclass(slots=True)
class Lane:
    """First in, first out. Row ``i`` of ``store`` is ``running[i]``'s."""

    max_batch_size: int
    prompt_key: Callable[[GenerationRequest], Hashable]
    """Requests with equal keys share a prefill."""
    store: RowStore = field(default_factory=RowStore)
    waiting: deque[Running] = field(default_factory=deque)
    running: list[Running] = field(default_factory=list)
    kv_is_stale: bool = False
    """The rows' keys and values are older weights' and must be computed anew before the next decode step."""
    num_lines: int = 0
    """That were ever numbered."""

    @property
    def num_waiting(self) -> int:
        return sum(not w.future.done() for w in self.waiting)

    @property
    def num_running(self) -> int:
        return sum(not r.future.done() for r in self.running)

    @property
    def num_kv_tokens(self) -> int:
        """Tokens that the rows of running requests hold."""
        return sum(r.num_stored for r in self.running if not r.future.done())

    def drop_store(self) -> None:
        """Free the rows; running requests compute theirs anew before their next step."""
        self.store = RowStore()
        self.kv_is_stale = bool(self.running)

    def compact(self) -> list[Move]:
        """Drop ended requests; the last rows fill the holes, so no compute is spent on them. Returns the copies."""
        self.waiting = deque(w for w in self.waiting if not w.future.done())
        moves: list[Move] = []
        row = 0
        while row < len(self.running):
            if not self.running[row].future.done():
                row += 1
                continue
            last = self.running.pop()
            if row < len(self.running):
                self.running[row] = last
                if not last.future.done():
                    moves.append(Move(len(self.running), row, last.num_stored))
        return moves

    def can_admit(self) -> bool:
        return bool(self.waiting) and len(self.running) < self.max_batch_size

    def admit(self) -> tuple[list[Running], list[Admission], set[Hashable]]:
        """Move as many as fit from the queue into the next rows; also the prompt keys that still wait."""
        num = min(self.max_batch_size - len(self.running), len(self.waiting))
        admitted = [self.waiting.popleft() for _ in range(num)]
        self.running.extend(admitted)
        self._number_lines(admitted, [self._first_line(r.request) for r in admitted])
        admissions = [
            Admission(self.prompt_key(r.request), r.request.prompt_ids, r.request.sampling, r.next_uniform, r.line)
            for r in admitted
        ]
        return admitted, admissions, {self.prompt_key(w.request) for w in self.waiting}

    def decode_rows(self) -> list[DecodeRow]:
        return [DecodeRow(r.ids[-1], r.num_stored, r.request.sampling, r.next_uniform, r.line) for r in self.running]

    def _first_line(self, request: GenerationRequest) -> Hashable:
        sampling = request.sampling  # of it, what decides the distribution
        return self.prompt_key(request), sampling.temperature, sampling.top_p, sampling.top_k

    def part_lines(self, rows: Sequence[Running]) -> None:
        """After a step: of each line (lines.py), those that drew the same token are a line from here on. Rows that were
        admitted in different steps never are one: weights may have changed between them."""
        going_on = [r for r in rows if not r.future.done()]
        self._number_lines(going_on, [(r.line, r.ids[-1]) for r in going_on])

    def _number_lines(self, rows: Sequence[Running], keys: Sequence[Hashable]) -> None:
        numbers: dict[Hashable, int] = {}
        for running, key in zip(rows, keys, strict=True):
            running.line = numbers.setdefault(key, self.num_lines + len(numbers))
        self.num_lines += len(numbers)
