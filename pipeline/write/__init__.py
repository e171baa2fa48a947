"""Rows of a shard -> its Parquet files, all of them or none."""
