"""What travels from a training process: events, the ring, paths. The only package agents enter."""
