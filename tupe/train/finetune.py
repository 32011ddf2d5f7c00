"""Fine-tuning on GLUE by the second engine, with the numbers of the first."""

from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checkpoints.trained import read_model
from ..common.architectures import ELECTRA, split_size
from ..data.examples import Examples, collate
from ..data.glue import TASKS, glue_name, score, write_predictions
from ..encoder import ClassificationHead, Encoder, LMHead, of_cls
from ..modeling_tupe import TupeForSequenceClassification
from .loop import Loop
from .settle import Settled


class ForGlue(TupeForSequenceClassification):
    """The sum of the losses, of classes or of a regression, and the predictions: input_ids [B, L], labels [B]. Numbers
    are between 0 and 1 here, as in the prepared data, whatever the range of the labels."""

    _auto_class = None

    def forward(self, input_ids: Tensor, labels: Tensor, num_tokens: int | None = None) -> tuple[Tensor, Tensor]:
        x, _ = self.tupe.encoder(input_ids, False, num_tokens, of_cls(input_ids))
        logits = self.classifier(x)[: len(labels)]
        if self.config.num_labels == 1:
            logits = logits.squeeze(1)
            return F.mse_loss(logits, labels.float(), reduction="sum"), logits
        return F.cross_entropy(logits, labels.long(), reduction="sum"), logits.argmax(dim=1)


def new_model(recipe: Settled, task: str) -> ForGlue:
    """The pre-trained model with a new head, whose weights are those that the first engine gives it for this seed."""
    model, glue = recipe.model, TASKS[task]
    labels = dict(enumerate(glue.names))
    kind = "single_label_classification" if glue.labels else "regression"
    names = {"id2label": labels, "label2id": {name: number for number, name in labels.items()}, "problem_type": kind}
    names["architectures"] = ["TupeForSequenceClassification"]
    trained = replace(read_model(recipe.finetune_from_model), config=model)
    found = trained.model(ForGlue, **names, label_range=glue.range)
    config = found.config
    torch.manual_seed(recipe.seed)
    Encoder(config.vocab_size, 1, 2, model)  # whose random numbers the head's come after
    if split_size(recipe.architecture)[0] not in ELECTRA:  # whose generator has its own
        LMHead(model.width, config.vocab_size, config=model)
    head = ClassificationHead(model.width, config.classifier_inner, glue.outputs, model.pooler_dropout)
    found.classifier.load_state_dict(head.state_dict())
    encoder = found.tupe.encoder
    encoder.attention_backend = model.attention
    encoder.checkpoint_activations = model.checkpoint_activations
    if recipe.compile == "yes":  # not by itself: a fine-tuning is short, and its lengths are many
        encoder.compile()
    return found


class Finetuning(Loop):
    unit = 1.0  # nats, or a squared error
    collate = staticmethod(collate)

    def build(self, data: str, symbols: list[str]) -> tuple[ForGlue, Examples, dict[str, Examples]]:
        recipe = self.recipe
        self.name = glue_name(recipe.glue_task, data)
        names = [recipe.train_subset, *recipe.valid_subset.split(",")]
        parts = {name: Examples(Path(data, self.name), name, recipe.model.max_positions) for name in names}
        return new_model(recipe, self.name), parts.pop(recipe.train_subset), parts

    def scores_of(self, split: str, dataset: Examples) -> dict:
        batches = dataset.longest_first(self.recipe.batch_size_valid)
        loss, predictions = self.measure(dataset, batches)
        metrics = TASKS[self.name].metrics
        scores = {"loss": loss, **score(metrics, [predictions[i] for i in range(len(dataset))], dataset.targets)}
        best = self.run.add_scores(self.epoch(), self.done, split, scores)
        if split == next(iter(self.splits)):
            self.is_best = best
        if self.run.writes:
            glue, folder = TASKS[self.name], self.run.folder
            write_predictions(glue, predictions, dataset.targets, folder, split, self.is_best)
        return scores
