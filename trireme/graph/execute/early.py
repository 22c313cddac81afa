"""Which operations of a place are computed first, so that what other places wait for leaves soon.

Of the operations of one place and one depth, some make a value that another place reads. These, and
what they need, are computed and sent before the others: the other place computes at the same time
as these. Backward likewise: the others are computed before the gradients of the sent values are
waited for.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping

import torch
from torch import fx


def early(
    groups: Mapping[fx.Node, Hashable],
    sent: Iterable[fx.Node],
    together: Iterable[Iterable[fx.Node]],
) -> set[fx.Node]:
    """Returns the nodes to compute first.

    They are the values that are sent with their ancestors in the group. All of the nodes that share
    changed memory are among them if one is; likewise all that read a value that is no tensor, such
    as the several results of one operator: only tensors go from one segment to another.
    """
    beside: dict[fx.Node, list[fx.Node]] = {}
    for nodes in map(list, together):
        for node in nodes:
            beside.setdefault(node, []).extend(nodes)
    found: set[fx.Node] = set()
    open_ = list(sent)
    while open_:
        node = open_.pop()
        if node in found:
            continue
        found.add(node)
        near = [*node.all_input_nodes]
        if not isinstance(node.meta.get("val"), torch.Tensor):
            near += node.users
        open_ += [each for each in near if each in groups and groups[each] == groups[node]]
        open_ += beside.get(node, ())
    return found
