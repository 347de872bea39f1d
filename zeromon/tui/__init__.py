"""The terminal view: pure drawing of lines, thin widgets around them, screens, one app."""
