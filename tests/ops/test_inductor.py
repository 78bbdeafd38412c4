"""Compiled by inductor, which generates C++: the same outputs and gradients."""

import warnings

import pytest
import torch

from longspan.testing import Subject


@pytest.mark.inductor
@pytest.mark.usefixtures("plain_memory")
@pytest.mark.parametrize("spec", ["linear", "linear(rotary=100.0)", "softmax", "kernel", "linear; softmax"])
def test_inductor(spec):
    subject = Subject(spec)
    module, x = subject.make(), subject.data(n=131).requires_grad_()
    torch._dynamo.reset()
    found = []
    with warnings.catch_warnings():
        # Inductor and Dynamo emit warnings about their internals.
        warnings.simplefilter("ignore")
        for call in (torch.compile(lambda x: module(x)[0], fullgraph=True), lambda x: module(x)[0]):
            y = call(x)
            found.append((y, *torch.autograd.grad(y.square().sum(), (x, *module.parameters()))))
    torch.testing.assert_close(found[0], found[1], atol=1e-9, rtol=1e-9)
