"""A DLRM: tables of categories and a net of dense features interact; clicks are learnt."""

import numpy as np
import torch
from data import clicks
from torch import nn

import mpips
import mpips.torch as mt

arch_sparse_feature_size, arch_embedding_size = 8, [2000, 300, 50]
arch_mlp_bot, arch_mlp_top = [4, 16, 8], [14, 16, 1]
mini_batch_size, nepochs, learning_rate, print_freq = 128, 4, 0.05, 20
rule = mpips.Adagrad(learning_rate)


class DLRM_Net(nn.Module):
    def create_mlp(self, ln, sigmoid_layer=-1):
        layers = nn.ModuleList()
        for i in range(len(ln) - 1):
            layers.append(nn.Linear(ln[i], ln[i + 1]))
            layers.append(nn.Sigmoid() if i == sigmoid_layer else nn.ReLU())
        return nn.Sequential(*layers)

    def create_emb(self, m, ln):
        emb_l = nn.ModuleList()
        for n in ln:
            init = mpips.Uniform(np.sqrt(1 / n))
            EE = mt.EmbeddingBag(n, m, mode="sum", init=init, optimizer=rule)
            emb_l.append(EE)
        return emb_l

    def __init__(self):
        super().__init__()
        self.emb_l = self.create_emb(arch_sparse_feature_size, arch_embedding_size)
        self.bot_l = self.create_mlp(arch_mlp_bot)
        self.top_l = self.create_mlp(arch_mlp_top, sigmoid_layer=len(arch_mlp_top) - 2)

    def forward(self, dense_x, lS_i):
        x = self.bot_l(dense_x)
        ly = [E(column[:, None]) for E, column in zip(self.emb_l, lS_i.unbind(1), strict=True)]
        T = torch.stack([x, *ly], dim=1)
        Z = torch.bmm(T, T.transpose(1, 2))
        li, lj = torch.tril_indices(Z.shape[1], Z.shape[2], offset=-1)
        return self.top_l(torch.cat([x, Z[:, li, lj]], dim=1))[:, 0]


def inference(dlrm, test_ld):
    with torch.no_grad():
        right = sum(((dlrm(X, lS_i) > 0.5) == T).sum().item() for X, lS_i, T in test_ld)
    return right / len(test_ld.dataset)


def run(worker):
    train_data = torch.utils.data.TensorDataset(*clicks(8000, arch_embedding_size, seed=0))
    test_data = torch.utils.data.TensorDataset(*clicks(2000, arch_embedding_size, seed=1))
    test_ld = torch.utils.data.DataLoader(test_data, batch_size=1000)
    train_ld = worker.loader(train_data, mini_batch_size)
    dlrm, optimizer = worker.model, worker.optimizer
    loss_fn = nn.BCELoss()
    for k in worker.epochs(nepochs):
        for j, (X, lS_i, T) in enumerate(train_ld):
            Z = dlrm(X, lS_i)
            E = loss_fn(Z, T)
            optimizer.zero_grad()
            E.backward()
            optimizer.step()
            if j % print_freq == 0:
                print(f"Training it {j}/{len(train_ld)} of epoch {k}, loss {E.item():.6f}")
    worker.print(f"at the end: accuracy {inference(dlrm, test_ld):.4f}")


if __name__ == "__main__":
    raise SystemExit(mt.run(run, DLRM_Net, rule, mode="sync", out="dlrm").code)
