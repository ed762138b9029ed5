"""Who turns text into vectors? The protocol, and one file for each kind of embedder."""
