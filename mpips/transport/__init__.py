"""What crosses nodes: pushes, pulls, and how they are packed."""
