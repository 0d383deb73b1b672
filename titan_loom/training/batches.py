"""A step's batch on its way to the model: waiting for it with the other ranks, counting, cutting, hashing it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from titan_loom.data.lanes import IGNORED_LABEL
from titan_loom.data.loader import Batch, Fetch, LaneLoader, batch_digests, combine_digests
from titan_loom.distributed.process_group import first_error, gather_objects, ranks_where, sum_over_ranks
from titan_loom.errors import Interrupted
from titan_loom.models.layers.document_mask import Documents, documents_at, positions_by_eos
from titan_loom.tools.logging import logger
from titan_loom.training.signals import StopRequest

MAX_SECONDS_ALONE = 60.0
"""A rank that waits for data meets the others this often, well within the timeout of collectives."""


@dataclass
class MicroBatch:
    """Rows that go through the model together, on its device."""

    inputs: Tensor
    """(rows, seq) int64."""
    labels: Tensor
    """(rows, seq) int64, `IGNORED_LABEL` where there is nothing to learn."""
    sources: Tensor
    """(rows,) int64, -1 for a row without a source."""
    documents: Documents | None
    carried: tuple[Tensor, ...] = ()
    """What the last segment of loops left for the next one."""

    def source_sums(self, values: Tensor, num_sources: int) -> Tensor:
        """Sums over the tokens of each source, (num_sources,), of `values`: (rows, seq), 0 where ignored."""
        sums = torch.zeros(num_sources, device=values.device)
        # Rows without a source have no supervised token and add zero to whichever entry they meet.
        return sums.index_add_(0, self.sources.clamp(min=0), values.sum(1))


def next_batch(loader: LaneLoader, step: int, stop: StopRequest, report_seconds: float) -> Batch:
    """This rank's batch of `step`, when every rank has one. While one has not, the others neither hang nor time out.

    Raises on all ranks alike:
        UserError, ReadError: the first of those that a rank met.
        Interrupted: asked to stop while a rank was waiting for data.
    """
    fetch = Fetch(loader)
    while True:
        fetch.join(min(report_seconds, MAX_SECONDS_ALONE))
        waiting, failed, stopping = sum_over_ranks([fetch.is_alive(), fetch.error is not None, bool(stop)])
        if failed:
            raise first_error(fetch.error)
        if not waiting:
            return fetch.batch
        if stopping:
            raise Interrupted(f"stopped by {stop.reason or 'another rank'} while waiting for data")
        logger.warning(f"Step {step} waits for the data of ranks {ranks_where(fetch.is_alive())}")


def micro_batches(batch: Batch, rows: int, device: torch.device, document_eos: int | None) -> list[MicroBatch]:
    """`batch` in parts of `rows` rows, on `device`. With `document_eos`, the token that ends a document, the documents
    of a row are kept apart."""
    positions = [] if batch.positions is None else [batch.positions]
    parts = zip(*(t.split(rows) for t in (batch.inputs, batch.labels, batch.sources, *positions)), strict=True)
    result = []
    for part in parts:
        inputs, labels, sources, *positions = (t.to(device, non_blocking=True) for t in part)
        documents = None
        if document_eos is not None:
            in_documents = positions[0] if positions else positions_by_eos(inputs, document_eos)
            documents = documents_at(in_documents, labels == IGNORED_LABEL)
        result.append(MicroBatch(inputs, labels, sources, documents))
    return result


def supervised_tokens(batch: Batch, num_sources: int) -> list[int]:
    """This rank's supervised tokens by source."""
    by_row = (batch.labels != IGNORED_LABEL).sum(1)
    return [int(by_row[batch.sources == source].sum()) for source in range(num_sources)]


def global_sha256(batch: Batch) -> str:
    """One hash of the whole global batch, of which `batch` is this rank's part."""
    return combine_digests([digest for of_rank in gather_objects(batch_digests(batch)) for digest in of_rank])
