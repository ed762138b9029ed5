"""What is in a PostgreSQL database? Its declarations and its rows, as text to compare, the host's and ours."""

from __future__ import annotations

from typing import Any

from tests.postgres import Postgres

Declarations = dict[str, list[str]]
Contents = dict[str, list[tuple[Any, ...]]]

_RELATIONS = """
SELECT n.nspname || '.' || c.relname, c.relkind::text, c.oid, format('%I.%I', n.nspname, c.relname)
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname !~ '^pg_' AND n.nspname <> 'information_schema' AND c.relkind IN ('r', 'p', 'v', 'm', 'S')
"""

_COLUMNS = """
SELECT format('%%s %%s %%s %%s %%s %%s', attname, format_type(atttypid, atttypmod), collname,
              CASE WHEN attnotnull THEN 'not null' END, attidentity, pg_get_expr(adbin, adrelid))
FROM pg_attribute LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum
LEFT JOIN pg_collation ON pg_collation.oid = attcollation
WHERE attrelid = %(oid)s AND attnum > 0 AND NOT attisdropped ORDER BY attnum
"""

_CONSTRAINTS = """
SELECT conname || ' ' || pg_get_constraintdef(oid) FROM pg_constraint
WHERE conrelid = %(oid)s AND contype <> 'n' ORDER BY conname
"""  # NOT NULLs are constraints with names since 18, and columns tell of them, too

_INDEXES = (
    "SELECT pg_get_indexdef(indexrelid) FROM pg_index WHERE indrelid = %(oid)s ORDER BY indexrelid::regclass::text"
)


def declarations(server: Postgres, database: str) -> Declarations:
    """Every table, view and sequence: columns in their order, constraints and indexes by name."""
    with server.connect(database) as connection:
        return {
            name: [
                f"kind {kind}",
                *(
                    row[0]
                    for part in (_COLUMNS, _CONSTRAINTS, _INDEXES)
                    for row in connection.execute(part, {"oid": oid})
                ),
            ]
            for name, kind, oid, _ in connection.execute(_RELATIONS).fetchall()
        }


def contents(server: Postgres, database: str) -> Contents:
    """All rows of all tables."""
    with server.connect(database) as connection:
        found = connection.execute(_RELATIONS).fetchall()
        return {
            name: sorted(connection.execute(f"SELECT * FROM {quoted}".encode()).fetchall(), key=repr)
            for name, kind, _, quoted in found
            if kind == "r"
        }


def tables(server: Postgres, database: str, schema: str = "public") -> set[str]:
    return {name.removeprefix(f"{schema}.") for name in contents(server, database) if name.startswith(f"{schema}.")}


def advisory_locks(server: Postgres) -> int:
    ((count,),) = server.execute("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'")
    return int(count)
