"""Writes Grafana's dashboards as the JSON files that `zeromon prometheus dashboards` hands out.

python tools/make_boards.py
"""

from pathlib import Path

from grafana_boards.boards import BOARDS
from grafana_boards.document import document

FOLDER = Path(__file__).resolve().parents[1] / "zeromon" / "export" / "prometheus" / "boards"


def main() -> None:
    """Replaces the files."""
    for board in BOARDS:
        (FOLDER / f"{board.uid}.json").write_text(document(board))


if __name__ == "__main__":
    main()
