"""What can be wrong with a record, and how much of it was found?"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

Finding = Literal["missing", "orphaned", "stale", "foreign", "unfindable", "mismatched"]
FINDINGS: tuple[Finding, ...] = get_args(Finding)

BATCH = 1000
"""Records that are compared at once. Of Chroma, 5,000 ids asked for at once are not all found."""

MOST_EXAMPLES = 10
"""Ids that are named for each kind of finding."""


@dataclass
class Diagnosis:
    """How many records were compared, and what was wrong with which.

    ``owed`` of it was owed to the index, ``mended`` was put in order in SQL.
    """

    compared: int = 0
    counts: dict[Finding, int] = field(default_factory=lambda: dict.fromkeys(FINDINGS, 0))
    examples: dict[Finding, list[str]] = field(default_factory=dict)
    owed: int = 0
    mended: int = 0

    @property
    def found(self) -> int:
        return sum(self.counts.values())

    def note(self, finding: Finding, chunk_id: str) -> None:
        self.counts[finding] += 1
        if len(named := self.examples.setdefault(finding, [])) < MOST_EXAMPLES:
            named.append(chunk_id)
