"""Where do vectors lie, and who finds the nearest? SQL's own (canonical), and one file for each kind of index."""
