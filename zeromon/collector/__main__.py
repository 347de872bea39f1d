"""``python -m zeromon.collector``."""

import sys

from zeromon.collector.daemon import main

sys.exit(main())
