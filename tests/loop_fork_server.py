"""Starts ``headrace`` commands as processes of their own without paying seconds of imports for each.

A script, not a test: it imports torch and headrace once and then forks for each request, so that a test can start,
kill and resume a run a dozen times. The fork happens before any thread exists, and each child is a process as the
shell would start it: it ends through ``sys.exit`` and the interpreter's own shutdown.

Requests are lines of JSON on the standard input, answers lines on the standard output:
``{"start": [arguments], "log": FILE, "before": "module:function" or null}`` -> the pid;
``{"wait": pid, "timeout_s": S}`` -> the exit status (negative: the signal), or null after the timeout.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import sys
import time

# What every run imports, most of it lazily.
import torch

import headrace.run
import headrace.testing  # noqa: F401
from headrace.cli.main import main as headrace_main


def start(request: dict) -> int:
    pid = os.fork()
    if pid:
        return pid
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    torch.set_num_threads(1)
    if request["before"]:
        module, name = request["before"].split(":")
        getattr(importlib.import_module(module), name)()
    sys.exit(headrace_main(request["start"]))


def wait(request: dict) -> int | None:
    deadline_s = time.monotonic() + request["timeout_s"]
    while time.monotonic() < deadline_s:
        pid, status = os.waitpid(request["wait"], os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    return None


def serve() -> None:
    gc.freeze()  # nothing imported until here is garbage: no child need look
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(start(request) if "start" in request else wait(request)), flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C on the tests is pytest's to handle; children undo this
    serve()
