"""The loss on documents that training never reads, after every number of loops up to the trained one.

Which rows are evaluated does not depend on the machine: micro-batches of a fixed shape are dealt to the ranks whole,
and the sums of their rows are added up in order, in fp64. So the result is the same to the bit each time and for any
number of ranks. Every rank runs as many forward passes as the others; what is computed twice for that counts once.
"""

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_loom.config import job_config
from titan_loom.data.lanes import IGNORED_LABEL
from titan_loom.data.loader import Batch, LaneLoader
from titan_loom.data.sources import Parts, list_sources
from titan_loom.data.tokenizer import Tokenizer
from titan_loom.distributed.data_parallel import DataParallel
from titan_loom.distributed.process_group import from_rank0
from titan_loom.errors import UserError
from titan_loom.tools.logging import logger
from titan_loom.training.batches import MicroBatch, micro_batches
from titan_loom.training.loss import Loss


class Validator:
    """Holds the rows to evaluate, read once: called by all ranks together.

    Args:
        listing: what `list_sources` found for the sources of `data`.

    Raises:
        UserError, ReadError: on every rank, when there is nothing to evaluate or it cannot be read.
    """

    def __init__(
        self,
        config: job_config.Validation,
        data: job_config.Data,
        tokenizer: Tokenizer,
        *,
        seed: int,
        seq_len: int,
        listing: dict[str, Parts],
        device: torch.device,
        loss: Loss,
    ):
        batch = from_rank0(read_rows, config, data, tokenizer, seed, seq_len, listing)
        self.num_tokens = int((batch.labels != IGNORED_LABEL).sum())
        self._config, self._device, self._loss = config, device, loss
        self._document_eos = tokenizer.eos_id if data.isolates_documents else None
        self._batch = _share(batch, config)
        logger.info(
            f"Validation: {self.num_tokens:,} tokens of {config.path or 'the holdout'} in {config.steps} micro-batches "
            f"of {config.local_batch_size} sequences"
        )

    def run(self, model: nn.Module, data_parallel: DataParallel) -> dict[str, float]:
        """`loss`, the mean over all tokens, and `loop/<t>/loss` after each number of loops t, from one pass."""
        with data_parallel.evaluation():
            rows = self._config.local_batch_size
            parts = micro_batches(self._batch, rows, self._device, self._document_eos)
            sums = torch.stack([self._row_sums(model, part) for part in parts]).cpu()
        gathered = [torch.empty_like(sums) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, sums)
        # (micro-batches, loops, rows) in the order in which they were dealt
        in_order = torch.stack(gathered, dim=1).flatten(0, 1)[: self._config.steps]
        losses = (in_order.transpose(0, 1).flatten(1).sum(1) / self.num_tokens).tolist()
        return {"loss": losses[-1]} | {f"loop/{loop}/loss": loss for loop, loss in enumerate(losses, start=1)}

    def _row_sums(self, model: nn.Module, part: MicroBatch) -> Tensor:
        """(loops, rows) fp64: sums of the cross-entropy."""
        readouts = model(part.inputs, documents=part.documents, every_loop=True).readouts
        losses = (self._loss(hidden, model.head_weight, part.labels) for hidden in readouts)
        return torch.stack([of_loop.ce.double().sum(1) for of_loop in losses])


def list_validation(
    config: job_config.Validation, data: job_config.Data
) -> tuple[job_config.Data, dict[str, Parts] | None]:
    """The `[data]` that validation reads in one lane, and the parts of `validation.path`; None without a path, when it
    reads what `data` holds out.

    Raises:
        UserError: as `list_sources` does for a path.
    """
    single = replace(data, lanes=1, stages=[], mix_unit="sequence")
    if config.path is None:
        return single, None
    single = replace(single, sources={"validation": job_config.Source(path=config.path, format=config.format)})
    try:
        return replace(single, holdout_percent=0.0), list_sources(single)
    except UserError as error:
        raise UserError(str(error).replace("data.sources.validation.", "validation.")) from error


def read_rows(
    config: job_config.Validation,
    data: job_config.Data,
    tokenizer: Tokenizer,
    seed: int,
    seq_len: int,
    listing: dict[str, Parts],
) -> Batch:
    """All rows, as the first step of a run with one lane that reads them."""
    single, found = list_validation(config, data)
    loader = LaneLoader(
        single,
        job_config.Dataloader(),
        tokenizer,
        seed=seed,
        seq_len=seq_len,
        global_batch_size=config.steps * config.local_batch_size,
        steps=1,
        total_tokens=None,
        dp_rank=0,
        dp_degree=1,
        holdout=config.path is None,
        listing=found or listing,
    )
    return next(loader)


def _share(batch: Batch, config: job_config.Validation) -> Batch:
    """This rank's micro-batches of `batch`; the last one again where others have one more."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dealt = [min(i + rank, config.steps - 1) for i in range(0, config.steps, world_size)]
    rows = torch.arange(len(batch.labels)).view(config.steps, -1)[dealt].flatten()
    tensors = {name: value[rows] for name, value in vars(batch).items() if isinstance(value, Tensor)}
    return replace(batch, **tensors)
