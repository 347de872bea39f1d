"""The contents of every view, once: figures, thresholds, sentences, where a step goes. Pure.

Report, HTML page, terminal, dashboard, PromQL decoder, recording rules and alerts read this package and
keep no copy. It knows snapshots and nothing of how a view draws.

* :mod:`zeromon.readout.figures`: the figures of a rank, a node and a run
* :mod:`zeromon.readout.text`: sentences about a run and its ranks; ``hang`` and ``remedy``: about those
* :mod:`zeromon.readout.breakdown`: where the time of a step goes
* :mod:`zeromon.snapshot.levels` and :mod:`zeromon.snapshot.focus`, which forecasts and rules read too:
  the thresholds, and which rank is the worst
"""
