"""Position encodings for bidirectional attention: one small interface, a registry, and composition by name.

B batch, L sequence length, C model width, H heads, D = C / H width of a head, N layers. Position i = 0 is [CLS]; the
offset of key j from query i is j - i. The attention logits are

    logits = (q . k + content) * scale + bias,    scale = 1 / sqrt((1 + extra_terms) D)

A scheme is one class that overrides the hooks it needs; the other hooks cost nothing. Schemes combine: `untied+t5`.
Their options are part of the name, as pairs after colons: `rope:base:160000+urpe:layer:max_distance:64`. The schemes of
the literature are in `schemes_*.py`, by family.
"""

import importlib
import importlib.util
import inspect
import math
import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .names import unknown_scheme
from .token_positions import TokenPositions
from .tracing import is_traced

Scheme = TypeVar("Scheme", bound="type[PositionScheme]")
SCHEMES: dict[str, "type[PositionScheme]"] = {}  # name -> class, in the order of names in a combination: see `place`
FAMILIES = ("schemes_absolute", "schemes_bias", "schemes_content", "schemes_rotation")  # files; users' come last
CLS = ("tied", "untied", "zero")  # see `Positions`
IN_LAYERS = ("content", "rotate", "value", "unrotate")  # the hooks that run in each layer
# What a `Positions` has beside its schemes.
TAKEN = ("cls", "dims", "having", "name", "per_layer", "scale", "theta", "training", "untie_cls")


def register(name: str) -> Callable[[Scheme], Scheme]:
    """Class decorator: make a scheme available as `--position NAME`."""

    if not re.fullmatch(r"[\w-]+", name) or name in TAKEN or hasattr(Positions, name):
        valid = "letters, digits, _ and -; not an attribute of Positions"
        raise ValueError(f"{name!r:.60} is not a valid scheme name ({valid})")

    def add(cls: Scheme) -> Scheme:
        known = SCHEMES.get(name, cls)  # in a notebook, the class that the same cell defined before
        if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(f"position scheme {name!r:.60} is registered twice: {known} and {cls}")
        for option in options_of(cls).values():
            if option.annotation not in (bool, int, float) or option.default is option.empty or option.name == "layer":
                raise ValueError(f"option {option.name!r} of {cls} must be a bool, int or float with a default")
        SCHEMES[name] = cls
        in_order = sorted(SCHEMES.items(), key=place)
        SCHEMES.clear()
        SCHEMES.update(in_order)
        return cls

    return add


def place(item: tuple[str, type]) -> tuple[int, str]:
    """The sort key of a scheme, given as (name, class), in the registry and in the name of every combination: schemes
    of the same family stay in the order of their file, and users' schemes follow by name. The order does not depend on
    which file is imported first.

    The parameters of a model are drawn, and counted by optimizers, in this order: classes in `schemes_*.py` do not
    change places."""
    name, scheme = item
    file = scheme.__module__.rpartition(".")[2]
    return (FAMILIES.index(file), "") if file in FAMILIES else (len(FAMILIES), name)


def load_scheme_file(file: str | Path) -> None:
    """Run a Python file that registers schemes, once per process. Raises ValueError if the file is missing, or with the
    line at which it fails."""
    path = Path(file).resolve()
    if path in _loaded_files:
        return
    if not path.is_file():
        raise ValueError(f"position_file={file}: no such file")
    spec = importlib.util.spec_from_file_location(str(path), path)  # two files may be called alike
    if spec is None or spec.loader is None:
        raise ValueError(f"position_file={file}: the name of a Python file ends in .py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look for their module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[spec.name]
        where, what = f"{path}:{line_in(str(path), error) or 1}", str(error)
        if isinstance(error, SyntaxError):  # of this file, or of one that it imports
            where, what = f"{error.filename}:{error.lineno}", error.msg
        raise ValueError(f"{where}: {type(error).__name__}: {what.strip().partition(chr(10))[0]}") from error
    _loaded_files.add(path)


def is_loaded(file: str | Path) -> bool:
    """Whether `load_scheme_file` has run a file."""
    return Path(file).resolve() in _loaded_files


_loaded_files: set[Path] = set()


# ------------------------------------------------------------------------------------------------ names with options


@dataclass
class NamedScheme:
    """One scheme of a combination, with its options: `shaw:layer:max_distance:16`."""

    name: str
    per_layer: bool = False  # each layer has its own copy
    # those that differ from the defaults, in the order of the constructor
    options: dict[str, bool | int | float] = field(default_factory=dict)

    def __str__(self) -> str:
        words = [self.name]
        if self.per_layer:
            words.append("layer")
        return ":".join(words + [f"{key}:{format_value(value)}" for key, value in self.options.items()])


def options_of(scheme: type) -> dict[str, inspect.Parameter]:
    """A scheme's options: the keyword arguments of its constructor, with their types and defaults."""
    signature = inspect.signature(scheme.__init__, eval_str=True)  # type: ignore[misc]  # of this class, not of an object
    return dict(list(signature.parameters.items())[2:])  # without self and dims


def parse(names: str) -> list[NamedScheme]:
    """The schemes of `NAME[:layer][:OPTION:VALUE]...+...` in the order of the registry, so that every combination
    has one spelling. Raises ValueError, with what is valid, for an unknown or repeated name, option or value."""
    found = {}
    for text in names.split("+"):
        name, *words = text.split(":")
        if name not in SCHEMES:
            raise ValueError(unknown_scheme(name, names, SCHEMES))
        if name in found:
            raise ValueError(f"position scheme {name!r:.60} is repeated in {names!r:.100}")
        found[name] = parse_options(name, words, names)
    return [found[name] for name in SCHEMES if name in found]


def parse_options(name: str, words: list[str], names: str) -> NamedScheme:
    """The scheme that the words after a scheme's name describe. names: the whole combination, for errors."""
    known, words = options_of(SCHEMES[name]), list(words)
    given: dict[str, bool | int | float] = {}
    while words:
        key = words.pop(0)
        if key in given:
            raise ValueError(f"option {key} of {name} is repeated in {names!r:.100}")
        if key == "layer":
            given[key] = True
        elif key in known:
            given[key] = parse_value(key, words.pop(0) if words else "", known[key].annotation, names)
        else:
            valid = ", ".join(["layer", *(f"{option}:{format_value(known[option].default)}" for option in known)])
            where = f"{key!r:.60} of {name} in {names!r:.100}"
            raise ValueError(f"unknown option {where}; valid (with their defaults): {valid}")
    options = {key: given[key] for key in known if key in given and given[key] != known[key].default}
    return NamedScheme(name, "layer" in given, options)


def parse_value(key: str, text: str, kind: type, names: str) -> bool | int | float:
    """The value of an option of type `kind`. names: the whole combination, for errors."""
    try:
        value: bool | int | float = {"True": True, "False": False}[text] if kind is bool else kind(text)
        if not math.isfinite(value):
            raise ValueError
        return value
    except (KeyError, ValueError):
        valid = {int: "a whole number", float: "a number"}.get(kind, "True or False")
        raise ValueError(f"{f'{key}:{text}'!r:.60} in {names!r:.100}: {key} must be {valid}") from None


def format_value(value: bool | int | float) -> str:
    """A value as it is written in names: 160000.0 -> "160000", 1e-05 -> "1e-5"."""
    if not isinstance(value, float):
        return str(value)
    mantissa, _, exponent = repr(value).partition("e")
    return mantissa.removesuffix(".0") + (f"e{int(exponent)}" if exponent else "")


def canonical(names: str) -> str:
    """The one spelling of a combination that configurations, checkpoints and reports show. Raises as `parse` does."""
    return "+".join(map(str, parse(names)))


# ------------------------------------------------------------------------------------------------ one scheme, and all


@dataclass(frozen=True)
class Dims:
    """Sizes a scheme may need. value_dim is the width E of one value head: D, but for gated attention units."""

    max_positions: int  # longest L in training
    width: int  # C
    heads: int  # H
    layers: int  # N
    head_dim: int  # D
    value_dim: int  # E
    input_width: int | None = None  # of what a layer's projections take, if it is not C


class LayerContext(NamedTuple):
    """A layer, as the hooks that run in it see it. `reach` sees the first two fields only."""

    index: int  # type: ignore[assignment]  # hides a method of tuples that nobody calls
    positions: TokenPositions
    # its own projections, of vectors [1, R, C] to q, k and v [1, H, R, D]
    project: Any = None
    input: Any = None  # () -> [B, L, C], what it projects to q, k and v
    mask: Tensor | None = None  # [B, L], False at padding; None: there is none
    scale: float = 1.0  # of q . k and content

    def counted(self, x: Tensor) -> Tensor:
        """x [B, L, ...], 0 at padding: for sums over tokens."""
        return x if self.mask is None else x * self.mask.view(*self.mask.shape, *[1] * (x.dim() - 2))


class PositionScheme(nn.Module):
    """Base class of all schemes. Override any subset of the hooks; a hook that returns None adds no term. Keyword
    arguments of the constructor (bool, int or float, with a default) are the options that a name can set.

    embed, bias, cls_bias and gate run once per forward pass and serve all layers; reach is asked once for each layer;
    the others run in each layer, on its tensors.
    """

    paper = formula = ""  # for tables of schemes
    extra_terms = 0  # number of logit terms beside q . k that share its scale
    own_projections = False  # whether each layer has parameters of its own already
    bounded = False  # whether it has vectors for max_positions tokens, and cannot compute more
    # In `table`, one vector per position, the row of the first word: stretching keeps the rows before it, which are
    # [CLS]'s. None: the scheme has no such table.
    first_word_row: int | None = None
    numbered = True  # whether hooks read `layer.index`: if none does, layers of a kind share their compiled code
    only_scales = False  # whether `rotate` only multiplies q and k by numbers, and so goes with any rotation
    causal = True  # whether the encoding goes with hidden later keys: a token's terms depend on no later token
    # Parameters that weight decay leaves alone: those that should not be pulled towards 0.
    undecayed: tuple[str, ...] = ()

    def __init__(self, dims: Dims):
        super().__init__()

    def forward(self, hook: str, *args: Any) -> Any:
        """Calls a hook through the module, where something watches the module's calls: see `call`. The result must not
        be a parameter, or a view of one, because shards are taken away when the call is over."""
        return getattr(self, hook)(*args)

    def embed(self, positions: TokenPositions) -> Tensor | None:
        """[L, C], added to the token embeddings."""

    def bias(self, positions: TokenPositions, scale: float) -> Tensor | None:
        """[H, R, L], logits that do not depend on the tokens, already multiplied by `scale` if the paper does so.
        R is L; where memory is short, only the rows of `positions.queries` are asked for. `spread` returns these."""

    def cls_bias(self, scale: float) -> Tensor | None:
        """[2, H], the logits from [CLS] and to [CLS] if [CLS] is untied from positions."""

    def content(self, q: Tensor, k: Tensor, layer: LayerContext) -> Tensor | None:
        """[B, H, L, L], logits that depend on a layer's q and k, [B, H, L, D] each; not yet multiplied by the scale."""

    def gate(self, positions: TokenPositions) -> Tensor | None:
        """[H, L, L], factors of the normalised weights."""

    def reach(self, layer: LayerContext) -> int | None:
        """The largest distance at which tokens see each other in a layer; None: they all do."""

    def value(self, weights: Tensor, layer: LayerContext) -> Tensor | None:
        """[B, H, L, E], added to the mixed values; weights: [B, H, L, L]."""

    def rotate(self, q: Tensor, k: Tensor, v: Tensor, layer: LayerContext) -> tuple[Tensor, Tensor, Tensor]:
        """q, k [B, H, L, D] and v [B, H, L, E], each multiplied by a matrix of its position; q and k may become wider
        or narrower, both alike, the scale of logits stays."""
        return q, k, v

    def unrotate(self, out: Tensor, layer: LayerContext) -> Tensor:
        """[B, H, L, E]: undoes at each query's position what `rotate` did to the values."""
        return out


def undecayed_names(model: nn.Module) -> list[str]:
    """The parameters of a model, as `named_parameters` calls them, that weight decay leaves alone."""
    names = []
    for path, module in model.named_modules():
        if isinstance(module, PositionScheme):
            own = [name for name in module.undecayed if module._parameters.get(name) is not None]
            names += [f"{path}.{name}".removeprefix(".") for name in own]
    return names


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The parameters of a model with position schemes in it, as groups for any optimizer: with weight decay and, if
    `undecayed_names` has any, without."""
    undecayed, parameters = set(undecayed_names(model)), dict(model.named_parameters())
    decayed = [parameter for name, parameter in parameters.items() if name not in undecayed]
    without = [parameter for name, parameter in parameters.items() if name in undecayed]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": without, "weight_decay": 0.0}]
    return groups if without else groups[:1]


def call(scheme: PositionScheme, hook: str, *args: Any) -> Any:
    """The result of a scheme's hook. The hook is called directly, unless something watches the calls of the module to
    bring its parameters, as FSDP2, ZeRO-3 and accelerate's offloading do. An error in a hook names its class and its
    line."""
    try:
        return scheme(hook, *args) if is_watched(scheme) else getattr(scheme, hook)(*args)
    except Exception as error:
        kind = type(error)
        if kind.__module__ != "builtins":  # such as torch.OutOfMemoryError, which the training loop handles
            raise
        file, first_line = place_of(scheme, hook)
        where, name = f"{file}:{line_in(file, error) or first_line}", type(scheme).__qualname__
        raise kind(f"{hook} of position scheme {name} raised {kind.__name__}: {error} ({where})") from error


def is_watched(module: nn.Module) -> bool:
    """Whether a call of the module does more than its class's `forward`: PyTorch's hooks on modules, or accelerate's
    `forward` in its place."""
    hooks = module._forward_pre_hooks or module._forward_hooks or module._backward_pre_hooks or module._backward_hooks
    return bool(hooks) or "forward" in module.__dict__


def place_of(scheme: PositionScheme, hook: str) -> tuple[str, int]:
    """The file and the first line of a hook."""
    code = inspect.unwrap(getattr(scheme, hook)).__code__
    return code.co_filename, code.co_firstlineno


def line_in(file: str, error: BaseException) -> int | None:
    """The line of a file at which an error arose, if it did there."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return lines[-1] if lines else None


# The shapes of hooks' results, for errors; R differs from L where a long sequence's queries are computed in blocks.
SHAPES = {
    "embed": "[L, C]",
    "bias": "[H, R, L], R the `positions.queries`",
    "cls_bias": "[2, H]",
    "content": "[B, H, L, L]",
    "gate": "[H, L, L]",
    "value": "[B, H, L, E]",
    "rotate": "q and k [B, H, L, D], both of another width, too, v [B, H, L, E]",
    "unrotate": "[B, H, L, E]",
}
HOOKS = (*SHAPES, "reach")


def check(term: Any, scheme: PositionScheme, hook: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Returns the result of a scheme's hook. Raises ValueError, naming the class, for another shape, for numbers that
    are not floats, and for another kind of device. shape, device: the valid ones."""
    is_tensor = isinstance(term, Tensor)
    if is_tensor and term.shape == shape and term.is_floating_point() and term.device.type == device.type:
        return term
    got = f"{list(term.shape)} {term.dtype} on {term.device}" if is_tensor else type(term).__name__
    raise bad_return(scheme, hook, got, f"{list(shape)} floats on {device}: {SHAPES[hook]}")


def bad_return(scheme: PositionScheme, hook: str, got: Any, valid: str) -> ValueError:
    (file, line), name = place_of(scheme, hook), type(scheme).__qualname__
    return ValueError(f"{hook} of position scheme {name} returned {got}; valid: {valid} ({file}:{line})")


def overrides(scheme: type | PositionScheme, *hooks: str) -> bool:
    """Whether the scheme (class or instance) overrides any of the hooks."""
    kind = scheme if isinstance(scheme, type) else type(scheme)
    return any(getattr(kind, hook) is not getattr(PositionScheme, hook) for hook in hooks)


class Positions(nn.ModuleDict):
    """The schemes of one model, by name (a checkpoint key reads `positions.untied.table.weight`), and everything they
    share.

    names: scheme names with their options, joined by "+" (see `parse`), for example "untied+t5:multiplier:25". A scheme
    is shared by all layers; "shaw:layer" gives each layer its own copy. cls: "tied", or "untied" to take [CLS] out of
    all position terms: the content-free logits from and to [CLS] become learned constants theta (TUPE, equation 10;
    reset once, in the sum of all schemes), content and value terms 0, gates 1, windows end at it. "zero" is the same
    with theta fixed at 0: a control that takes [CLS] out and learns nothing in its place. Raises ValueError, with the
    reason, for an unknown name, option or value, and for a combination without meaning.
    """

    def __init__(self, names: str, dims: Dims, cls: str = "tied"):
        chosen = parse(names)
        check_combination(names, chosen, cls)
        super().__init__()
        for one in chosen:
            try:
                copies = [SCHEMES[one.name](dims, **one.options) for _ in range(dims.layers if one.per_layer else 1)]
            except ValueError as error:  # an option's value, or a size of the model
                raise ValueError(f"position={names}: {one.name}: {error}") from None
            self[one.name] = nn.ModuleList(copies) if one.per_layer else copies[0]
            if one.per_layer and next(self[one.name].parameters(), None) is None:
                raise ValueError(f"position={names}: {one.name} has no parameters; it cannot be per layer")
        schemes = [SCHEMES[one.name] for one in chosen]
        self.dims = dims
        self.name = "+".join(map(str, chosen))
        # hook -> names of the schemes that have it: the others are not asked, which would take longer than a layer's
        # own work where the model is small
        self.having = {hook: [one.name for one in chosen if overrides(SCHEMES[one.name], hook)] for hook in HOOKS}
        self.per_layer = any(one.per_layer for one in chosen)
        self.cls, self.untie_cls = cls, cls != "tied"
        if cls == "untied" and not any(overrides(scheme, "cls_bias") for scheme in schemes):
            self.theta = nn.Parameter(torch.randn(2, dims.heads) * 0.02)
        self.scale = 1 / math.sqrt((1 + sum(scheme.extra_terms for scheme in schemes)) * dims.head_dim)

    def forward(self) -> Tensor:
        """[2, H], a copy of theta: read in a call of the module that owns it, see `PositionScheme.forward`."""
        return self.theta.to(torch.float32, copy=True)

    def of_layer(self, layer: int, hook: str | None = None) -> list[PositionScheme]:
        """The schemes that act in one layer; with `hook`, only the schemes that have it."""
        schemes: list[Any] = []
        for name in self if hook is None else self.having[hook]:
            scheme = self[name]
            schemes.append(scheme[layer] if isinstance(scheme, nn.ModuleList) else scheme)
        return schemes

    def is_numbered(self, *hooks: str) -> bool:
        """Whether what these hooks do differs from layer to layer."""
        return self.per_layer or any(scheme.numbered for hook in hooks for scheme in self.of_layer(0, hook))

    def _sum(
        self, schemes: list[PositionScheme], hook: str, shape: tuple[int, ...], device: torch.device, *args: Any,
        start: Tensor | None = None,
    ) -> Tensor | None:  # fmt: skip
        """The sum of `start` and what a hook of these schemes returns, or None; of gates the product. shape, device:
        see `check`."""
        total = start
        for scheme in schemes:
            term = call(scheme, hook, *args)
            if term is not None:
                check(term, scheme, hook, shape, device)
                total = term if total is None else total * term if hook == "gate" else total + term
        return total

    def _shape(self, positions: TokenPositions) -> tuple[int, int, int]:
        """[H, R, L], of a bias."""
        return self.dims.heads, positions.last - positions.first, positions.length

    def token_positions(self, length: int, device: torch.device | str | None = None) -> TokenPositions:
        """The positions 0 .. L-1. Raises ValueError for a sequence that some scheme cannot compute."""
        if length > self.dims.max_positions and (bounded := bounded_schemes(self.name)):
            raise ValueError(
                f"a sequence of {length} tokens exceeds the limit of {self.dims.max_positions} positions, for which "
                f"{' and '.join(bounded)} has vectors: cut the text (a tokeniser's `truncation=True, "
                f"max_length={self.dims.max_positions}`), or let `tupe checkpoint stretch` make more of them"
            )
        return TokenPositions(length, next((p.device for p in self.parameters()), "cpu") if device is None else device)

    def embed(self, positions: TokenPositions | int) -> Tensor | None:
        """[L, C], to be added to the token embeddings. positions: or L. Raises ValueError as `token_positions` does."""
        positions = self.token_positions(positions) if isinstance(positions, int) else positions
        shape = positions.length, self.dims.width
        return self._sum(self.of_layer(0, "embed"), "embed", shape, positions.device, positions)

    def terms(self, positions: TokenPositions | int) -> list[tuple[Tensor | None, Tensor | None]]:
        """A pair (bias, gate) for each of the N layers, [H, L, L] float32 or None each. Without per-layer schemes, all
        are the same object. positions: or L.

        Always computed in float32, whatever the precision of the model: every layer would share the rounding error.
        """
        positions = self.token_positions(positions) if isinstance(positions, int) else positions
        shape, device = self._shape(positions), positions.device
        layers = range(self.dims.layers if self.per_layer else 1)

        def combined(hook: str, *args: Any) -> list[Tensor | None]:
            """A hook's term for each layer: the sum, or product, of the shared schemes' and the layer's own."""
            schemes: list[Any] = [self[name] for name in self.having[hook]]
            own: list[Any] = [copies for copies in schemes if isinstance(copies, nn.ModuleList)]
            shared = [scheme for scheme in schemes if not isinstance(scheme, nn.ModuleList)]
            term = self._sum(shared, hook, shape, device, *args)
            return [self._sum([copies[n] for copies in own], hook, shape, device, *args, start=term) for n in layers]

        with torch.autocast(autocast_device(device.type), enabled=False):
            biases, gates = combined("bias", positions, self.scale), combined("gate", positions)
            terms = [(self._reset_bias(biases[n], n, positions), self._mask_cls(gates[n], 1.0)) for n in layers]
            return terms if self.per_layer else terms * self.dims.layers

    def has_bias(self) -> bool:
        """Whether there are logits that do not depend on the tokens."""
        return self.cls == "untied" or bool(self.having["bias"])

    def bias(self, layer: int, positions: TokenPositions) -> Tensor | None:
        """[H, R, L] float32, one layer's logits that do not depend on the tokens, for the queries of `positions`."""
        with torch.autocast(autocast_device(positions.device.type), enabled=False):
            schemes, shape = self.of_layer(layer, "bias"), self._shape(positions)
            bias = self._sum(schemes, "bias", shape, positions.device, positions, self.scale)
            return self._reset_bias(bias, layer, positions)

    # Resets row and column of [CLS], i = 0, in a new tensor: the inputs may be views of parameters.
    def _reset_bias(self, bias: Tensor | None, layer: int, positions: TokenPositions) -> Tensor | None:
        """A layer's bias [H, R, L] with theta, or 0, from and to [CLS], unless [CLS] is tied."""
        length, rows = positions.length, positions.last - positions.first
        above = 1 if positions.first == 0 else 0  # rows of [CLS]
        if not self.untie_cls:
            return bias
        if self.cls == "zero":  # as no term at all is already
            return None if bias is None else F.pad(bias[:, above:, 1:], (1, 0, above, 0))
        if hasattr(self, "theta"):
            theta = self()
        else:
            schemes = self.of_layer(layer, "cls_bias")
            theta = self._sum(schemes, "cls_bias", (2, self.dims.heads), positions.device, self.scale)
            if theta is None:
                raise bad_return(schemes[0], "cls_bias", None, SHAPES["cls_bias"])
        from_cls, to_cls = theta[:, :, None, None]  # [H, 1, 1] each
        if bias is None:
            bias = theta.new_zeros(self.dims.heads, rows, length)
        bias = torch.cat([to_cls.expand(-1, rows - above, 1), bias[:, above:, 1:]], dim=2)
        from_cls = from_cls.expand(-1, 1, length)  # includes [CLS] to [CLS]
        return torch.cat([from_cls, bias], dim=1) if above else bias

    def _mask_cls(self, x: Tensor | None, value: float = 0.0) -> Tensor | None:
        """x [..., L, L] with `value` wherever the query or the key is [CLS], if [CLS] is untied."""
        return F.pad(x[..., 1:, 1:], (1, 0, 1, 0), value=value) if self.untie_cls and x is not None else x

    def reach(self, layer: LayerContext) -> int | None:
        """The largest distance at which tokens see each other in a layer; None: they all do. If [CLS] is untied, it
        sees all, and all see it."""
        nearest: int | None = None
        for scheme in self.of_layer(layer.index, "reach"):
            reach = call(scheme, "reach", layer)
            if reach is None:
                continue
            if not isinstance(reach, int) or reach < 0:
                raise bad_return(scheme, "reach", reach, "None, or a whole number from 0 on")
            if nearest is None or reach < nearest:
                nearest = reach
        if nearest is None or is_traced():  # in traced code, the length must not decide
            return nearest
        return nearest if nearest < layer.positions.span - 1 else None

    def content(self, q: Tensor, k: Tensor, layer: LayerContext) -> Tensor | None:
        """[B, H, L, L], the logits that depend on q and k [B, H, L, D]."""
        if not self.having["content"]:
            return None
        schemes, shape = self.of_layer(layer.index, "content"), (*q.shape[:3], k.size(2))
        return self._mask_cls(self._sum(schemes, "content", shape, q.device, q, k, layer))

    def value(self, weights: Tensor | None, layer: LayerContext) -> Tensor | None:
        """[B, H, L, E], to be added to the mixed values; weights: [B, H, L, L]."""
        if not self.having["value"]:  # as on all backends that compute no weights
            return None
        assert weights is not None  # `Backend.refuses` such schemes otherwise
        schemes, shape = self.of_layer(layer.index, "value"), (*weights.shape[:3], self.dims.value_dim)
        return self._sum(schemes, "value", shape, weights.device, self._mask_cls(weights), layer)

    def rotate(self, q: Tensor, k: Tensor, v: Tensor, layer: LayerContext) -> tuple[Tensor, Tensor, Tensor]:
        """q, k [B, H, L, D] and v [B, H, L, E] as attention uses them."""
        for scheme in self.of_layer(layer.index, "rotate"):
            new = call(scheme, "rotate", q, k, v, layer)
            if not isinstance(new, tuple | list) or len(new) != 3:
                raise bad_return(scheme, "rotate", type(new).__name__, SHAPES["rotate"])
            width = new[0].shape[-1:] if isinstance(new[0], Tensor) else q.shape[-1:]
            # sines are computed in float32, and attention takes q, k and v of one dtype
            q = check(new[0], scheme, "rotate", q.shape[:3] + width, v.device).to(q.dtype)
            k = check(new[1], scheme, "rotate", k.shape[:3] + width, v.device).to(k.dtype)
            v = check(new[2], scheme, "rotate", v.shape, v.device).to(v.dtype)
        return q, k, v

    def unrotate(self, out: Tensor, layer: LayerContext) -> Tensor:
        """The mixed values [B, H, L, E], with the rotation of v undone."""
        for scheme in self.of_layer(layer.index, "unrotate"):
            out = check(call(scheme, "unrotate", out, layer), scheme, "unrotate", out.shape, out.device)
        return out


def autocast_device(device: str) -> str:
    """The kind of device whose autocast setting applies on `device`: the meta device, which only has shapes, has no
    setting of its own."""
    return "cpu" if device == "meta" else device


def precision_of(x: Tensor) -> torch.dtype:
    """What products of x are computed in: the dtype of autocast, where it is on, or that of x."""
    device = autocast_device(x.device.type)
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def bounded_schemes(names: str) -> list[str]:
    """The schemes of a combination that compute at most max_positions tokens; the others compute any number."""
    return [one.name for one in parse(names) if SCHEMES[one.name].bounded]


def check_combination(names: str, chosen: list[NamedScheme], cls: str) -> None:
    """Raise ValueError for schemes that cannot be combined, or not with this treatment of [CLS]."""
    if cls not in CLS:
        raise ValueError(f"cls must be one of {', '.join(CLS)}, not {cls!r}")
    schemes = {one.name: SCHEMES[one.name] for one in chosen}
    rotating = [name for name, scheme in schemes.items() if overrides(scheme, "rotate") and not scheme.only_scales]
    if "nopos" in schemes and len(chosen) > 1:
        raise ValueError(f"position={names}: nopos means no position information and cannot be combined")
    if len(rotating) > 1:
        raise ValueError(f"position={names}: {' and '.join(rotating)} would both rotate the same queries and keys")
    for name in (one.name for one in chosen if one.per_layer):
        if overrides(schemes[name], "embed"):
            raise ValueError(f"position={names}: {name} changes embeddings; it cannot be per layer")
        if schemes[name].own_projections:
            raise ValueError(f"position={names}: {name} has projections of its own in every layer already")
    every = {
        one.name: one.options.get("every", options_of(schemes[one.name])["every"].default)
        for one in chosen if one.name in ("rope", "window")
    }  # fmt: skip
    local = any(one.name == "rope" and {"local", "local_base"} & one.options.keys() for one in chosen)
    if local and every.get("window") is not None and every["rope"] != every["window"]:
        raise ValueError(f"position={names}: rope's local layers are those with a window; give both the same every")
    if cls != "tied":
        if rotating:
            why = f"{rotating[0]} rotates q and k, it has no term to drop; give cls=tied"
            raise ValueError(f"cls={cls} with position={names}: {why}")
        if not any(overrides(scheme, "bias", "content", "gate", "reach", "value") for scheme in schemes.values()):
            why = "attention has no position term to untie [CLS] from; give cls=tied"
            raise ValueError(f"cls={cls} with position={names}: {why}")


# So that the registry is full whichever file is imported first. By name, because these files import this one.
for _file in FAMILIES:
    importlib.import_module(f"{__package__}.{_file}")
