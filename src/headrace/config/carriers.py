"""How weights travel to an engine that holds a copy of them: ``engine.carrier``, told apart by ``type``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from headrace.config.base import Section


class MemoryCarrierConfig(Section):
    """Through memory: straight into the copy of an engine in this process, else through memory that both processes
    map."""

    is_default_type: ClassVar[bool] = True
    type: Literal["memory"] = "memory"


class _FolderCarrier(Section):
    path: Path | None = None
    """A folder of any disk that sender and engines see; None: ``weights`` in the run's folder."""
    keep: int = Field(2, ge=1)
    """Whole versions that stay; the folder needs room for one more."""


class FileCarrierConfig(_FolderCarrier):
    """Each version whole, as safetensors files in a folder that others may read too."""

    type: Literal["file"] = "file"


class DeltaCarrierConfig(_FolderCarrier):
    """What changed since the version before, with a whole version now and then."""

    type: Literal["delta"] = "delta"
    anchor_every: int = Field(20, ge=1)
    """Differences between two whole versions: what a late joiner has to read at most."""
    zstd_level: int = Field(3, ge=1, le=19)


class BroadcastCarrierConfig(Section):
    """By collective, for engines in other processes."""

    type: Literal["broadcast"] = "broadcast"
    backend: Literal["gloo", "nccl"] = "gloo"
    host: str = "127.0.0.1"
    """This machine's address, as the engines reach it."""
    bucket_bytes: int = Field(256 << 20, ge=1 << 10)
    """Weights that travel at once."""
    deadline_s: float = Field(120.0, gt=0)
    """For all engines to come, and for each collective."""


def _carrier_type(carrier: Any) -> Any:
    return carrier.get("type", "memory") if isinstance(carrier, dict) else getattr(carrier, "type", None)


CarrierConfig = Annotated[
    Annotated[MemoryCarrierConfig, Tag("memory")]
    | Annotated[FileCarrierConfig, Tag("file")]
    | Annotated[DeltaCarrierConfig, Tag("delta")]
    | Annotated[BroadcastCarrierConfig, Tag("broadcast")],
    Discriminator(_carrier_type),
]
