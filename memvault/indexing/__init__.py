"""How does the index follow SQL? The vault's memory of it, its reach from this process, and the payment of debts."""
