"""What does Chroma know of a chunk, and how does a filter ask for it?"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from memvault.filters import And, Comparison, Filter, Or
from memvault.vectors.base import RecordMetadata

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_OPERATORS = {
    "==": "$eq", "!=": "$ne", "<": "$lt", "<=": "$lte", ">": "$gt", ">=": "$gte", "in": "$in", "not in": "$nin",
}  # fmt: skip

_KINDS = {
    "user_id": str, "session_id": str, "memory_type": str, "importance": float, "compressed": bool,
    "created_at": str, "created_us": int,
}  # fmt: skip


def compile_where(where: Filter) -> dict[str, Any]:
    """A filter that `pushdown` let through, as Chroma's where: one operator to a dictionary."""
    match where:
        case And(parts):
            return {"$and": [compile_where(part) for part in parts]}
        case Or(parts):
            return {"$or": [compile_where(part) for part in parts]}
        case Comparison(field, operator, value):
            name = _OPERATORS[operator]
            if field != "created_at":
                return {field: {name: list(value) if isinstance(value, tuple) else value}}
            # Chroma orders numbers only.
            times = value if isinstance(value, tuple) else (value,)
            numbers = [_microseconds(time) for time in times if isinstance(time, datetime)]
            return {"created_us": {name: numbers if isinstance(value, tuple) else numbers[0]}}
        case _:
            raise NotImplementedError(f"a filter of kind {type(where).__name__}")


def _microseconds(time: datetime) -> int:
    return (time - _EPOCH) // _MICROSECOND


def stored_metadata(metadata: RecordMetadata) -> dict[str, str | int | float | bool]:
    """The seven keys, always all of them: an upsert of Chroma's leaves alone what it does not name."""
    return {
        "user_id": metadata.user_id,
        "session_id": metadata.session_id,
        "memory_type": metadata.memory_type,
        "importance": float(metadata.importance),  # an int would be of another type to Chroma, equal to no float
        "compressed": metadata.compressed,
        "created_at": metadata.created_at.astimezone(UTC).isoformat(),
        "created_us": _microseconds(metadata.created_at),
    }


def restored_metadata(stored: dict[str, Any]) -> RecordMetadata | None:
    """What `stored_metadata` was given; None where it cannot have made this."""
    if {name: type(value) for name, value in stored.items()} != _KINDS:
        return None
    values = {name: stored[name] for name in RecordMetadata.__dataclass_fields__}
    try:
        metadata = RecordMetadata(**{**values, "created_at": datetime.fromisoformat(stored["created_at"])})
        return metadata if stored_metadata(metadata) == stored else None
    except (TypeError, ValueError):  # a time without a zone, or none at all
        return None
