"""Where a view gets its snapshots: a live collector, the run store, a replay, a Prometheus."""
