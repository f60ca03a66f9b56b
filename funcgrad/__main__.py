"""``python -m funcgrad``."""

from funcgrad._cli import main

main()
