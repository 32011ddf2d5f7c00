"""The seam: names with their options, composition, [CLS], and properties that hold for the whole registry.

B batch, L sequence length, H heads, D width of a head.
"""

import pytest
import torch
from helpers import attention_weights, ended, fork, never_pack, scramble
from torch._subclasses.fake_tensor import FakeTensorMode

from tupe import backend_cpu, positions
from tupe.attention import NORMALISERS
from tupe.encoder import BLOCKS, Encoder
from tupe.positions import (
    IN_LAYERS,
    SHAPES,
    Dims,
    LayerContext,
    Positions,
    PositionScheme,
    canonical,
    load_scheme_file,
    overrides,
    register,
)  # fmt: skip
from tupe.schemes import SCHEMES
from tupe.token_positions import TokenPositions, draw_positions

B, L, H, D, PAD = 2, 9, 2, 4, 1
DIMS = Dims(max_positions=16, width=H * D, heads=H, layers=3, head_dim=D, value_dim=6)


COMBINATIONS = [
    "untied+t5", "absolute+shaw", "shaw+shaw_values", "untied+deberta", "t5+urpe", "shaw:layer+urpe:layer", "rope+urpe",
    "sinusoidal_learned+shaw_sinusoidal", "t5:layer+untied",
]  # fmt: skip


NAMES = ["window:size:4" if name == "window" else name for name in SCHEMES]  # smaller than L


# ---- [CLS] ----

UNTIEABLE = [n for n in NAMES if overrides(SCHEMES[n.partition(":")[0]], "bias", "content", "gate", "reach", "value")]


def encoder(position, cls="tied", **options):
    torch.manual_seed(0)
    options = {"dropout": 0.0, "attention_dropout": 0.0, "layers": 2, "width": 16, "ffn": 32, "heads": 2, **options}
    return Encoder(40, PAD, max_positions=16, position=position, cls=cls, **options).double()


def tokens(length=L, batch=B):
    return torch.randint(3, 40, (batch, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("normaliser", NORMALISERS)
def test_theta1_matters_only_without_a_denominator(normaliser):
    """A constant added to one whole row of logits cancels in softmax and l2, in outputs and gradients; elsewhere it
    does not."""
    model = scramble(encoder("alibi", "untied", normaliser=normaliser))
    before, _ = model(tokens())
    before.square().sum().backward()
    with torch.no_grad():
        model.positions.theta[0] += 0.7
    after, _ = model(tokens())
    cancels = normaliser in ("softmax", "l2")
    assert ((before - after).abs().max() < 1e-6) == cancels
    assert (model.positions.theta.grad[0].abs().max() < 1e-6) == cancels
    assert model.positions.theta.grad[1].abs().max() > 1e-6


# ---- properties of the whole registry ----

SETTINGS = [(n, "untied" if n in UNTIEABLE else "tied") for n in NAMES] + [(n, "tied") for n in COMBINATIONS]
SETTINGS += [(n, "tied") for n in ("untied", "absolute_d", "shaw_values", "window:size:4", "absolute+t5")]
SETTINGS += [("untied+t5", "untied"), ("t5+shaw+window:size:4", "untied"), ("untied+t5", "zero"), ("shaw", "zero")]
everywhere = pytest.mark.parametrize(("position", "cls"), SETTINGS, ids=lambda x: x)


def refused(position):
    try:
        Positions(position, DIMS)
    except ValueError:
        return True


PER_LAYER = [(f"{name}:layer", "tied") for name in SCHEMES if not refused(f"{name}:layer")]


@pytest.mark.parametrize(("position", "cls"), [*SETTINGS, *PER_LAYER])
def test_every_parameter_learns(position, cls):
    model = scramble(encoder(position, cls))
    out, _ = model(tokens())
    generator = torch.Generator().manual_seed(2)
    (out * torch.randn(out.shape, generator=generator, dtype=out.dtype)).sum().backward()
    silent = set()
    for name, p in model.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all(), name
        if p.grad.abs().max() < 1e-6:
            silent.add(name)
    # A bias of the keys adds a constant to each row of logits, which softmax does not see; [CLS] untied, the row is no
    # longer whole.
    keyed = {"untied", "untied:layer", "absolute_d", "absolute_d:layer"} & set(position.split("+"))
    copies = [f"{name[:-6]}.{i}" for name in keyed for i in range(2) if name.endswith(":layer")]
    whole = [name for name in keyed if not name.endswith(":layer")]
    assert silent == ({f"positions.{name}.k.bias" for name in copies + whole} if cls == "tied" else set())


IN_ALL_LAYERS = [(position, cls, "transformer", "softmax") for position, cls in SETTINGS] + [
    (*s, block, norm) for s in [("nopos", "tied"), ("urpe", "untied")] for block in BLOCKS for norm in NORMALISERS
]


@pytest.mark.parametrize(("position", "cls", "block", "normaliser"), IN_ALL_LAYERS)
def test_padding_changes_nothing(position, cls, block, normaliser):
    model = scramble(encoder(position, cls, block=block, normaliser=normaliser)).eval()
    padded = tokens()
    padded[1, 6:] = PAD
    both, _ = model(padded)
    alone, _ = model(padded[1:, :6])
    other = padded.clone()
    other[0] = other[0].flip(0)
    torch.testing.assert_close(both[1, :6], alone[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(model(other)[0][1], both[1], rtol=1e-9, atol=1e-9)  # nor do the other rows of the batch


AGAIN = [("untied+t5", "untied"), ("shaw+shaw_values", "tied")]


@pytest.mark.parametrize(
    ("position", "cls", "block", "normaliser", "recompute"),
    [(*case, False) for case in IN_ALL_LAYERS]
    + [(*setting, block, "softmax", True) for setting in AGAIN for block in BLOCKS],
)
def test_token_wise_work_without_padding(position, cls, block, normaliser, recompute, monkeypatch):
    """Features, hidden states and all gradients are those of the padded computation, wherever the padding is."""
    options = {"block": block, "normaliser": normaliser, "checkpoint_activations": recompute}
    model = scramble(encoder(position, cls, **options))
    batch = tokens(batch=5)
    batch[0, 6:] = batch[2, :3] = batch[3, 4] = batch[1, -1] = PAD
    real = batch.ne(PAD)
    assert real.sum() == 37 and len(model.packing(batch).indices) == 38 < real.numel()  # T, with one token of padding

    def outcome():
        model.zero_grad()
        features, hiddens = model(batch, return_all_hiddens=True)
        x = torch.stack([features, *hiddens], dim=2)[real]  # [T, N + 2, C]
        (x * torch.randn(x.shape, generator=torch.Generator().manual_seed(2), dtype=x.dtype)).sum().backward()
        return {"features": x.detach()} | {name: p.grad.clone() for name, p in model.named_parameters()}

    ours = outcome()
    never_pack(monkeypatch)
    torch.testing.assert_close(ours, outcome(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("position", [*NAMES, *COMBINATIONS])
def test_only_what_says_nothing_ignores_order(position):
    model = scramble(encoder(position)).eval()
    x, order = tokens(), torch.randperm(L, generator=torch.Generator().manual_seed(3))
    difference = (model(x)[0][:, order] - model(x[:, order])[0]).abs().max()
    assert difference < 1e-12 if position in ("nopos", "log_length") else difference > 1e-6


@everywhere
def test_state_dict_round_trip(position, cls):
    model = scramble(encoder(position, cls)).eval()
    copy = encoder(position, cls).eval()
    copy.load_state_dict(model.state_dict())
    torch.testing.assert_close(copy(tokens())[0], model(tokens())[0], rtol=0, atol=0)


@everywhere
def test_finite_in_float16(position, cls):
    """Whose range is small; that of bfloat16 is float32's."""
    model = encoder(position, cls).half()
    padded = tokens()
    padded[1, 6:] = PAD
    out, _ = model(padded)
    out.float().square().mean().backward()
    assert out.isfinite().all()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", [name for name, kind in SCHEMES.items() if not list(kind(DIMS).parameters())])
def test_half_precision_does_not_round_what_is_fixed(name):
    """fairseq's --fp16 calls `half()` on the model: sines and slopes stay what a float32 model computes."""
    dims = Dims(max_positions=512, width=768, heads=12, layers=1, head_dim=64, value_dim=64)
    whole, half = SCHEMES[name](dims), SCHEMES[name](dims).half()
    q, k = torch.randn(2, 1, 12, 512, 64, generator=torch.Generator().manual_seed(0))
    places = TokenPositions(512)
    for hook, inputs in {"embed": (places,), "bias": (places, 1.0), "content": (q, k, LayerContext(0, places))}.items():
        exact = getattr(whole, hook)(*inputs)
        assert exact is None or torch.equal(getattr(half, hook)(*inputs), exact)


@everywhere
def test_position_terms_are_computed_once_per_forward(position, cls, monkeypatch):
    model = encoder(position, cls, layers=3)
    calls = []
    for name, module in model.positions.items():
        for scheme in module if isinstance(module, torch.nn.ModuleList) else [module]:
            for hook in ("bias", "gate", "embed"):
                original = getattr(scheme, hook)
                monkeypatch.setattr(
                    scheme, hook, lambda *a, name=name, hook=hook, f=original: calls.append((name, hook)) or f(*a)
                )
    model(tokens())
    for name, module in model.positions.items():
        copies = len(module) if isinstance(module, torch.nn.ModuleList) else 1
        for hook in ("bias", "gate", "embed"):
            assert calls.count((name, hook)) == copies * overrides(SCHEMES[name], hook)
    terms = [terms.prepared for terms in model.layer_inputs(L)]
    reach = model.positions.reach(LayerContext(1, TokenPositions(L)))
    first = 0 if reach is None else 1  # of those that see equally far
    assert all((t is terms[first]) != model.positions.per_layer for t in terms[first + 1 :])  # shared: one object


@everywhere
def test_position_terms_stay_accurate_under_autocast(position, cls):
    """float32 whatever the precision around them: within 1e-5 of the float64 logits, where bfloat16 would be off by
    1e-2."""
    model = scramble(encoder(position, cls))
    exact = model.positions.terms(L)[0]
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model.float().positions.terms(L)[0]
    for a, b in zip(exact, rounded, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert b.dtype == torch.float32
            torch.testing.assert_close(b.double(), a.double(), atol=1e-5, rtol=1e-5)


# ---- windows ----


@pytest.mark.parametrize("cls", ["tied", "untied"])
@pytest.mark.parametrize("padded", [False, True])
def test_weights_end_at_the_window(cls, padded):
    """At a distance of 2, but in every second layer; an untied [CLS] sees all and is seen by all."""
    model, x = scramble(encoder("t5+window:size:4:every:2", cls, layers=4)).eval(), tokens()
    x[1, 6:] = PAD if padded else 3
    seen = [[abs(i - j) <= 2 or (cls == "untied" and 0 in (i, j)) for j in range(L)] for i in range(L)]
    with torch.no_grad():
        for layer in range(4):
            weights = attention_weights(model, x)[layer]
            expected = (torch.tensor(seen) if layer % 2 else torch.ones(L, L, dtype=bool)) & x.ne(PAD)[:, None, None]
            real = x.ne(PAD)[:, None, :, None].expand_as(weights)
            assert torch.equal((weights > 0)[real], expected.expand_as(weights)[real]) and weights.isfinite().all()


# ---- where tokens stand ----


@pytest.mark.parametrize("kind", ["random", "shifted"])
def test_drawn_positions(kind):
    """[CLS] at 0, all positions below the span, in increasing order, and every one of them is drawn at some time."""
    torch.manual_seed(0)
    draws = [draw_positions(4, 9, kind).drawn.tolist() for _ in range(200)]
    assert all(draw[0] == 0 and draw == sorted(set(draw)) and len(draw) == 4 for draw in draws)
    assert {position for draw in draws for position in draw} == set(range(9))
    gaps = {b - a for draw in draws for a, b in zip(draw[1:], draw[2:], strict=False)}
    assert gaps == ({1} if kind == "shifted" else {1, 2, 3, 4, 5, 6})
    assert draw_positions(9, 9, kind).drawn.tolist() == list(range(9))
    with pytest.raises(ValueError, match="10 tokens exceeds the limit of 9"):
        draw_positions(10, 9, kind)


@pytest.mark.parametrize("position", ["absolute", "untied+t5", "rope", "shaw+shaw_values", "deberta_v2"])
def test_random_places_are_for_training(position):
    """One draw serves embeddings and all layers; evaluation is what it is without."""
    model = scramble(encoder(position, places="random"))
    torch.manual_seed(3)
    drawn = model(tokens())[0]
    torch.manual_seed(3)
    places = model.token_positions(tokens())
    fixed = encoder(position)
    fixed.load_state_dict(model.state_dict())
    fixed.token_positions = lambda tokens, extra=0: places
    torch.testing.assert_close(drawn, fixed(tokens())[0])
    assert (drawn - model(tokens())[0]).abs().max() > 1e-4  # another draw
    plain = encoder(position)
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model.eval()(tokens())[0], plain.eval()(tokens())[0])


TABLES = {"absolute", "untied", "absolute_d", "nonparametric"}


@pytest.mark.parametrize("position", NAMES)
def test_longer_than_in_training(position):
    """What has no table of positions computes any length, and what it computes for pairs within the trained length does
    not depend on the length."""
    model = scramble(encoder(position, attention="plain")).eval()
    longer = tokens(40)
    if position in TABLES:
        with pytest.raises(ValueError, match=f"40 tokens .* 16 positions.* {position}"):
            model(longer)
    else:
        assert model(longer)[0].isfinite().all()
        for ours, theirs in zip(model.positions.terms(40)[0], model.positions.terms(16)[0], strict=True):
            assert ours is None or torch.allclose(ours[:, :16, :16], theirs, atol=1e-5)


# ---- errors ----


@pytest.mark.parametrize(
    ("names", "cls", "message"),
    [
        ("xyzzy", "tied", "valid, joined by '\\+': absolute, "),
        ("untyed", "tied", "unknown position scheme 'untyed' in 'untyed'; did you mean 'untied'"),
        ("t5+RoPE:base:10", "tied", "did you mean 'rope'"),
        ("tupe_r", "tied", r"tupe_r is an architecture; give --arch tupe_r, or --position untied\+t5 --cls untied"),
        ("BERT-A_mini", "tied", "give --arch bert_a_mini, or --position absolute$"),
        ("untied+untied", "tied", "repeated"),
        ("untied:head", "tied", r"unknown option 'head' of untied .*valid .*: layer, norm:True, std:0.02"),
        ("untied:norm:no", "tied", "norm must be True or False"),
        ("untied:norm:False:norm:False", "tied", "norm of untied is repeated"),
        ("t5:buckets:3.5", "tied", "buckets must be a whole number"),
        ("t5:buckets:30", "tied", "t5: buckets must be a multiple of 4, not 30"),
        ("t5:max_distance:8", "tied", "t5: max_distance must be more than buckets / 4"),
        ("t5:multiplier:0", "tied", "t5: multiplier must be at least 1e-06"),
        ("rope:base:nan", "tied", "base must be a number"),
        ("rope:base:0.5", "tied", "rope: base must be at least 1"),
        ("rope:fraction:0", "tied", "rope: fraction must be more than 0 and at most 1"),
        ("rope:ntk:0.5", "tied", "rope: ntk must be at least 1"),
        ("rope:ntk:2:yarn:2", "tied", "rope: only one of interpolate, ntk and yarn"),
        ("rope:learned:True:local_base:100", "tied", "rope: learned:True has no bases"),
        ("rope:every:2", "tied", "rope: every has no meaning without local:True or a local_base"),
        (
            "rope:local_base:100+window:every:2",
            "tied",
            "rope's local layers are those with a window; .* the same every",
        ),
        ("rope:local:True:every:2+window", "tied", "rope's local layers are those with a window"),
        ("rope:local_base:100+window:every:0", "tied", "rope's local layers are those with a window"),
        ("rope:local_base:100:every:1", "tied", "rope: every:1 leaves no local layer"),
        ("rope:local:True:yarn:4", "tied", "rope: local:True turns only local layers"),
        ("deberta_v2:buckets:7", "tied", "deberta_v2: buckets must be an even number"),
        ("deberta_v2:max_distance:100", "tied", "deberta_v2: max_distance must be more than buckets / 2"),
        ("fire:threshold:0", "tied", "fire: threshold must be at least 1"),
        ("window:size:1", "tied", "window: size must be at least 2"),
        ("window:every:1", "tied", r"window: every must be 0 \(no layer is global\), or 2 or more, not 1"),
        ("clipped:max_distance:0", "tied", "clipped: max_distance must be at least 1"),
        ("absolute:std:-1", "tied", "absolute: std must be at least 0"),
        ("absolute:gain:0.1", "tied", "needs norm:True"),
        ("untied", "maybe", "cls must be one of tied, untied, zero"),
        ("nopos+t5", "tied", "cannot be combined"),
        ("rope+rope_values", "tied", "both rotate"),
        ("absolute:layer", "tied", "cannot be per layer"),
        ("deberta:layer", "tied", "deberta has projections of its own in every layer already"),
        ("rope:layer", "tied", "rope has no parameters; it cannot be per layer"),
        ("absolute", "untied", "attention has no position term"),
        ("absolute", "zero", "cls=zero .* no position term"),
        ("rope+t5", "untied", "no term to drop"),
    ],
)
def test_refusals_give_the_reason(names, cls, message):
    with pytest.raises(ValueError, match=message):
        Positions(names, DIMS, cls)


@pytest.mark.parametrize("position", ["rope", "rope_values", "rope:learned:True", "sinusoidal", "shaw_sinusoidal"])
def test_an_odd_width_is_refused_when_built(position):
    with pytest.raises(ValueError, match=f"{position.partition(':')[0]}: sinusoids and rotations need an even width"):
        encoder(position, width=15, heads=3)
    assert encoder("rope:fraction:0.5", width=15, heads=3)(tokens())[0].isfinite().all()  # rotates 2 columns of 5


def test_too_long_a_sequence_names_length_and_limit():
    with pytest.raises(ValueError, match="17 tokens exceeds the limit of 16"):
        encoder("untied")(tokens(17))


@pytest.mark.parametrize(
    ("typed", "spelling"),
    [
        ("t5+untied", "untied+t5"),
        ("rope:base:160000", "rope:base:160000"),
        ("rope:base:1.6e5", "rope:base:160000"),
        ("rope:base:1e16", "rope:base:1e16"),
        ("rope:base:1e4", "rope"),
        ("absolute:std:0.0600", "absolute:std:0.06"),
        ("absolute:std:0.00001", "absolute:std:1e-5"),
        ("untied:std:1:norm:False", "untied:norm:False:std:1"),
        ("shaw:max_distance:16:layer", "shaw:layer:max_distance:16"),
        ("urpe:layer+t5:max_distance:256:buckets:64", "t5:buckets:64:max_distance:256+urpe:layer"),
        ("deberta:max_distance:512", "deberta"),
    ],
)
def test_one_spelling(typed, spelling):
    """Whatever is typed, the name and the encoder's configuration say the same."""
    assert Positions(typed, DIMS).name == canonical(typed) == canonical(spelling) == spelling
    model = encoder(typed)
    assert model.config.position == model.positions.name == spelling
    encoder(spelling).load_state_dict(model.state_dict())


def test_names_of_registered_options_are_checked():
    class Wrong(PositionScheme):
        def __init__(self, dims, size=3):
            super().__init__(dims)

    with pytest.raises(ValueError, match="option 'size' of .*Wrong.* must be a bool, int or float with a default"):
        register("wrong")(Wrong)
    assert "wrong" not in SCHEMES
    made = Positions("t5", Dims(4, 8, 2, 1, head_dim=4, value_dim=4), "untied")
    taken = {name for name in vars(made) if not name.startswith("_")}
    assert {"scale", "dims", "training"} <= taken
    for name in ("a:b", "a+b", "a.b", "", "a b", "embed", "theta", *taken):
        with pytest.raises(ValueError, match="is not a valid scheme name"):
            register(name)


OWN_FILE = """
from __future__ import annotations  # types become strings
from dataclasses import dataclass
from torch import nn
from tupe.positions import PositionScheme, register

@dataclass
class Fact:
    slope: float

@register("own_distance")
class Distance(PositionScheme):
    def __init__(self, dims, slope: float = 1.0):
        super().__init__(dims)
        self.heads, self.slope = dims.heads, slope

    def bias(self, positions, scale):
        return positions.spread(-self.slope * positions.offsets.abs().float().expand(self.heads, -1))
"""


@pytest.fixture
def own_file(tmp_path, monkeypatch):
    monkeypatch.setattr(positions, "_loaded_files", set())
    path = tmp_path / "own.py"
    path.write_text(OWN_FILE)
    yield path
    SCHEMES.pop("own_distance", None)


def test_a_scheme_from_a_file(own_file):
    with pytest.raises(ValueError, match="unknown position scheme 'own_distance'.*--position-file FILE"):
        encoder("own_distance")
    load_scheme_file(own_file)
    load_scheme_file(own_file)  # once is enough
    assert encoder("own_distance:slope:0.50", layers=1).config.position == "own_distance:slope:0.5"
    with pytest.raises(ValueError, match="did you mean 'own_distance'"):
        encoder("own_Distence")
    with pytest.raises(ValueError, match="no such file"):
        load_scheme_file(own_file.with_name("missing.py"))
    with pytest.raises(ValueError, match="position_file=.*own.txt: the name of a Python file ends in .py"):
        load_scheme_file(own_file.rename(own_file.with_suffix(".txt")))


def test_two_files_called_alike_do_not_replace_each_other(own_file):
    load_scheme_file(own_file)
    other = own_file.parent / "other" / own_file.name
    other.parent.mkdir()
    other.write_text(OWN_FILE)
    with pytest.raises(ValueError, match="'own_distance' is registered twice"):
        load_scheme_file(other)


def test_a_cell_of_a_notebook_can_run_again(own_file):
    load_scheme_file(own_file)
    first = SCHEMES["own_distance"]
    again = type("Distance", (first,), {"__module__": first.__module__, "__qualname__": first.__qualname__})
    assert register("own_distance")(again) is SCHEMES["own_distance"] is again
    with pytest.raises(ValueError, match="'own_distance' is registered twice"):
        register("own_distance")(type("Other", (first,), {}))


def test_a_file_that_fails_can_be_loaded_again(own_file):
    own_file.write_text("from dataclasses import dataclass\nraise OSError('not ready')")
    with pytest.raises(ValueError, match=r"own\.py:2: OSError: not ready$"):
        load_scheme_file(own_file)
    own_file.write_text(OWN_FILE)
    load_scheme_file(own_file)
    assert "own_distance" in SCHEMES


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("import torch\n\ndef broken(:\n", r"own\.py:3: SyntaxError: invalid syntax"),
        ("import torch\nimport no_such_module\n", r"own\.py:2: ModuleNotFoundError: No module named 'no_such_module'"),
        ("\nimport broken_helper\n", r"broken_helper\.py:2: SyntaxError: '\(' was never closed"),
        ("def bias():\n    return slope\n\nbias()\n", r"own\.py:2: NameError: name 'slope' is not defined"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_line_with_its_place(text, line, own_file, monkeypatch):
    own_file.write_text(text)
    own_file.with_name("broken_helper.py").write_text("\nprint(\n")
    monkeypatch.syspath_prepend(own_file.parent)
    with pytest.raises(ValueError, match=f"^/.*{line}$"):
        load_scheme_file(own_file)


# ---- what hooks return ----


class Own(PositionScheme):
    """Every hook, right where `returns` does not say what else it returns."""

    returns = {}

    def __init__(self, dims):
        super().__init__(dims)
        self.dims = dims

    def hook(self, name, right):
        return self.returns.get(name, lambda right: right)(right)

    def embed(self, positions):
        return self.hook("embed", torch.zeros(positions.length, self.dims.width))

    def bias(self, positions, scale):
        return self.hook("bias", torch.zeros(self.dims.heads, len(positions.queries), positions.length))

    def cls_bias(self, scale):
        return self.hook("cls_bias", torch.zeros(2, self.dims.heads))

    def content(self, q, k, layer):
        return self.hook("content", torch.zeros(*q.shape[:3], k.size(2)))

    def gate(self, positions):
        return self.hook("gate", torch.ones(self.dims.heads, positions.length, positions.length))

    def reach(self, layer):
        return self.hook("reach", None)

    def value(self, weights, layer):
        return self.hook("value", torch.zeros(*weights.shape[:3], self.dims.value_dim))

    def rotate(self, q, k, v, layer):
        return self.hook("rotate", (q, k, v))

    def unrotate(self, out, layer):
        return self.hook("unrotate", out)


@pytest.fixture
def own():
    yield register("own")(type("Mine", (Own,), {"returns": {}}))
    SCHEMES.pop("own", None)


HOOKS = [
    ("embed", r"\[9, 16\]"), ("bias", r"\[2, 9, 9\]"), ("cls_bias", r"\[2, 2\]"), ("content", r"\[2, 2, 9, 9\]"),
    ("gate", r"\[2, 9, 9\]"), ("value", r"\[2, 2, 9, 8\]"), ("rotate", r"\[2, 2, 9, 8\]"),
    ("unrotate", r"\[2, 2, 9, 8\]"),
]  # fmt: skip
WRONG = {
    "another length": (lambda x: x[..., :1], r"\[.*1\] "),
    "no axis": (lambda x: x[0], r"\["),
    "whole numbers": (lambda x: x.long(), r"\[.*\] torch.int64"),
    "another device": (lambda x: x.to("meta"), ".* on meta;"),
    "a number": (lambda x: 0.0, "float"),
}


@pytest.mark.parametrize(
    ("hook", "shape", "wrong"), [(*HOOKS[1], wrong) for wrong in WRONG] + [(*case, "another length") for case in HOOKS]
)
def test_what_hooks_return_is_checked(hook, shape, wrong, own):
    """With the name of the class, what it returned, and what is valid."""
    change, got = WRONG[wrong]
    own.returns = {hook: (lambda x: (x[0], change(x[1]), x[2])) if hook == "rotate" else change}
    rotates = "rotate" in hook
    for other in () if rotates else ("rotate", "unrotate"):  # which untied [CLS] does not go with
        setattr(own, other, getattr(PositionScheme, other))
    message = f"^{hook} of position scheme Mine returned {got}.* valid: {shape} floats on cpu"
    with pytest.raises(ValueError, match=message):
        encoder("own", "tied" if rotates else "untied")(tokens())


def test_hooks_that_return_what_is_valid(own):
    assert set(SHAPES) == {hook for hook, _ in HOOKS}
    assert encoder("own")(tokens())[0].shape == (B, L, 16)
    for reach in (2.5, -1, "all"):
        own.returns = {"reach": lambda _, reach=reach: reach}
        with pytest.raises(ValueError, match=f"reach of position scheme Mine returned {reach}; valid: None, or a"):
            encoder("own")(tokens())
    own.returns = {"rotate": lambda x: x[:2]}
    with pytest.raises(ValueError, match="rotate of position scheme Mine returned tuple; valid: q and k"):
        encoder("own")(tokens())
    own.returns = {"rotate": lambda x: (x[0].repeat(1, 1, 1, 2), *x[1:])}  # q alone wider
    with pytest.raises(ValueError, match="rotate of position scheme Mine returned .* 8] .*; valid: .* 16] floats"):
        encoder("own")(tokens())
    own.returns = {"rotate": lambda x: (*(y.repeat(1, 1, 1, 2) for y in x[:2]), x[2])}
    assert encoder("own")(tokens())[0].shape == (B, L, 16)


def test_untied_cls_needs_logits(own):
    """A scheme that says it has some, and returns None."""
    for hook in ("rotate", "unrotate"):
        setattr(own, hook, getattr(PositionScheme, hook))
    own.returns = {"cls_bias": lambda x: None}
    with pytest.raises(ValueError, match=r"^cls_bias of position scheme Mine returned None; valid: \[2, H\] \(.*\)$"):
        encoder("own", "untied")(tokens())


def test_a_bias_that_ignores_the_queries_fails_with_the_reason(own, monkeypatch):
    """It trains, and is asked for a block of queries first where an evaluation meets a long sequence."""
    for hook in ("rotate", "embed", "content", "gate", "value", "unrotate", "reach", "cls_bias"):
        setattr(own, hook, getattr(PositionScheme, hook))
    own.bias = lambda self, positions, scale: torch.zeros(2, positions.length, positions.length)
    model = encoder("own").float()
    model(tokens())[0].sum().backward()
    monkeypatch.setattr(backend_cpu, "BLOCKED_BIAS_FROM", 8)
    monkeypatch.setattr(backend_cpu, "QUERY_BLOCK_LOGITS", 100)  # a few queries at a time
    message = r"bias of position scheme Mine returned \[2, 9, 9\] .*; valid: \[2, \d, 9\] .* R the `positions.queries`"
    with pytest.raises(ValueError, match=message), torch.no_grad():
        model.eval()(tokens())


def test_a_rotation_in_float32_is_that_of_the_queries(own):
    """As cosines of positions are, unless somebody minds."""
    for hook in ("bias", "unrotate", "embed", "content", "gate", "value", "reach", "cls_bias"):
        setattr(own, hook, getattr(PositionScheme, hook))
    own.rotate = lambda self, q, k, v, layer: (q * torch.ones(1), k * torch.ones(1), v * torch.ones(1))
    for path in ("plain", "auto", "sdpa"):
        with torch.autocast("cpu", torch.bfloat16):
            encoder("own", attention=path).float()(tokens())[0].sum().backward()
        encoder("own", attention=path).bfloat16()(tokens())[0].sum().backward()


def test_long_sequences_without_a_bias(own, monkeypatch):
    """An option of a scheme may switch its bias off."""
    for hook in ("rotate", "unrotate", "embed", "content", "gate", "value", "reach", "cls_bias"):
        setattr(own, hook, getattr(PositionScheme, hook))
    own.bias = lambda self, positions, scale: None
    monkeypatch.setattr(backend_cpu, "BLOCKED_BIAS_FROM", 8)
    with torch.no_grad():
        plain, ours = (encoder("own", attention=path).eval()(tokens())[0] for path in ("plain", "auto"))
    torch.testing.assert_close(plain, ours)


class Unread:
    """In place of a layer's index: whoever reads it fails."""

    def fail(self, *_):
        raise AssertionError

    __index__ = __mod__ = __eq__ = __hash__ = fail


@pytest.mark.parametrize("position", [*SCHEMES, "rope:local:True", "rope:local_base:100", "window:every:0"])
def test_schemes_that_are_not_numbered_do_not_read_the_layer(position):
    """Layers share compiled code then; and schemes that are read it, or each layer would have code of its own."""
    torch.manual_seed(0)
    dims = Dims(max_positions=12, width=16, heads=2, layers=2, head_dim=8, value_dim=8)
    positions = Positions(position, dims)
    q, k, v = torch.randn(3, 1, 2, 6, 8)
    weights, x = torch.rand(1, 2, 6, 6), torch.randn(1, 6, 16)

    def project(y):
        return [part.unflatten(2, (2, 8)).transpose(1, 2) for part in (y, y, y)]

    layer, hooks = LayerContext(Unread(), positions.token_positions(6), project, lambda: x), (*IN_LAYERS, "reach")
    having = [hook for hook in hooks if positions.having[hook]]
    arguments = {"content": (q, k), "rotate": (q, k, v), "value": (weights,), "unrotate": (v,), "reach": ()}
    try:
        for hook in having:
            getattr(positions, hook)(*arguments[hook], layer)
        reads = False
    except AssertionError:
        reads = True
    assert reads == positions.is_numbered(*hooks)


OWN_BUGS = """\
import torch
from tupe.positions import PositionScheme, register

@register("own_distance")
class Distance(PositionScheme):
    def bias(self, positions, scale):
        return self.slopes(positions) @ torch.zeros(3)

    def slopes(self, positions):
        return {}["missing"]

    def content(self, q, k, layer):
        return torch.zeros(2, 2) @ torch.zeros(3)

    def reach(self, layer):
        return None.index
"""


@pytest.mark.parametrize(
    ("hook", "kind", "message", "line"),
    [
        ("bias", KeyError, "KeyError: 'missing'", 10),
        ("content", RuntimeError, "RuntimeError: .*size.*", 13),
        ("reach", AttributeError, "AttributeError: 'NoneType' object has no attribute 'index'", 16),
    ],
)
@pytest.mark.parametrize("watched", [False, True])
def test_a_bug_in_a_hook_is_told_with_its_class_and_line(hook, kind, message, line, watched, own_file):
    own_file.write_text(OWN_BUGS)
    load_scheme_file(own_file)
    for other in {"bias", "content", "reach"} - {hook}:
        setattr(SCHEMES["own_distance"], other, getattr(PositionScheme, other))
    model = encoder("t5+own_distance")
    if watched:
        model.positions["own_distance"].register_forward_pre_hook(lambda *_: None)
    message = f"{hook} of position scheme Distance raised {message} \\({own_file}:{line}\\)"
    with pytest.raises(kind, match=message) as caught:
        model(tokens())
    assert type(caught.value) is kind


def test_a_wrong_shape_is_told_with_the_line_of_the_hook(own_file):
    lines = ["    def gate(self, positions):", "        return torch.ones(3)"]
    own_file.write_text("\n".join([*OWN_BUGS.splitlines()[:5], *lines]))
    load_scheme_file(own_file)
    message = rf"gate of position scheme Distance returned \[3\] torch.float32 on cpu; valid: .* \({own_file}:6\)$"
    with pytest.raises(ValueError, match=message):
        encoder("own_distance")(tokens())


def test_an_answered_error_of_a_hook_stays_what_it_is(own):
    """Of a class of its own: whoever trains knows what to do where memory is short."""
    for hook in ("rotate", "unrotate"):
        setattr(own, hook, getattr(PositionScheme, hook))

    def fail(right):
        raise torch.OutOfMemoryError("CUDA out of memory")

    own.returns = {"bias": fail}
    with pytest.raises(torch.OutOfMemoryError, match="^CUDA out of memory$"):
        encoder("own")(tokens())


@pytest.mark.parametrize("hook", ["register_forward_pre_hook", "register_forward_hook"])
def test_what_watches_a_scheme_sees_its_hooks(hook):
    """Shards and offloading bring parameters when a module is called."""
    model, seen = encoder("shaw+t5"), []
    for name, scheme in model.positions.items():
        getattr(scheme, hook)(lambda module, args, *_, name=name: seen.append((name, args[0])))
    expected, (found, _) = encoder("shaw+t5")(tokens())[0], model(tokens())
    assert torch.equal(found, expected)
    assert sorted(seen) == sorted([("t5", "bias")] + [("shaw", "content")] * 2)


@pytest.mark.thorough
def test_hooks_are_checked_in_compiled_code(own):
    for hook in ("rotate", "unrotate"):
        setattr(own, hook, getattr(PositionScheme, hook))
    model = encoder("own+urpe", "untied").float()
    compiled = torch.compile(model, backend="eager", dynamic=True)
    for length in (9, 7):
        torch.testing.assert_close(compiled(tokens(length))[0], model(tokens(length))[0])


def test_the_registry_is_full_whoever_asks_it_first():
    def ask():
        from tupe.positions import SCHEMES as imported
        from tupe.positions import canonical

        assert imported is not SCHEMES and [*imported] == [*SCHEMES] and canonical("t5+untied") == "untied+t5"

    assert ended(fork(ask, "tupe", anew=True)) == 0


# ---- batches ----


def test_a_wrong_number_of_real_tokens_is_refused():
    batch = tokens()
    batch[1, 5:] = PAD
    model = encoder("t5")
    torch.testing.assert_close(model(batch, num_tokens=14)[0], model(batch)[0])
    for num_tokens in (7, 13, 18):
        with pytest.raises(ValueError, match=f"num_tokens={num_tokens}: the batch has 14 tokens beside padding"):
            model(batch, num_tokens=num_tokens)
    with FakeTensorMode(allow_non_fake_inputs=True):  # which has no numbers to count
        assert model(batch, num_tokens=18)[0].shape == (B, L, 16)


EVERYDAY = ("untied", "t5", "shaw_values", "deberta_v2", "cope", "selective_rope", "urpe", "window:size:4")
TRANSFORMED = [pytest.param(n, {}, marks=() if n in EVERYDAY else pytest.mark.thorough) for n in NAMES] + [
    ("untied+t5", {name: value}) for name, valid in (("normaliser", NORMALISERS), ("block", BLOCKS)) for value in valid
]


@pytest.mark.parametrize("position, options", TRANSFORMED)
def test_gradients_of_each_sequence_by_torch_func(position, options):
    """In one call of `vmap`, as influence functions and Fisher information want them; and forward derivatives."""
    model, batch = encoder(position, **options), tokens(batch=3)
    batch[1, 5:] = PAD
    weights, parameters = torch.randn(16).double(), dict(model.named_parameters())

    def score(parameters, sequence):
        features = torch.func.functional_call(model, parameters, (sequence[None],))[0][0]
        return (features * sequence.ne(PAD)[:, None] @ weights).sum()

    each = torch.func.vmap(torch.func.grad(score), (None, 0))(parameters, batch)
    step, along = {name: torch.ones_like(p) for name, p in parameters.items()}, 0
    for sequence, expected in enumerate(batch):
        found = torch.autograd.grad(score(parameters, expected), parameters.values(), allow_unused=True)
        for name, gradient in zip(parameters, found, strict=True):
            gradient = torch.zeros_like(parameters[name]) if gradient is None else gradient
            torch.testing.assert_close(each[name][sequence], gradient, msg=name)
            along += gradient.sum()
    slope = torch.func.jvp(lambda p: sum(score(p, sequence) for sequence in batch), (parameters,), (step,))[1]
    torch.testing.assert_close(slope, along)


def test_unknown_block_and_normaliser():
    with pytest.raises(ValueError, match="valid: softmax, l2"):
        encoder("untied", normaliser="softmin")
    with pytest.raises(ValueError, match="unknown block 'rnn'; valid: transformer, gau, modern"):
        encoder("untied", block="rnn")


def test_sizes_without_meaning():
    with pytest.raises(ValueError, match="width 16 is not a multiple of the number of heads 3"):
        encoder("untied", heads=3)
    encoder("untied", heads=3, block="gau")  # has one head
    with pytest.raises(ValueError, match="activation_dropout=0.1 has no meaning"):
        encoder("untied", block="gau", activation_dropout=0.1)


def test_the_order_of_names_does_not_depend_on_which_file_is_imported_first():
    first_of_bias = next(name for name, cls in SCHEMES.items() if cls.__module__ == "tupe.schemes_bias")
    late = type("Late", (PositionScheme,), {"__module__": "tupe.schemes_absolute"})
    try:
        register("late")(late)
        assert canonical(f"t5+{first_of_bias}+late") == f"late+{first_of_bias}+t5"
        for name in ("zebra", "antelope"):  # of users, in whichever order their files are imported
            register(name)(type(name, (PositionScheme,), {"__module__": "mine"}))
        assert canonical("zebra+antelope+t5") == "t5+antelope+zebra"
    finally:
        for name in ("late", "zebra", "antelope"):
            SCHEMES.pop(name, None)


def test_no_scheme_has_changed_places():
    """Parameters are drawn, and counted by saved optimizers, in this order. A new one may stand anywhere."""
    order = (
        "nopos absolute sinusoidal sinusoidal_learned untied absolute_d t5 clipped nonparametric factored alibi "
        "directions kerple fire cpb shaw shaw_sinusoidal shaw_sinusoidal_learned shaw_values deberta deberta_shared "
        "deberta_v2 transformer_xl wavelets cope cable grape_a rope rope_values fope selective_rope pope log_length "
        "urpe window"
    )
    assert " ".join(name for name in SCHEMES if name in order.split()) == order
