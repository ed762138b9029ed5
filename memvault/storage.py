"""Where does everything come together? `StorageLayer` owns engine, index and embedder, and hands out users."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from sqlalchemy import URL, Engine
from sqlalchemy.orm import Session, scoped_session

from memvault.config import DEFAULT_EMBEDDER, build_embedder, build_index, default_vectors, settings_from_env
from memvault.database import migrate
from memvault.database.engine import create_engine, parse_url, require_folder
from memvault.database.joined_session import SessionTransactions
from memvault.database.transactions import Database, OwnTransactions
from memvault.database.unit import Unit
from memvault.embedding.base import Embedder
from memvault.errors import ConfigurationError, ValidationError
from memvault.indexing.checkup import check_up
from memvault.indexing.mirror import Mirror
from memvault.indexing.payer import Payer
from memvault.indexing.reach import IndexReach
from memvault.indexing.truth import Truth
from memvault.indexing.vault import Vault, find_vault, found_vault, require_index, require_model
from memvault.memory.chunks import ChunkStore
from memvault.memory.drafts import Drafting, Known, TokenCounter
from memvault.memory.sessions import SessionStore
from memvault.operations import census
from memvault.operations.compaction import compact
from memvault.operations.erasure import erase_user
from memvault.operations.transfer import import_chunks
from memvault.search.nearest import NearestSearch
from memvault.search.pipeline import Search
from memvault.text import check_choice, check_identifier, check_integer, shown
from memvault.user import UserMemory
from memvault.values import CompactReport, DoctorReport, ErasureReport, ImportReport, SyncReport
from memvault.vectors.base import VectorIndex

SCHEMA_MODES = ("upgrade", "check", "ignore")
INDEXING_MODES = ("inline", "background", "manual")
MEMORY = ":memory:"

T = TypeVar("T")


class StorageLayer:
    """One vault, open. Thread-safe and fork-safe; a context manager. Make it by `open` or `from_env`.

    After a fork, such as gunicorn's with preload, parent and child may both go on with it, and each closes its own. An
    embedded index stays the parent's, as it would be with any other process. Fork between transactions: one that is
    open at the time belongs to the parent alone.
    """

    def __init__(
        self,
        database: Database,
        vault: Vault,
        reach: IndexReach,
        drafting: Drafting,
        *,
        indexing: str,
        index_wait: float,
        exact_limit: int,
        cache_bytes: int,
        cleanup: ExitStack,
    ) -> None:
        """For `open`: takes what it has put together."""
        self.vault_id = vault.id
        self.indexing = indexing
        self.index_wait = index_wait
        self._database = database
        self._reach = reach
        self._drafting = drafting
        self._payer = Payer(database, reach, threaded=indexing != "manual")
        database.mirror = Mirror(reach)
        self._search = Search(NearestSearch(reach, exact_limit, cache_bytes), drafting)
        self._cleanup = cleanup
        if reach.owner_pid == os.getpid():
            self._payer.start()  # others owe, and leave it to this process to pay

    @classmethod
    def open(
        cls,
        database_url: str | URL | Engine,
        *,
        vectors: str | VectorIndex | None = None,
        embedder: str | Path | Embedder | Callable[[list[str]], Any] | None = None,
        schema: Literal["upgrade", "check", "ignore"] | None = None,
        indexing: Literal["inline", "background", "manual"] = "inline",
        index_wait: float = 1.0,
        exact_limit: int = 20_000,
        cache_bytes: int = 256 << 20,
        schema_name: str | None = None,
        token_counter: TokenCounter | None = None,
        embed_timeout: float = 60.0,
        engine_options: dict[str, Any] | None = None,
    ) -> Self:
        """Open a vault, founding it where there is none.

        ``database_url``: a SQLAlchemy URL or Engine; ":memory:" is a private temporary file, gone at `close`.
        ``vectors``: None for what the vault remembers ("chroma" in a new one on SQLite; on a server a new one has to
        name it), else "chroma" (a folder beside the database), "chroma:///folder", "chroma+http(s)://host:port",
        "sqlite-vec", "pgvector", "exact", or a VectorIndex. ``embedder``: None likewise ("static" in a new
        one), else "static", "none" (the caller brings every vector), "sentence-transformers/NAME" or the path of such a
        model, an Embedder, an embedding function of Chroma's, or any function from texts to vectors.
        ``schema``: "upgrade" (default on SQLite) migrates to head first, and creates an index in the database; "check"
        (default on servers) raises SchemaError where the database is elsewhere; "ignore" does neither.
        ``schema_name``: the PostgreSQL schema of memvault's tables, where it is not the database's default one.
        ``indexing``: "inline" waits until what a write owes to the index is paid, ``index_wait`` seconds at most, and
        not at all where this process cannot reach the index; "background" never waits; in both, a thread pays these
        debts and others'. "manual" pays in `sync` only. Searches are right whatever is owed.
        ``exact_limit``: up to so many vectors a user's search is exact, above it the index is asked. ``cache_bytes``:
        of the vectors of users who searched last, kept in memory for exact searches, and compared with the database
        before each; 0 for none.
        ``token_counter``: tokens of a text; by default a quarter of its characters. ``embed_timeout``: seconds that one
        call of the embedder may take, for some hundred texts, before it is an EmbeddingError. ``engine_options``: for
        `sqlalchemy.create_engine`.

        Raises ConfigurationError, SchemaError, StorageError; IndexMismatchError (a VectorIndexError) where the vault
        remembers another index or embedder, or the index found is not this vault's.
        """
        _check_options(schema, indexing, index_wait, exact_limit, cache_bytes)
        if token_counter is not None and not callable(token_counter):
            raise ConfigurationError(f"token_counter must be callable with a text, got {shown(token_counter)}")
        if engine_options is not None and not isinstance(engine_options, dict):
            raise ConfigurationError(f"engine_options must be a dict, got {shown(engine_options)}")
        with ExitStack() as cleanup:
            engine = _engine(database_url, engine_options or {}, cleanup)
            database = Database(engine, schema_name)
            schema = schema or ("upgrade" if engine.dialect.name == "sqlite" else "check")
            if schema == "upgrade":
                migrate.upgrade(database.engine)
            elif schema == "check":
                migrate.require_head(database.engine)
            remembered = find_vault(database)
            if vectors is None:
                vectors = remembered.index.spec if remembered else default_vectors(engine)
            index = build_index(vectors, database)
            model = build_embedder(_choice(embedder, remembered.index.model if remembered else DEFAULT_EMBEDDER))
            drafting = Drafting(model, token_counter, embed_timeout)
            vault = remembered or found_vault(
                database,
                location=index.location,
                model=drafting.model,
                dimension=drafting.dimension,
                transactional=index.transactional,
            )
            require_index(vault, index.location)
            require_model(vault, drafting.model, drafting.dimension)
            drafting.dimension = vault.index.dimension
            reach = IndexReach(database, vault, index, creates=schema == "upgrade")
            cleanup.callback(reach.close)
            reach.acquire()
            return cls(
                database,
                vault,
                reach,
                drafting,
                indexing=indexing,
                index_wait=index_wait,
                exact_limit=exact_limit,
                cache_bytes=cache_bytes,
                cleanup=cleanup.pop_all(),
            )

    @classmethod
    def from_env(cls) -> Self:
        """Open what MEMVAULT_DATABASE_URL names; MEMVAULT_VECTORS, _EMBEDDER, _SCHEMA, _SCHEMA_NAME, _INDEXING,
        _INDEX_WAIT, _EXACT_LIMIT, _CACHE_BYTES and _EMBED_TIMEOUT are `open`'s arguments of these names.
        """
        return cls.open(**settings_from_env())

    def for_user(self, user_id: str, *, sql_session: Session | scoped_session[Session] | None = None) -> UserMemory:
        """A user's memory: cheap, and no I/O. Raises ValidationError where user_id breaks the text policy.

        ``sql_session``: a Session bound to `engine`, or to one that `memvault.create_engine` made for this database
        (else ConfigurationError). All that is done happens in its transaction, and becomes visible with its commit; a
        call that fails undoes itself only, and the transaction goes on. What is owed to an index is paid after the
        commit, within a second; nobody waits for it. On SQLite the Session begins by waiting for the write lock,
        unless it is bound to ``engine.execution_options(memvault_read_only=True)``, and then may only read.
        """
        self._payer.start()
        if sql_session is None:
            return UserMemory(self._transactions(user_id), self._drafting, self._search)
        check_identifier(user_id, "user_id")
        return UserMemory(SessionTransactions(self._database, user_id, sql_session), self._drafting, self._search)

    @property
    def engine(self) -> Engine:
        """The SQLAlchemy engine that everything here runs on."""
        return self._database.engine

    def user_ids(self) -> Iterator[str]:
        """Every user for whom a write was ever asked, and who was not erased since, in the order of their ids."""
        return census.user_ids(self._database)

    def sync(self) -> SyncReport:
        """Pay now what is owed to the index. Where another process owns the index, everything stays owed."""
        return self._payer.pay_all()

    def doctor(self, *, repair: bool = False, progress: Callable[[int, int], None] | None = None) -> DoctorReport:
        """Compare SQL with the index, record by record and both ways, while the vault is in use.

        ``repair``: owe the index what it has not got right, and pay it; what is being written meanwhile is left to its
        writer; an index that cannot even be read is made anew from SQL. ``progress`` is called with (done, total)
        records. An index of another dimension, metric, model or vault is ``mismatched``, which no payment mends.

        Raises IndexOwnershipError where another process owns the index, VectorIndexError where it cannot be read.
        """
        embed = None if self._drafting.embedder is None else self._drafting.embed
        truth = Truth(self._transactions, self._database.reading, self._reach.row, embed)
        return check_up(self._database, self._reach, self._payer, truth, repair=repair, progress=progress)

    def compact(self) -> CompactReport:
        """Give back the disk space of what was deleted, and what an embedded Chroma keeps of erased texts.

        The index is made anew from SQL, a SQLite file is written anew, which takes as much room again meanwhile. A
        Chroma server and PostgreSQL are left to their operators. Searches and writes go on.

        Raises IndexOwnershipError where another process owns the index, VectorIndexError, StorageError.
        """
        return compact(self._database, self._reach, self._payer.pay_all)

    def create_index(self, dimension: int | None = None) -> bool:
        """Make the vault's index where it is missing, filled from SQL, and say whether it was missing.

        For a deployment where the service itself opens with schema="check". ``dimension``: of a vault with embedder
        "none" and no vector yet. Raises ConfigurationError, VectorIndexError.
        """
        if dimension is not None:
            check_integer(dimension, "dimension", minimum=1)
        made = self._reach.create(dimension)
        self._drafting.dimension = self._reach.row.dimension
        return made

    def erase_user(self, user_id: str) -> ErasureReport:
        """Delete everything of a user from SQL, then from the index; reports what the index still owes."""
        transactions = self._transactions(user_id)
        return erase_user(transactions, lambda: census.owed(self._database, self._reach.row.id, user_id))

    def import_user(
        self,
        stream: Iterable[str],
        user_id: str | None = None,
        *,
        progress: Callable[[int], None] | None = None,
    ) -> ImportReport:
        """Import JSON Lines of chunks (see `memvault.operations.transfer`), for ``user_id`` or the lines' own users.

        Importing twice adds nothing; ids that another user has are a ConflictError. ``progress`` is
        called with the number of lines done.
        """
        if user_id is not None:
            check_identifier(user_id, "user_id")
        if isinstance(stream, str | bytes) or not isinstance(stream, Iterable):
            raise ValidationError(f"stream must be a file or a list of lines, got {shown(stream)}")

        @contextmanager
        def begin(user: str) -> Iterator[tuple[SessionStore, ChunkStore]]:
            with self.for_user(user).transaction() as tx:
                yield tx.sessions, tx.chunks

        def known(user: str) -> Known:
            return self.for_user(user).chunks.known_vectors

        return import_chunks(stream, begin, self._drafting, known, user_id=user_id, progress=progress)

    def health(self) -> dict[str, Any]:
        """For a readiness probe: ``ok``, ``debts``, ``oldest_debt_s``, ``last_error``, ``index_owned_elsewhere``.

        ``ok`` is whether the database answers. Debts are no failure: searches are right with them. Where another
        process owns the index, ``index_owner_pid`` is that process, if it is known.
        """
        return census.health(self._database, self._reach)

    def stats(self) -> dict[str, Any]:
        """What the vault holds: users, rows by table, the index and what it holds and owes."""
        return census.stats(self._database, self._reach)

    def close(self) -> None:
        """Release the index, its lock, and the engine if it was made here. Idempotent.

        What is owed to the index is paid for ``index_wait`` seconds more, and then by whoever opens the vault next.
        """
        self._payer.close(self.index_wait)
        self._database.close()
        self._cleanup.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"StorageLayer({self.engine.url.render_as_string(hide_password=True)!r})"

    def _transactions(self, user_id: str) -> OwnTransactions:
        check_identifier(user_id, "user_id")
        return OwnTransactions(self._database, user_id, self._committed)

    def _committed(self, unit: Unit) -> None:
        if unit.fixed_dimension is not None:
            self._drafting.dimension = unit.fixed_dimension
            self._reach.fix_dimension(unit.fixed_dimension)
        if self._reach.row.transactional:
            if unit.fixed_dimension is not None:
                self._payer.make_index()
        elif unit.owed:
            self._payer.hand_over(unit.owed, self.index_wait if self.indexing == "inline" else 0.0)


def _choice(named: T | None, otherwise: str) -> T | str:
    return otherwise if named is None else named


def _engine(database_url: object, options: dict[str, Any], cleanup: ExitStack) -> Engine:
    if isinstance(database_url, Engine):
        if options:
            raise ConfigurationError("engine_options are for a URL; this engine is made already")
        parse_url(database_url.url)
        return database_url
    folder = None
    if database_url == MEMORY:
        folder = tempfile.mkdtemp(prefix="memvault-")
        cleanup.callback(_remove, folder, os.getpid())
        database_url = URL.create("sqlite", database=str(Path(folder) / "memvault.db"))
    if not isinstance(database_url, str | URL):
        raise ConfigurationError(f"database_url must be a SQLAlchemy URL or Engine, got {shown(database_url)}")
    url = parse_url(database_url)
    require_folder(url)
    engine = create_engine(url, **options)
    if folder is not None:
        weakref.finalize(engine, _remove, folder, os.getpid())  # should nobody close it
    cleanup.callback(engine.dispose)
    return engine


def _remove(folder: str, owner: int) -> None:
    """Unless this is a process that forked off since, which shares the folder and leaves it to its owner."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


def _check_options(
    schema: object, indexing: object, index_wait: object, exact_limit: object, cache_bytes: object
) -> None:
    try:
        check_choice("upgrade" if schema is None else schema, "schema", SCHEMA_MODES)
        check_choice(indexing, "indexing", INDEXING_MODES)
        check_integer(exact_limit, "exact_limit", minimum=0)
        check_integer(cache_bytes, "cache_bytes", minimum=0)
    except ValidationError as exc:
        raise ConfigurationError(str(exc)) from exc
    if isinstance(index_wait, bool) or not isinstance(index_wait, int | float) or not 0 <= index_wait < math.inf:
        raise ConfigurationError(f"index_wait must be a number of seconds, 0 or more, got {shown(index_wait)}")
