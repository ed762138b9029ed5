"""Is every table with a user_id marked as owned, so that export, erasure and the audits reach it?"""

from __future__ import annotations

import pytest
from sqlalchemy import Table

from memvault.database.base import Base, Owned, is_owned, owned_tables, table_of
from memvault.models import metadata

NOT_OWNED = {
    "owners": "the users themselves: erasure deletes the row by itself, after all that is owned",
    "index_outbox": "outlives its owner: an erased user's deletions are owed to the index until they are paid",
}


def with_user_id() -> list[Table]:
    return [table for table in metadata.sorted_tables if "user_id" in table.c]


@pytest.mark.parametrize("table", with_user_id(), ids=lambda table: table.name)
def test_a_table_with_a_user_id_is_owned(table: Table) -> None:
    assert is_owned(table) != (table.name in NOT_OWNED)


def test_the_exceptions_exist() -> None:
    assert NOT_OWNED.keys() <= {table.name for table in with_user_id()}


@pytest.mark.parametrize("table", owned_tables(), ids=lambda table: table.name)
def test_an_owned_row_has_an_owner(table: Table) -> None:
    column = table.c.user_id
    assert column.nullable is False
    assert column.server_default is None
    assert column.default is None


@pytest.mark.parametrize("table", owned_tables(), ids=lambda table: table.name)
def test_the_owner_leads_an_index(table: Table) -> None:
    assert any(index.columns[0] is table.c.user_id for index in table.indexes)


def test_every_marked_class_is_listed() -> None:
    marked = {table_of(mapper.class_) for mapper in Base._sa_registry.mappers if issubclass(mapper.class_, Owned)}
    assert marked == set(owned_tables())
    assert len(owned_tables()) == len(marked) >= 5


def test_children_stand_before_their_parents() -> None:
    places = {table: place for place, table in enumerate(owned_tables())}
    for table, place in places.items():
        for key in table.foreign_keys:
            assert place < places.get(key.column.table, len(places))
