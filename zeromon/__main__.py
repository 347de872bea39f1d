"""``zeromon``, and ``python -m zeromon``."""

import sys


def main() -> int:
    """Runs the command line; Ctrl-C ends it without a word, also while it is still being imported."""
    try:
        from zeromon.cli import main as run

        return run()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
