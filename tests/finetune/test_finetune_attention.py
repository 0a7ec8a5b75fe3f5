"""Attention inside documents: equal to a dense mask in values and gradients, in memory that grows with the tokens."""

import subprocess
import sys

import pytest
import torch
from filled import filled_model
from rigs.tables import each_row

from contracts.job_config import JobConfig
from finetune.data import collate, pack, prepare
from finetune.model import Documents, attend, cut
from finetune.rows import load_tokenizer

pytestmark = pytest.mark.long

LENGTH = 70
ROWS = {
    "plain": None,
    "packed": [[10, 33, LENGTH], [LENGTH, LENGTH, LENGTH]],
    "documents of one token": [[1, 2, LENGTH], [LENGTH - 1, LENGTH, LENGTH]],
}


def dense(ends, window):
    """[rows, tokens, tokens]: who sees whom."""
    at = torch.arange(LENGTH)
    back = at[:, None] - at
    seen = ((back >= 0) & (back < (window or LENGTH))).expand(2, -1, -1)
    if ends is None:
        return seen
    number = torch.stack([torch.bucketize(at, torch.tensor(sorted(set(row))), right=True) for row in ends])
    return seen & (number[:, :, None] == number[:, None])


@each_row("name", ROWS)
@each_row("window", [None, 5, 16, 64, 100])
def test_documents_and_windows_equal_a_dense_mask(name, window):
    """Results and gradients of grouped heads; a window reaches over several blocks, one, or none."""
    draw, ends = torch.Generator().manual_seed(1), ROWS[name]
    shapes = ((2, 8, LENGTH, 16), (2, 2, LENGTH, 16), (2, 2, LENGTH, 16))
    given = [torch.randn(shape, generator=draw, requires_grad=True) for shape in shapes]
    documents = None if ends is None else Documents.of(torch.tensor(ends, dtype=torch.int32), LENGTH)
    got, _ = attend(None, *given, None, sliding_window=window, documents=documents)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        *given, attn_mask=dense(ends, window)[:, None], enable_gqa=True
    ).transpose(1, 2)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    back = torch.randn(wanted.shape, generator=draw)
    for one, other in zip(torch.autograd.grad(got, given, back), torch.autograd.grad(wanted, given, back), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_a_packed_row_trains_as_under_the_mask_of_transformers():
    """The whole model: loss and every gradient, against transformers' own mask for packed rows."""
    config = JobConfig(
        model_name_or_path="random:micro-llama", tokenizer_name="builtin:bytes", use_peft=False, dataset_rows=12
    )
    rows, _ = prepare(config, "train", load_tokenizer(config))
    batch = collate(pack(rows, 160)[:2], 2, 160, 2)
    assert batch.ends is not None
    results = []
    for kernel in ("by_document", "sdpa"):
        model = filled_model(config)
        model.set_attn_implementation(kernel)
        (chunk,) = cut(model, [(0, 4)], [0], fused_loss=False)
        loss = chunk(batch.tokens, batch.positions, batch.labels, batch.ends if kernel == "by_document" else None).sum()
        loss.backward()
        results.append((loss.detach(), [p.grad for p in chunk.parameters()]))
    (loss, grads), (wanted, others) = results
    torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=0)
    for one, other in zip(grads, others, strict=True):
        assert (one - other).norm() < 1e-5 * other.norm()


LONG = 128 * 1024
SCRIPT = f"""
import resource, torch
from finetune.model import Documents, attend
torch.set_num_threads(1)
ends = torch.arange(1024, {LONG} + 1, 1024, dtype=torch.int32)[None]
q, k, v = (torch.randn(1, heads, {LONG}, 16, requires_grad=True) for heads in (4, 2, 2))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
attend(None, q, k, v, None, documents=Documents.of(ends, {LONG}))[0].sum().backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def test_a_row_of_128k_tokens_takes_no_memory_of_its_square():
    """Forward and backward: a mask of one byte would be 16 GiB; what is kept are a few tensors of the row's length."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    row = LONG * (4 + 2 + 2) * 16 * 4  # queries, keys and values
    assert int(done.stdout) < 12 * row < LONG**2 / 16
