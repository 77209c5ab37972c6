"""What a run leaves behind: the JSON record, scripts that reproduce failures, the terminal's view."""

FOLDER = ".veriformer"
"""Where reports and failures go, unless it is said."""
