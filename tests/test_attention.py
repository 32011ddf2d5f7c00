"""Every faster path against the plain one: outputs, all gradients, dropout, and what a step allocates."""

import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
from helpers import allocations, never_pack
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from tupe import backend_cpu, backend_sdpa, cpu, losses, windows
from tupe.attention import NORMALISERS, Batch, Plain
from tupe.backend_sdpa import Sdpa
from tupe.backends import BACKENDS, choose
from tupe.encoder import BLOCKS, Encoder, LMHead, of_cls
from tupe.packing import NO_PADDING, Packing
from tupe.positions import Dims, LayerContext, Positions, overrides
from tupe.schemes import SCHEMES
from tupe.token_positions import TokenPositions

V, PAD, N, C, H, MAX = 40, 1, 2, 32, 4, 40
FAST = ["blocked", "sdpa"]
HAS_GPU = torch.cuda.is_available()
DEVICES = ["cpu", "cuda"] if HAS_GPU else ["cpu"]
FAST_ON = [("blocked", "cpu"), ("sdpa", "cpu"), *([("sdpa", "cuda")] if HAS_GPU else [])]
TRITON = [("triton", "cuda")] if HAS_GPU else []  # in its interpreter: test_triton.py
PATHS_ON = [("plain", "cpu"), *([("plain", "cuda")] if HAS_GPU else []), *FAST_ON]


def encoder(position="untied+t5", cls=None, **options):
    torch.manual_seed(1)
    cls = cls or ("untied" if "untied" in position else "tied")
    settings = {"layers": N, "dropout": 0.0, "attention_dropout": 0.0, **options}
    model = Encoder(V, PAD, width=C, ffn=2 * C, heads=H, max_positions=MAX, position=position, cls=cls, **settings)
    for p in model.parameters():  # far from 0, so that no term is too small to be seen
        p.data += 0.2 * torch.randn_like(p)
    return model


def fast_backend_refuses(positions):
    return BACKENDS["sdpa"]().refuses(positions, "softmax", torch.device("cpu"), torch.float32)


def mix(path, q, k, v, bias, p=0.0):
    """q, k, v [B, H, L, D] and bias [H, L, L] -> [B, H, L, D], without padding."""
    backend, (_, heads, length, width) = BACKENDS[path](), q.shape
    batch = Batch(TokenPositions(length, q.device), q.dtype, heads)
    return backend.mix(q, k, v, None, backend.prepare(bias, None, None, batch), width**-0.5, p)[0]


def has_fast_path(position, cls):
    dims = Dims(MAX, C, H, N, head_dim=C // H, value_dim=C // H)
    try:
        return fast_backend_refuses(Positions(position, dims, cls)) is None
    except ValueError:  # no position term in attention to untie [CLS] from
        return False


WINDOWS = ["window:size:8", "untied+t5+window:size:8", "rope+window:size:9:every:0", "t5:layer+window:size:60"]
SCHEMES_AND_MORE = [*SCHEMES, "untied+t5", "t5:layer", *WINDOWS]
SOFTMAX = [(name, cls) for name in SCHEMES_AND_MORE for cls in ("tied", "untied") if has_fast_path(name, cls)]
# What a backend can tell apart: no bias, one, one for each layer, one that hides pairs, windows, and rotations, of the
# values too, or into wider vectors. The other encodings, which differ in the numbers of their bias alone, are thorough.
KINDS = [
    ("absolute", "tied"), ("untied+t5", "untied"), ("t5:layer", "tied"), ("directions", "tied"), ("rope", "tied"),
    ("rope_values", "tied"), ("pope", "tied"), ("window:size:8", "tied"), ("untied+t5+window:size:8", "untied"),
    ("rope+window:size:9:every:0", "tied"), ("t5:layer+window:size:60", "untied"),
]  # fmt: skip
ON_FAST_PATHS = [*KINDS, *(pytest.param(*s, marks=pytest.mark.thorough) for s in SOFTMAX if s not in KINDS)]
assert {*KINDS} <= {*SOFTMAX}


def batch(length=MAX, padding=(), size=3):
    tokens = torch.randint(4, V, (size, length), generator=torch.Generator().manual_seed(length))
    for row, count in enumerate(padding):
        tokens[row, length - count :] = PAD
    return tokens


def outcome(model, tokens):
    """Features at tokens and the gradients of all parameters, on the CPU wherever they were computed."""
    model.zero_grad()
    features, _ = model(tokens.to(model.tokens.weight.device))
    features = features.cpu()[tokens.ne(PAD)]
    weights = torch.randn(features.shape, generator=torch.Generator().manual_seed(0))
    (features * weights).sum().backward()
    return features.detach(), {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(ours, plain, tolerance):
    torch.testing.assert_close(ours[0], plain[0], rtol=tolerance, atol=tolerance)
    assert ours[1].keys() == plain[1].keys()
    floor = 1e-3 * max(gradient.norm() for gradient in plain[1].values())  # some are 0 but for rounding
    for name, gradient in plain[1].items():
        off = (ours[1][name] - gradient).norm() / gradient.norm().clamp(min=floor)
        assert off < 10 * tolerance, f"{name}: relative error {off:.1e}"


# Of the blocked backend, (logits of a block, longest sequence whose weights are kept): one [L, L] block at a time, some
# heads at a time, or all; weights computed again in the backward pass, or kept.
BLOCKINGS = {"full": [(1, MAX), (2**14, 0)], "padded": [(1, 0), (2**18, MAX)], "L1": [(1, 0)]}


@functools.cache  # two backends are compared with it
def plain_outcome(position, cls, length, padding):
    return outcome(encoder(position, cls, attention="plain"), batch(length, padding))


@pytest.mark.parametrize("length, padding", [(MAX, ()), (39, (0, 5, 38)), (1, ())], ids=BLOCKINGS)
@pytest.mark.parametrize("position, cls", ON_FAST_PATHS)
@pytest.mark.parametrize("path, device", [*FAST_ON, *TRITON])
def test_equals_plain(path, device, position, cls, length, padding, monkeypatch):
    expected = plain_outcome(position, cls, length, padding)
    monkeypatch.setattr(windows, "CHUNK", 5)
    blockings = BLOCKINGS["L1" if length == 1 else "padded" if padding else "full"]
    for block, short in blockings if path == "blocked" else blockings[:1]:
        monkeypatch.setattr(backend_cpu, "BLOCK_LOGITS", block)
        monkeypatch.setattr(backend_cpu, "SAVE_WEIGHTS_UP_TO", short)
        ours = outcome(encoder(position, cls, attention=path).to(device), batch(length, padding))
        assert_same(ours, expected, 1e-5 if device == "cpu" else 1e-4)


@pytest.mark.parametrize(
    "position, path", [(name, "plain") for name in SCHEMES] + [(name, path) for name, _ in KINDS for path in FAST]
)
def test_a_sequence_that_is_all_padding_makes_no_nan(position, path):
    tokens = batch(17, padding=(17, 1))  # packed, with a token of the first row to make up a round number
    features, gradients = outcome(encoder(position, attention=path), tokens)
    assert features.isfinite().all() and all(gradient.isfinite().all() for gradient in gradients.values())
    assert encoder(position, attention=path)(tokens, output_indices=of_cls(tokens))[0].isfinite().all()


@pytest.mark.parametrize("path", ["plain", *FAST])
@pytest.mark.parametrize("shape", [(1, 1), (2, 6)])
def test_a_batch_that_is_all_padding_has_the_usual_shapes(shape, path):
    """As the baseline of an attribution."""
    model, tokens = encoder(attention=path), torch.full(shape, PAD)
    assert model(tokens)[0].shape == (*shape, C)
    features, _ = model(tokens, output_indices=of_cls(tokens))
    assert features.shape == (shape[0], C) and features.isfinite().all()


@pytest.mark.thorough
@pytest.mark.parametrize("position, cls", [("t5+window:size:4", "tied"), ("untied+window:size:4", "untied")])
def test_compiled_code_of_long_windows_in_evaluation(position, cls, monkeypatch):
    monkeypatch.setattr(backend_cpu, "BLOCKED_BIAS_FROM", 8)
    model, tokens = encoder(position, cls).eval(), batch(30)
    with torch.no_grad():
        expected, _ = model(tokens)
        model.compile(backend="eager")
        torch.testing.assert_close(model(tokens)[0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("normaliser", sorted(NORMALISERS))
def test_padding_alone_makes_no_nan_with_any_normaliser(normaliser, monkeypatch):
    model, tokens = encoder("t5", "tied", normaliser=normaliser), batch(17, padding=(17, 1))
    features, gradients = outcome(model, tokens)
    assert features.isfinite().all() and all(gradient.isfinite().all() for gradient in gradients.values())
    monkeypatch.setattr(backend_cpu, "BLOCKED_BIAS_FROM", 8)  # a few queries at a time
    with torch.no_grad():
        assert model.eval()(tokens)[0].isfinite().all()


@pytest.mark.parametrize("padding", [(), (0, 5, 38)], ids=["full", "padded"])
@pytest.mark.parametrize("position, cls", [*ON_FAST_PATHS, ("t5", "zero")])
def test_long_sequences_in_evaluation(position, cls, padding, monkeypatch):
    """A few queries at a time; neither logits nor bias of all pairs are there."""
    monkeypatch.setattr(windows, "CHUNK", 5)
    monkeypatch.setattr(backend_cpu, "BLOCKED_BIAS_FROM", MAX - 1)
    monkeypatch.setattr(backend_cpu, "QUERY_BLOCK_LOGITS", 3 * H * MAX * 7)  # 7 queries at a time, 5 in the last block
    tokens, model = batch(padding=padding), encoder(position, cls).eval()
    with torch.no_grad():
        expected = encoder(position, cls, attention="plain").eval()(tokens)[0]
        with Sizes(MAX * MAX) as sizes:
            ours = model(tokens)[0]
    torch.testing.assert_close(ours[tokens.ne(PAD)], expected[tokens.ne(PAD)], rtol=1e-5, atol=1e-5)
    if model.positions.has_bias() and position not in ("fire", "nonparametric"):  # an MLP's hidden units; a parameter
        assert [shape for _, shape in sizes.large if shape[-2:] == (MAX, MAX)] == []


@pytest.mark.parametrize("position, layers", [("untied", 1), ("untied+t5:layer", 1), ("untied:layer", N)])
def test_long_sequences_project_their_positions_once(position, layers, monkeypatch):
    """And not again for every block of queries."""
    monkeypatch.setattr(backend_cpu, "BLOCKED_BIAS_FROM", MAX - 1)
    monkeypatch.setattr(backend_cpu, "QUERY_BLOCK_LOGITS", 3 * H * MAX * 7)
    untied, rows = SCHEMES["untied"], []
    monkeypatch.setattr(untied, "project", lambda self, x, f=untied.project: rows.append(len(x)) or f(self, x))
    with torch.no_grad():
        encoder(position).eval()(batch())
    assert rows.count(MAX) == layers


def test_an_empty_batch_has_no_features():
    for path in ("plain", *FAST):
        assert encoder(attention=path)(torch.empty(0, 5, dtype=torch.long))[0].shape == (0, 5, C)


def test_a_backend_that_is_refused_names_those_that_are_not():
    with pytest.raises(ValueError, match="attention=blocked is not .* normaliser l2 .* valid here: auto, plain$"):
        encoder(attention="blocked", normaliser="l2")(batch())


READ = {"[CLS]": of_cls, "some": lambda tokens: tokens.ne(PAD).flatten().nonzero().squeeze(1)[[7, 0, 3]]}


WHOLE = [  # the options of a model, whichever terms and layers it has
    *({"position": position, "cls": cls} for position, cls in KINDS),
    *({"position": position} for position in SCHEMES if (position, "tied") not in SOFTMAX),
    *({"normaliser": normaliser} for normaliser in NORMALISERS),
    {"block": "gau", "normaliser": "relu2"},
    {"block": "modern"},
    {"checkpoint_activations": True},
]
# With each of them, [CLS] of full or of padded sequences, in turns, and some tokens of the others.
CASES = [
    (options, padding, read)
    for options, turn in zip(WHOLE, itertools.cycle([[(), (5, 33, 0)], [(5, 33, 0), ()]]), strict=False)
    for padding, read in zip(turn, READ, strict=True)
]


@pytest.mark.parametrize(
    "options, padding, read",
    CASES,
    ids=lambda x: "-".join(map(str, x.values())) if isinstance(x, dict) else x if isinstance(x, str) else str(bool(x)),
)
def test_the_last_layer_computes_only_what_is_read(options, padding, read):
    """Features and all gradients are those of the whole batch; the last layer's products have few rows."""
    tokens, model, outcomes = batch(35, padding), encoder(**options), []
    indices, last = READ[read](tokens), model.layers[-1]
    rows = []
    (last.fc2 if hasattr(last, "fc2") else last.u).register_forward_hook(lambda *a: rows.append(a[2].flatten(0, -2)))
    for chosen in (None, indices):
        model.zero_grad()
        features, _ = model(tokens, output_indices=chosen)
        features = features.flatten(0, 1)[indices] if chosen is None else features
        weights = torch.randn(features.shape, generator=torch.Generator().manual_seed(0))
        (features * weights).sum().backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        outcomes.append((features.detach(), gradients))
    assert_same(*outcomes[::-1], 1e-5)
    assert len(rows[0]) > 60 and len(rows[-1]) == len(indices)
    features, hiddens = model(tokens, return_all_hiddens=True, output_indices=indices)
    torch.testing.assert_close(features, outcomes[0][0], rtol=1e-5, atol=1e-5)
    assert len(hiddens) == N + 1 and hiddens[-1].shape == (*tokens.shape, C)


def test_nothing_is_wanted():
    assert encoder()(batch(padding=(3,)), output_indices=torch.empty(0, dtype=torch.long))[0].shape == (0, C)


@pytest.mark.parametrize("position, cls", [("t5+window:size:8", "untied"), ("rope+window:size:8", "tied")])
@pytest.mark.parametrize("path, device", FAST_ON)
def test_windows_of_other_positions(path, device, position, cls, monkeypatch):
    """Where tokens are not neighbours, fewer of them are near."""
    monkeypatch.setattr(windows, "CHUNK", 5)
    outcomes = []
    for way in ("plain", path):
        model = encoder(position, cls, attention=way, places="random").train().to(device)
        torch.manual_seed(3)  # of the positions
        outcomes.append(outcome(model, batch(28, padding=(0, 3))))
    assert_same(*outcomes, 1e-5 if device == "cpu" else 1e-4)


@pytest.mark.parametrize("position, cls", [("window:size:8", "tied"), ("untied+t5+window:size:8", "untied")])
@pytest.mark.parametrize("path", FAST)
def test_windows_save_work(path, position, cls, monkeypatch):
    """Layers with a window have the logits of 13 or 14 keys for each query, not of 40."""
    monkeypatch.setattr(windows, "CHUNK", 5)
    for every in (3, 0):  # the second of two layers has a window, or both have
        model = encoder(f"{position}:every:{every}", cls)
        terms = model.layer_inputs(MAX, BACKENDS[path]())
        assert [isinstance(term.prepared, windows.InChunks) for term in terms] == [every == 0, True]
        assert terms[1].prepared.near.bias.shape[-2:] == (5, 13 + (cls == "untied"))
    whole = {}
    for name in ("nopos", "window:size:8:every:0"):
        with Sizes(MAX * MAX) as sizes:
            encoder(name, attention="blocked")(batch())[0].sum().backward()
        whole[name] = [shape for _, shape in sizes.large if shape[-2:] == (MAX, MAX)]
    assert whole["nopos"] and not whole["window:size:8:every:0"]


def flash_in_plain(q, k, v, bounds, longest, reach, scale, dropout):
    """What flash attention computes in each of the spans of [T, H, D]."""
    assert bounds.dtype == torch.int32 and bounds[-1] == len(q) and q.size(-1) % 8 == 0 and dropout == 0
    outs = []
    for first, last in itertools.pairwise(bounds.tolist()):
        assert last - first <= longest
        index, (queries, keys, values) = torch.arange(last - first), (x[first:last].transpose(0, 1) for x in (q, k, v))
        far = (index - index[:, None]).abs() > (longest if reach is None else reach)
        weights = torch.softmax((queries @ keys.mT * scale).masked_fill(far, -torch.inf), dim=-1)
        outs.append((weights @ values).transpose(0, 1))
    return torch.cat(outs)


@pytest.fixture
def flash(monkeypatch):
    """The arguments of all calls of flash attention, which is there from now on, as on a GPU."""
    calls, pack = [], Packing.of

    def noted(q, k, v, bounds, longest, reach, *rest):
        calls.append((bounds.tolist(), longest, reach))
        return flash_in_plain(q, k, v, bounds, longest, reach, *rest)

    monkeypatch.setattr(backend_sdpa, "has_flash", lambda device, dtype: True)
    monkeypatch.setattr(backend_sdpa, "flash", noted)
    monkeypatch.setattr(Packing, "of", lambda mask, count, on_the_right: pack(mask, count, True))
    return calls


WITHOUT_BIAS = [
    *[(name, cls, ()) for name, cls in SOFTMAX if "window" in name and cls == "tied"],
    *[(name, cls, (0, 5, 38)) for name, cls in SOFTMAX if cls == "tied"],
]


@pytest.mark.parametrize("position, cls, padding", WITHOUT_BIAS)
def test_flash_attention_computes_padding_and_windows(position, cls, padding, flash):
    """Of every encoding without a bias: in each layer whose tokens do not see all."""
    ours = encoder(position, cls, attention="sdpa")
    assert_same(outcome(ours, batch(39, padding)), plain_outcome(position, cls, 39, padding), 1e-5)
    reaches = [ours.positions.reach(LayerContext(n, TokenPositions(39))) for n in range(N)]
    expected = [] if ours.positions.has_bias() else [reach for reach in reaches if padding or reach is not None]
    assert [reach for _, _, reach in flash] == expected
    for bounds, longest, _ in flash:
        assert longest == 39 and bounds == ([0, 39, 39, 73, 78, 79, 117] if padding else [0, 39, 78, 117])


def test_flash_attention_does_not_take_what_it_would_get_wrong(flash, monkeypatch):
    """[CLS] that sees beyond a window, positions that are not neighbours, padding before tokens, heads too wide."""
    padded = batch(28, padding=(0, 3))
    for options in ({"position": "window:size:8", "cls": "untied"}, {"position": "window:size:8", "places": "random"}):
        encoder(**options, attention="sdpa").train()(padded)
        assert {reach for _, _, reach in flash} <= {None}  # of the layer without a window
        flash.clear()
    real = padded.ne(PAD)
    whole, q = Batch(TokenPositions(28), torch.float32, H, Packing(real, on_the_right=True)), torch.randn(3, H, 28, 264)
    ours, plain = (
        way.mix(q, q, q, None, way.prepare(None, None, None, whole), 0.1, 0.0)[0] for way in (Sdpa(), Plain())
    )
    torch.testing.assert_close(ours.transpose(1, 2)[real], plain.transpose(1, 2)[real])
    assert not flash
    monkeypatch.setattr(Packing, "of", lambda mask, count, on_the_right: Packing(mask))
    encoder("rope", attention="sdpa")(padded.flip(1))
    assert not flash


def test_flash_attention_gets_queries_without_a_copy(monkeypatch):
    """As the model's layers have them, of a joint projection."""
    seen = []
    monkeypatch.setattr(backend_sdpa, "has_flash", lambda device, dtype: True)
    monkeypatch.setattr(backend_sdpa, "flash", lambda q, k, v, *rest: seen.extend((q, k, v)) or v)
    whole = Batch(TokenPositions(28), torch.float32, H, Packing(torch.arange(28).expand(3, -1) < 20, on_the_right=True))
    joint, backend = torch.randn(3, 28, 3 * H * 16), Sdpa()
    backend.mix(*cpu.split_heads(joint, H), None, backend.prepare(None, None, None, whole), 0.1, 0.0)
    assert {x.untyped_storage().data_ptr() for x in seen} == {joint.untyped_storage().data_ptr()}


@pytest.mark.thorough
@pytest.mark.parametrize("position", ["rope", "rope_values", "rope:local:True+window:size:8", "shaw", "absolute_d"])
def test_compiled_layers_of_a_kind_share_their_code(position):
    """The first and the last one are two kinds, unless a scheme tells layers apart by their number."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    ours, plain = (encoder(position, layers=4, attention="plain") for _ in range(2))
    ours.compile(backend="eager")
    outcomes = []
    for model in (ours, plain):
        x, _ = model(batch(), output_indices=torch.arange(7))
        x.square().sum().backward()
        outcomes.append((x.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}))
    assert_same(*outcomes, 1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == (4 if "local" in position else 2)


@pytest.mark.parametrize("path, device", FAST_ON)
def test_gated_attention_unit(path, device):
    tokens = batch(padding=(0, 3, 9))
    expected = outcome(encoder("t5", block="gau", attention="plain"), tokens)
    ours = outcome(encoder("t5", block="gau", attention=path).to(device), tokens)
    assert_same(ours, expected, 1e-5 if device == "cpu" else 1e-4)


@pytest.mark.parametrize("padding", [(), (0, 3, 9)], ids=["full", "padded"])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("path, device", PATHS_ON)
def test_autocast(path, device, block, padding):
    """A forward and backward pass in bf16 against the plain one in float32; tolerance: of the relative error."""
    tokens = batch(padding=padding)
    features, expected = outcome(encoder("untied+t5", block=block, attention="plain"), tokens)
    with torch.autocast(device, torch.bfloat16):
        ours, gradients = outcome(encoder("untied+t5", block=block, attention=path).to(device), tokens)
    assert (ours - features).norm() < 0.1 * features.norm()
    assert gradients.keys() == expected.keys()
    out = "layers.0.out.weight" if block == "gau" else "layers.0.attention.out.weight"
    for name in ("positions.untied.q.weight", "positions.t5.table.weight", out):
        assert (gradients[name] - expected[name]).norm() < 0.2 * expected[name].norm(), name


@pytest.mark.parametrize("padding", [(), (0, 5)], ids=["full", "padded"])
def test_sdpa_leaves_cudnn_out(padding, monkeypatch):
    """Its backward pass is wrong for some lengths; the setting of whoever calls is back afterwards."""
    backends, contexts, call = torch.backends.cuda, [], F.scaled_dot_product_attention

    def state():
        kernels = backends.flash_sdp_enabled, backends.mem_efficient_sdp_enabled, backends.math_sdp_enabled
        return [enabled() for enabled in (*kernels, backends.cudnn_sdp_enabled)]

    def watched(*args, **kwargs):
        contexts.append(state())
        return call(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    before = state()
    encoder(attention="sdpa")(batch(padding=padding))[0].sum().backward()
    assert contexts and all(context == [True, True, True, False] for context in contexts) and state() == before


@pytest.mark.parametrize("padding", [(), (0, 5)], ids=["full", "padded"])
def test_sdpa_rounds_the_bias_once(padding, monkeypatch):
    """Kernels for GPUs read it in the precision of queries and keys, as a mask of four dimensions; layers share it."""
    seen, fused = [], F.scaled_dot_product_attention

    def spy(q, k, v, attn_mask, **options):
        seen.append((attn_mask.dtype == q.dtype, attn_mask.dim(), attn_mask.untyped_storage().data_ptr()))
        return fused(q, k, v, attn_mask=attn_mask, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    with torch.autocast("cpu", torch.bfloat16):
        encoder(attention="sdpa")(batch(padding=padding))
    assert len(seen) == N and len(set(seen)) == 1 and seen[0][:2] == (True, 4)


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 3e-2), (torch.float16, 4e-3)], ids=["bf16", "fp16"])
@pytest.mark.parametrize("path, device", [*FAST_ON, *TRITON])
def test_attention_in_low_precision(path, device, dtype, tolerance):
    """Output and gradients of q, k, v and the bias against the same in float64; tolerance: of the relative error."""
    generator = torch.Generator().manual_seed(0)
    qkv = [torch.randn(2, H, MAX - 1, 8, generator=generator).to(device, dtype).requires_grad_() for _ in range(3)]
    bias = torch.randn(H, MAX - 1, MAX - 1, generator=generator).to(device).requires_grad_()
    gradient = torch.randn(2, H, MAX - 1, 8, generator=generator).to(device)

    def run(path, q, k, v, bias):
        out = mix(path, q, k, v, bias)
        return out, *torch.autograd.grad(out, (q, k, v, bias), gradient.to(out.dtype))

    exact = run("plain", *(x.detach().double().requires_grad_() for x in (*qkv, bias)))
    for ours, theirs in zip(run(path, *qkv, bias), exact, strict=True):
        assert (ours - theirs).norm() / theirs.norm() < tolerance


@pytest.mark.parametrize("logits", [1, 2**12, 2**18])
@pytest.mark.parametrize("heads", [1, 5])
@pytest.mark.parametrize("lengths", [[40] * 6, [1, 40, 7, 7, 0, 33, 2, 12, 40, 3]], ids=["full", "mixed"])
def test_blocks_cover_all_pairs_of_real_tokens_once(lengths, heads, logits, monkeypatch):
    monkeypatch.setattr(backend_cpu, "BLOCK_LOGITS", logits)
    monkeypatch.setattr(backend_cpu, "MIN_BLOCK_LOGITS", logits // 8)
    lengths = sorted(lengths, reverse=True)
    q = torch.zeros(len(lengths), heads, MAX, 1)
    real = torch.arange(MAX) < torch.tensor(lengths)[:, None]
    seen = torch.zeros(len(lengths), heads, MAX, MAX)
    for block in backend_cpu.plan_blocks(heads, len(lengths), MAX, MAX, lengths):
        h, r, queries, keys = block.shape
        seen[block.rows, block.heads, :queries, :keys] += 1
        assert block.cut(q).shape == (h, r, queries, 1)
    pairs = (real[:, :, None] & real[:, None])[:, None].expand_as(seen)
    assert (seen[pairs] == 1).all() and seen.max() == 1
    if len(set(lengths)) == 1:
        assert seen.min() == 1
    elif logits < 2**18:
        assert seen.sum() < 0.8 * seen.numel()


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout_mask(p):
    """The share of dropped entries, the independence of neighbours, the scale, and a gradient with the same mask."""
    torch.manual_seed(0)
    x = torch.ones(1000, 1000, requires_grad=True)
    y = cpu.dropout(x, p, True)
    y.sum().backward()
    torch.testing.assert_close(x.grad, y.detach(), rtol=0, atol=0)
    kept = (y > 0).double()
    bound = 5 * (p * (1 - p) / 1e6) ** 0.5  # five standard deviations
    assert abs(kept.mean() - (1 - p)) < bound
    assert set(y.detach().unique().tolist()) == {0.0, y.max().item()} and abs(y.max().item() * (1 - p) - 1) < 1e-4
    for a, b in ((kept[:, 1:], kept[:, :-1]), (kept[1:], kept[:-1]), (kept[:, 4:], kept[:, :-4])):
        assert abs((a * b).mean() - (1 - p) ** 2) < 3 * bound
    assert not torch.equal(cpu.dropout(x, p, True), y)
    torch.manual_seed(0)
    assert torch.equal(cpu.dropout(x, p, True), y)
    assert cpu.dropout(x, p, False) is x


@pytest.mark.parametrize("path, device", PATHS_ON)
def test_attention_dropout(path, device):
    """The mean over many draws is the result without dropout, and so is the mean gradient; draws vary as they
    should."""
    p, draws, length = 0.2, 2000, 6
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, H, length, 8, generator=generator).to(device) for _ in range(3))
    bias = torch.randn(H, length, length, generator=generator).to(device)

    def run(q, k, v, bias, p):
        return mix(path, q, k, v, bias, p)

    torch.manual_seed(0)
    repeated = [x.expand(draws, -1, -1, -1).clone().requires_grad_() for x in (q, k, v)]
    out = run(*repeated, bias, p)
    exact_inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    exact = run(*exact_inputs, bias, 0.0)
    weights = torch.softmax(q @ k.transpose(2, 3) * 8**-0.5 + bias, -1)
    # Var of sum_j a_j v_j m_j / (1 - p) with m_j ~ Bernoulli(1 - p)
    variance = (weights.square() @ v.square()) * p / (1 - p)
    error = (out.mean(0) - exact[0]) / (variance[0] / draws).sqrt()
    assert error.abs().max() < 5
    assert ((out.var(0) / variance[0]) - 1).abs().max() < 0.25
    gradient = torch.randn(exact.shape, generator=generator).to(device)
    ours = torch.autograd.grad(out, repeated, gradient.expand(draws, -1, -1, -1))
    for mean, theirs in zip(ours, torch.autograd.grad(exact, exact_inputs, gradient), strict=True):
        spread = mean.std(0) / draws**0.5
        assert ((mean.mean(0) - theirs[0]).abs() < 5.5 * spread + 1e-6).all()


@pytest.mark.parametrize("short", [0, MAX], ids=["again", "kept"])
def test_blocked_gradient_with_dropout(short, monkeypatch):
    """The gradient belongs to the very masks of the forward pass: it is the difference quotient under one seed."""
    monkeypatch.setattr(backend_cpu, "SAVE_WEIGHTS_UP_TO", short)
    p = 0.3
    q, k, v = (torch.randn(2, H, 5, 8, generator=torch.Generator().manual_seed(i)).requires_grad_() for i in range(3))
    bias = torch.randn(H, 5, 5, requires_grad=True)
    gradient = torch.randn(2, H, 5, 8)

    def loss(*inputs):
        torch.manual_seed(7)
        return (backend_cpu.blocked_attention(*inputs, None, 8**-0.5, p) * gradient).sum()

    inputs = (q, k, v, bias)
    gradients = torch.autograd.grad(loss(*inputs), inputs)
    for index, ours in enumerate(gradients):
        direction, step = torch.randn_like(ours), 1e-2
        moved = [[x + sign * step * direction if i == index else x for i, x in enumerate(inputs)] for sign in (1, -1)]
        quotient = (loss(*moved[0]) - loss(*moved[1])) / (2 * step)
        torch.testing.assert_close((ours * direction).sum(), quotient, rtol=1e-2, atol=5e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [1, 2**18])  # logits in a block: one sequence and head, or all
def test_blocked_is_the_same_without_gradients(block, dtype, monkeypatch):
    monkeypatch.setattr(backend_cpu, "BLOCK_LOGITS", block)
    q, k, v = (torch.randn(2, H, 6, 8, dtype=dtype).requires_grad_() for _ in range(3))
    bias, real = torch.randn(H, 6, 6), torch.arange(6) < torch.tensor([[6], [4]])

    def mix():
        return backend_cpu.blocked_attention(q, k, v, bias, backend_cpu.additive(real[:, None, None]), 8**-0.5, 0.0)

    with torch.no_grad():
        without = mix()
    assert without.shape == q.shape and torch.equal(mix(), without)


def passes(model, monkeypatch):
    """A function: how often a forward pass computes the terms. Its features equal those of a pass with gradients."""
    computed, terms = [], Positions.terms
    monkeypatch.setattr(Positions, "terms", lambda self, at: computed.append(at) or terms(self, at))

    def count(length=MAX, context=torch.inference_mode):
        expected, _ = model(batch(length))
        computed.clear()
        with context():
            features, _ = model(batch(length))
        assert torch.equal(features, expected)
        return len(computed)

    return count


def raise_by_numpy(weight):
    weight.detach().numpy()[:] += 1


CHANGES = {
    "in place": lambda model, weight: torch.nn.init.normal_(weight),
    "data": lambda model, weight: weight.data.add_(1),
    "numpy": lambda model, weight: raise_by_numpy(weight),
    "another storage": lambda model, weight: setattr(weight, "data", weight.data + 1),
    "loaded": lambda model, weight: model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()}),
    "dtype": lambda model, weight: model.bfloat16(),
}


@pytest.mark.parametrize("position", ["untied+t5", "fire", "t5:layer"])
def test_terms_are_kept_in_evaluation_until_a_weight_changes(position, monkeypatch):
    model = encoder(position).eval()
    count = passes(model, monkeypatch)
    assert [count(), count(), count(8), count(context=torch.no_grad), count(8)] == [1, 0, 1, 0, 0]
    for name, change in CHANGES.items():
        change(model, next(model.positions.parameters()))
        assert [count(), count()] == [1, 0], name
    assert [count(context=torch.enable_grad), count()] == [1, 0]
    model.train()
    assert [count(), count()] == [1, 1]


def test_few_bytes_of_terms_are_kept(monkeypatch):
    count = passes(encoder("t5").eval(), monkeypatch)
    monkeypatch.setattr(backend_cpu, "KEPT_BYTES", 4 * H * (8 * 8 + 9 * 9))
    assert [count(8), count(9), count(8), count(9)] == [1, 1, 0, 0]
    assert [count(7), count(9), count(8), count(9), count(MAX), count(MAX)] == [1, 0, 1, 1, 1, 1]


@pytest.mark.parametrize("case", ["another's class", "another's part", "watched", "drawn"])
def test_terms_that_may_depend_on_more_are_not_kept(case, monkeypatch):
    model = encoder(places="random" if case == "drawn" else "consecutive").eval()
    if case == "drawn":
        drawn = TokenPositions(MAX // 2, drawn=torch.arange(0, MAX, 2), span=MAX)
        monkeypatch.setattr(model, "token_positions", lambda tokens, extra: drawn)
    elif case == "watched":
        model.positions["untied"].q.register_forward_pre_hook(lambda *call: None)
    else:
        part = model.positions["untied"] if case == "another's class" else model.positions["untied"].q
        part.__class__ = type("Mine", (type(part),), {"__module__": "mine"})
    count = passes(model, monkeypatch)
    assert [count(MAX // 2), count(MAX // 2)] == [1, 1]


class Biases(TorchDispatchMode):
    """Notes casts of the numbers [H, L, L] that all sequences share, and operations that mix them with others of
    another precision."""

    def __init__(self):
        super().__init__()
        self.casts, self.mixed = 0, []

    def __torch_dispatch__(self, function, types, args=(), options=None):
        result = function(*args, **(options or {}))
        floats = [x for x in args if isinstance(x, torch.Tensor) and x.is_floating_point() and x.dim()]
        if any(x.numel() == H * MAX * MAX for x in floats):
            self.casts += function is torch.ops.aten._to_copy.default
            if len({x.dtype for x in floats}) > 1 and function is not torch.ops.aten.copy_.default:
                self.mixed.append(function)
        return result


@pytest.mark.parametrize("padding", [(), (0, 5, 38)], ids=["full", "padded"])
@pytest.mark.parametrize("path", ["plain", *FAST])
def test_layers_share_one_cast_of_the_bias(path, padding, monkeypatch):
    """In bf16 autocast; plain and blocked attention add it to float32 logits as it is."""
    found = []
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, k, v, **options: v)  # a CPU's would add to it
    for layers in (1, 3):
        options = {"layers": layers, "width": C, "ffn": 2 * C, "heads": H, "max_positions": MAX, "attention": path}
        model = Encoder(V, PAD, position="untied+t5", cls="untied", **options)
        with Biases() as biases, torch.autocast("cpu", torch.bfloat16):
            model(batch(padding=padding))
        found.append((biases.casts, biases.mixed))
    assert found == [(int(path == "sdpa"), [])] * 2


@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("length", [512, 509])
def test_triton_with_dropout_on_cuda(dtype, most, length):
    from test_triton import dropout_case

    assert max(dropout_case("cuda", dtype, length, 64)) < most


def test_choice():
    model = encoder()

    def ask(request, **o):
        backend, reason = choose(
            request, o.get("positions", model.positions), o.get("normaliser", "softmax"),
            torch.device(o.get("device", "cpu")), o.get("dtype", torch.float32), 512,
        )  # fmt: skip
        return backend.name, reason

    assert ask("auto")[0] == "blocked" and ask("auto", device="cuda")[0] == "sdpa"
    assert ask("auto", device="mps")[0] == "plain" and ask("plain", device="cuda")[0] == "plain"
    assert ask("auto", dtype=torch.float64)[0] == "plain"
    path, reason = ask("auto", normaliser="l2")
    assert path == "plain" and "l2" in reason
    shaw = encoder("shaw").positions
    assert ask("auto", positions=shaw)[0] == "plain"
    with pytest.raises(ValueError, match="shaw.*valid here"):
        ask("sdpa", positions=shaw)
    with pytest.raises(ValueError, match="for CPUs"):
        ask("blocked", device="cuda")
    with pytest.raises(ValueError, match="'flash'; valid: auto, plain, blocked, sdpa"):
        ask("flash")
    with pytest.raises(ValueError, match="exp overflows in float16 .* valid: bfloat16, float32"):
        ask("auto", normaliser="exp", device="cuda", dtype=torch.float16)
    assert ask("blocked") == ("blocked", "as requested")
    slow = set(SCHEMES) - {name for name, _ in SOFTMAX}
    assert slow == {name for name, kind in SCHEMES.items() if overrides(kind, "content", "gate", "value")}
    assert {"absolute_d", "deberta", "shaw", "transformer_xl", "urpe"} <= slow


def test_says_which_path_it_took(caplog):
    model = encoder()
    with caplog.at_level("INFO"):
        model(batch()), model(batch())
    assert [r.message for r in caplog.records] == ["attention backend: blocked (the default on cpu)"]


# ---- guards: the bias is made once, never copied per sequence


class Sizes(TorchDispatchMode):
    """Counts the results of operations with at least `entries` entries that are new memory, not views."""

    def __init__(self, entries):
        super().__init__()
        self.entries, self.large = entries, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        inputs = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
        for x in result if isinstance(result, tuple | list) else [result]:
            new = isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in inputs
            if new and x.untyped_storage().nbytes() // x.element_size() >= self.entries:
                self.large.append((str(func), tuple(x.shape)))
        return result


def saved_bytes(position, path, tokens, **options):
    """Memory that the forward pass keeps for the backward pass, every storage counted once."""
    model = encoder(position, attention=path, attention_dropout=0.1, dropout=0.1, **options)
    owned = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages = {}

    def pack(x):
        if x.untyped_storage().data_ptr() not in owned:
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        model(tokens)[0].sum()
    return sum(s.nbytes() for s in storages.values())


@pytest.mark.parametrize("path, padding", [("plain", 0), ("blocked", 0), ("blocked", 40)])
def test_peak_memory_with_and_without_positions(path, padding):
    """Positions cost a constant, not something per sequence, at the worst moment of a step, backward pass included,
    where attention outweighs all else."""
    sizes = {"layers": 1, "width": 128, "heads": 8, "ffn": 16, "max_positions": 128, "attention": path}

    def peak(size, **position):
        model, tokens = Encoder(50, PAD, **sizes, **position).train(), batch(128, [padding] * (size // 4), size)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        _, steps = allocations(lambda: model(tokens)[0].sum().backward())
        return max(itertools.accumulate(steps))

    tupe_r, nopos = {"position": "untied+t5", "cls": "untied"}, {"position": "nopos"}
    extra = [peak(size, **tupe_r) - peak(size, **nopos) for size in (9, 13)]  # one head in a block
    assert extra[0] == extra[1], "positions cost memory per sequence"


@pytest.mark.parametrize("short, share", [(0, 0.6), (MAX, 0.8)], ids=["again", "kept"])
def test_blocked_keeps_less_memory_than_plain(short, share, monkeypatch):
    monkeypatch.setattr(backend_cpu, "SAVE_WEIGHTS_UP_TO", short)
    tokens = batch(size=16)
    assert saved_bytes("untied+t5", "blocked", tokens) < share * saved_bytes("untied+t5", "plain", tokens)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_select(dtype):
    x, kept = torch.randn(7, 5, dtype=dtype), torch.rand(7, 5) < 0.5
    assert torch.equal(cpu.select(x, kept), x * kept)
    assert torch.equal(cpu.select(x.t(), kept.t()), (x * kept).t())
    assert torch.equal(cpu.select(torch.full((2,), torch.nan), torch.tensor([False, False])), torch.zeros(2))


# ---- products, loss, options of the encoder


NO_ONEDNN = pytest.mark.skipif(not cpu.HAS_ONEDNN, reason="this PyTorch has no oneDNN")


@pytest.fixture(params=[False, pytest.param(True, marks=NO_ONEDNN)])
def onednn(request, monkeypatch):
    """With oneDNN, as on an AMD processor, and without."""
    monkeypatch.setattr(cpu, "ONEDNN", request.param)
    return request.param


@pytest.mark.parametrize("shape", [(3, 5), (3, 17), (2, 3, 1), ()], ids=str)
@pytest.mark.parametrize("needs", ["xwb", "xw", "w", "x"])
def test_linear(needs, shape, onednn):
    x, w, b = torch.randn(*shape, 16), torch.randn(7, 16), torch.randn(7)
    for tensor, name in ((x, "x"), (w, "w"), (b, "b")):
        tensor.requires_grad_(name in needs)
    bias = b if "b" in needs else None
    wanted = [t for t in (x, w, bias) if t is not None and t.requires_grad]
    ours, theirs = cpu.linear(x, w, bias), F.linear(x, w, bias)
    torch.testing.assert_close(ours, theirs)
    g = torch.randn(7, *shape).movedim(0, -1)  # not contiguous
    for a, e in zip(torch.autograd.grad(ours, wanted, g), torch.autograd.grad(theirs, wanted, g), strict=True):
        torch.testing.assert_close(a, e)


@pytest.mark.parametrize("n, m, k", [(40, 30, 4), (40, 4, 30), (2, 30, 4), (3, 5, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_product_over_rows(n, m, k, dtype, onednn):
    """Whichever matrix goes first, the result is one that a parameter can keep as its gradient without a copy."""
    a, b = torch.randn(n, m, dtype=dtype), torch.randn(n, k, dtype=dtype)
    product = cpu.product_over_rows(a, b)
    torch.testing.assert_close(product, torch.einsum("nm,nk->mk", a, b))
    assert product.is_contiguous()


def test_linear_uses_onednn_where_it_should(onednn):
    x, w = torch.randn(4, 16, requires_grad=True), torch.randn(7, 16)
    made_by = cpu.linear(x, w).grad_fn
    assert ("OneDnn" in f"{made_by} {made_by.next_functions[0][0]}") == onednn
    assert cpu.linear(x.double(), w.double()).dtype == torch.float64
    with torch.autocast("cpu", torch.bfloat16):
        assert cpu.linear(x, w).dtype == torch.bfloat16


def test_second_derivatives_by_the_plain_way(onednn):
    model, tokens = encoder(attention="plain").eval(), batch(17, padding=(0, 3))
    weight = model.layers[0].attention.qkv.weight
    (first,) = torch.autograd.grad(model(tokens)[0].square().sum(), weight, create_graph=True)
    direction = torch.randn_like(weight)
    (second,) = torch.autograd.grad((first * direction).sum(), weight)

    def gradient(step):
        with torch.no_grad():
            weight.add_(direction, alpha=step)
        (found,) = torch.autograd.grad(model(tokens)[0].square().sum(), weight)
        with torch.no_grad():
            weight.add_(direction, alpha=-step)
        return found

    model.double()
    weight, direction = model.layers[0].attention.qkv.weight, direction.double()
    expected = (gradient(1e-5) - gradient(-1e-5)) / 2e-5
    torch.testing.assert_close(second.double(), expected, rtol=1e-3, atol=1e-2)


@NO_ONEDNN
def test_few_shapes_for_onednn(monkeypatch):
    """Whatever the number of masked tokens is, oneDNN sees few shapes: it never forgets one."""
    monkeypatch.setattr(cpu, "ONEDNN", True)
    shapes, product = set(), cpu.product

    def recorded(a, b, bias=None):
        shapes.add((tuple(a.shape), tuple(b.shape)))
        return product(a, b, bias)

    monkeypatch.setattr(cpu, "product", recorded)
    w, b = torch.randn(6, 4, requires_grad=True), torch.zeros(6)
    for n in range(128, 257):
        x = torch.randn(n, 4, requires_grad=True)
        cpu.linear(x, w).sum().backward()
        losses.lm_loss(x, w, b, torch.zeros(n, dtype=torch.long))
    rows = {a[0] for a, _ in shapes} - {4, 6}
    assert rows == set(range(128, 257, 8))
    assert len(shapes) == 3 * len(rows)  # forward, and two in the backward pass


def test_dense_before_onednn():
    """oneDNN multiplies with gaps between rows, but a thousand times slower: they must be closed before."""
    x = torch.randn(6, 20)
    for view in (x, x.t(), x[:, :5], x[:, :5].t(), x[::2], x[0].expand(4, 20)):
        closed = cpu.dense(view)
        assert torch.equal(closed, view) and (closed.is_contiguous() or closed.t().is_contiguous())
    assert cpu.dense(x.t()).data_ptr() == x.data_ptr()


@pytest.mark.parametrize("rows", [4, 1024])
@pytest.mark.parametrize("n", [0, 1, 11, 51])
@pytest.mark.parametrize("device", DEVICES)
def test_lm_loss(device, n, rows, onednn, monkeypatch):
    monkeypatch.setattr(losses, "LM_LOSS_ROWS", rows)
    inputs = [torch.randn(shape, device=device).requires_grad_() for shape in ((n, 8), (V, 8), (V,))]
    targets = torch.randint(V, (n,), device=device)
    ours = losses.lm_loss(*inputs, targets)
    theirs = F.cross_entropy(F.linear(*inputs), targets, reduction="sum")
    torch.testing.assert_close(ours, theirs)
    for a, e in zip(torch.autograd.grad(3 * ours, inputs), torch.autograd.grad(3 * theirs, inputs), strict=True):
        torch.testing.assert_close(a, e)
    with pytest.raises(RuntimeError, match="one backward pass"):
        torch.autograd.grad(ours, inputs)
    with torch.no_grad():
        torch.testing.assert_close(losses.lm_loss(*inputs, targets), theirs)


def test_lm_loss_never_holds_all_logits(monkeypatch):
    monkeypatch.setattr(losses, "LM_LOSS_ROWS", 4)
    head, x, weight = LMHead(8, 500), torch.randn(40, 8, requires_grad=True), torch.randn(500, 8, requires_grad=True)
    with Sizes(40 * 500) as sizes:
        head(x, weight, torch.randint(500, (40,))).backward()
    assert sizes.large == []
    with Sizes(40 * 500) as sizes:
        F.cross_entropy(head(x, weight), torch.randint(500, (40,))).backward()
    assert sizes.large != []


@pytest.mark.parametrize("device", DEVICES)
def test_lm_loss_in_bf16(device):
    head, x, weight = LMHead(8, V).to(device), torch.randn(11, 8, device=device), torch.randn(V, 8, device=device)
    targets = torch.randint(V, (11,), device=device)
    expected = head(x, weight, targets)
    with torch.autocast(device, torch.bfloat16):
        loss = head(x, weight, targets)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=2e-2, atol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_lm_loss_in_fp16_sees_the_loss_scale(device, monkeypatch):
    """Gradients of rare words, which half precision can hold only after they are scaled."""
    monkeypatch.setattr(losses, "LM_LOSS_ROWS", 4)
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(*shape, generator=generator).half() for shape in ((11, 8), (V, 8))]
    inputs.append(torch.where(torch.arange(V) < 3, 0.0, -16.0))  # bias: rare words have probability 1e-8 or so
    inputs = [x.to(device).requires_grad_() for x in inputs]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    targets = torch.randint(3, (11,), generator=generator).to(device)
    ours = losses.lm_loss(*inputs, targets)
    theirs = F.cross_entropy(F.linear(*exact), targets, reduction="sum")
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-2, atol=0)
    half, single = (torch.autograd.grad(2**10 * loss, of) for loss, of in ((ours, inputs), (theirs, exact)))
    assert (half[0] - single[0]).norm() < 0.03 * single[0].norm()
    for a, b in zip(half[1:], single[1:], strict=True):
        assert (a[3:] - b[3:]).norm() < 0.03 * b[3:].norm()  # of the words that are no targets
    assert losses.lm_loss(inputs[0][:0], *inputs[1:], targets[:0]) == 0


@pytest.mark.parametrize("path", ["plain", "blocked"])
def test_checkpointed_activations(path):
    """The same numbers with dropout, because the same masks are drawn again, and less memory."""
    results = []
    for checkpointed in (False, True):
        model = encoder(attention=path, dropout=0.1, attention_dropout=0.1, checkpoint_activations=checkpointed)
        torch.manual_seed(5)
        results.append(outcome(model, batch(padding=(0, 4))))
    assert_same(results[1], results[0], 1e-6)
    calls = []
    model.layers[0].register_forward_pre_hook(lambda *args: calls.append(1))
    outcome(model, batch())
    assert len(calls) == 2  # forward, and again in the backward pass
    model.eval()
    outcome(model, batch())
    assert len(calls) == 3  # where memory is not scarce, once
    few, many = (saved_bytes("untied", path, batch(), checkpoint_activations=on) for on in (True, False))
    assert few < 0.3 * many


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("path, device", PATHS_ON)
def test_token_wise_work_without_padding(path, device, autocast, monkeypatch):
    """As the padded computation, on every path; `test_positions.py` has every scheme."""
    model, tokens = encoder(attention=path).to(device), batch(padding=(5, 21, 0))
    tokens[0, 7] = PAD
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
        ours = outcome(model, tokens)
        never_pack(monkeypatch)
        assert_same(ours, outcome(model, tokens), 2e-2 if autocast else 1e-5 if device == "cpu" else 1e-4)


def test_dropout_without_padding(monkeypatch):
    """Other draws of the same distribution: equal mean and variance of every feature."""
    draws = 4000
    tokens = batch(8, padding=(3,), size=1).expand(draws, -1)
    model = encoder(dropout=0.2, attention_dropout=0.2).train()
    torch.manual_seed(0)
    with torch.no_grad():
        ours = model(tokens)[0][:, :5]
        never_pack(monkeypatch)
        padded = model(tokens)[0][:, :5]
    error = (ours.mean(0) - padded.mean(0)) / ((ours.var(0) + padded.var(0)) / draws).sqrt()
    assert error.abs().max() < 5
    assert (ours.var(0) / padded.var(0) - 1).abs().max() < 0.25


def test_padding_known_beforehand():
    model, tokens = encoder().eval(), batch(padding=(0, 4))
    assert torch.equal(model(tokens, num_tokens=3 * MAX - 4)[0], model(tokens)[0])
    assert torch.equal(model(batch(), num_tokens=3 * MAX)[0], model(batch())[0])
    assert model.packing(batch(), num_tokens=3 * MAX) is model.packing(batch()) is NO_PADDING
