"""Embedding tables: ownership, index, shard, wire, rounds, snapshot and eviction."""
