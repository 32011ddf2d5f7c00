"""Configuration of an exported TUPE encoder. This folder needs transformers and torch, nothing else of the training
code."""

from transformers import PretrainedConfig


class TupeConfig(PretrainedConfig):
    """position: position schemes joined by "+"; cls_position: "untied" if logits from and to [CLS] do not depend on
    positions; layer, normaliser: kinds of layer and of attention normalisation; segments: whether a vector per segment
    of a pair is added; classifier_name: what a fairseq checkpoint calls the classification head. See positions.py and
    encoder.py beside this file for all names."""

    model_type = "tupe"

    def __init__(
        self,
        vocab_size=32768,
        hidden_size=768,
        num_hidden_layers=12,
        num_attention_heads=12,
        intermediate_size=3072,
        max_position_embeddings=512,
        position="untied+t5",
        cls_position="untied",
        layer="transformer",
        normaliser="softmax",
        segments=False,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
        activation_dropout=0.0,
        classifier_dropout=0.1,
        classifier_inner=None,
        classifier_name="sentence_classification_head",
        layer_norm_eps=1e-5,
        bos_token_id=0,
        pad_token_id=1,
        eos_token_id=2,
        **options,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.intermediate_size = intermediate_size
        self.max_position_embeddings = max_position_embeddings
        self.position = position
        self.cls_position = cls_position
        self.layer = layer
        self.normaliser = normaliser
        self.segments = segments
        self.hidden_dropout_prob = hidden_dropout_prob
        self.attention_probs_dropout_prob = attention_probs_dropout_prob
        self.activation_dropout = activation_dropout
        self.classifier_dropout = classifier_dropout
        self.classifier_inner = classifier_inner or hidden_size
        self.classifier_name = classifier_name
        self.layer_norm_eps = layer_norm_eps
        super().__init__(bos_token_id=bos_token_id, pad_token_id=pad_token_id, eos_token_id=eos_token_id, **options)
