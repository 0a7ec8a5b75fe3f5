"""Attention inside documents: equal to a dense mask in values and gradients, in memory that grows with the tokens."""

import pytest
import torch
from filled import filled_model
from rigs.command import python
from rigs.tables import each_row

from contracts.job_config import JobConfig
from finetune.model import attend, cut, find_documents
from finetune.rows import collate, load_tokenizer, pack, prepare

pytestmark = pytest.mark.long

LENGTH = 70
ROWS = {  # the lengths of the documents of each row
    "plain": None,
    "packed": [[10, 23, LENGTH - 33], [LENGTH]],
    "documents of one token": [[1, 1, LENGTH - 2], [LENGTH - 1, 1]],
}


def dense(rows):
    """[rows, tokens, tokens]: who sees whom."""
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().expand(2, -1, -1)
    if rows is None:
        return seen
    number = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in rows])
    return seen & (number[:, :, None] == number[:, None])


@each_row("name", ROWS)
def test_documents_equal_a_dense_mask(name):
    """Results and gradients of grouped heads."""
    draw, rows = torch.Generator().manual_seed(1), ROWS[name]
    shapes = ((2, 8, LENGTH, 16), (2, 2, LENGTH, 16), (2, 2, LENGTH, 16))
    given = [torch.randn(shape, generator=draw, requires_grad=True) for shape in shapes]
    at = None if rows is None else torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])
    documents = None if at is None else find_documents(at)
    got, _ = attend(None, *given, None, documents=documents)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        *given, attn_mask=dense(rows)[:, None], enable_gqa=True
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
    assert batch.packed
    results = []
    for kernel in ("by_document", "sdpa"):
        model = filled_model(config)
        model.set_attn_implementation(kernel)
        (chunk,) = cut(model, [(0, 4)], [0], fused_loss=False)
        loss = chunk(batch.tokens, batch.positions, batch.labels, packed=kernel == "by_document").sum()
        loss.backward()
        results.append((loss.detach(), [p.grad for p in chunk.parameters()]))
    (loss, grads), (wanted, others) = results
    torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=0)
    for one, other in zip(grads, others, strict=True):
        assert (one - other).norm() < 1e-5 * other.norm()


LONG = 128 * 1024
SCRIPT = f"""
import torch
from finetune.model import attend, find_documents
from finetune.recorder import highest_rss_bytes  # unlike ru_maxrss not that of the process that started this one
torch.set_num_threads(1)
positions = torch.arange({LONG})[None] % 1024
q, k, v = (torch.randn(1, heads, {LONG}, 16, requires_grad=True) for heads in (4, 2, 2))
before = highest_rss_bytes()
attend(None, q, k, v, None, documents=find_documents(positions))[0].sum().backward()
print(highest_rss_bytes() - before)
"""


def test_a_row_of_128k_tokens_takes_no_memory_of_its_square():
    """Forward and backward: a mask of one byte would be 16 GiB; what is stored has the row's length."""
    done = python(SCRIPT)
    row = LONG * (4 + 2 + 2) * 16 * 4  # queries, keys and values
    assert int(done.stdout) < 12 * row < LONG**2 / 16
