"""logprob beside the bf16 product alone, which every implementation has to make, and beside torch's own way, block by block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from longscan.kernels.bench.case import Candidate, Case, Errors, Peer, relative_error
from longscan.kernels.bench.limits import logprob_work
from longscan.kernels.bench.measure import peak_bytes
from longscan.kernels.checks import Backend
from longscan.kernels.logprob import logprob
from longscan.kernels.logprob.cases import Case as Shape
from longscan.kernels.logprob.cases import Inputs, make

TOLERANCE = 1e-4
"""Absolute error of a log-probability, against the reference in fp32."""
PRODUCT = "the bf16 product alone"
BLOCK = 4096
"""Rows whose logits torch holds at a time."""


def cases(
    shapes: Sequence[Shape],
    *,
    backend: Backend = "cutile",
    device: str = "cuda",
    memory: Callable[[Callable[[], object]], int] | None = peak_bytes,
) -> Iterator[Case]:
    for shape in shapes:
        yield _case(shape, make(shape, device, torch.bfloat16), backend, memory)


def _case(shape: Shape, inputs: Inputs, backend: Backend, memory: Callable[[Callable[[], object]], int] | None) -> Case:
    hidden, weight, targets = inputs.hidden_TD, inputs.weight_VD, inputs.targets_T
    truth = logprob(hidden.float(), weight.float(), targets, backend="torch")
    wanted = targets >= 0

    def ours() -> torch.Tensor:
        return logprob(hidden, weight, targets, backend=backend)

    def check() -> Errors:
        error = float((ours() - truth)[wanted].abs().max())
        return {"logprob, absolute": error if error == error else float("inf")}

    def product() -> Candidate:
        out = hidden.new_empty(len(hidden), len(weight))

        def call() -> torch.Tensor:
            return torch.mm(hidden, weight.T, out=out)

        def check_product() -> Errors:
            return {"logits": relative_error(call()[:64], hidden[:64].float() @ weight.float().T)}

        return Candidate("", call, check_product)

    def plain() -> torch.Tensor:
        blocks = zip(hidden.split(BLOCK), targets.clamp(min=0).split(BLOCK), strict=True)
        return torch.cat([torch.log_softmax((h @ weight.T).float(), 1).gather(1, t.long()[:, None])[:, 0] for h, t in blocks])

    def check_plain() -> Errors:
        return {"logprob": relative_error(plain()[wanted], truth[wanted])}

    return Case(
        operator="logprob",
        shape=f"{shape.name}, V {shape.vocabulary}, D {shape.width}",
        load=f"{shape.rows} rows",
        work=logprob_work(shape.width, shape.vocabulary, shape.rows),
        ours=Candidate("longscan", ours, check, TOLERANCE),
        peers=[Peer(PRODUCT, lambda: [product()]), Peer("torch, logits in bf16", lambda: [Candidate("", plain, check_plain)])],
        memory=memory,
    )
