"""Input: what a user names -> Parquet files, and of a shard its documents, one at a time, in memory bounded by one. Tokenizes nothing."""
