"""`python -m tidegate` is the `tidegate` command."""

from tidegate.cli.main import main

main()
