"""The daemon of a node: follows rings, serves a snapshot a second, reports to other nodes."""
