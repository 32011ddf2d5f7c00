"""Times of the parts of a training step, measured in turns: products, dropout, a layer, attention by every path.

B batch, L sequence length, H heads, D width of a head, C = H D.
"""

from collections.abc import Callable, Iterable, Sequence

import click
import torch
import torch.nn.functional as F
from torch import Tensor

from .. import cpu
from ..attention import Batch
from ..backends import BACKENDS
from ..common import options
from ..common.options import Command, ListOf
from ..common.tables import Table
from ..encoder import Encoder, LMHead
from ..token_positions import TokenPositions
from .machine import DEVICE, PRECISIONS, environment, facts
from .turns import Step, medians, take_turns, timed


def concatenated(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pos_q: Tensor,
    pos_k: Tensor,
    theta: Tensor,
    real: Tensor | None,
    scale: float,
    dropout: float,
) -> Tensor:
    """TUPE-A's attention without a bias: its position term has rank D, so longer queries and keys can compute it.

    q, k, v [B, H, L, D]; pos_q, pos_k [H, L, D], the projections of positions; theta [2, H], logits from and to [CLS];
    real [B, 1, 1, L] or None, False at padded keys. Returns [B, H, L, D].

        [q_i, pos_q_i, i = 0, i > 0, 1] . [k_j, pos_k_j, theta_1 / scale, theta_2 / scale if j = 0, -3e4 if padded]

    with pos_q_0 = pos_k_0 = 0. Fused kernels need values as wide as keys: 2 D + 3, rounded up to a multiple of 8.
    A candidate only, which the encoder does not use (see docs/performance.md).
    """
    batch, heads, length, width = q.shape
    others = torch.ones(length, 1, dtype=q.dtype, device=q.device)
    others[0] = 0  # [CLS]
    others = others.expand(heads, -1, -1)
    from_cls, to_cls = (theta / scale).to(q.dtype)[:, :, None, None]  # [H, 1, 1] each
    padded = q.new_zeros(batch, 1, length, 1)
    if real is not None:
        padded = padded.masked_fill(~real.transpose(2, 3), -3e4)
    left = torch.cat([pos_q.to(q.dtype) * others, 1 - others, others, torch.ones_like(others)], 2)  # [H, L, D + 3]
    right = torch.cat([pos_k.to(q.dtype) * others, from_cls.expand(-1, length, -1), to_cls * (1 - others)], 2)
    q = torch.cat([q, left.expand(batch, -1, -1, -1)], 3)
    k = torch.cat([k, right.expand(batch, -1, -1, -1), padded.expand(-1, heads, -1, -1)], 3)
    missing = -k.size(3) % 8
    q, k, v = F.pad(q, (0, missing)), F.pad(k, (0, missing)), F.pad(v, (0, k.size(3) + missing - width))
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, scale=scale)[..., :width]


class Case:
    """A function and the tensors to differentiate it by; `forward()` and `backward()` are measured."""

    def __init__(self, compute: Callable[[], Tensor], inputs: Iterable[Tensor]):
        self.compute, self.inputs, self.grad = compute, tuple(inputs), None

    def forward(self) -> None:
        self.out = self.compute()

    def backward(self) -> None:
        if self.grad is None:  # the values do not matter, but zeros might be faster
            self.grad = torch.randn_like(self.out)
        torch.autograd.grad(self.out, self.inputs, self.grad)


def attention_case(
    name: str,
    batch: int,
    length: int,
    dtype: torch.dtype,
    device: str,
    dropout: float,
    heads: int = 12,
    width: int = 64,
) -> Case:
    """One kind of attention on random inputs.

    name: a path, or "concatenated". The paths read TUPE-A's bias, computed beforehand as in the encoder (whose layers
    share it), and return its gradient.
    """

    def random(*shape, dtype=dtype):
        return torch.randn(*shape, device=device, dtype=dtype, generator=generator).requires_grad_()

    generator = torch.Generator(device).manual_seed(0)
    scale = (2 * width) ** -0.5
    qkv = [random(batch, heads, length, width) for _ in range(3)]
    pos = [random(heads, length, width, dtype=torch.float32) for _ in range(2)]
    theta = random(2, heads, dtype=torch.float32)
    if name == "concatenated":
        inputs = (*qkv, *pos, theta)
        return Case(lambda: concatenated(*inputs, None, scale, dropout), inputs)
    bias = (pos[0] * scale @ pos[1].transpose(1, 2)).detach()
    bias[:, :, 0], bias[:, 0] = theta.detach()[1, :, None], theta.detach()[0, :, None]
    backend, whole = BACKENDS[name](), Batch(TokenPositions(length, device), dtype, heads)
    bias.requires_grad_()

    def call():
        return backend.mix(*qkv, None, backend.prepare(bias, None, None, whole), scale, dropout)[0]

    return Case(call, (*qkv, bias))


def step_cases(
    batch: int, length: int, width: int, ffn: int, vocab: int, dtype: torch.dtype, device: str
) -> dict[str, Case]:
    """{name: Case} of the parts of a step of TUPE-R: a layer, and what a step computes once. dtype: of autocast."""

    def autocast(compute):
        def call():
            with torch.autocast(device, dtype, enabled=dtype != torch.float32):
                return compute()

        return call

    torch.manual_seed(0)
    sizes = {"layers": 1, "width": width, "ffn": ffn, "heads": width // 64, "max_positions": length}
    encoder = Encoder(vocab, 1, position="untied+t5", cls="untied", **sizes).to(device).train()
    head = LMHead(width, vocab).to(device).train()
    tokens = torch.randint(2, vocab, (batch, length), device=device)
    x = torch.randn(batch, length, width, device=device, requires_grad=True)
    masked = torch.randn(round(0.15 * batch * length), width, device=device, requires_grad=True)
    targets = tokens.view(-1)[: len(masked)]
    positions, layer, embedding = encoder.positions, encoder.layers[0], encoder.tokens.weight
    with torch.no_grad():
        (terms,) = encoder.layer_inputs(length, encoder.choose_backend(x))
    bias = terms.prepared.bias.requires_grad_()
    inputs = {
        "layer": (lambda: layer(x, terms), (x, bias, *layer.parameters())),
        "position terms": (lambda: positions.terms(length)[0][0], positions.parameters()),
        "token embeddings": (lambda: encoder.tokens(tokens), (embedding,)),
        "LM head and loss": (lambda: head.loss(masked, embedding, targets), (masked, embedding, *head.parameters())),
    }
    return {name: Case(autocast(compute), tensors) for name, (compute, tensors) in inputs.items()}


def milliseconds(steps: dict[tuple[str, str], Step], turns: int) -> dict[str, list[float]]:
    """{row: medians of each part of the steps of its columns}, all measured in turns. steps: {(row, column): step}"""
    rows = {row: [] for row, _ in steps}
    for (row, _), times in take_turns(steps, turns).items():
        rows[row] += [1e3 * seconds for seconds in medians(times)]
    return rows


def table_of(header: list[str], rows: dict[str, list[float]]) -> Table:
    return Table.plain(header, [[name, *(f"{cell:.2f}" for cell in cells)] for name, cells in rows.items()])


def attention_table(
    names: Sequence[str],
    shapes: list[tuple[int, int]],
    dtypes: list[torch.dtype],
    device: str,
    turns: int,
    dropout: float,
) -> Table:
    """A row per dtype, (batch, length), path: milliseconds forward and backward, and how many times as fast as the
    first path."""
    rows = {}
    for dtype in dtypes:
        for batch, length in shapes:
            setting = f"{str(dtype).removeprefix('torch.')}, B {batch}, L {length}"
            cases = {name: attention_case(name, batch, length, dtype, device, dropout) for name in names}
            steps = {(f"{n}, {setting}", ""): timed(device, case.forward, case.backward) for n, case in cases.items()}
            measured = milliseconds(steps, turns)
            first = sum(measured[f"{names[0]}, {setting}"])
            rows |= {name: [*cells, first / sum(cells)] for name, cells in measured.items()}
    header = [f"attention, H 12, D 64, dropout {dropout}", "forward ms", "backward ms", f"times as fast as {names[0]}"]
    return table_of(header, rows)


def step_table(
    batch: int, length: int, width: int, ffn: int, vocab: int, precisions: dict[str, torch.dtype | None], device: str,
    turns: int,
) -> Table:  # fmt: skip
    """A row per part of a step: milliseconds forward and backward in each precision, and the first's over the
    last's."""
    steps = {
        (part, precision): timed(device, case.forward, case.backward)
        for precision, dtype in precisions.items()
        for part, case in step_cases(batch, length, width, ffn, vocab, dtype, device).items()
    }
    header = [f"of TUPE-R, B {batch}, L {length}, C {width}, V {vocab}"]
    header += [f"{precision}: {way} ms" for precision in precisions for way in ("forward", "backward")]
    rows = {part: [*ms, sum(ms[:2]) / sum(ms[-2:])] for part, ms in milliseconds(steps, turns).items()}
    return table_of([*header, "times as fast"], rows)


def parts_table(tokens: int, width: int, ffn: int, device: str, turns: int) -> Table:
    """Milliseconds of one product and one dropout, by PyTorch and by `kernels`."""
    x, weight = (torch.randn(n, width, device=device) for n in (tokens, ffn))
    hidden = torch.randn(tokens, ffn, device=device)
    half, half_weight = x.bfloat16(), weight.bfloat16()
    calls = {
        ("product, float32", "PyTorch"): lambda: x @ weight.t(),
        ("product, float32", "here"): lambda: cpu.multiply(x, weight),
        ("product, bf16", "PyTorch"): lambda: half @ half_weight.t(),
        ("product, bf16", "here"): lambda: cpu.multiply(half, half_weight),
        ("dropout, float32", "PyTorch"): lambda: F.dropout(hidden, 0.1),
        ("dropout, float32", "here"): lambda: cpu.dropout(hidden, 0.1, True),
    }
    header = [f"{tokens} x {width} by {width} x {ffn}; dropout of {tokens} x {ffn}", "PyTorch ms", "here ms"]
    return table_of(header, milliseconds({name: timed(device, call) for name, call in calls.items()}, turns))


# ---- the command

CANDIDATES = [*BACKENDS, "concatenated"]


@click.command(cls=Command)
@click.option("--paths", type=ListOf(CANDIDATES), help=f"of {', '.join(CANDIDATES)}; default: all for the device")
@click.option("--lengths", type=ListOf(int), default="512,128", show_default=True, metavar="L,...")
@click.option("--tokens", default=2048, show_default=True, help="tokens of a batch; B = tokens / L")
@options.vocab_size()
@click.option("--precision", type=ListOf(list(PRECISIONS)), default="float32,bf16", show_default=True)
@click.option("--dropout", type=ListOf(float), default="0.1,0", show_default=True, help="of the attention weights")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default=DEVICE, help="default: a GPU if there is one")
@click.option("--turns", type=click.IntRange(1), default=9, show_default=True, help="measured calls of each function")
def command(paths, lengths, tokens, vocab_size, precision, dropout, device, turns):
    """Measure the parts of a training step at base size: products, dropout, a layer, attention by every path.

    \b
    tupe bench kernels
    tupe bench kernels --paths plain,blocked --lengths 2048 --precision float32
    """
    paths = paths or [name for name in CANDIDATES if device == "cpu" or name != "blocked"]
    precisions = {name: PRECISIONS[name] for name in precision}
    shapes = [(max(1, tokens // length), length) for length in lengths]
    click.echo(facts(environment()) + "\n")
    click.echo(parts_table(tokens, 768, 3072, device, turns).markdown())
    click.echo(step_table(*shapes[0], 768, 3072, vocab_size, precisions, device, turns).markdown())
    for p in dropout:
        click.echo(attention_table(paths, shapes, precisions.values(), device, turns, p).markdown())
