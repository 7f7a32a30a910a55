"""TensorFlow's tutorial of parameter servers, in PyTorch: who likes films of which genres."""

import random

import torch
from torch import nn
from torch.nn import functional as F

import mpips.torch as mt

feature_vocab = [
    "avenger", "ironman", "batman", "hulk", "spiderman", "kingkong", "wonder_woman",
]  # fmt: skip
label_vocab = ["no", "yes"]
lookup = {word: number for number, word in enumerate(feature_vocab)}
BATCH_SIZE, EMBEDDING_DIM, EPOCHS, EXAMPLES = 32, 16, 4, 1600


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb_layer = nn.Embedding(len(feature_vocab), EMBEDDING_DIM)
        self.dense = nn.Linear(EMBEDDING_DIM, 1)

    def forward(self, features):
        return self.dense(self.emb_layer(features).mean(1))[:, 0]


def dataset_fn(seed):
    rng = random.Random(seed)
    examples = []
    for _ in range(EXAMPLES):
        features = rng.sample(feature_vocab, 3)
        label = "yes" if "avenger" in features else "no"
        examples.append(([lookup[word] for word in features], label_vocab.index(label)))
    features, labels = zip(*examples, strict=True)
    return torch.utils.data.TensorDataset(torch.tensor(features), torch.tensor(labels).float())


def train_step(model, optimizer, features, labels):
    loss = F.binary_cross_entropy_with_logits(model(features), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def evaluate(model):
    features, labels = dataset_fn(seed=1).tensors
    with torch.no_grad():
        return ((model(features) > 0) == labels.bool()).float().mean().item()


def rmsprop(params):
    return torch.optim.RMSprop(params, lr=0.01)


def main(worker):
    model, optimizer = worker.model, worker.optimizer
    dataset = worker.loader(dataset_fn(seed=0), BATCH_SIZE)
    for epoch in worker.epochs(EPOCHS):
        losses = [train_step(model, optimizer, *batch) for batch in dataset]
        worker.print(f"Finished epoch {epoch}, loss {sum(losses) / len(losses):.4f}")
    worker.print(f"at the end: accuracy {evaluate(model):.4f}")


if __name__ == "__main__":
    raise SystemExit(mt.run(main, Model, rmsprop, mode="sync", out="films").code)
