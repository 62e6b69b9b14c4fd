"""How weights travel from the trainer to an engine, and how both sides prove that they hold the same.

``inprocess`` has the carriers of one process (:class:`SharedWeights`, :class:`CopiedWeights`), ``streamed`` the one
that is fed by the buckets of several. Between two copies, ``carrier`` is the interface (sender, manifest, receiver),
and ``shared_memory``, ``file`` (whole versions and differences in a folder), ``broadcast`` and ``cuda_ipc`` implement
it; ``carried`` is an engine's copy that any of them feeds. ``checksums`` has the per-tensor checksum that trainer and
engine share, ``canary`` the proof after each update (I6). Imports torch.
"""

from headrace.weights.checksums import checksum, checksums, named_parameters
from headrace.weights.inprocess import CopiedWeights, SharedWeights, WeightUpdateError

__all__ = ["CopiedWeights", "SharedWeights", "WeightUpdateError", "checksum", "checksums", "named_parameters"]
