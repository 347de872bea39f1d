"""What Prometheus needs to know of zeromon: rules, a scrape configuration, Grafana's dashboards."""
