"""What is decided before anything is computed: model, device, sizes, workers, shards, and the fingerprint of it all. Writes nothing."""
