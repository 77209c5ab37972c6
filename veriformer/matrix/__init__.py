"""The compatibility matrix: every installed library's parts, judged one variant at a time, each in a process alone."""
