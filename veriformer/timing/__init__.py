"""How fast an implementation is beside others, as a fraction of what the machine could do."""
