"""Transport between nodes: pushes, pulls, and their packing."""
