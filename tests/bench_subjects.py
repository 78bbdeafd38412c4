"""Subjects for a worker in tests: one that is right, and ways to be wrong. Needs torch and nothing else."""

import os

import torch
from torch.nn import functional as F


def attend(q, k, v, eps=1e-6, diagonal=0):
    q, k = F.elu(q) + 1, F.elu(k) + 1
    weights = torch.einsum("bnhd,bmhd->bhnm", q, k).tril(diagonal)
    return torch.einsum("bhnm,bmhd->bnhd", weights / (weights.sum(-1, keepdim=True) + eps), v)


def right(task):
    os.write(1, b"something that is no answer\n")
    return lambda q, k, v: attend(q, k, v).flatten(2)


def right_step(task):
    past = []

    def step(q, k, v):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        past.append((k, v))
        keys, values = (torch.cat(parts, 1) for parts in zip(*past, strict=True))
        queries = torch.cat([torch.zeros_like(keys[:, 1:]), q], 1)
        return attend(queries, keys, values)[:, -1:].transpose(1, 2)

    return step


def leaking(task):
    return lambda q, k, v: attend(q, k, v, diagonal=1).flatten(2)


def off(task):
    return lambda q, k, v: attend(q, k, v, eps=1.0).flatten(2)


def nan(task):
    return lambda q, k, v: attend(q, k, v).flatten(2) * float("nan")


def wrong_gradient(task):
    return lambda q, k, v: attend(q.detach() + 0 * q, k, v).flatten(2)


def narrow(task):
    return lambda q, k, v: attend(q, k, v)[:, :, 0]


def forgetful(task):
    return lambda *token: attend(*(t.transpose(1, 2) for t in token)).transpose(1, 2)


def failing(task):
    raise TypeError("of no\nuse")


def dying(task):
    def die(*inputs):
        os.write(2, b"last words\n")
        os._exit(3)

    return die


def large(task):
    first = True

    def take(q, k, v):
        nonlocal first
        if q.shape[1] <= 64 and first:
            torch.ones(60 * 2**20)  # 240 MB of loading
            first = False
        return torch.ones(10 * 2**20) + q.sum()  # 40 MB, and as much again for the sum

    return take


def about():
    return {"fake": "1.2"}


SUBJECTS = {
    "ft": {"attention": right, "step": right_step},
    "performer": {"attention": failing},
    "right": {"attention": right, "step": right_step},
    "leaking": {"attention": leaking},
    "off": {"attention": off},
    "nan": {"attention": nan},
    "wrong_gradient": {"attention": wrong_gradient},
    "narrow": {"attention": narrow},
    "forgetful": {"step": forgetful},
    "failing": {"attention": failing, "step": failing},
    "dying": {"attention": dying},
    "large": {"attention": large},
}
