"""nanoGPT's train.py without its part for several GPUs, on a text made on the spot."""

import math
import time
from contextlib import nullcontext

import torch
from data import text
from gpt import GPT, GPTConfig

import mpips.torch as mt

out_dir = "out"
eval_interval, log_interval, eval_iters = 25, 10, 8
always_save_checkpoint = False
gradient_accumulation_steps = 1  # of a batch: the run adds up those of a step
batch_size, block_size = 16, 32
n_layer, n_head, n_embd = 2, 2, 32
learning_rate, max_iters, weight_decay = 1e-2, 100, 1e-1
beta1, beta2, grad_clip = 0.9, 0.95, 1.0
decay_lr, warmup_iters, lr_decay_iters, min_lr = True, 10, 100, 1e-3
device = "cuda" if torch.cuda.is_available() else "cpu"
ctx = nullcontext() if device == "cpu" else torch.autocast(device, torch.bfloat16)
master_process = True

torch.manual_seed(1337)
train_data, val_data, vocab_size = text(20_000)


def get_batch(split):
    data = train_data if split == "train" else val_data
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([data[i : i + block_size] for i in ix])
    y = torch.stack([data[i + 1 : i + 1 + block_size] for i in ix])
    return x.to(device), y.to(device)


iter_num, best_val_loss = 0, 1e9
model_args = {"n_layer": n_layer, "n_head": n_head, "n_embd": n_embd, "block_size": block_size}
model = GPT(GPTConfig(**model_args, vocab_size=vocab_size))
model.to(device)
optimizer = model.configure_optimizers(weight_decay, learning_rate, (beta1, beta2), device)


@torch.no_grad()
def estimate_loss():
    out = {}
    model.eval()
    for split in ["train", "val"]:
        losses = torch.zeros(eval_iters)
        for k in range(eval_iters):
            X, Y = get_batch(split)
            with ctx:
                _, loss = model(X, Y)
            losses[k] = loss.item()
        out[split] = losses.mean()
    model.train()
    return out


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    if it > lr_decay_iters:
        return min_lr
    decay_ratio = (it - warmup_iters) / (lr_decay_iters - warmup_iters)
    coeff = 0.5 * (1.0 + math.cos(math.pi * decay_ratio))
    return min_lr + coeff * (learning_rate - min_lr)


t0 = time.time()


def iteration(worker, k, X, Y):
    global best_val_loss, t0
    iter_num, optimizer = worker.steps, worker.optimizer  # each worker makes max_iters
    master_process = worker.once() and k % 2 == 0  # in the first batch of a step
    lr = get_lr(iter_num) if decay_lr else learning_rate
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr
    if iter_num % eval_interval == 0 and master_process:
        losses = estimate_loss()
        print(f"step {iter_num}: train {losses['train']:.4f}, val loss {losses['val']:.4f}")
        if losses["val"] < best_val_loss or always_save_checkpoint:
            best_val_loss = losses["val"]
            checkpoint = {"model": model.state_dict(), "model_args": model_args}
            checkpoint |= {"iter_num": iter_num, "best_val_loss": best_val_loss}
            worker.save(checkpoint, "ckpt.pt")
    for _ in range(gradient_accumulation_steps):
        with ctx:
            _, loss = model(X, Y)
            loss = loss / gradient_accumulation_steps
        loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    dt, t0 = time.time() - t0, time.time()
    if iter_num % log_interval == 0 and master_process:
        lossf = loss.item() * gradient_accumulation_steps
        print(f"iter {iter_num}: loss {lossf:.4f}, time {dt * 1000:.2f}ms")


def train(worker):
    windows = train_data.unfold(0, block_size + 1, 1)
    dataset = torch.utils.data.TensorDataset(windows[:, :-1], windows[:, 1:])
    for k, (X, Y) in enumerate(worker.loader(dataset, batch_size)):
        iteration(worker, k, X.to(device), Y.to(device))
    worker.print(f"at the end: val loss {estimate_loss()['val']:.4f}")


how = {"accumulate": 2, "clip": grad_clip, "steps": max_iters, "out": out_dir, "mode": "sync"}
raise SystemExit(mt.run(train, lambda: model, lambda params: optimizer, **how).code)
