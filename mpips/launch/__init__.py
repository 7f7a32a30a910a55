"""Ranks of one's own, their supervisor, and the terminal where a person looks at them."""
