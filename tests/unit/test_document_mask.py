from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from tests.unit.test_nanocoder import TINY, VARIANTS, initialized, trained
from titan_loom.models.layers import document_attention as paths
from titan_loom.models.layers.document_mask import (
    Documents,
    block_mask,
    documents_at,
    positions_by_eos,
    positions_in_documents,
)
from titan_loom.models.nanocoder.ngram import ngram_rows
from titan_loom.models.nanocoder.refresh import causal_convolution

EOS = 2


def packed(batch: int = 2, seq: int = 60, mean_length: int = 12, seed: int = 0) -> torch.Tensor:
    """Rows of random tokens with an EOS now and then."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(EOS + 1, TINY.vocab_size, (batch, seq), generator=generator)
    return ids.masked_fill(torch.rand(batch, seq, generator=generator) < 1 / mean_length, EOS)


def documents_of(ids: torch.Tensor) -> Documents:
    return documents_at(positions_by_eos(ids, EOS))


def pieces(ids: torch.Tensor) -> list[tuple[int, slice]]:
    """Row and columns of every document, found the slow way."""
    found = []
    for row, tokens in enumerate(ids.tolist()):
        ends = [i + 1 for i, token in enumerate(tokens) if token == EOS and i + 1 < len(tokens)]
        found += [(row, slice(start, end)) for start, end in pairwise([0, *ends, len(tokens)])]
    return found


def for_flex(documents: Documents) -> Documents:
    """The same documents as CUDA gets them."""
    return documents._replace(block_mask=block_mask(documents.positions))


@pytest.fixture(params=["by document", "flex"])
def documents_on_path(request, monkeypatch):
    """`documents_of` for each of the attention's paths; FlexAttention uncompiled, which is forward only on a CPU."""
    if request.param == "by document":
        return documents_of
    monkeypatch.setattr(paths, "compiled_flex_attention", lambda: flex_attention)
    return lambda ids: for_flex(documents_of(ids))


def heads(batch: int, seq: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(batch, seq, num_heads, 8, generator=generator).to(dtype).requires_grad_() for num_heads in (4, 2, 2)
    ]


def test_eos_belongs_to_the_document_that_it_ends():
    ids = torch.tensor([[7, 8, EOS, 9, EOS, EOS, 7, 7], [EOS, 7, 7, 7, 7, 7, 7, EOS]])
    documents = documents_of(ids)
    assert documents.positions.tolist() == [[0, 1, 2, 0, 1, 0, 0, 1], [0, 0, 1, 2, 3, 4, 5, 6]]
    assert documents.positions.dtype == torch.int64
    assert documents.block_mask is None


@pytest.mark.parametrize("seq", [5, 128, 300, 512])
@pytest.mark.parametrize("mean_length", [3, 100, 10_000])
def test_the_block_mask_is_what_torch_finds_by_trying_all_pairs(seq, mean_length):
    positions = documents_of(packed(3, seq, mean_length)).positions
    found = block_mask(positions)
    expected = create_block_mask(found.mask_mod, 3, None, seq, seq, device="cpu")
    assert found.shape == expected.shape
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    for name in ("kv_indices", "full_kv_indices", "q_indices", "full_q_indices"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.05)]
)
def test_attention_and_its_gradients_are_those_of_a_boolean_mask(dtype, tolerance):
    q, k, v = heads(2, 60, dtype)
    positions = documents_of(packed()).positions
    starts = torch.arange(60) - positions
    mask = (starts.unsqueeze(2) == starts.unsqueeze(1)).tril().unsqueeze(1)
    found = paths.document_attention(q, k, v, Documents(positions, None))
    transposed = (t.double().transpose(1, 2) for t in (q, k, v))
    expected = F.scaled_dot_product_attention(*transposed, attn_mask=mask, enable_gqa=True).transpose(1, 2)
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    gradients = torch.autograd.grad((found * weights).sum(), (q, k, v))
    wanted = torch.autograd.grad((expected * weights).sum(), (q, k, v))
    for result, reference in zip((found, *gradients), (expected, *wanted), strict=True):
        assert result.dtype == dtype
        torch.testing.assert_close(result.double(), reference.double(), rtol=tolerance, atol=tolerance)


def test_every_path_attends_as_in_each_document_alone(documents_on_path):
    q, k, v = (t.detach() for t in heads(2, 300))
    ids = packed(2, 300, mean_length=70)
    found = paths.document_attention(q, k, v, documents_on_path(ids))
    for row, columns in pieces(ids):
        alone = (t[row : row + 1, columns].transpose(1, 2) for t in (q, k, v))
        expected = F.scaled_dot_product_attention(*alone, is_causal=True, enable_gqa=True).transpose(1, 2)
        torch.testing.assert_close(found[row : row + 1, columns], expected)


def test_the_operator_keeps_torchs_contract():
    q, k, v = (t.detach().flatten(0, 1).requires_grad_() for t in heads(2, 60))
    positions = documents_of(packed()).positions.flatten()
    torch.library.opcheck(paths.attention_by_document, (q, k, v, positions))


@pytest.mark.parametrize("args", VARIANTS)
def test_a_packed_row_gives_what_its_documents_give_alone(args, documents_on_path):
    with torch.no_grad():
        model, ids = trained(args).float(), packed()
        logits = model.logits(model(ids, documents=documents_on_path(ids)).hidden)
        for row, columns in pieces(ids):
            alone = model.logits(model(ids[row : row + 1, columns]).hidden)[0]
            # fp32 1e-5 of the logits' own size
            assert (logits[row, columns] - alone).abs().max() < 1e-5 * alone.abs().max()


def changed_in(ids: torch.Tensor, document: tuple[int, slice]) -> torch.Tensor:
    """Other tokens in all of one document but its EOS."""
    changed = ids.clone()
    part = changed[document]
    changed[document] = torch.where(part == EOS, EOS, EOS + 1 + (part + 7) % (TINY.vocab_size - EOS - 1))
    return changed


def check_isolation(logits, ids: torch.Tensor) -> None:
    """Perturb every document in turn; `logits` gives (batch, seq, vocab) of ids."""
    before = logits(ids)
    for row, columns in pieces(ids):
        after = logits(changed_in(ids, (row, columns)))
        others = torch.ones(ids.shape, dtype=torch.bool)
        others[row, columns] = False
        assert torch.equal(after[others], before[others])
        assert columns.stop - columns.start == 1 or not torch.equal(after[row, columns], before[row, columns])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("args", VARIANTS[:2])
def test_no_bit_of_a_document_depends_on_another(args, dtype, documents_on_path):
    with torch.no_grad():
        model = trained(args).to(dtype)
        check_isolation(lambda ids: model.logits(model(ids, documents=documents_on_path(ids)).hidden), packed(1, 48))
        long = packed(1, 300, mean_length=90)  # more than one block of FlexAttention and of the flash kernel
        check_isolation(lambda ids: model.logits(model(ids, documents=documents_on_path(ids)).hidden), long)


@pytest.mark.parametrize("args", VARIANTS[:2])
def test_no_bit_of_a_document_depends_on_where_another_is_cut(args, documents_on_path):
    with torch.no_grad():
        model, ids = trained(args).float(), packed(1, 48)
        (row, first), *_ = (piece for piece in pieces(ids) if piece[1].stop - piece[1].start > 4)
        cut = ids.clone()
        cut[row, first.start + 2] = EOS
        before, after = (model(each, documents=documents_on_path(each)).hidden for each in (ids, cut))
        assert torch.equal(before[row, first.stop :], after[row, first.stop :])


def test_compiled_documents_are_isolated_too():
    torch._dynamo.reset()
    model, ids = trained(replace(TINY, refresh="gated")).float(), packed(1, 24, mean_length=8)
    for block in model.blocks:
        block.compile(dynamic=False)
    with torch.no_grad():
        check_isolation(lambda ids: model.logits(model(ids, documents=documents_of(ids)).hidden), ids)
    torch._dynamo.reset()


@pytest.mark.parametrize("args", VARIANTS[:2])
def test_a_documents_loss_has_no_gradient_in_another(args):
    model, ids = trained(args).float(), packed(1, 40)
    _, (_, own), *_ = pieces(ids)
    model(ids, documents=documents_of(ids)).hidden[0, own].sum().backward()
    used = model.embedding.weight.grad.abs().sum(1).nonzero().flatten().tolist()
    assert set(used) == set(ids[0, own].tolist())


@pytest.mark.parametrize("refresh", ["scalar", "gated"])
@pytest.mark.parametrize("path", ["by document", "flex"])
def test_one_graph_serves_all_documents(refresh, path):
    torch._dynamo.reset()
    model, graphs = initialized(replace(TINY, refresh=refresh)), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    for block in model.blocks:
        block.compile(backend=backend, dynamic=False)
    with torch.set_grad_enabled(path == "by document"):
        for seed in range(4):
            ids = packed(mean_length=3 + 8 * seed, seed=seed)
            documents = documents_of(ids)
            hidden = model(ids, documents=documents if path == "by document" else for_flex(documents)).hidden
            if hidden.requires_grad:
                hidden.sum().backward()
    assert len(graphs) == 1
    torch._dynamo.reset()


@pytest.mark.parametrize("order", [2, 4])
def test_ngrams_start_anew_in_every_document(order):
    ids = packed(mean_length=4)
    rows = ngram_rows(ids, 10**9, order, positions=documents_of(ids).positions)
    for row, columns in pieces(ids):
        assert torch.equal(rows[row : row + 1, columns], ngram_rows(ids[row : row + 1, columns], 10**9, order))


def test_the_convolution_starts_anew_in_every_document():
    ids = packed(mean_length=12)
    generator = torch.Generator().manual_seed(1)
    x, weights = (torch.randn(2, 60, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    kernel = torch.randn(6, 9, generator=generator, dtype=torch.float64)
    x.requires_grad_(), kernel.requires_grad_()
    y = causal_convolution(x, kernel, documents_of(ids).positions)
    expected = torch.zeros_like(y)
    for row, columns in pieces(ids):
        expected[row, columns] = causal_convolution(x[row : row + 1, columns], kernel)[0]
    torch.testing.assert_close(y, expected)
    gradients, wanted = (torch.autograd.grad((out * weights).sum(), (x, kernel)) for out in (y, expected))
    torch.testing.assert_close(gradients, wanted)


def test_an_infinity_stays_in_its_document():
    positions = positions_in_documents(torch.tensor([[True, False, False, True, False]]))
    x = torch.ones(1, 5, 1)
    x[0, 1] = torch.inf
    y = causal_convolution(x, torch.ones(1, 9), positions).flatten().tolist()
    assert y == [1, torch.inf, torch.inf, 1, 2]
