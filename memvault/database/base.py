"""What do all tables share? Registry, naming, column types, the owner mark, and the two tables of the vault itself."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from functools import cache
from typing import Any, ClassVar, cast

from sqlalchemy import (
    JSON,
    BigInteger,
    CheckConstraint,
    Column,
    DateTime,
    Dialect,
    Integer,
    MetaData,
    String,
    Table,
    Text,
)
from sqlalchemy.dialects.postgresql import VARCHAR
from sqlalchemy.orm import registry
from sqlalchemy.types import TypeDecorator
from sqlmodel import Field, SQLModel

VERSION_TABLE = "alembic_version_memvault"

NAMING = {
    "ix": "ix_%(table_name)s_%(column_0_name)s",
    "uq": "uq_%(table_name)s_%(column_0_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s",
    "pk": "pk_%(table_name)s",
}

SCHEMA = "memvault"
"""The schema that our tables are declared in. It is a symbol: every engine translates it to `schema_name` or, without
one, to the database's default schema. A host's tables have no schema, and are never translated with ours."""

metadata = MetaData(schema=SCHEMA, naming_convention=NAMING)
"""Our own metadata: a host application's SQLModel tables never meet ours."""


class Base(SQLModel, registry=registry(metadata=metadata)):
    """Base of every table class. ``table=True`` models validate nothing: the stores do, and CHECKs back them."""

    metadata: ClassVar[MetaData] = metadata


class Owned:
    """Marks a table whose rows belong to the user in their user_id.

    The owner guard, erasure, export and the SQL audit go by this mark.
    """

    user_id: str


def _utc_of_text(value: str | None) -> datetime | None:
    """What SQLite keeps of a time; a tenth of the time that SQLAlchemy's regular expression takes."""
    return None if value is None else datetime.fromisoformat(f"{value}+00:00")


def _text_of_utc(value: datetime | None) -> str | None:
    if value is None:
        return None
    if value.tzinfo is not UTC:
        if value.utcoffset() is None:
            raise ValueError(f"naive datetime {value.isoformat()}")
        value = value.astimezone(UTC)
    return value.isoformat(" ", "microseconds").removesuffix("+00:00")


class UtcDateTime(TypeDecorator[datetime]):
    """An aware datetime, in UTC both ways; SQLite stores it without the offset, PostgreSQL as timestamptz."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        if value.utcoffset() is None:
            raise ValueError(f"naive datetime {value.isoformat()}")
        return value.astimezone(UTC)

    def bind_processor(self, dialect: Dialect) -> Callable[[Any], Any] | None:
        return _text_of_utc if dialect.name == "sqlite" else super().bind_processor(dialect)

    def result_processor(self, dialect: Dialect, coltype: object) -> Callable[[Any], Any] | None:
        return _utc_of_text if dialect.name == "sqlite" else super().result_processor(dialect, coltype)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


def identifier() -> String:
    """An id, key or name of at most 255 characters, compared by code point on every database."""
    return String(255).with_variant(VARCHAR(255, collation="C"), "postgresql")


def long_text() -> Text:
    return Text()


def json_value() -> JSON:
    """JSON kept as text: PostgreSQL's jsonb would rewrite numbers, and values must come back equal."""
    return JSON()


def big_key() -> BigInteger:
    """A 64-bit key; on SQLite the rowid itself, by which the rows are clustered."""
    return BigInteger().with_variant(Integer(), "sqlite")


def one_of(column: str, choices: tuple[str, ...], name: str) -> CheckConstraint:
    listed = ", ".join(f"'{choice}'" for choice in choices)
    return CheckConstraint(f"{column} IN ({listed})", name=name)


def within_unit(column: str) -> CheckConstraint:
    return CheckConstraint(f"{column} >= 0 AND {column} <= 1", name=f"{column}_range")


def non_negative(column: str) -> CheckConstraint:
    return CheckConstraint(f"{column} >= 0", name=f"{column}_not_negative")


def table_of(model: type) -> Table:
    """The Core table of a table class."""
    return cast(Table, cast(Any, model).__table__)


@cache
def is_owned(table: Table) -> bool:
    return table in owned_tables()


def table_names() -> frozenset[str]:
    """The names of our tables, as they stand in whichever schema."""
    return frozenset(table.name for table in metadata.tables.values())


def plain_metadata() -> MetaData:
    """The tables as they lie in one schema, which is not named: what Alembic compares with."""
    plain = MetaData(naming_convention=NAMING)
    for table in metadata.sorted_tables:
        table.to_metadata(plain, schema=None)  # type: ignore[arg-type]  # "that of the metadata", says SQLAlchemy
    return plain


def owned_tables() -> list[Table]:
    """Every owned table, children before the tables they refer to: the order in which rows can be deleted."""
    marked = {table_of(mapper.class_) for mapper in Base._sa_registry.mappers if issubclass(mapper.class_, Owned)}
    return [table for table in reversed(metadata.sorted_tables) if table in marked]


class Owner(Base, table=True):
    """A user, as the writes know them: the row that each write locks first.

    ``epoch`` rises by one with every change of a chunk, and stands in the changed vector's row; ``removed_epoch`` is
    the last epoch at which a vector went away or was replaced; ``incarnation`` is drawn anew after an erasure.
    """

    __tablename__ = "owners"
    __table_args__ = (
        non_negative("vector_count"),
        {"sqlite_autoincrement": True},  # a number is never given out twice
    )

    number: int = Field(sa_column=Column(Integer, primary_key=True))
    user_id: str = Field(sa_column=Column(identifier(), nullable=False, unique=True))
    incarnation: str = Field(sa_column=Column(String(32), nullable=False))
    epoch: int = Field(sa_column=Column(BigInteger, nullable=False))
    removed_epoch: int = Field(sa_column=Column(BigInteger, nullable=False))
    vector_count: int = Field(sa_column=Column(Integer, nullable=False))
    default_session_id: str | None = Field(sa_column=Column(identifier(), nullable=True))


class StoreMeta(Base, table=True):
    """Facts about the vault as a whole, by key: ``vault_id``."""

    __tablename__ = "store_meta"

    key: str = Field(sa_column=Column(identifier(), primary_key=True))
    value: str = Field(sa_column=Column(Text, nullable=False))


OWNERS = table_of(Owner)
STORE_META = table_of(StoreMeta)
