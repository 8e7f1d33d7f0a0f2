"""`python -m squeeze_release`, for launchers that take a module."""

from .cli import main

main()
