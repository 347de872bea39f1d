"""Aligned tables as text."""

from __future__ import annotations

from zeromon.readout.tables import Column, text_table


def test_texts_that_differ_in_length_are_aligned_to_the_left_where_a_column_says_so() -> None:
    rows = [("a", "short"), ("b", "a much longer cause")]
    table = text_table(
        rows, Column("run", lambda row: row[0]), Column("n", lambda row: "7"),
        Column("cause", lambda row: row[1], left=True),
    )  # fmt: skip
    assert (
        len(
            {
                line.index(word)
                for line, word in zip(table.splitlines(), ("cause", "short", "a much"), strict=True)
            }
        )
        == 1
    )
