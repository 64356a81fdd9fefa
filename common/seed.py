"""Seeds for named things: one number decides all, and each thing draws from its own stream.

Left out: cryptographic strength; SHA-256 is used because it is the same in every process (Python's `hash` is not).
"""

from __future__ import annotations

import hashlib


def seed_for(*parts: int | str) -> int:
    """A seed in [0, 2**63) that depends on all `parts` and their order, and on nothing else."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1
