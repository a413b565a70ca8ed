"""`python -m homing`: the command line."""

from __future__ import annotations

from homing.cli import main

if __name__ == "__main__":
    main()
