"""``python -m zeromon.collector``."""

import sys

from zeromon.collector.process import main

sys.exit(main())
