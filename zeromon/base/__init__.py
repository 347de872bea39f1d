"""Foundation of every package: errors that say what to do, and figures with their units. Pure."""
