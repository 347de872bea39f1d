"""The storage of a run on disk: the run store, the step history, the snapshot log."""
