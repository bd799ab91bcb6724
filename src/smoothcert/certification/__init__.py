"""A data set through smoothing: certificates files, shards, other statistics, and attacks as a check."""
