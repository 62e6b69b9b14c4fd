"""Secrets never reach the record: resolved configurations are redacted before they are written."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

REDACTED = "[redacted]"

_SECRET_KEY = re.compile(
    r"(^|_)(token|password|passwd|secret|secrets|credentials?|authorization|cookie|bearer)$"
    r"|(api|access|secret|private|auth|signing|encryption)_?key(_id)?$"
    r"|(token|secret|password)_(value|string)$"
)
_SECRET_VALUE = re.compile(
    r"\b(hf_[A-Za-z0-9]{8,}|sk-[A-Za-z0-9_-]{8,}|gh[pousr]_[A-Za-z0-9]{8,}|github_pat_\w{8,}|xox[abpr]-[\w-]{8,}"
    r"|AKIA[A-Z0-9]{12,}|glpat-[\w-]{8,}|pypi-[\w-]{16,}|AIza[\w-]{20,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*)"
    r"|\b[Bb]earer\s+[\w.~+/=-]{8,}"
)
_URL_CREDENTIALS = re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^/\s@]+@", re.IGNORECASE)
_URL_QUERY_SECRET = re.compile(r"([?&](?:token|key|api_key|access_token|sig|signature|password)=)[^&\s]+", re.I)


def redact(value: Any) -> Any:
    """A copy of nested dicts, lists and strings without secrets. Values under a telling key (``api_key``, ``token``,
    ``password``, ...) go whole, unless they are empty, a number or a truth value; in other strings, known token forms
    and the credentials of URLs go. ``max_tokens`` and the like stay."""
    if isinstance(value, Mapping):
        return {k: _under(str(k), v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact(v) for v in value]
    if isinstance(value, PurePath):
        return redact(str(value))
    if isinstance(value, str):
        value = _URL_CREDENTIALS.sub(rf"\1{REDACTED}@", value)
        value = _URL_QUERY_SECRET.sub(rf"\1{REDACTED}", value)
        return _SECRET_VALUE.sub(REDACTED, value)
    return value


def _under(key: str, value: Any) -> Any:
    normal = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key).replace("-", "_").replace(".", "_").lower()
    if _SECRET_KEY.search(normal) and value and not isinstance(value, (bool, int, float)):
        return REDACTED
    return redact(value)
