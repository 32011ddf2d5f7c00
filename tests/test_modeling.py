"""The models of transformers: adapters, quantised weights, weights that are elsewhere or in shards."""

import copy
import itertools
import threading

import numpy as np
import pytest
import torch
from helpers import Waits
from torch import nn

from tupe import cpu
from tupe.attention import Recorder
from tupe.encoder import BLOCKS
from tupe.positions import Dims, Positions, check_combination, parse
from tupe.schemes import SCHEMES

transformers = pytest.importorskip("transformers")
from tupe import modeling_tupe as modeling  # noqa: E402
from tupe.configuration_tupe import TupeConfig  # noqa: E402
from tupe.modeling_tupe import TupeForMaskedLM  # noqa: E402

IDS = torch.tensor([[0, 5, 3, 9, 7, 2, 1, 1], [0, 6, 7, 2, 2, 3, 8, 2]])
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
SUMS = ["untied+t5", "untied:norm:False+t5:layer", "shaw+shaw_values", "rope+window:size:4"]


def config(position="untied+t5", **options):
    """Of a tiny model; [CLS] is untied where that has a meaning."""
    cls = "untied"
    try:
        check_combination(position, parse(position), cls)
    except ValueError:
        cls = "tied"
    sizes = {"vocab_size": 40, "max_position_embeddings": 40}
    return TupeConfig(**{**SIZES, **sizes, "position": position, "cls_position": cls, **options})


def make(kind=TupeForMaskedLM, position="untied+t5", **options):
    """A tiny model whose every parameter matters."""
    torch.manual_seed(0)
    model = kind(config(position, **options)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape) * 0.1)
    return model


def first_output(model, ids=IDS, **options):
    """Where tokens are real."""
    out = model(ids, **options)[0]
    return out[ids != 1] if out.shape[:2] == ids.shape else out


def has_parameters(position):
    return any(True for _ in Positions(position, Dims(40, 32, 4, 2, head_dim=8, value_dim=8)).parameters())


def test_copies_of_data_parallel_compute_the_same():
    """transformers' Trainer makes them in a process with several GPUs; they have no parameters, only tensors."""
    model = make()
    expected = first_output(model)
    replica = replicated(model)
    assert not list(replica.parameters())
    assert torch.equal(first_output(replica), expected)


def replicated(module):
    """What torch.nn.parallel.replicate makes of it, without a second device."""
    copied = module._replicate_for_data_parallel()
    for name, child in module.named_children():
        setattr(copied, name, replicated(child))
    copied._former_parameters = dict(module._parameters)
    for name, parameter in module._parameters.items():
        copied._parameters.pop(name, None)
        if parameter is not None:
            setattr(copied, name, parameter.detach().clone().requires_grad_())
    return copied


LEARNED = [*filter(has_parameters, [*SCHEMES, *SUMS])]
# Every scheme that learns in the usual block; in the others, some with modules of their own or of the layer's.
BLOCKS_TRIED = [(position, "transformer") for position in LEARNED]
BLOCKS_TRIED += [(name, block) for name in [*SUMS, "deberta_v2", "cable"] for block in BLOCKS if block != "transformer"]


@pytest.mark.parametrize("position, block", BLOCKS_TRIED)
def test_weights_that_come_from_a_disk_for_their_module_s_call(position, block, tmp_path):
    """No weight is read past its module: outside of its call, it has no values."""
    accelerate = pytest.importorskip("accelerate")
    model = make(position=position, block=block, normaliser="relu2" if block == "gau" else "softmax")
    with torch.no_grad():
        expected = first_output(model)
        accelerate.disk_offload(model, str(tmp_path), execution_device=torch.device("cpu"))
        assert all(p.device.type == "meta" for p in model.parameters())
        torch.testing.assert_close(first_output(model), expected, rtol=0, atol=0)


@pytest.mark.parametrize("position", ["untied+t5", "absolute_d", "factored", "cpb", "deberta", "transformer_xl"])
def test_hooks_see_every_projection_of_positions(position):
    """Adapters, shards and quantised weights are modules that stand where the projection stood, and must be called."""
    model, called = make(position=position), set()
    for name, module in model.named_modules():
        module.register_forward_hook(lambda *_, name=name: called.add(name))
    model(IDS)
    with_weights = {name for name, module in model.named_modules() if module._parameters}
    assert any("positions" in name for name in with_weights) and with_weights <= called


def test_a_position_replaces_that_of_a_folder(tmp_path):
    """And the treatment of [CLS] that belongs to it, unless one is given."""
    TupeConfig(position="untied+t5", cls_position="untied").save_pretrained(tmp_path)
    treated = {
        position: TupeConfig.from_pretrained(tmp_path, position=position).cls_position
        for position in ("rope", "alibi", "untied")
    }
    assert treated == {"rope": "tied", "alibi": "tied", "untied": "untied"}
    assert TupeConfig.from_pretrained(tmp_path, position="alibi", cls_position="zero").cls_position == "zero"
    assert TupeConfig.from_pretrained(tmp_path).cls_position == "untied"
    assert TupeConfig(position="untied", cls_position="auto").cls_position == "untied"


@pytest.mark.parametrize(
    "position, kind",
    [("untied+t5", kind) for kind in ("lora", "dora", "ia3")]
    + [(position, "lora") for position in ("deberta", "factored", "transformer_xl", "cpb", "deberta_v2")],
)
def test_adapters_train(position, kind):
    """On every linear module, those of positions too; merged, they give the same."""
    peft = pytest.importorskip("peft")
    model = make(position=position)
    linear = [name for name, m in model.named_modules() if isinstance(m, nn.Linear) and m is not model.decoder]
    assert any("positions" in name for name in linear) or position == "deberta_v2"
    if kind == "ia3":
        options = peft.IA3Config(target_modules=linear, feedforward_modules=[])
    else:
        options = peft.LoraConfig(target_modules="all-linear", use_dora=kind == "dora", init_lora_weights=False)
    adapted = peft.get_peft_model(model, options)
    adapted(IDS, labels=IDS).loss.backward()
    trained = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
    assert len(trained) == len(linear) * {"lora": 2, "dora": 3, "ia3": 1}[kind]
    without = [name for name, p in trained.items() if p.grad is None or not p.grad.any()]
    assert not without
    with torch.no_grad():
        logits = adapted(IDS).logits
        torch.testing.assert_close(adapted.merge_and_unload()(IDS).logits, logits, rtol=1e-4, atol=1e-5)


def in_shards(rank, kind, store, positions):
    """One of two processes: what their shards have learned is what one whole model has."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{store}", rank=rank, world_size=2)
    for position in positions:
        whole, model = make(position=position), make(position=position)
        optimizer = torch.optim.SGD(whole.parameters(), 0.1)
        whole(IDS, labels=IDS).loss.backward()
        optimizer.step()
        if kind == "fsdp":
            from torch.distributed.fsdp import fully_shard

            mesh = torch.distributed.init_device_mesh("cpu", (2,))
            tied = model.decoder, model.tupe.encoder.tokens
            units = [m for m in model.modules() if m._parameters and m not in tied]
            for unit in (*reversed(units), *model.tupe.encoder.layers, model):
                fully_shard(unit, mesh=mesh)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            model(IDS, labels=IDS).loss.backward()
            optimizer.step()
            found = [p.full_tensor() for p in model.parameters()]
        else:
            import deepspeed.utils

            options = {"stage": 3, "stage3_param_persistence_threshold": 0}
            options = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.0, "zero_optimization": options}
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            options["zero_allow_untested_optimizer"] = True
            engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=options)
            engine.backward(engine(IDS, labels=IDS).loss)
            engine.step()
            found = [deepspeed.utils.safe_get_full_fp32_param(p) for p in model.parameters()]
        for (name, p), q in zip(whole.named_parameters(), found, strict=True):
            torch.testing.assert_close(q, p, rtol=1e-5, atol=1e-6, msg=f"{position}: {name}")
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("kind", [pytest.param("fsdp", marks=pytest.mark.thorough), "zero"])
def test_shards_have_the_same_gradients(kind, tmp_path, monkeypatch):
    """FSDP2, whose unit may be a layer or a projection of positions, and ZeRO-3, which gathers what a module's call
    reads, by hooks: in two processes."""
    if kind == "zero":
        pytest.importorskip("deepspeed")
    for name, value in {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": "0", "LOCAL_SIZE": "2", "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)
    arguments = kind, str(tmp_path / "store"), ["nopos", *LEARNED]
    # Not copies of this process, whose compiler has threads: one of them may hold what a copy waits for.
    way = "forkserver" if kind == "fsdp" else "spawn"  # deepspeed wants interpreters of its own
    torch.multiprocessing.start_processes(in_shards, arguments, nprocs=2, start_method=way)


@pytest.mark.parametrize("position", ["kerple+urpe", "fire", "sinusoidal_learned", "shaw_sinusoidal_learned", "shaw"])
def test_loading_into_a_model_without_memory(position, tmp_path):
    """Also by accelerate, and what weight decay must leave alone is known afterwards."""
    accelerate = pytest.importorskip("accelerate")
    model = make(position=position)
    model.save_pretrained(tmp_path)
    with accelerate.init_empty_weights():
        empty = TupeForMaskedLM(model.config)
    with torch.device("meta"):
        on_meta = TupeForMaskedLM(model.config)
    for other in (empty, on_meta):
        other.tie_weights()
        other = accelerate.load_checkpoint_and_dispatch(other, str(tmp_path), device_map={"": "cpu"})
    loaded = [TupeForMaskedLM.from_pretrained(tmp_path, device_map=to) for to in (None, "cpu")]
    groups = [[p.shape for p in group["params"]] for group in model.parameter_groups(0.1)]
    assert len(groups) == 2 - (position == "shaw")
    for other in (empty, on_meta, *loaded):
        assert torch.equal(first_output(other.eval()), first_output(model))
        assert [[p.shape for p in group["params"]] for group in other.parameter_groups(0.1)] == groups


KINDS = [modeling.TupeModel, TupeForMaskedLM, modeling.TupeForSequenceClassification]
KINDS += [modeling.TupeForQuestionAnswering, modeling.TupeForTokenClassification]
LEFT = torch.tensor([[1, 1, 0, 5, 3, 9, 7, 2], [0, 6, 7, 2, 2, 3, 8, 2]])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ids", [IDS, LEFT])
def test_vectors_in_place_of_ids(kind, ids):
    model, mask = make(kind), (ids != 1).long()
    vectors = model.get_input_embeddings()(ids)
    expected = first_output(model, ids)
    torch.testing.assert_close(first_output(model, ids, attention_mask=mask), expected)
    got = model(inputs_embeds=vectors, attention_mask=mask)[0]
    torch.testing.assert_close(got[ids != 1] if got.shape[:2] == ids.shape else got, expected)
    with pytest.raises(ValueError, match="give input_ids or inputs_embeds, and not both"):
        model(ids, inputs_embeds=vectors)
    with pytest.raises(ValueError, match="give input_ids or inputs_embeds, and not both"):
        model()


@pytest.mark.parametrize("position", ["untied+t5", "untied+t5:layer", "shaw+shaw_values", "rope", "deberta"])
@pytest.mark.parametrize("ids", [IDS, LEFT])
def test_attention_weights_and_the_two_parts_of_their_logits(position, ids):
    model, real = make(position=position), ids != 1
    out, encoder = model(ids, output_attentions=True), model.tupe.encoder
    torch.testing.assert_close(out.logits[real], model(ids).logits[real])
    assert len(out.attentions) == 2
    if ids is IDS:
        recorder = Recorder(encoder.normaliser)
        encoder(ids[:1], backend=recorder)  # of which nothing stays
        encoder(ids, backend=recorder)
        for weights, (words, positions) in zip(out.attentions, recorder.logits_of_layers(), strict=True):
            expected = (words + positions).masked_fill(~real[:, None, None], -1e9).softmax(-1)
            for row, tokens in enumerate(real):
                torch.testing.assert_close(weights[row][:, tokens], expected[row][:, tokens])
        torch.testing.assert_close(recorder.weights_of_layers[1], out.attentions[1])
        bias = encoder.positions.terms(8)[1][0]
        assert torch.equal(positions[0], torch.zeros_like(words[0]) if bias is None else bias)
    copy.deepcopy(model)  # nothing of what was recorded stays
    model.config._attn_implementation = "eager"  # transformers refuses the setting beside another one
    model.config.output_attentions = True
    assert len(model(ids).attentions) == 2


@pytest.mark.parametrize(
    "mask, message",
    [
        (torch.ones(2, 8, 8), r"be \[batch, length\], 0 at padding, here \[2, 8\], not \[2, 8, 8\]"),
        (torch.ones(2, 5), r"here \[2, 8\], not \[2, 5\]"),
        (torch.zeros(2, 8).index_fill(1, torch.tensor(7), -1e9), "this one is to be added to logits"),
        ([[1] * 8] * 2, "be a tensor, 0 at padding, not a list"),
    ],
)
def test_masks_of_a_wrong_kind_or_shape_are_refused_in_a_line(mask, message):
    with pytest.raises(ValueError, match=f"attention_mask .*{message}"):
        make(modeling.TupeForSequenceClassification)(IDS, attention_mask=mask)


@pytest.mark.parametrize("kind", KINDS)
def test_the_mask_says_what_is_padding(kind):
    """An id of padding that it calls a token, as collators draw, is one, with its own vector; also the first."""
    model, kept = make(kind), torch.tensor([[1, 1, 1, 1, 1, 1, 0, 0], [1] * 8])
    for column in (0, 3):
        ids, others = IDS.clone(), IDS.clone()
        ids[0, column], others[0, column] = 1, 30
        with torch.no_grad():
            model.get_input_embeddings().weight[1] = model.get_input_embeddings().weight[30]
            expected = model(others, attention_mask=kept)[0]
            for mask in (kept, kept.bool(), kept.float()):
                got = model(ids, attention_mask=mask)[0]
                real = kept == 1 if got.shape[:2] == ids.shape else ...
                torch.testing.assert_close(got[real], expected[real])


def test_heads_for_tokens_and_choices():
    """Trained on what only they can do: a label for each token, and the one of three texts with a 9."""
    torch.manual_seed(0)
    still = dict.fromkeys(["hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout"], 0.0)
    tokens = modeling.TupeForTokenClassification(config(num_labels=5, **still)).train()
    labels = torch.where(IDS == 1, -100, IDS % 5)
    choice = modeling.TupeForMultipleChoice(config(**still)).train()
    texts = torch.randint(10, 40, (16, 3, 6))
    texts[..., 0], right = 0, torch.randint(3, (16,))
    texts[torch.arange(16), right, 3] = 9
    for model, inputs, target in ((tokens, IDS, labels), (choice, texts, right)):
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        for _ in range(30):
            optimizer.zero_grad()
            loss = model(inputs, labels=target).loss
            loss.backward()
            optimizer.step()
        logits = model.eval()(inputs).logits
        assert loss < 0.5 and (logits.argmax(-1) == target)[target != -100].all()
    assert logits.shape == (16, 3)
    vectors = choice.get_input_embeddings()(texts)
    torch.testing.assert_close(choice(inputs_embeds=vectors).logits, logits)


@pytest.mark.parametrize(
    ("labels", "kind"),
    [
        (torch.tensor([0, 2]), "single_label_classification"),
        (torch.tensor([[0.0, 1.0, 1.0], [1.0, 0.0, 0.0]]), "multi_label_classification"),
        (torch.tensor([0.5, 2.0]), "regression"),
    ],
)
def test_the_configuration_notes_the_kind_of_scores(labels, kind, tmp_path):
    """As BERT's, of what was trained: from it a pipeline takes softmax, sigmoid or nothing."""
    outputs = 1 if kind == "regression" else 3
    bert = transformers.BertConfig(**SIZES, vocab_size=40, num_labels=outputs)
    for model in (
        make(modeling.TupeForSequenceClassification, num_labels=outputs),
        transformers.BertForSequenceClassification(bert),
    ):
        model(IDS, labels=labels)
        model.config.save_pretrained(tmp_path)
        assert type(model.config).from_pretrained(tmp_path).problem_type == kind


def test_names_of_another_place_are_no_settings():
    for name, value, valid in (
        ("cls", "untied", "cls_position"), ("layers", 2, "num_hidden_layers"), ("places", "random", "the option"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"TupeConfig has no {name}; valid: {valid}"):
            TupeConfig(**{name: value})


def test_a_frozen_bias_stays_frozen_and_threads_do_not_disturb_each_other():
    model = make()
    model.lm_head.bias.requires_grad_(False)
    model.resize_token_embeddings(44)
    assert not model.lm_head.bias.requires_grad and len(model.lm_head.bias) == 44
    expected, errors = model(IDS).logits, []

    def ask(**options):
        for _ in range(20):
            errors.append(float((model(IDS, **options).logits - expected).abs().max()))

    others = [threading.Thread(target=ask, kwargs={"output_attentions": True}), threading.Thread(target=ask)]
    for thread in others:
        thread.start()
    for thread in others:
        thread.join()
    assert len(errors) == 40 and max(errors) < 1e-4


def test_a_bias_of_the_same_size_stays_the_one_that_an_optimizer_knows():
    model = make()
    bias = model.lm_head.bias
    model.resize_token_embeddings(40)
    assert model.lm_head.bias is bias


def test_an_update_without_labels_has_a_loss_of_0():
    """Trainer gives the number of labels of all its batches, which is 0 where the collator masked nothing."""
    for model in (make(), make(modeling.TupeForTokenClassification)):
        for count in (None, 0, torch.tensor(0)):
            model.zero_grad()
            loss = model(IDS, labels=torch.full_like(IDS, -100), num_items_in_batch=count).loss
            loss.backward()
            assert loss == 0 and all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_an_empty_sequence_has_no_features_of_another():
    model = make(modeling.TupeForSequenceClassification)
    ids = torch.tensor([[0, 5, 6, 2, 1, 1, 1, 1], [1] * 8, [0, 7, 8, 9, 2, 1, 1, 1]])
    logits, whole = model(ids).logits, model(ids, output_hidden_states=True).logits
    torch.testing.assert_close(logits, whole)
    ids[2, 1:4] = torch.tensor([11, 12, 13])
    torch.testing.assert_close(model(ids).logits[:2], logits[:2])


def test_prompts_are_tuned():
    peft = pytest.importorskip("peft")
    model = make(modeling.TupeForSequenceClassification)
    options = peft.PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=3, num_layers=2, token_dim=32)
    tuned = peft.get_peft_model(model, options)
    tuned(input_ids=IDS, attention_mask=(IDS != 1).long(), labels=torch.tensor([0, 1])).loss.backward()
    prompt = tuned.prompt_encoder["default"].embedding.weight
    assert prompt.grad.abs().sum() > 0


def test_captum_attributes_to_words():
    captum = pytest.importorskip("captum.attr")
    model = make(modeling.TupeForSequenceClassification)
    layer = captum.LayerIntegratedGradients(lambda ids: model(ids).logits[:, 1], model.tupe.encoder.tokens)
    baseline = torch.where(IDS > 2, 3, IDS)
    expected = layer.attribute(IDS, baseline, n_steps=100)
    total = (model(IDS).logits - model(baseline).logits)[:, 1]
    torch.testing.assert_close(expected.sum((1, 2)).float(), total, atol=2e-2, rtol=0)
    vectors = model.get_input_embeddings()(torch.stack([IDS, baseline]))
    mask = (IDS != 1).long()
    integrated = captum.IntegratedGradients(lambda x, m: model(inputs_embeds=x, attention_mask=m).logits[:, 1])
    got = integrated.attribute(*vectors, n_steps=100, additional_forward_args=mask)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-3, check_dtype=False)


# Which have all ways of spreading what is known by offset; the other schemes are slow.
TRACED = [("untied+t5", "sdpa"), ("shaw+shaw_values", "eager"), ("window:size:4", "eager"), ("nonparametric", "sdpa")]


def slow_but(quick, *axes):
    """Every encoding on both attention paths, and the product with other axes: what is not in `quick` is slow."""
    names = dict.fromkeys([*SCHEMES, *(name for name, _ in TRACED)])
    cases = itertools.product(names, ("sdpa", "eager"), *axes)
    return [*quick, *(pytest.param(*case, marks=pytest.mark.slow) for case in cases if case not in quick)]


def texts(batch, length):
    """Of a length of their own, with padding on both sides."""
    ids = torch.randint(3, 40, (batch, length), generator=torch.Generator().manual_seed(length))
    ids[:, 0] = 0
    ids[1:2, length // 2 :], ids[2:3, :2] = 1, 1
    return ids, (ids != 1).long()


def same_at_other_sizes(model, run):
    for batch, length in ((1, 5), (3, 13)):
        ids, mask = texts(batch, length)
        torch.testing.assert_close(run(ids, mask)[mask == 1], model(ids, mask)[0][mask == 1], rtol=1e-4, atol=1e-5)


@pytest.fixture
def traceable(position, path):
    """The model, whose attention takes this path; nothing is recorded for a backward pass."""
    model = make(position=position)
    model.config._attn_implementation, model.config.return_dict = path, False
    with torch.no_grad():
        yield model


def sizes():
    size = {0: torch.export.Dim("batch", min=1, max=64), 1: torch.export.Dim("length", min=3, max=40)}
    return size, size


# Products of oneDNN's and others.
@pytest.mark.parametrize(
    "position, path, onednn",
    [(name, path, onednn) for name in SUMS for path, onednn in (("sdpa", True), ("sdpa", False), ("eager", True))]
    + [(name, "eager", True) for name in ("deberta_v2", "cope", "fire", "alibi")]
    + [pytest.param(name, "sdpa", True, marks=pytest.mark.thorough) for name in SCHEMES],
)
def test_traced_code_has_any_length(position, path, onednn, traceable, monkeypatch):
    monkeypatch.setattr("tupe.cpu.ONEDNN", onednn and cpu.HAS_ONEDNN)
    traced = torch.jit.trace(traceable, texts(2, 8), check_trace=False)
    same_at_other_sizes(traceable, lambda *inputs: traced(*inputs)[0])


@pytest.mark.thorough
@pytest.mark.parametrize("position, path", slow_but(TRACED))
def test_exported_programs_have_any_length(position, path, traceable):
    program = torch.export.export(traceable, texts(2, 8), dynamic_shapes=sizes(), strict=False).module()
    same_at_other_sizes(traceable, lambda *inputs: program(*inputs)[0])


@pytest.mark.parametrize("position, path, dynamo", slow_but([(*TRACED[0], False), (*TRACED[1], True)], (True, False)))
@pytest.mark.thorough
def test_onnx_has_any_length(position, path, dynamo, traceable, tmp_path):
    for name in ("onnx", *(["onnxscript"] if dynamo else [])):
        pytest.importorskip(name)
    runtime = pytest.importorskip("onnxruntime")
    file, names = str(tmp_path / "model.onnx"), ["ids", "mask"]
    axes = {name: {0: "batch", 1: "length"} for name in names}
    dynamic = {"dynamic_shapes": sizes()} if dynamo else {"dynamic_axes": axes, "opset_version": 18}
    with torch.set_grad_enabled(dynamo):  # not only where gradients are off
        program = torch.onnx.export(
            traceable,
            texts(2, 8),
            *([] if dynamo else [file]),
            dynamo=dynamo,
            input_names=names,
            verbose=False,
            **dynamic,
        )
    if dynamo:
        program.save(file)
    session = runtime.InferenceSession(file)
    same_at_other_sizes(
        traceable, lambda ids, mask: torch.tensor(session.run(None, {"ids": ids.numpy(), "mask": mask.numpy()})[0])
    )


@pytest.mark.thorough
def test_compiled_code_is_one_graph_in_the_first_call_and_few_over_lengths():
    model, graphs = make(), []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=count, fullgraph=True)
    for length in (8, 5, 13, 21, 34):
        ids, mask = texts(2, length)
        out = compiled(ids, mask, token_type_ids=torch.zeros_like(ids)).logits
        torch.testing.assert_close(out[mask == 1], model(ids, mask).logits[mask == 1], rtol=1e-4, atol=1e-5)
    assert 1 <= len(graphs) <= 3


@pytest.mark.parametrize("ids", [IDS, LEFT])
@pytest.mark.parametrize("masked", [False, True])
def test_a_forward_pass_waits_for_a_gpu_once(ids, masked):
    """When it has asked, at once, for all that it must know of padding: one `tolist`, which is no operation here."""
    model, mask = make().eval(), (ids != 1).long() if masked else None
    expected = model(ids, attention_mask=mask).logits
    with Waits() as waits:
        found = model(ids, attention_mask=mask).logits
    assert torch.equal(found, expected) and not waits.operations


def test_an_accumulated_loss_is_a_mean_over_masked_tokens(tmp_path):
    """One update of transformers' Trainer has one loss and one gradient, however its batch is split."""
    rows, rng = [], np.random.default_rng(1)
    for masked in (1, 2, 7, 9):  # a mean of the means of batches would depend on the split
        ids = rng.integers(4, 40, size=12)
        rows.append({"input_ids": ids, "labels": np.where(np.arange(12) < masked, ids, -100)})
    found = []
    for size in (1, 2, 4):
        torch.manual_seed(1)
        model = TupeForMaskedLM(config(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
        arguments = transformers.TrainingArguments(
            str(tmp_path), per_device_train_batch_size=size, gradient_accumulation_steps=4 // size, max_steps=1,
            learning_rate=0.0, report_to=[], use_cpu=True, logging_steps=1, save_strategy="no", max_grad_norm=1e9,
        )  # fmt: skip
        trainer = transformers.Trainer(model, arguments, train_dataset=rows)
        trainer.train()
        found.append([trainer.state.log_history[0][name] for name in ("loss", "grad_norm")])
    np.testing.assert_allclose(found[1:], [found[0]] * 2, rtol=1e-4)


@pytest.mark.parametrize(
    "mask, known",
    [
        ([[1, 1, 1, 0], [1, 1, 1, 1]], 7), ([[0, 1, 1, 1], [1, 1, 0, 0]], 5),
        ([[1, 0, 1, 1], [1, 1, 1, 1]], None), ([[0, 0, 0, 0], [1, 0, 1, 1]], None),
    ],
)  # fmt: skip
def test_a_mask_that_hides_tokens_between_others_is_told_from_padding(mask, known, monkeypatch):
    """Kernels that take padding on the right alone rely on a number of tokens that is given."""
    model, seen = make().eval(), []
    packing = model.tupe.encoder.packing
    monkeypatch.setattr(model.tupe.encoder, "packing", lambda ids, number: seen.append(number) or packing(ids, number))
    model(torch.full((2, 4), 7), torch.tensor(mask))
    assert seen == [known]
