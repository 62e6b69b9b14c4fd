"""The CUDA IPC carrier between two processes on one GPU. Where there is none, this waits for one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from headrace.protocols import WeightUpdate
from headrace.types import PolicyVersion
from headrace.weights.checksums import checksums
from headrace.weights.cuda_ipc import CudaIpcSender

READER = Path(__file__).parents[1] / "weights_cuda_ipc_reader.py"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA IPC needs a GPU")
def test_another_process_reads_the_trainers_own_memory() -> None:
    """Issue 4: bits, shapes and dtypes arrive without a copy, also of slices of one allocation; the same version again
    is nothing; a bit that changed since the manifest is named."""
    whole = torch.randn(1000, device="cuda")
    tensors = {"slice": whole[100:900].view(20, 40), "half": whole[:33].bfloat16()}
    tensors["strided"] = whole[:12].view(3, 4).t()
    sender = CudaIpcSender()
    with subprocess.Popen(
        [sys.executable, str(READER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as reader:
        assert reader.stdin is not None and reader.stdout is not None and reader.stderr is not None
        print(json.dumps(sender.receiver), file=reader.stdin, flush=True)

        def told(number: int) -> object:
            update = WeightUpdate(version=PolicyVersion(0, number), tensors=tensors)
            print(json.dumps(sender.send(update, None)), file=reader.stdin, flush=True)
            return json.loads(reader.stdout.readline())

        assert told(1) == checksums(tensors.items())
        assert told(1) is None
        manifest = sender.send(WeightUpdate(version=PolicyVersion(0, 2), tensors=tensors), None)
        whole[150] += 1
        torch.cuda.synchronize()
        print(json.dumps(manifest), file=reader.stdin, flush=True)
        assert reader.stdout.readline() == ""
        assert "slice arrived with other bits than were sent" in reader.stderr.read()
