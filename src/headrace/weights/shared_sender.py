"""One sender for several engines of one process: whoever comes first publishes, the others get the same manifest.

For carriers that keep what they published (file, delta). Each engine has a handle in a sender's place and closes that;
the sender is closed with the last of them, and opened again by a later one, so that an engine may be started anew.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from headrace.protocols import WeightUpdate
from headrace.types import PolicyVersion
from headrace.weights.carrier import Manifest, WeightSender


class SharedSender:
    """``sender`` belongs to it from now on."""

    def __init__(self, sender: WeightSender) -> None:
        self.sender = sender
        self.lock = threading.Lock()
        """Engines send from threads of their own."""
        self._handles: set[Handle] = set()

    def handle(self) -> Handle:
        """For one engine. Implements ``carrier.WeightSender``."""
        made = Handle(self)
        with self.lock:
            self._handles.add(made)
        return made

    def let_go(self, handle: Handle) -> None:
        with self.lock:
            self._handles.discard(handle)
            if not self._handles:
                self.sender.close()


class Handle:
    """See :class:`SharedSender`."""

    def __init__(self, shared: SharedSender) -> None:
        self._shared = shared

    @property
    def receiver(self) -> Mapping[str, Any]:
        return self._shared.sender.receiver

    @property
    def inherit(self) -> tuple[int, ...]:
        return self._shared.sender.inherit

    def send(self, update: WeightUpdate, base: PolicyVersion | None) -> Manifest:
        """Publish, unless another engine's handle did; then ``update`` must have the same bits."""
        with self._shared.lock:
            return self._shared.sender.send(update, None)

    def transfer(self) -> None:
        """Nothing: what was published lies there."""

    def latest(self) -> WeightUpdate | None:
        with self._shared.lock:
            return self._shared.sender.latest()

    def close(self) -> None:
        self._shared.let_go(self)
