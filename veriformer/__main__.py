"""`python -m veriformer` is the command `veriformer`."""

from veriformer.cli import main

main()
