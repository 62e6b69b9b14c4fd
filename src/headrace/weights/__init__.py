"""How weights travel from the trainer to an engine, and how both sides prove that they hold the same.

``inprocess`` has the carriers of one process (:class:`SharedWeights`, :class:`CopiedWeights`), ``checksums`` the
per-tensor checksum that trainer and engine share. Imports torch.
"""

from headrace.weights.checksums import checksum, checksums, named_parameters
from headrace.weights.inprocess import CopiedWeights, SharedWeights, WeightUpdateError

__all__ = ["CopiedWeights", "SharedWeights", "WeightUpdateError", "checksum", "checksums", "named_parameters"]
