"""Pictures of numbers as lines of toned text: pure functions of data, width and height."""
