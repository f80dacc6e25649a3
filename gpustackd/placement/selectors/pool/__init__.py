"""Cards of a pool: slices, hardware partitions or whole cards."""
