"""What is remembered? One file for each kind of memory: its table at the top, its store below."""
