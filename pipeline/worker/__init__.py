"""Shards through one engine, several at once, on one device: its tools, and what becomes of a worker that hangs or dies."""
