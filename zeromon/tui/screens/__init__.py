"""The screens: what each puts where, and what its keys do."""
