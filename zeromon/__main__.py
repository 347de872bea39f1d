"""``zeromon``, and ``python -m zeromon``."""

import signal
import sys


def main() -> int:
    """Runs the command line; Ctrl-C ends it without a word, also while it is still being imported."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # until all is imported: an exception in the import of an extension module may crash Python
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from zeromon.cli import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
