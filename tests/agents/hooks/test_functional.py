"""The operators of functional collectives that the hooks know."""

from __future__ import annotations

from collections import Counter

import torch
import torch.distributed._functional_collectives  # it tells torch.fx which operators have side effects

from zeromon_agents.hooks.functional import NAMESPACES, OPERATORS, OTHERS


def test_every_operator_is_hooked_or_known_to_issue_nothing() -> None:
    """A new torch that adds a functional collective must not go unseen."""
    names = Counter(
        name
        for schema in torch._C._jit_get_all_schemas()
        for namespace, _, name in [schema.name.partition("::")]
        if namespace in NAMESPACES
    )
    assert set(names) - set(OPERATORS) - OTHERS == set()


def test_an_operator_calls_its_attribute() -> None:
    """And takes its hash from it, by which torch finds operators in its tables."""
    operator = torch.ops._c10d_functional.wait_tensor
    for owner in (operator, operator.default):
        assert "_op" in vars(owner)
        assert hash(owner) == hash(vars(owner)["_op"])
        assert owner in torch.fx.node._side_effectful_functions
