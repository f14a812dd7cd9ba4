"""The kind of layer that produced each storage, in the words of the papers whose policies ask for it."""

from torch import fx

from fxhome.passes.facts import GraphFacts
from fxhome.passes.fusion import operator_name

_BY_WORD = (
    ("attention", ("attention", "flash", "efficient_attention")),
    ("convolution", ("convolution", "conv2d", "conv1d", "conv3d")),
    ("pool", ("pool", "upsample")),
    ("norm", ("norm", "var_mean")),
    ("matmul", ("::mm", "addmm", "bmm", "matmul", "linear")),
    ("activation", ("relu", "gelu", "silu", "sigmoid", "tanh", "threshold", "hardswish", "elu", "softmax")),
)


def op_class(node: fx.Node) -> str:
    """Name the class of a node's layer, a key of `_BY_WORD` or "other"; a getitem has its source's class."""
    if operator_name(node) == "" and node.all_input_nodes:
        return op_class(node.all_input_nodes[0])
    name = operator_name(node)
    for kind, words in _BY_WORD:
        if any(word in name for word in words):
            return kind
    return "other"


def storage_classes(module: fx.GraphModule, facts: GraphFacts) -> list[str]:
    """The class of the node that produces each storage, in the order of `facts.storages`."""
    nodes = [node for node in module.graph.nodes if node.op != "output"]
    return [op_class(nodes[owner]) if nodes[owner].op == "call_function" else "other" for owner in facts.storage_owner]
