"""Samples of a Prometheus in, the snapshots and histories out that all views know. Pure.

What is not in the samples is unknown: None, -1, or empty. Texts come from labels, which anybody may
have written: a rank that is no number is skipped, every other text is for the view to clean.
"""

from zeromon.sources.prometheus.decode.ranks import (
    findings_of,
    hangs_of_ranks,
    history_of,
    on_our_clock,
    rank_of,
    stragglers_of_findings,
    with_deaths,
    with_host_use,
)
from zeromon.sources.prometheus.decode.samples import (
    Key,
    RankSamples,
    dedupe_jobs,
    fleet_of_nodes,
    key_of,
    nodes_of_samples,
    samples_by_rank,
    series_of_ranks,
    whole_of,
    whole_series_of,
)
