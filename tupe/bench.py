"""Training steps of our encoders and of what people use instead, measured side by side.

Every contender lives in a process of its own (so that its peak memory is its own) and is asked for one step at a time,
in turns, with the same tokens and the same masked positions: what disturbs the machine disturbs all alike, and the
ratio of two contenders is the median over the turns of the ratios within a turn.

B batch, L sequence length, C width, F feed-forward width, N layers, V vocabulary.
"""

import multiprocessing
import os
import platform
import resource
import statistics
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from types import SimpleNamespace

import torch

MASKED = 0.15  # share of the tokens that are masked
PAPER_TOKENS = 1_000_000 * 256 * 512  # updates x sequences x tokens
OURS = {  # name -> (architecture, options on top of it)
    "tupe_r": ("tupe_r", {}),
    "tupe_a": ("tupe_a", {}),
    "bert_a": ("bert_a", {}),
    "nopos": ("bert_a", {"position": "nopos"}),
    "tupe_r-plain": ("tupe_r", {"attention": "plain"}),
    "tupe_r-sdpa": ("tupe_r", {"attention": "sdpa"}),
    "tupe_r-compile": ("tupe_r", {"compile": True}),
    "tupe_r-checkpoint": ("tupe_r", {"checkpoint_activations": True}),
}
CONTENDERS = [*OURS, "fairseq", "hf"]
DEFAULT = ["tupe_r", "tupe_a", "bert_a", "nopos", "fairseq", "hf"]


@dataclass(frozen=True)
class Setting:
    size: str = ""  # suffix of the architecture: "" for base, "_tiny", ...
    layers: int = 0  # 0: those of the size
    length: int = 512
    batch: int = 4
    vocab: int = 32768
    precision: str = "float32"  # or "bf16": autocast, float32 weights
    device: str = "cpu"
    threads: int = 0  # 0: PyTorch's default

    def dims(self):
        """(N, C, number of heads, F)."""
        from .model import SIZES

        layers, width, heads, ffn = SIZES[self.size]
        return self.layers or layers, width, heads, ffn


def flops_per_token(setting):
    """Of one training step: 6 per weight of a product and token (2 forward, 4 backward), 12 C L per layer for q . k and
    weights . v over the full length, LM head only at masked tokens. Not counted: recomputation, embeddings, position
    terms (what they cost is what is measured), element-wise operations."""
    layers, width, _, ffn = setting.dims()
    weights = layers * (4 * width**2 + 2 * width * ffn) + MASKED * (width**2 + width * setting.vocab)
    return 6 * weights + 12 * layers * width * setting.length


def masked_batch(setting):
    """Tokens [B, L], of which the same number is masked in every call, and targets [B, L], pad (1) elsewhere."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(5, setting.vocab - 1, (setting.batch, setting.length), generator=generator)
    tokens[:, 0] = 0
    targets = torch.full_like(tokens, 1)
    count = max(1, round(MASKED * tokens.numel()))
    places = torch.randperm(tokens.numel(), generator=generator)[:count]
    targets.view(-1)[places] = tokens.view(-1)[places]
    tokens.view(-1)[places] = setting.vocab - 1
    return tokens.to(setting.device), targets.to(setting.device)


def dictionary(vocab):
    from fairseq.data import Dictionary

    words = Dictionary()
    for i in range(vocab - len(words)):
        words.add_symbol(f"w{i}")
    return words


class Contender:
    """One model with its criterion and optimizer, as its users train it."""

    def __init__(self, name, setting):
        if name not in CONTENDERS:
            raise ValueError(f"unknown contender {name!r}; valid: {', '.join(CONTENDERS)}")
        torch.manual_seed(0)
        self.setting = setting
        self.tokens, self.targets = masked_batch(setting)
        build = self.build_hf if name == "hf" else self.build_fairseq if name == "fairseq" else self.build_ours
        self.model = build(name).to(setting.device).train()
        self.optimizer = self.build_optimizer(name)

    def build_ours(self, name):
        from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_DATACLASS_REGISTRY

        import tupe  # noqa: F401

        arch, options = OURS[name]
        layers, *_ = self.setting.dims()
        config = MODEL_DATACLASS_REGISTRY[arch + self.setting.size](
            encoder_layers=layers, max_positions=self.setting.length, **options
        )
        model = ARCH_MODEL_REGISTRY[arch + self.setting.size].build_model(
            config, SimpleNamespace(source_dictionary=dictionary(self.setting.vocab))
        )
        masked = self.targets.ne(1)
        self.loss = lambda: self.model(
            self.tokens, masked_tokens=masked, lm_targets=self.targets[masked], padded=False
        )[0]
        return model

    def build_fairseq(self, name):
        from fairseq import modules
        from fairseq.models.roberta import RobertaModel

        layers, width, heads, ffn = self.setting.dims()
        config = SimpleNamespace(
            encoder_layers=layers, encoder_embed_dim=width, encoder_attention_heads=heads, encoder_ffn_embed_dim=ffn,
            max_positions=self.setting.length, dropout=0.1, attention_dropout=0.1,
        )  # fmt: skip
        model = RobertaModel.build_model(config, SimpleNamespace(source_dictionary=dictionary(self.setting.vocab)))
        masked = self.targets.ne(1)

        def loss():
            logits, _ = self.model(self.tokens, masked_tokens=masked)
            return modules.cross_entropy(logits, self.targets[masked], reduction="sum", ignore_index=1)

        self.loss = loss
        return model

    def build_hf(self, name):
        from transformers import BertConfig, BertForMaskedLM

        layers, width, heads, ffn = self.setting.dims()
        config = BertConfig(
            vocab_size=self.setting.vocab, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
            intermediate_size=ffn, max_position_embeddings=self.setting.length, attn_implementation="sdpa",
        )  # fmt: skip
        labels = self.targets.masked_fill(self.targets.eq(1), -100)
        count = labels.ne(-100).sum()
        self.loss = lambda: self.model(self.tokens, labels=labels).loss * count
        return BertForMaskedLM(config)

    def build_optimizer(self, name):
        options = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.01}
        if name == "hf":  # what its Trainer takes by default
            return torch.optim.AdamW(self.model.parameters(), fused=True, **options)
        if name == "fairseq":
            from fairseq.optim.adam import Adam

            return Adam(self.model.parameters(), **options)
        from .optim import AdamW

        return AdamW(self.model.parameters(), **options)

    def step(self):
        """Seconds of forward, backward and optimizer."""
        times = [self.now()]
        bf16 = self.setting.precision == "bf16"
        with torch.autocast(self.setting.device, torch.bfloat16) if bf16 else nullcontext():
            loss = self.loss()
        times.append(self.now())
        (loss / self.targets.ne(1).sum()).backward()
        times.append(self.now())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        times.append(self.now())
        return [b - a for a, b in zip(times, times[1:], strict=False)]

    def now(self):
        if self.setting.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


class MatrixPeak:
    """A large product in the same precision; the fastest one that this PyTorch has."""

    def __init__(self, setting):
        self.setting, self.size = setting, 8192 if setting.device == "cuda" else 2048
        dtype = torch.bfloat16 if setting.precision == "bf16" else torch.float32
        self.a = torch.randn(self.size, self.size, device=setting.device, dtype=dtype)

    def step(self):
        from .kernels import multiply

        times = []
        for _ in range(3):
            start = Contender.now(self)
            multiply(self.a, self.a)
            times.append(Contender.now(self) - start)
        return [min(times)]


def resident():
    """MiB of memory at the peak so far: of this process, or allocated on the GPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def work(name, setting, pipe):
    """A contender's process: builds, then answers every request with the times of a step and the peak memory."""
    if setting.threads:
        torch.set_num_threads(setting.threads)
    if name in OURS:
        import tupe  # noqa: F401
    before = resident()
    try:
        contender = MatrixPeak(setting) if name == "peak" else Contender(name, setting)
        pipe.send(None)
        while pipe.recv():
            pipe.send((contender.step(), resident() - before))
    except Exception as error:
        pipe.send(error)


def measure(names, setting, rounds, warmup=1, say=print):
    """{name: {"steps": seconds [rounds][3], "memory": MiB}}, and the times of the large product under "peak"."""
    context = multiprocessing.get_context("spawn")
    pipes, processes, results = {}, [], {}
    for name in ["peak", *names]:
        pipes[name], theirs = context.Pipe()
        processes.append(context.Process(target=work, args=(name, setting, theirs), daemon=True))
        processes[-1].start()
    try:
        for name, pipe in pipes.items():
            if isinstance(error := pipe.recv(), Exception):
                raise error
            results[name] = {"steps": [], "memory": 0.0}
        for turn in range(-warmup, rounds):
            for name, pipe in pipes.items():
                pipe.send(True)
                answer = pipe.recv()
                if isinstance(answer, Exception):
                    raise answer
                times, results[name]["memory"] = answer
                if turn >= 0:
                    results[name]["steps"].append(times)
            if turn >= 0:
                times = "  ".join(f"{name} {sum(results[name]['steps'][-1]):.2f} s" for name in names)
                say(f"{setting.precision} L={setting.length} N={setting.dims()[0]} turn {turn + 1}/{rounds}: {times}")
    finally:
        for process in processes:
            process.kill()
            process.join()
    return results


def ratio(results, a, b, parts=slice(None)):
    """How many times as fast as b a is: the median over turns. parts: which of forward, backward, optimizer."""
    pairs = zip(results[a]["steps"], results[b]["steps"], strict=True)
    return statistics.median(sum(theirs[parts]) / sum(ours[parts]) for ours, theirs in pairs)


def summary(results, names, setting):
    """One row (dict) per contender."""
    tokens = setting.batch * setting.length
    size = 8192 if setting.device == "cuda" else 2048
    peak = 2 * size**3 / min(t[0] for t in results["peak"]["steps"])
    rows = []
    for name in names:
        steps = results[name]["steps"]
        speed = tokens / statistics.median(sum(step) for step in steps)
        rows.append({
            "contender": name, **asdict(setting), "layers": setting.dims()[0], "tokens_per_s": speed,
            "forward_s": statistics.median(s[0] for s in steps), "backward_s": statistics.median(s[1] for s in steps),
            "optimizer_s": statistics.median(s[2] for s in steps), "memory_mib": results[name]["memory"],
            "flops_per_token": flops_per_token(setting), "peak_flops": peak,
            "share_of_peak": speed * flops_per_token(setting) / peak,
            "times_as_fast": {b: ratio(results, name, b) for b in names if b != name},
            "times_as_fast_without_optimizer": {b: ratio(results, name, b, slice(2)) for b in names if b != name},
        })  # fmt: skip
    return rows


def environment():
    """What the figures depend on."""
    cpu = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as lines:
            cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), cpu)
    return {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "cpu": cpu, "cores": os.cpu_count(), "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__, "python": platform.python_version(),
        "load_average": os.getloadavg()[0],
    }  # fmt: skip


BASELINES = ("nopos", "bert_a", "fairseq", "hf")


def markdown(rows, about, devices):
    """The tables, one per setting. devices: number to project the paper's run on, or 0."""
    lines = [", ".join(f"{key} {value}" for key, value in about.items() if value is not None), ""]
    settings = list(dict.fromkeys((r["precision"], r["length"], r["layers"]) for r in rows))
    for precision, length, layers in settings:
        part = [r for r in rows if (r["precision"], r["length"], r["layers"]) == (precision, length, layers)]
        against = [b for b in BASELINES if any(r["contender"] == b for r in part) and len(part) > 1]
        head = part[0]
        lines += [
            f"{precision}, {layers} layers, B = {head['batch']}, L = {length}, {head['device']}; "
            f"{head['flops_per_token'] / 1e6:.0f} MFLOP per token, matrix peak {head['peak_flops'] / 1e9:.0f} GFLOP/s",
            "",
        ]
        titles = [
            "",
            "tokens/s",
            *(f"x {b}" for b in against),
            "forward s",
            "backward s",
            "optimizer s",
            "MiB",
            "of peak",
        ]
        titles += [f"days on {devices}"] * bool(devices)
        lines += ["| " + " | ".join(titles) + " |", "|---" + "|---:" * (len(titles) - 1) + "|"]
        for r in part:
            cells = [r["contender"], f"{r['tokens_per_s']:.0f}"]
            cells += [f"{r['times_as_fast'][b]:.2f}" if b in r["times_as_fast"] else "1" for b in against]
            cells += [f"{r[key]:.2f}" for key in ("forward_s", "backward_s", "optimizer_s")]
            cells += [f"{r['memory_mib']:.0f}", f"{100 * r['share_of_peak']:.0f} %"]
            cells += [f"{project(r['tokens_per_s'], devices):.1f}"] * bool(devices)
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def project(tokens_per_s, devices):
    """Days for the paper's pre-training on so many devices that each reach this speed (no loss between them)."""
    return PAPER_TOKENS / (tokens_per_s * devices) / 86400


def picture(rows, path):
    """Tokens per second against L and against N, a line per contender and precision."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True, constrained_layout=True)
    full, most = max(r["layers"] for r in rows), statistics.mode(r["length"] for r in rows)
    names = list(dict.fromkeys((r["contender"], r["precision"]) for r in rows))
    for axis, key, fixed, value in ((axes[0], "length", "layers", full), (axes[1], "layers", "length", most)):
        for index, (name, precision) in enumerate(names):
            points = sorted(
                (r[key], r["tokens_per_s"])
                for r in rows
                if (r["contender"], r["precision"]) == (name, precision) and r[fixed] == value
            )
            style = {"marker": "osD^vPX*"[index % 8], "linestyle": ["-", "--", ":", "-."][index % 4]}
            axis.plot(*zip(*points, strict=True), color=f"C{index}", label=f"{name} {precision}", **style)
        axis.set(xlabel={"length": "L", "layers": "N"}[key], xscale="log", yscale="log")
        axis.set_xticks(sorted({r[key] for r in rows if r[fixed] == value}), minor=False)
        axis.get_xaxis().set_major_formatter(matplotlib.ticker.ScalarFormatter())
        axis.minorticks_off()
    axes[0].set_ylabel("tokens / s")
    axes[0].legend(fontsize=7)
    figure.savefig(path, dpi=120)
    plt.close(figure)


# ---- the data loader


def loader_speed(folder, workers, length=512, blocks=2000, batch=32, vocab=32768):
    """Tokens per second that fairseq's masked-LM data pipeline hands over, without any training."""
    from fairseq.data import indexed_dataset
    from fairseq.tasks.masked_lm import MaskedLMConfig, MaskedLMTask

    words, path = dictionary(vocab), os.path.join(folder, "train")
    words.save(os.path.join(folder, "dict.txt"))
    builder = indexed_dataset.make_builder(path + ".bin", impl="mmap", vocab_size=vocab)
    generator = torch.Generator().manual_seed(0)
    for _ in range(blocks):
        for part in torch.randint(5, vocab, (length - 1,), generator=generator).split(32):  # sentences
            builder.add_item(part.int())
    builder.finalize(path + ".idx")
    config = MaskedLMConfig(data=folder, tokens_per_sample=length, sample_break_mode="complete", mask_prob=MASKED)
    config.seed, config.shorten_method = 1, "none"
    task = MaskedLMTask.setup_task(config)
    task.load_dataset("train")
    epoch = task.get_batch_iterator(
        task.dataset("train"), max_sentences=batch, num_workers=workers, seed=1
    ).next_epoch_itr(shuffle=True)
    tokens, start = 0, None
    for sample in epoch:
        start = start or time.perf_counter()  # the first batch includes the start of the workers
        tokens += sample["ntokens"]
    return (tokens - batch * length) / (time.perf_counter() - start)
