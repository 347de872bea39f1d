"""Events in, snapshot out: the one fold that the live view, replay and report share. Pure."""
