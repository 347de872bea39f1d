"""One file per monitor: launch, live answers, answers afterwards, lines in the script (monitor.py)."""
