"""What of a module will differ or break when it runs as replicas, each finding with its line and a remedy.

Most of these show only on two or more distinct GPUs; reading the module finds them on a laptop.
"""

import ast
import functools
import inspect
import textwrap
import types
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dphybrid.parallel.dropout import Dropout
from dphybrid.parallel.replication import OF_TORCH, unsuitable


@dataclass(frozen=True)
class Finding:
    """breaks: it fails or computes on the wrong weights; otherwise results differ from those of one device.

    module: dotted name in the checked module. place: file and line, or the attribute.
    """

    breaks: bool
    module: str
    place: str
    problem: str
    remedy: str

    def text(self) -> str:
        """Return the finding as two lines."""
        return (
            f"{'BREAKS ' if self.breaks else 'differs'} {self.module or '(top)'} [{self.place}]: "
            f"{self.problem}\n        remedy: {self.remedy}"
        )


def check_module(module: nn.Module) -> list[Finding]:
    """Return what data parallelism changes in `module`, in the order of its submodules."""
    found: list[Finding] = []
    for name, part in module.named_modules():
        found += [
            Finding(breaks, name, *words)
            for breaks, *words in (*_kind(part), *_attributes(part), *_source(part))
        ]
    return found + _tied(module)


_Words = tuple[bool, str, str, str]


def _kind(part: nn.Module) -> Iterator[_Words]:
    kind = type(part).__name__
    if found := unsuitable(part):
        yield True, kind, *found
    if isinstance(part, _BatchNorm) and not isinstance(part, nn.SyncBatchNorm):
        yield (
            False,
            kind,
            "each device normalises its own rows, and only the first device's running statistics are kept",
            "use GroupNorm or LayerNorm, or batches large enough for each device",
        )
    if isinstance(part, nn.RNNBase | nn.MultiheadAttention) and not part.batch_first:
        yield True, kind, "reads the batch on dim 1, and the split is on dim 0", "set batch_first=True"
    if isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0 and not isinstance(part, Dropout):
        why = "masks differ from those of one device"
        yield False, kind, why, "on the CPU, dphybrid.parallel.Dropout draws the same; else nothing"


def _attributes(part: nn.Module) -> Iterator[_Words]:
    for name, value in vars(part).items():
        if name in OF_TORCH or name == "_all_weights":
            continue
        for leaf in _leaves(value):
            words = None
            if isinstance(leaf, Tensor):
                why = "a tensor that is not registered stays on the first device"
                words = why, "make it a buffer with register_buffer"
            elif isinstance(leaf, nn.Module):
                why = "a module outside the module tree is not replicated"
                words = why, "put it into an nn.ModuleList or nn.ModuleDict"
            elif _bound_to_module(leaf):
                why = "a stored bound method keeps the first device's module"
                words = why, "look the method up when it is called"
            if words:
                yield True, f"self.{name}", *words


def _leaves(value: object) -> Iterator[object]:
    if isinstance(value, list | tuple | set):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _leaves(item)
    else:
        yield value


def _bound_to_module(value: object) -> bool:
    if isinstance(value, functools.partial):
        return _bound_to_module(value.func) or any(isinstance(arg, nn.Module) for arg in value.args)
    if isinstance(value, types.MethodType):
        return isinstance(value.__self__, nn.Module)
    cells = value.__closure__ or () if isinstance(value, types.FunctionType) else ()
    return any(isinstance(cell.cell_contents, nn.Module) for cell in cells)


def _source(part: nn.Module) -> Iterator[_Words]:
    """Findings in the source of `forward` and of the module's own methods that it calls."""
    waiting, seen = ["forward"], {"forward"}
    while waiting and not type(part).__module__.startswith("torch."):
        # len has no source: a part without the method is passed over
        function = inspect.unwrap(getattr(type(part), waiting.pop(), len))
        try:
            lines, first = inspect.getsourcelines(function)
            file = inspect.getsourcefile(function) or "?"
        except (OSError, TypeError):
            continue  # made without a source file, or no function
        text = textwrap.dedent("".join(lines))
        if "flatten_parameters" not in text and any(isinstance(c, nn.RNNBase) for c in part.children()):
            yield (
                False,
                f"{file}:{first}",
                "a recurrent layer's weights lie in pieces in a replica: slower, more memory, and a warning",
                "call flatten_parameters() of the layer first in forward",
            )
        for node in ast.walk(ast.parse(text)):
            place = f"{file}:{first + vars(node).get('lineno', 1) - 1}"
            found = _in_node(node, function.__name__)
            yield from ((breaks, place, problem, remedy) for breaks, problem, remedy in found)
            called = _dotted(node.func) if isinstance(node, ast.Call) else ""
            name = called.removeprefix("self.")
            if called.startswith("self.") and name in vars(type(part)) and name not in seen:
                seen.add(name)
                waiting.append(name)


def _in_node(node: ast.AST, method: str) -> Iterator[tuple[bool, str, str]]:
    if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for name in (attribute for target in targets for attribute in _own_attributes(target)):
            yield (
                False,
                f"{method} writes self.{name}: lost on every replica but the first, and there too unless it "
                "is a buffer changed in place",
                "return the value instead, or keep it outside the block",
            )
    if isinstance(node, ast.If | ast.IfExp | ast.While) and (drawn := _drawn(node.test)):
        yield (
            False,
            f"decides by chance ({drawn[0]}): each replica by itself, so that results depend on the number "
            "of devices",
            "decide outside of the block and pass the decision in",
        )
    if isinstance(node, ast.stmt) and not isinstance(node, ast.FunctionDef):
        own = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
        tests = [node.test] if isinstance(node, ast.If | ast.While) else []
        if drawn := [name for child in own if child not in tests for name in _drawn(child)]:
            yield (
                False,
                f"draws from a generator that all share ({', '.join(drawn)}): what each sample gets depends "
                "on the number of devices",
                "draw outside of the block, a row a sample, and pass it in; or live with it, as with dropout",
            )
    if isinstance(node, ast.Call) and (axis := _over_the_batch(node)):
        yield (
            False,
            f"{axis}: if that is the batch, each replica computes over its own rows alone, which cannot be "
            "made right",
            "compute it outside of the block; train.check_split compares the first batch with itself unsplit",
        )
    if isinstance(node, ast.Call) and (device := _fixed_device(node)):
        yield True, f"names the device {device}", "use the device of an input, x.device"


_TORCH_DRAWS = {
    *("rand", "rand_like", "randn", "randn_like", "randint", "randint_like", "randperm", "normal"),
    *("bernoulli", "multinomial", "poisson"),
}
_TENSOR_DRAWS = {
    *("bernoulli", "bernoulli_", "multinomial", "uniform_", "normal_", "random_", "exponential_"),
    *("geometric_", "cauchy_", "log_normal_"),
}


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _drawn(expression: ast.expr) -> list[str]:
    """Return the names of the calls in an expression that draw random numbers."""
    found = []
    for node in ast.walk(expression):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        name, root = _dotted(node.func), _dotted(node.func).split(".")[0]
        is_library = root in ("random", "np", "numpy") and ("random." in name)
        if is_library or (root == "torch" and node.func.attr in _TORCH_DRAWS):
            found.append(name)
        elif root != "torch" and node.func.attr in _TENSOR_DRAWS:
            found.append(f".{node.func.attr}")
    return found


_REDUCTIONS = {
    *("softmax", "log_softmax", "logsumexp", "mean", "std", "var", "norm", "cumsum", "argsort", "sort"),
    *("argmax", "argmin", "amax", "amin", "median"),
}


def _over_the_batch(call: ast.Call) -> str | None:
    """Return what a call reduces or normalises over dim 0, unless its operand is an attribute of the
    module."""
    if not isinstance(call.func, ast.Attribute) or call.func.attr not in _REDUCTIONS:
        return None
    name = _dotted(call.func)
    is_function = name.split(".")[0] in ("torch", "F", "nn")
    if name.startswith("self.") or (is_function and call.args and _dotted(call.args[0]).startswith("self.")):
        return None
    given = call.args[1:2] if is_function else call.args[:1]
    for value in (*given, *(keyword.value for keyword in call.keywords if keyword.arg in ("dim", "axis"))):
        if isinstance(value, ast.Constant) and value.value == 0 and value.value is not False:
            return f"{call.func.attr} over dim 0"
    return None


def _own_attributes(target: ast.expr) -> Iterator[str]:
    if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
        yield target.attr
    elif isinstance(target, ast.Subscript):
        yield from _own_attributes(target.value)
    elif isinstance(target, ast.Tuple | ast.List):
        for item in target.elts:
            yield from _own_attributes(item)


def _fixed_device(call: ast.Call) -> str | None:
    if isinstance(call.func, ast.Attribute) and call.func.attr == "cuda":
        return ".cuda()"
    values = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg == "device")]
    named = [value.value for value in values if isinstance(value, ast.Constant)]
    return next((repr(name) for name in named if str(name).split(":")[0] == "cuda"), None)


def _tied(module: nn.Module) -> list[Finding]:
    """A table shared with another layer must lie on the GPU, so it cannot be a host table."""
    users: dict[int, list[tuple[str, nn.Module]]] = {}
    for name, part in module.named_modules():
        for parameter in part._parameters.values():
            if parameter is not None:
                users.setdefault(id(parameter), []).append((name, part))
    return [
        Finding(
            False,
            names[0][0],
            "weight",
            f"a table shared with {', '.join(name for name, _ in names[1:])} is copied to every device in "
            "each step",
            "give the output layer weights of its own and make the table a HostEmbedding",
        )
        for names in users.values()
        if len(names) > 1 and any(isinstance(part, nn.Embedding | nn.EmbeddingBag) for _, part in names)
    ]
