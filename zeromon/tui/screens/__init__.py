"""The screens: the layout and the keys of each."""
