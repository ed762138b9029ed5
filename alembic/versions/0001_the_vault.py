"""The vault: the four tables of the seed, and what memvault keeps beside them.

Revision ID: 0001
Revises:
"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def identifier() -> sa.types.TypeEngine[str]:
    """At most 255 characters, compared by code point on every database."""
    return sa.String(255).with_variant(sa.VARCHAR(255, collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "compression_jobs",
        sa.Column("id", identifier(), nullable=False),
        sa.Column("user_id", identifier(), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("sessions_compressed", sa.Integer(), nullable=False),
        sa.Column("memories_created", sa.Integer(), nullable=False),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("completed_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("lease_token", sa.String(length=32), nullable=True),
        sa.Column("leased_until", sa.DateTime(timezone=True), nullable=True),
        sa.Column("attempts", sa.Integer(), server_default="0", nullable=False),
        sa.CheckConstraint(
            "status IN ('queued', 'running', 'completed', 'failed')", name=op.f("ck_compression_jobs_status")
        ),
        sa.CheckConstraint("attempts >= 0", name=op.f("ck_compression_jobs_attempts_not_negative")),
        sa.CheckConstraint("memories_created >= 0", name=op.f("ck_compression_jobs_memories_created_not_negative")),
        sa.CheckConstraint(
            "sessions_compressed >= 0", name=op.f("ck_compression_jobs_sessions_compressed_not_negative")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_compression_jobs")),
    )
    op.create_index("idx_jobs_user", "compression_jobs", ["user_id", "created_at", "id"])

    op.create_table(
        "index_outbox",
        sa.Column("index_id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("chunk_id", identifier(), nullable=False),
        sa.Column("user_id", identifier(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("lease_token", sa.String(length=32), nullable=True),
        sa.Column("leased_until", sa.DateTime(timezone=True), nullable=True),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("last_error", sa.Text(), nullable=True),
        sa.Column("not_before", sa.DateTime(timezone=True), nullable=True),
        sa.Column("marked_at", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint("attempts >= 0", name=op.f("ck_index_outbox_attempts_not_negative")),
        sa.PrimaryKeyConstraint("index_id", "chunk_id", name=op.f("pk_index_outbox")),
    )
    op.create_index("idx_outbox_user", "index_outbox", ["index_id", "user_id"])

    op.create_table(
        "owners",
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("user_id", identifier(), nullable=False),
        sa.Column("incarnation", sa.String(length=32), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("removed_epoch", sa.BigInteger(), nullable=False),
        sa.Column("vector_count", sa.Integer(), nullable=False),
        sa.Column("default_session_id", identifier(), nullable=True),
        sa.CheckConstraint("vector_count >= 0", name=op.f("ck_owners_vector_count_not_negative")),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_owners")),
        sa.UniqueConstraint("user_id", name=op.f("uq_owners_user_id")),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "sessions",
        sa.Column("id", identifier(), nullable=False),
        sa.Column("user_id", identifier(), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("last_activity", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("compressed", sa.Boolean(), nullable=False),
        sa.Column("memory_count", sa.Integer(), nullable=False),
        sa.Column("total_tokens", sa.Integer(), nullable=False),
        sa.CheckConstraint("memory_count >= 0", name=op.f("ck_sessions_memory_count_not_negative")),
        sa.CheckConstraint("total_tokens >= 0", name=op.f("ck_sessions_total_tokens_not_negative")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_sessions")),
    )
    op.create_index("idx_sessions_user", "sessions", ["user_id", "started_at", "id"])

    op.create_table(
        "store_meta",
        sa.Column("key", identifier(), nullable=False),
        sa.Column("value", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("key", name=op.f("pk_store_meta")),
    )
    op.create_table(
        "vector_indexes",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("spec", sa.Text(), nullable=False),
        sa.Column("model", identifier(), nullable=False),
        sa.Column("dimension", sa.Integer(), nullable=True),
        sa.Column("transactional", sa.Boolean(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint("state IN ('live', 'building', 'retired')", name=op.f("ck_vector_indexes_state")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_vector_indexes")),
    )
    op.create_index(
        "uq_vector_indexes_live",
        "vector_indexes",
        ["state"],
        unique=True,
        sqlite_where=sa.text("state = 'live'"),
        postgresql_where=sa.text("state = 'live'"),
    )

    op.create_table(
        "memory_chunks",
        sa.Column("id", identifier(), nullable=False),
        sa.Column("user_id", identifier(), nullable=False),
        sa.Column("session_id", identifier(), nullable=False),
        sa.Column("memory_type", sa.String(length=16), nullable=False),
        sa.Column("content", sa.Text(), nullable=False),
        sa.Column("importance", sa.Float(precision=53), nullable=False),
        sa.Column("token_count", sa.Integer(), nullable=False),
        sa.Column("compressed", sa.Boolean(), nullable=False),
        sa.Column("compression_source", identifier(), nullable=True),
        sa.Column("source_session_id", identifier(), nullable=True),
        sa.Column("chroma_id", identifier(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("metadata", sa.JSON(), nullable=False),
        sa.Column("version", sa.Integer(), server_default="1", nullable=False),
        sa.CheckConstraint(
            "memory_type IN ('episodic', 'semantic', 'working', 'procedural')",
            name=op.f("ck_memory_chunks_memory_type"),
        ),
        sa.CheckConstraint("importance >= 0 AND importance <= 1", name=op.f("ck_memory_chunks_importance_range")),
        sa.CheckConstraint("token_count >= 0", name=op.f("ck_memory_chunks_token_count_not_negative")),
        sa.CheckConstraint("version >= 1", name=op.f("ck_memory_chunks_version_from_one")),
        sa.ForeignKeyConstraint(["session_id"], ["sessions.id"], name=op.f("fk_memory_chunks_session_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_memory_chunks")),
    )
    op.create_index("idx_memory_compressed", "memory_chunks", ["user_id", "compressed"])
    op.create_index("idx_memory_session", "memory_chunks", ["session_id"])
    op.create_index("idx_memory_user", "memory_chunks", ["user_id", "created_at", "id"])
    op.create_index("idx_memory_user_type", "memory_chunks", ["user_id", "memory_type"])

    op.create_table(
        "memory_vectors",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=False, nullable=False),
        sa.Column("user_id", identifier(), nullable=False),
        sa.Column("chunk_id", identifier(), nullable=False),
        sa.Column("field", sa.String(length=32), nullable=False),
        sa.Column("model", identifier(), nullable=False),
        sa.Column("dimension", sa.Integer(), nullable=False),
        sa.Column("content_hash", sa.String(length=64), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("vector", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(
            ["chunk_id"], ["memory_chunks.id"], name=op.f("fk_memory_vectors_chunk_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_memory_vectors")),
        sa.UniqueConstraint("chunk_id", "field", "model", name="uq_memory_vectors_chunk"),
    )
    op.create_index("idx_memory_vectors_owner", "memory_vectors", ["user_id", "epoch"])

    op.create_table(
        "procedural_memory",
        sa.Column("id", identifier(), nullable=False),
        sa.Column("user_id", identifier(), nullable=False),
        sa.Column("key", identifier(), nullable=False),
        sa.Column("value", sa.JSON(), nullable=False),
        sa.Column("confidence", sa.Float(precision=53), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("source_chunk_id", identifier(), nullable=True),
        sa.CheckConstraint("confidence >= 0 AND confidence <= 1", name=op.f("ck_procedural_memory_confidence_range")),
        sa.ForeignKeyConstraint(
            ["source_chunk_id"],
            ["memory_chunks.id"],
            name=op.f("fk_procedural_memory_source_chunk_id"),
            ondelete="SET NULL",
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_procedural_memory")),
    )
    op.create_index("idx_proc_source_chunk", "procedural_memory", ["source_chunk_id"])
    op.create_index("idx_proc_user_key", "procedural_memory", ["user_id", "key"], unique=True)


def downgrade() -> None:
    op.drop_table("procedural_memory")
    op.drop_table("memory_vectors")
    op.drop_table("memory_chunks")
    op.drop_table("vector_indexes")
    op.drop_table("store_meta")
    op.drop_table("sessions")
    op.drop_table("owners")
    op.drop_table("index_outbox")
    op.drop_table("compression_jobs")
