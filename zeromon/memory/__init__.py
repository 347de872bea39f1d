"""Memory of a rank: predicted, measured against predicted, forecast, and planned. Pure."""
