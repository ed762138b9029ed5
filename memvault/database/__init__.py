"""How does memvault speak to the SQL database? Engine, tables' base, transactions, migrations."""
