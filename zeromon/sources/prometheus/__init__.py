"""Runs as a Prometheus knows them, or what speaks its HTTP API: VictoriaMetrics, Mimir, Thanos."""
