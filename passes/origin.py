"""Where in the user's code a node of a graph comes from."""

from torch import fx


def module_path(node: fx.Node) -> str:
    """Dotted path of the module that made `node`, or an empty string."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    path = str(list(stack.values())[-1][0])
    return path.replace("L['self'].", "").replace("L['self']", "").replace("self.", "")


def source_line(node: fx.Node) -> str:
    """`file:line` of the user's code that made `node`, or an empty string."""
    trace = node.meta.get("stack_trace") or ""
    lines = [line.strip() for line in trace.splitlines() if line.strip().startswith("File ")]
    if not lines:
        return ""
    parts = lines[-1].split(", ")
    return (
        f"{parts[0].removeprefix('File ').strip(chr(34))}:{parts[1].removeprefix('line ')}"
        if len(parts) > 1
        else parts[0]
    )


def made_at(node: fx.Node) -> str:
    """Module path and source line as the part of a sentence that follows the node; empty where neither is known."""
    return "".join(
        f" {word} {found}" for word, found in (("of", module_path(node)), ("at", source_line(node))) if found
    )
