"""What does `python -m memvault` do? The same as the command `memvault`."""

from __future__ import annotations

from memvault.cli.app import main

if __name__ == "__main__":
    main()
