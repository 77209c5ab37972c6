"""Performance and accuracy of past commits: recording by asv, a report of our own, asv's pages offline."""
