"""Pictures in the browser, made with plotly. The core never imports this: it asks for it by name."""
