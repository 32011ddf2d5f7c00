"""The encoder and its heads as models of the transformers library. `tupe.hf` registers them; an export holds a copy of
this file and its neighbours, which needs nothing but torch and transformers.

B batch, L sequence length, C width, V vocabulary.
"""

import logging
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import (
    BaseModelOutput,
    MaskedLMOutput,
    MultipleChoiceModelOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.utils import ModelOutput, can_return_tuple

from .attention import Recorder
from .backend_sdpa import Sdpa
from .configuration_tupe import AUTO_MAP, TupeConfig, own_code
from .cpu import Linear, linear
from .encoder import ClassificationHead, Encoder, HeadLinear, LMHead, init_bert, of_cls, second_segment
from .positions import parameter_groups
from .tracing import is_traced

logger = logging.getLogger(__name__)


class TupePreTrainedModel(PreTrainedModel):
    config_class = TupeConfig
    base_model_prefix = "tupe"
    supports_gradient_checkpointing = True
    # Losses here are means over the batch that forward sees. Because of `**options`, Trainer would assume that they are
    # divided by the size of all accumulated batches, and would sum the means with gradient accumulation.
    accepts_loss_kwargs = False
    _supports_sdpa = True
    _no_split_modules = ["TransformerLayer", "GatedAttentionLayer"]
    _keys_to_ignore_on_load_unexpected = [  # of the other models
        r"^lm_head\.", r"^classifier\.", r"^qa_outputs\.", r"^token_classifier\."
    ]  # fmt: skip

    def _init_weights(self, module: nn.Module) -> None:
        init_bert(module)

    def parameter_groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """Parameters for an optimizer; see positions.py. Trainer's own groups decay some that must not be."""
        return parameter_groups(self, weight_decay)

    def save_pretrained(self, save_directory: str | Path, *args: Any, **options: Any) -> None:
        """As every model's, with the code, a user's encodings too: the folder loads where this package is not."""
        self.config.auto_map = dict(AUTO_MAP)
        super().save_pretrained(save_directory, *args, **options)
        self.write_own_code(save_directory)
        Path(save_directory, "checksums.json").unlink(missing_ok=True)  # of what was here before

    def write_own_code(self, folder: str | Path) -> None:
        try:
            own = own_code(self.config.position)
        except ValueError as error:  # in Trainer, hours into a training
            logger.warning(f"{folder} gets no code of its encoding, and loads where that is imported: {error}")
            own = {}
        for name, code in own.items():
            Path(folder, name).write_text(code, encoding="utf-8")

    def _upload_modified_files(self, working_dir: str | Path, *args: Any, **options: Any) -> Any:
        """With push_to_hub=True, transformers uploads the folder before it returns to `save_pretrained` above."""
        self.write_own_code(working_dir)
        return super()._upload_modified_files(working_dir, *args, **options)

    @classmethod
    def from_pretrained(
        cls, *args: Any, output_loading_info: bool = False, **kwargs: Any
    ) -> "TupePreTrainedModel | tuple[TupePreTrainedModel, dict[str, Any]]":
        """Parameters that the files lack start as in a new model: transformers allocates them, but initialises only
        modules that it knows."""
        model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        changed = [key if isinstance(key, str) else key[0] for key in info["mismatched_keys"]]
        if missing := {*info["missing_keys"], *changed}:
            with torch.device("cpu"), torch.no_grad():
                fresh, own = cls(model.config).state_dict(), model.state_dict()
                for name in missing & fresh.keys():
                    if own[name].shape == fresh[name].shape:  # else ZeRO-3 has divided it, as it was initialised
                        own[name].copy_(fresh[name])
        return (model, info) if output_loading_info else model


def check_mask(mask: Any, ids: Tensor) -> None:
    """Raise ValueError for a mask that is not of the shape of ids [B, L], or has floats below 0."""
    if mask is None:
        return
    if not isinstance(mask, Tensor):
        raise ValueError(f"attention_mask must be a tensor, 0 at padding, not a {type(mask).__name__}")
    if mask.dim() != 2 or (not is_traced() and mask.shape != ids.shape):
        here, given = list(ids.shape), list(mask.shape)
        raise ValueError(f"attention_mask must be [batch, length], 0 at padding, here {here}, not {given}: all see all")
    if mask.is_floating_point() and not is_traced() and (mask < 0).any():
        raise ValueError("attention_mask must be 1 at tokens, 0 at padding; this one is to be added to logits")


def first_token(mask: Tensor) -> Tensor:
    """[B]: the column of each sequence's first token, by mask [B, L], False at padding; 0 where all is padding."""
    return mask.byte().argmax(1)


def shifted(x: Tensor, by: Tensor) -> Tensor:
    """x [B, L, ...] with row b moved to the left by by[b] columns, from 1-L to L-1. What leaves a row on one side comes
    back on the other."""
    length = x.size(1)  # ONNX knows no remainder of a length, and traced code takes len for a constant
    columns = torch.arange(length, device=x.device) + by[:, None]
    columns = torch.where(columns < 0, columns + length, torch.where(columns < length, columns, columns - length))
    return x[torch.arange(x.size(0), device=x.device)[:, None], columns]


def mean_cross_entropy(
    logits: Tensor, labels: Tensor, ignored: int = -100, count: Tensor | int | None = None
) -> Tensor:  # fmt: skip
    """The mean over the labels that are not ignored. If all are ignored it is 0: NaN would destroy the model. count:
    the number of labels in all batches of an update, if this is one of several."""
    total = F.cross_entropy(logits.float(), labels, ignore_index=ignored, reduction="sum")
    count = labels.ne(ignored).sum() if count is None else count
    return total / (count + (count == 0))


def shifted_back(x: Tensor, by: Tensor) -> Tensor:
    """x [B, H, L, L] of shifted rows, with queries and keys in the columns where they were."""
    x = shifted(x.permute(0, 2, 3, 1), -by)  # [B, L, L, H], queries
    return shifted(x.transpose(1, 2), -by).permute(0, 3, 2, 1)


class TupeModel(TupePreTrainedModel):
    """Features [B, L, C]; the first token's, `<s>`, stands for the whole sequence. Positions are counted from it,
    whatever padding there is before it; where a mask hides tokens behind it, their positions stay empty."""

    _auto_class = "AutoModel"  # with it, transformers saves the code too; 4 sets none for a model

    def __init__(self, config: TupeConfig):
        super().__init__(config)
        self.encoder = Encoder(
            config.vocab_size,
            config.pad_token_id,
            config.eos_token_id,
            **config.model_options(),
        )
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.encoder.tokens

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.encoder.tokens = value

    @can_return_tuple
    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None, inputs_embeds: Tensor | None = None,
        output_hidden_states: bool | None = None, output_attentions: bool | None = None,
        only_cls: bool = False, **others: Any,
    ) -> BaseModelOutput:  # fmt: skip
        """input_ids [B, L]; attention_mask [B, L], 0 at padding (padding ids are recognised without it); token_type_ids
        [B, L] are not needed, because `</s> </s>` separates segments; inputs_embeds [B, L, C], the tokens' vectors in
        place of ids (no ids: all are of segment A, and only the mask tells padding); output_attentions: see
        `Recorder`; only_cls: only the features [B, C] of the first tokens. Raises ValueError for segments that
        contradict that, and for inputs that this model does not have."""
        if unknown := [name for name, value in others.items() if value is not None and name != "use_cache"]:
            valid = (
                "input_ids, attention_mask, token_type_ids, inputs_embeds, output_hidden_states, output_attentions, "
                "return_dict, and labels of a model with a head"
            )
            raise ValueError(f"{', '.join(unknown)}: this model has no such input; valid: {valid}")
        if inputs_embeds is not None and input_ids is None:  # ids of some token that is not padding
            input_ids = inputs_embeds.new_full(inputs_embeds.shape[:2], self.config.bos_token_id, dtype=torch.long)
        elif input_ids is None or inputs_embeds is not None:
            raise ValueError("give input_ids or inputs_embeds, and not both")
        vectors = inputs_embeds
        encoder, pad = self.encoder, self.config.pad_token_id
        check_mask(attention_mask, input_ids)
        is_pad = input_ids == pad
        mask = ~is_pad if attention_mask is None else attention_mask != 0
        first, is_word = first_token(mask), is_pad & mask
        if is_traced():
            shift, num_tokens, pad_is_word = True, None, attention_mask is not None
        else:  # once for all questions, because each time a GPU is waited for
            begins = mask & ~F.pad(mask[:, :-1], (1, 0))  # where tokens begin, or go on behind hidden ones
            questions = torch.stack([first.sum(), mask.sum(), is_word.sum(), (begins.sum(1) > 1).sum()])
            shift, num_tokens, pad_is_word, holes = questions.tolist()
            num_tokens = None if holes else num_tokens  # the encoder looks for itself
        if pad_is_word and vectors is None:
            vectors = encoder.tokens(input_ids)
        if attention_mask is not None:
            # Ids of padding where the mask is 0, and nowhere else: where it calls that id a token, which a collator may
            # have drawn in place of a masked one, the token's own vector goes beside the id of another.
            input_ids = input_ids.masked_fill(is_pad, self.config.bos_token_id).masked_fill(~mask, pad)
        if token_type_ids is not None and not is_traced():
            self.check_segments(input_ids, token_type_ids)
        if shift:
            input_ids = shifted(input_ids, first)
            vectors = None if vectors is None else shifted(vectors, first)
        encoder.checkpoint_activations = self.gradient_checkpointing
        # PyTorch exports nothing of it to ONNX where gradients are computed
        fused = self.config._attn_implementation == "sdpa" and not torch.onnx.is_in_onnx_export()
        dtype = encoder.tokens.weight.dtype
        obstacle = Sdpa().refuses(encoder.positions, encoder.normaliser, input_ids.device, dtype)
        backend = "sdpa" if fused and obstacle is None else "plain"
        if output_attentions is None:
            output_attentions = self.config.output_attentions
        recorder = Recorder(encoder.normaliser) if output_attentions else None
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        features, hiddens = encoder(
            input_ids, bool(output_hidden_states), num_tokens, of_cls(input_ids) if only_cls else None, vectors,
            recorder or backend,
        )  # fmt: skip
        weights = recorder.weights_of_layers if recorder else []
        if shift:
            features = features if only_cls else shifted(features, -first)
            hiddens = [shifted(x, -first) for x in hiddens or ()]
            weights = [shifted_back(x, first) for x in weights]
        return BaseModelOutput(
            last_hidden_state=features,
            hidden_states=tuple(hiddens) if output_hidden_states else None,
            attentions=tuple(weights) if output_attentions else None,
        )

    def check_segments(self, input_ids: Tensor, token_type_ids: Tensor) -> None:
        """Tokenisers without segments return all zeros; anything else must agree with the model's segments."""
        mask = input_ids != self.config.pad_token_id
        learned = self.config.segments == "learned"
        segments = second_segment(input_ids, self.config.eos_token_id)
        if not learned:
            segments = torch.zeros_like(segments)
        if token_type_ids[mask].any() and (token_type_ids != segments)[mask].any():
            where = "begin after the first `</s> </s>`" if learned else "do not exist in this model"
            raise ValueError(f"token_type_ids would have no effect: segments {where}; leave them out")


class TupeWithHead(TupePreTrainedModel):
    """Base of the models with a head on the features and its loss."""

    output_class: type[ModelOutput]
    only_cls = False  # whether it reads the features of each sequence's first token alone, [B, C]

    def __init__(self, config: TupeConfig):
        super().__init__(config)
        self.tupe = TupeModel(config)
        self.add_head(config)
        self.post_init()

    @can_return_tuple
    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None, **options: Any,
    ) -> Any:  # fmt: skip
        """The head's `output_class`. num_items_in_batch: the number of labels in all batches of an update."""
        logits, out = self.logits(input_ids, attention_mask, options)
        loss = None if labels is None else self.loss(logits, labels, num_items_in_batch)
        return self.output_class(loss=loss, logits=logits, hidden_states=out.hidden_states, attentions=out.attentions)

    def logits(
        self, input_ids: Tensor | None, attention_mask: Tensor | None, options: dict[str, Any]
    ) -> tuple[Tensor, BaseModelOutput]:
        """The head's logits, and what the encoder returned."""
        raise NotImplementedError

    def loss(self, logits: Tensor, labels: Tensor, count: Tensor | int | None) -> Tensor:
        return mean_cross_entropy(logits.flatten(0, -2), labels.flatten(), count=count)

    def features(
        self, input_ids: Tensor | None, attention_mask: Tensor | None, options: dict[str, Any]
    ) -> BaseModelOutput:
        return self.tupe(input_ids, attention_mask, **{**options, "only_cls": self.only_cls, "return_dict": True})


class Decoder(Linear):
    """The product with the input embeddings, whose weight it shares: the head's own bias is an argument."""

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:  # type: ignore[override]  # see above
        return linear(x, self.weight, bias)


IS_5 = int(transformers.__version__.partition(".")[0]) >= 5
TIED = {"decoder.weight": "tupe.encoder.tokens.weight"}  # transformers 4 takes only the first names


class TupeForMaskedLM(TupeWithHead):
    """Logits [B, L, V]; with labels [B, L] (-100: ignored), the mean cross-entropy: over all batches of an update, if
    transformers' Trainer tells how many labels they have."""

    output_class = MaskedLMOutput
    accepts_loss_kwargs = True
    _auto_class = "AutoModelForMaskedLM"
    _tied_weights_keys = TIED if IS_5 else list(TIED)

    def add_head(self, config: TupeConfig) -> None:
        if not config.tie_word_embeddings:
            raise ValueError("tie_word_embeddings=False: the head of this model multiplies by the input embeddings")
        self.lm_head = LMHead(config.hidden_size, config.vocab_size, config=self.tupe.encoder.config)
        self.decoder = Decoder(config.hidden_size, config.vocab_size, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        return self.decoder

    def set_output_embeddings(self, value: Decoder) -> None:
        self.decoder = value

    def resize_token_embeddings(self, *args: Any, **options: Any) -> nn.Embedding:
        tokens = super().resize_token_embeddings(*args, **options)
        old = self.lm_head.bias
        if added := len(tokens.weight) - len(old):  # else it stays the one that an optimizer knows
            self.lm_head.bias = nn.Parameter(F.pad(old.detach(), (0, added)), old.requires_grad)  # cut, if below 0
        return tokens

    def logits(self, *inputs: Any) -> tuple[Tensor, BaseModelOutput]:
        out = self.features(*inputs)
        return self.decoder(*self.lm_head(out.last_hidden_state)), out


class TupeForSequenceClassification(TupeWithHead):
    """Logits [B, num_labels]; with labels, the loss that transformers has for them: of one label the squared error, of
    classes [B] the cross-entropy, of several labels at a time, floats [B, num_labels], the binary one. Which of them it
    was is noted in the configuration, from which a pipeline takes the kind of its scores. One output is in the units of
    the configuration's `label_range`."""

    output_class, only_cls = SequenceClassifierOutput, True
    _auto_class = "AutoModelForSequenceClassification"

    def add_head(self, config: TupeConfig) -> None:
        sizes = config.hidden_size, config.classifier_inner, config.num_labels
        self.classifier = ClassificationHead(*sizes, config.classifier_dropout)

    def logits(self, *inputs: Any) -> tuple[Tensor, BaseModelOutput]:
        out = self.features(*inputs)
        logits = self.classifier(out.last_hidden_state)  # of [B, C]
        if self.config.label_range and logits.size(1) == 1:
            least, greatest = self.config.label_range
            logits = least + logits * (greatest - least)
        return logits, out

    def loss(self, logits: Tensor, labels: Tensor, count: Tensor | int | None) -> Tensor:
        if self.config.problem_type is None:
            several = "multi_label_classification" if labels.is_floating_point() else "single_label_classification"
            self.config.problem_type = several if logits.size(1) > 1 else "regression"
        kind = self.config.problem_type
        if kind == "multi_label_classification":
            return F.binary_cross_entropy_with_logits(logits.float(), labels.float())
        if kind == "single_label_classification":
            return mean_cross_entropy(logits, labels.flatten(), count=count)
        return F.mse_loss(logits.float().view(labels.shape), labels.float())


class TupeForQuestionAnswering(TupeWithHead):
    """Logits [B, L] of an answer's first and last token; with positions, the mean cross-entropy (of those inside)."""

    _auto_class = "AutoModelForQuestionAnswering"

    def add_head(self, config: TupeConfig) -> None:
        self.qa_outputs = HeadLinear(config.hidden_size, 2)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        **options: Any,
    ) -> QuestionAnsweringModelOutput:
        out = self.features(input_ids, attention_mask, options)
        start, end = self.qa_outputs(out.last_hidden_state).unbind(-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            length = start.size(1)  # a position beyond it, of a cut text, is left out
            pairs = (start, start_positions), (end, end_positions)
            loss = sum(mean_cross_entropy(x, y.flatten().clamp(0, length), length) for x, y in pairs) / 2
        return QuestionAnsweringModelOutput(
            loss=loss, start_logits=start, end_logits=end, hidden_states=out.hidden_states, attentions=out.attentions
        )


class TupeForTokenClassification(TupeWithHead):
    """Logits [B, L, num_labels]; with labels [B, L] (-100: ignored), the mean cross-entropy."""

    output_class = TokenClassifierOutput
    _auto_class = "AutoModelForTokenClassification"

    def add_head(self, config: TupeConfig) -> None:
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.token_classifier = HeadLinear(config.hidden_size, config.num_labels)

    def logits(self, *inputs: Any) -> tuple[Tensor, BaseModelOutput]:
        out = self.features(*inputs)
        return self.token_classifier(self.dropout(out.last_hidden_state)), out


class TupeForMultipleChoice(TupeWithHead):
    """input_ids [B, N, L], N texts to choose from -> logits [B, N]; with labels [B], the mean cross-entropy."""

    output_class, only_cls = MultipleChoiceModelOutput, True
    _auto_class = "AutoModelForMultipleChoice"

    def add_head(self, config: TupeConfig) -> None:
        sizes = config.hidden_size, config.classifier_inner, 1
        self.classifier = ClassificationHead(*sizes, config.classifier_dropout)

    def logits(
        self, input_ids: Tensor | None, attention_mask: Tensor | None, options: dict[str, Any]
    ) -> tuple[Tensor, BaseModelOutput]:
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, **options}
        batch, choices = next(x for x in inputs.values() if isinstance(x, Tensor)).shape[:2]
        inputs = {key: x.flatten(0, 1) if isinstance(x, Tensor) else x for key, x in inputs.items()}
        out = self.features(inputs.pop("input_ids"), inputs.pop("attention_mask"), inputs)
        return self.classifier(out.last_hidden_state).view(batch, choices), out
