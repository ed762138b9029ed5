"""What do ids look like, and who makes them?

Short ids (``mem_`` and 12 hex digits, ``sess_`` and ``job_`` and 8) are friendly in logs and prompts, and collide:
8 hex digits have even odds of one collision at 77,000 ids. Whoever inserts a generated id must therefore be ready to
draw again; `memvault.memory` does so.
"""

from __future__ import annotations

import hashlib
import secrets

MAX_DRAWS = 16
"""Draws of a new id before an insert gives up: at a million 8-digit ids the odds of that are below 1e-58."""


def new_chunk_id() -> str:
    return f"mem_{secrets.token_hex(6)}"


def new_session_id() -> str:
    return f"sess_{secrets.token_hex(4)}"


def new_job_id() -> str:
    return f"job_{secrets.token_hex(4)}"


def new_preference_id() -> str:
    return f"proc_{secrets.token_hex(6)}"


def derived_chunk_id(*parts: str) -> str:
    """The id of a chunk that came without one: the same parts give the same id, so that importing twice adds
    nothing. Parts are length-prefixed, hence ("ab", "c") and ("a", "bc") differ.
    """
    digest = hashlib.sha256()
    for part in parts:
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(8, "big") + encoded)
    return f"mem_{digest.hexdigest()[:12]}"
