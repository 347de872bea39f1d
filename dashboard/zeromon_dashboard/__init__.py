"""The dashboard, made with Dash and plotly. The core never imports it; the CLI loads it by name."""
