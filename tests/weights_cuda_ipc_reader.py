"""The engine's side of the CUDA IPC carrier, as a process: manifests come as lines of JSON, checksums go back."""

from __future__ import annotations

import json
import sys

from headrace.weights.checksums import checksums
from headrace.weights.receivers import make_receiver

receiver = make_receiver(json.loads(sys.stdin.readline()))
for line in sys.stdin:
    read = receiver.read(json.loads(line))
    print(json.dumps(None if read is None else checksums(read.tensors.items())), flush=True)
    if read is not None:
        receiver.commit(read)
