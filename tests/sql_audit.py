"""Does a statement reach no rows but one user's? SQL as it goes to the driver, parsed and held against its parameters.

It fails closed: an owned table that stands anywhere but where this module looked, a statement that it cannot parse, and
a kind that it does not know are leaks.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache
from typing import Any

import sqlglot
from sqlglot import exp
from sqlglot.errors import SqlglotError
from sqlglot.tokenizer_core import TokenType

_NO_ROWS = re.compile(
    r"BEGIN( IMMEDIATE)?|SAVEPOINT \w+|RELEASE SAVEPOINT \w+|ROLLBACK TO SAVEPOINT \w+"
    r'|PRAGMA \w+\.table_x?info\("\w+"\)'
)
"""Statements that reach no rows at all."""


_Reaching = exp.Select | exp.Update | exp.Delete


class Leak(AssertionError):
    """A statement is not confined to one user."""


def owners_bound(sql: str, parameters: Sequence[Any], owned: Collection[str]) -> set[Any] | None:
    """The values that a statement binds as owner of every owned table in it; None where there is no such table.

    Several, where a filter on user_id stands beside the owner: the rows are then both's, that is, nobody's. Raises
    `Leak`.
    """
    if _NO_ROWS.fullmatch(sql.strip()):
        return None
    tree = _parsed(sql)
    if not isinstance(tree, exp.Select | exp.SetOperation | exp.Insert | exp.Update | exp.Delete):
        raise Leak(f"a statement of kind {type(tree).__name__}: {sql}")
    audit = _Audit(parameters, owned)
    for insert in tree.find_all(exp.Insert):
        audit.insert(insert)
    nodes: list[_Reaching] = [*tree.find_all(exp.Select), *tree.find_all(exp.Update), *tree.find_all(exp.Delete)]
    for node in nodes:
        audit.rows(node)
    for table in tree.find_all(exp.Table):
        if table.name in owned and id(table) not in audit.confined:
            raise Leak(f"{table.name} stands where nothing confines it: {sql}")
    if not audit.bound:
        return None
    common = set.intersection(*audit.bound)
    if not common:
        raise Leak(f"one statement for several owners, {audit.bound}: {sql}")
    return common


@lru_cache(maxsize=2000)
def _parsed(sql: str) -> exp.Expression:
    try:
        trees = sqlglot.parse(_numbered(sql), read="sqlite")
    except SqlglotError as error:
        raise Leak(f"cannot parse {sql}") from error
    if len(trees) != 1 or not isinstance(trees[0], exp.Expression):
        raise Leak(f"not one statement: {sql}")
    return trees[0]


def _numbered(sql: str) -> str:
    """Each ``?`` as ``:p`` and its number: in the tree they no longer stand in the order of the text."""
    parts: list[str] = []
    end = 0
    marks = [token for token in sqlglot.tokenize(sql, read="sqlite") if token.token_type == TokenType.PLACEHOLDER]
    for number, mark in enumerate(marks):
        parts += [sql[end : mark.start], f":p{number}"]
        end = mark.end + 1
    return "".join([*parts, sql[end:]])


class _Audit:
    def __init__(self, parameters: Sequence[Any], owned: Collection[str]) -> None:
        self._parameters = parameters
        self._owned = owned
        self.bound: list[set[Any]] = []
        self.confined: set[int] = set()

    def insert(self, node: exp.Insert) -> None:
        """Rows go in under a bound owner, and never over rows that are there."""
        schema = node.this
        table = schema.this if isinstance(schema, exp.Schema) else schema
        if not isinstance(table, exp.Table) or table.name not in self._owned:
            return
        conflict = node.args.get("conflict")
        action = None if conflict is None else conflict.args.get("action")
        if node.args.get("alternative") or (conflict is not None and str(action) != "DO NOTHING"):
            raise Leak(f"an INSERT into {table.name} that changes rows which are there: {node.sql()}")
        names = [column.name for column in schema.expressions] if isinstance(schema, exp.Schema) else []
        if "user_id" not in names:
            raise Leak(f"an INSERT into {table.name} without user_id: {node.sql()}")
        place = names.index("user_id")
        source = node.expression
        if isinstance(source, exp.Values):
            rows = [row.expressions for row in source.expressions]
        elif isinstance(source, exp.Select):
            rows = [source.expressions]
        else:
            raise Leak(f"an INSERT into {table.name} from {type(source).__name__}: {node.sql()}")
        for row in rows:
            if not isinstance(row[place].unalias(), exp.Placeholder):
                raise Leak(f"an INSERT into {table.name} whose user_id is not bound: {node.sql()}")
            self.bound.append({self._value(row[place].unalias())})
        self.confined.add(id(table))

    def rows(self, node: _Reaching) -> None:
        """Rows are read, changed or deleted under ``table.user_id = ?``, joined to all else by AND."""
        sources = list(_sources(node))
        conditions = list(_conjuncts(node.args.get("where")))
        for join in node.args.get("joins") or ():
            conditions += _conjuncts(join.args.get("on"))
        for table in sources:
            if table.name not in self._owned:
                continue
            owners = {
                self._value(other)
                for condition in conditions
                for column, other in _equality(condition)
                if column.name == "user_id" and _means(column, table, alone=len(sources) == 1)
            }
            if not owners:
                raise Leak(f"{table.name} without its owner: {node.sql()}")
            self.bound.append(owners)
            self.confined.add(id(table))
            if isinstance(node, exp.Update) and any(change.this.name == "user_id" for change in node.expressions):
                raise Leak(f"{table.name}'s rows change hands: {node.sql()}")

    def _value(self, placeholder: exp.Placeholder) -> Any:
        return self._parameters[int(placeholder.name.removeprefix("p"))]


def _sources(node: _Reaching) -> Iterator[exp.Table]:
    """The tables that stand in FROM, in a join, or after UPDATE and DELETE; subqueries are audited as their own."""
    places = [] if isinstance(node, exp.Select) else [node.this]
    if (origin := node.args.get("from_")) is not None:
        places.append(origin.this)
    for table in list(places):
        places += [join.this for join in table.args.get("joins") or ()]
    places += [join.this for join in node.args.get("joins") or ()]
    for place in places:
        if isinstance(place, exp.Table):
            yield place


def _conjuncts(condition: exp.Expr | None) -> Iterator[exp.Expr]:
    if isinstance(condition, exp.Where | exp.Paren):
        yield from _conjuncts(condition.this)
    elif isinstance(condition, exp.And):
        yield from _conjuncts(condition.left)
        yield from _conjuncts(condition.right)
    elif condition is not None:
        yield condition


def _equality(condition: exp.Expr) -> Iterator[tuple[exp.Column, exp.Placeholder]]:
    if isinstance(condition, exp.EQ):
        for one, other in ((condition.left, condition.right), (condition.right, condition.left)):
            if isinstance(one, exp.Column) and isinstance(other, exp.Placeholder):
                yield one, other


def _means(column: exp.Column, table: exp.Table, *, alone: bool) -> bool:
    return column.table == table.alias_or_name or (not column.table and alone)
