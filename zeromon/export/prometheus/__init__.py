"""Files that Prometheus needs for zeromon: rules, a scrape configuration, Grafana's dashboards."""
