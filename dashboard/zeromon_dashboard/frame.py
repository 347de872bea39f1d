"""What stays on the screen while pages change. Pure."""

from typing import Any

import dash_mantine_components as dmc
from dash import dcc, html

from zeromon_dashboard.url_state import PAGES

_SMALL = {"size": "xs"}
_USUAL = {
    "Button": {"size": "xs", "variant": "light"}, "Select": _SMALL, "TextInput": _SMALL,
    "SegmentedControl": _SMALL, "Paper": {"withBorder": True, "radius": "md"},
    "MultiSelect": {"size": "xs", "searchable": True, "clearable": True, "limit": 64, "w": 260},
    "Table": {"withTableBorder": True, "verticalSpacing": 4},
}  # fmt: skip
"""Component -> the properties that it has everywhere, unless a page gives others."""


def frame() -> Any:
    """The header, the navigation, and the place for the page."""
    links = [
        dmc.NavLink(label=f"{n}  {title}", id=f"nav-{name}", href="#", className="nav")
        for n, (name, title) in enumerate(PAGES.items(), 1)
    ]
    return dmc.MantineProvider(
        id="theme",
        theme={"components": {name: {"defaultProps": own} for name, own in _USUAL.items()}},
        children=[
            dcc.Location(id="url", refresh=False),
            dcc.Store(id="route"),
            dcc.Store(id="at"),
            dcc.Store(id="cursor"),
            dcc.Store(id="sink"),
            dcc.Interval(id="tick", interval=1000),
            dmc.AppShell(
                [
                    dmc.AppShellHeader(
                        dmc.Group(
                            [
                                dcc.Link(
                                    dmc.Text("zeromon", fw=800, size="lg"),
                                    href="/",
                                    className="plain",
                                ),
                                dmc.Text(id="lost", c="red", size="sm"),
                                dmc.Switch(id="dark", label="dark", size="sm"),
                            ],
                            justify="space-between",
                            h="100%",
                            px="md",
                        )
                    ),
                    dmc.AppShellNavbar(
                        [
                            dmc.NavLink(label="0  Runs", id="nav-runs", href="/", className="nav"),
                            dmc.Divider(my=4),
                            html.Div(links, id="pages"),
                            dmc.Text(
                                f"Keys: 0 to {len(PAGES)} pages, d dark, space play",
                                size="xs",
                                c="dimmed",
                                mt="md",
                            ),
                        ],
                        p="xs",
                    ),
                    dmc.AppShellMain(html.Div(id="page")),
                ],
                header={"height": 46},
                navbar={"width": 170, "breakpoint": "sm"},
                padding="sm",
            ),
        ],
    )
