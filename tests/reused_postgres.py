"""How do many tests use one PostgreSQL database, each as if it were new?"""

from __future__ import annotations

import contextlib
from typing import Any

from memvault.database import migrate
from memvault.database.base import VERSION_TABLE
from memvault.models import metadata
from tests.postgres import Postgres, rows


class Reused:
    """A database at head that many tests use one after the other: emptying takes 3 ms, making one 40 to 140."""

    NAME, TEMPLATE = "tested", "migrated"

    def __init__(self, server: Postgres) -> None:
        self.server = server
        self.url = server.create_database(self.TEMPLATE)
        migrate.upgrade(self.url)
        server.create_database(self.NAME, self.TEMPLATE)
        self._connected = contextlib.ExitStack()
        self._connection = self._connected.enter_context(server.connect(self.NAME))
        self.url = server.url(self.NAME)
        self._as_made = self._described()

    def emptied(self) -> str:
        """Its URL, as it was after migration: whatever a test added, changed in the schema, or left connected."""
        self._connection.execute(_EMPTY.encode())
        if self._described() != self._as_made:
            self.close()
            self.server.drop_database(self.NAME)
            self.server.create_database(self.NAME, self.TEMPLATE)
            self._connection = self._connected.enter_context(self.server.connect(self.NAME))
        return self.url

    def _described(self) -> list[tuple[Any, ...]]:
        return rows(self._connection, _DESCRIPTION)

    def close(self) -> None:
        self._connected.close()


_CHILDREN_FIRST = ", ".join(
    f"'{name}'" for name in [*(table.name for table in reversed(metadata.sorted_tables)), VERSION_TABLE]
)

_EMPTY = """
DO $$
DECLARE found record;
BEGIN
  PERFORM pg_terminate_backend(pid, 5000) FROM pg_stat_activity
    WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend';
  FOR found IN SELECT nspname FROM pg_namespace WHERE nspname !~ '^(pg_|information_schema$|public$)' LOOP
    EXECUTE format('DROP SCHEMA %I CASCADE', found.nspname);
  END LOOP;
  FOR found IN
    SELECT relname FROM pg_class
    WHERE relnamespace = 'public'::regnamespace AND relkind = 'r' AND relname <> ALL(ARRAY[OURS])
  LOOP
    EXECUTE format('DROP TABLE IF EXISTS public.%I CASCADE', found.relname);
  END LOOP;
  FOR found IN
    SELECT name FROM unnest(ARRAY[OURS]) WITH ORDINALITY AS ours(name, place)
    WHERE to_regclass('public.' || name) IS NOT NULL AND name <> 'VERSION' ORDER BY place
  LOOP
    -- Truncating makes new files, which takes longer than deleting a few rows; dead rows are left until it pays.
    IF pg_relation_size(to_regclass('public.' || found.name)) > 1000000 THEN
      EXECUTE format('TRUNCATE public.%I CASCADE', found.name);
    ELSE
      EXECUTE format('DELETE FROM public.%I', found.name);
    END IF;
  END LOOP;
  PERFORM setval(oid::regclass, 1, false) FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relkind = 'S';
END
$$
""".replace("OURS", _CHILDREN_FIRST).replace("VERSION", VERSION_TABLE)

_DESCRIPTION = f"""
SELECT relname::text, attname::text, atttypid::text, attnotnull::text FROM pg_class
JOIN pg_attribute ON attrelid = pg_class.oid WHERE relnamespace = 'public'::regnamespace AND attnum > 0
UNION ALL SELECT conname, pg_get_constraintdef(oid), '', '' FROM pg_constraint
  WHERE connamespace = 'public'::regnamespace
UNION ALL SELECT 'version', version_num, '', '' FROM public.{VERSION_TABLE}
ORDER BY 1, 2
"""
"""What has to be the same again: columns, indexes, constraints, revision."""
