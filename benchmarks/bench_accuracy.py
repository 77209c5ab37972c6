"""asv: how accurate results are, one class for each operation; less is better."""
