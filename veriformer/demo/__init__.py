"""`veriformer demo`: the reference, trained on three small tasks until it solves them.

Reading order: data, tasks, training, svg, pictures, record, show. `data`, `svg` and `pictures` need no torch.
"""
