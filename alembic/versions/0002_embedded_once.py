"""Vectors that the embedder made are found by their content's hash, so that a text is embedded once.

Revision ID: 0002
Revises: 0001
"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # Nobody knows of the vectors there are whether the embedder or the caller made them: they are not used again.
    op.add_column("memory_vectors", sa.Column("embedded", sa.Boolean(), server_default=sa.false(), nullable=False))
    op.create_index(
        "idx_memory_vectors_embedded",
        "memory_vectors",
        ["user_id", "content_hash"],
        sqlite_where=sa.text("embedded = 1"),
        postgresql_where=sa.text("embedded"),
    )


def downgrade() -> None:
    op.drop_index("idx_memory_vectors_embedded", "memory_vectors")
    op.drop_column("memory_vectors", "embedded")
