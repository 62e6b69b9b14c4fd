"""The allocator setting of CPU runs."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from headrace.model import memory


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting exists in glibc only")
def test_setting_is_accepted() -> None:
    """In a process of its own, so that this one keeps its allocator as it is."""
    program = "import sys; from headrace.model.memory import keep_large_buffers; sys.exit(not keep_large_buffers())"
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0


def test_other_systems_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No ctypes call where the C library is another one."""
    monkeypatch.setattr(memory.sys, "platform", "darwin")
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: pytest.fail("called"))
    assert memory.keep_large_buffers() is False
