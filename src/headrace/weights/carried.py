"""An engine's copy of the model that is fed by any carrier between a sender and a receiver.

What the receiver has read is checked against the model (names, shapes, dtypes) before the first parameter is written,
and is committed after the last. An engine in the trainer's process has the sender too and gets updates with tensors;
one of several, or one elsewhere, gets ``WeightUpdate(version, manifest=...)``.
"""

from __future__ import annotations

import copy

from torch import nn

from headrace.protocols import WeightUpdate
from headrace.types import PolicyVersion
from headrace.weights.carrier import ReceivedWeights, WeightReceiver, WeightSender, WeightUpdateError, carry
from headrace.weights.inprocess import check_version
from headrace.weights.parameters import Parameters, Travels, all_travel


class CarriedWeights:
    """The engine runs its own copy, made here from ``model``; see the module."""

    def __init__(
        self,
        model: nn.Module,
        version: PolicyVersion,
        receiver: WeightReceiver,
        sender: WeightSender | None = None,
        travels: Travels = all_travel,
    ) -> None:
        self.model = copy.deepcopy(model).requires_grad_(False).eval()
        self.version = version
        self.broken = ""
        """Why the weights are of no version; empty while they are of one."""
        self._receiver = receiver
        self._sender = sender
        self._parameters = Parameters(self.model, travels)

    def receive(self, update: WeightUpdate) -> None:
        check_version(update.version, self.version)
        if update.manifest is not None:
            read = self._receiver.read(update.manifest)
        elif self._sender is not None:
            read = carry(self._sender, self._receiver, update)
        else:
            raise WeightUpdateError(
                f"weights {update.version} came without a manifest, but this engine gets its weights from a sender "
                "elsewhere; publish there, and pass the manifest on"
            )
        if read is not None:
            self._install(read)

    def _install(self, read: ReceivedWeights) -> None:
        new = self._parameters.checked(read.tensors, read.version)
        self.broken = f"weights {read.version} were written in part, so the engine holds weights of no version"
        self._parameters.write(new)
        self._receiver.commit(read)
        self.version, self.broken = read.version, ""

    def checksums(self) -> dict[str, str]:
        return self._parameters.checksums()

    def shares_storage_with(self, model: nn.Module) -> bool:
        """Never: it is a copy."""
        return False

    def close(self) -> None:
        self._receiver.close()
        if self._sender is not None:
            self._sender.close()
