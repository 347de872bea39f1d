"""``python -m zeromon.collector``."""

import sys

from zeromon.collector.collector_process import main

sys.exit(main())
