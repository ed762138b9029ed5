"""Which vault is this, and which index and model does it remember?"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy import Connection, select

from memvault.database.base import STORE_META
from memvault.database.bulk import upsert
from memvault.database.transactions import Database
from memvault.errors import IndexMismatchError
from memvault.vectors.outbox import INDEXES, LiveIndex, live_index

VAULT_ID = "vault_id"


@dataclass(frozen=True)
class Vault:
    """A vault's identity, and its live index."""

    id: str
    index: LiveIndex


def find_vault(database: Database) -> Vault | None:
    """The vault in a database at head; None where none was founded yet."""
    with database.reading() as connection:
        return _read(connection)


def found_vault(database: Database, *, location: str, model: str, dimension: int | None, transactional: bool) -> Vault:
    """The vault in a database, founded with this index and model where there was none.

    Many processes may call at once: the first one's choice stands, and is returned to all.
    """
    with database.writing() as connection:
        if (vault := _read(connection)) is not None:
            return vault
        insert_meta = upsert(connection, STORE_META).values(key=VAULT_ID, value=uuid.uuid4().hex)
        connection.execute(insert_meta.on_conflict_do_nothing())
        insert_index = upsert(connection, INDEXES).values(
            spec=location,
            model=model,
            dimension=dimension,
            transactional=transactional,
            state="live",
            created_at=datetime.now(UTC),
        )
        connection.execute(insert_index.on_conflict_do_nothing())
        vault = _read(connection)
        assert vault is not None
        return vault


def require_index(vault: Vault, location: str) -> None:
    """Raise IndexMismatchError unless this is the index that the vault remembers."""
    if location != vault.index.spec:
        raise IndexMismatchError(
            f"this vault's index is {vault.index.spec!r}, not {location!r}; leave vectors= out to open it as it is, or "
            f"move it by `memvault reindex --vectors {location}`"
        )


def require_model(vault: Vault, model: str, dimension: int | None) -> None:
    """Raise IndexMismatchError unless this is the embedding model that the vault remembers."""
    index = vault.index
    if model != index.model or (dimension is not None and index.dimension is not None and dimension != index.dimension):
        raise IndexMismatchError(
            f"this vault's vectors are of the embedder {index.model!r} (dimension {index.dimension}), not of {model!r} "
            f"(dimension {dimension}); leave embedder= out to open it as it is, or change it by "
            f"`memvault reindex --embedder {model}`"
        )


def _read(connection: Connection) -> Vault | None:
    vault_id = connection.execute(select(STORE_META.c.value).where(STORE_META.c.key == VAULT_ID)).scalar_one_or_none()
    index = live_index(connection)
    return None if vault_id is None or index is None else Vault(vault_id, index)
