"""Samples of a Prometheus in, the snapshots and histories out that all views know. Pure.

What is not in the samples is unknown: None, -1, or empty. Texts come from labels, which anybody may
have written: a rank that is no number is skipped, every other text is for the view to clean.
"""

from zeromon.sources.prometheus.decode.findings import (
    findings_of as findings_of,
    hangs_of as hangs_of,
    history_of as history_of,
    stragglers_of as stragglers_of,
)
from zeromon.sources.prometheus.decode.fleet import (
    fleet_of as fleet_of,
    nodes_of as nodes_of,
    whole_of as whole_of,
)
from zeromon.sources.prometheus.decode.history import (
    series_of as series_of,
    whole_series_of as whole_series_of,
)
from zeromon.sources.prometheus.decode.ranks import (
    on_our_clock as on_our_clock,
    rank_of as rank_of,
    with_host_use as with_host_use,
)
from zeromon.sources.prometheus.decode.samples import (
    Key as Key,
    RankSamples as RankSamples,
    dedupe_jobs as dedupe_jobs,
    gathered as gathered,
    key_of as key_of,
)
