"""`PackStream`: packed shards as the batches of one rank, exact and resumable."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from packsvc.errors import ConfigError, StateError
from packsvc.stream.batch import PackedBatch
from packsvc.stream.cache import CacheSettings
from packsvc.stream.collate import RowShape
from packsvc.stream.device import deliver, open_device, stage
from packsvc.stream.epoch import Epoch, Picks, Steps, runs
from packsvc.stream.maker import BatchMaker, Made, Run, in_order
from packsvc.stream.mixing import Mixture
from packsvc.stream.opening import Out, check_tokenizer, open_outputs
from packsvc.stream.options import Check, Layout, Remainder, Unit, choice, rank_and_world, size_in_bytes, whole_number
from packsvc.stream.order import PackOrder
from packsvc.stream.prefetch import prefetch
from packsvc.stream.state import Binding, Position, read_state, write_state
from packsvc.stream.workers import PassBoard


@dataclass(slots=True, kw_only=True)
class _Pass:
    """One iteration: from which step of which epoch, and every how manyth step it takes."""

    epoch: int
    step: int
    stride: int = 1
    worker: int | None = None


class PackStream(IterableDataset[PackedBatch]):
    """The packs of one output, or of several mixed, as `PackedBatch`es for one rank.

    The order is a pure function of (seed, epoch, index); ranks, threads and DataLoader workers only share it out.
    Every pack of an epoch goes to one rank at one step, and every rank has the same number of steps. Under a
    DataLoader use `batch_size=None`.
    """

    def __init__(
        self,
        out: Out | Sequence[tuple[Out, float]],
        *,
        rank: int | None = None,
        world_size: int | None = None,
        batch_packs: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        device: torch.device | str | None = None,
        split: str = "train",
        epoch: int = 0,
        remainder: str = "drop",
        layout: str = "trimmed",
        align: int = 1,
        tokenizer: object = None,
        threads: int = 2,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_limit: int | str | None = None,
        balance: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        unit: str = "loss_tokens",
        check: str = "touch",
    ) -> None:
        """Open the manifest and check it; no shard is read yet unless `check="all"`.

        Args:
            out: Folder or URL of a packed output, or a list of (output, share) to mix.
            rank: Which rank reads; with `world_size` from torch.distributed, else the environment, else 0 of 1.
            world_size: How many ranks read.
            batch_packs: Packs in a batch of one rank.
            seed: Of the order.
            shuffle: False: the order of the manifest.
            device: Where batches are handed over; default the CPU.
            split: Which split to read.
            epoch: Where to begin.
            remainder: "drop" leaves out the packs that fill no global batch, "pad" fills it with packs without loss.
            layout: "trimmed" gives real tokens only, "padded" `seq_len` tokens a pack.
            align: Pad each segment to a multiple of this (context parallelism, FP8).
            tokenizer: What the trainer uses: a tokenizer, its folder or hub id, or its fingerprint. An output that
                another one encoded is refused.
            threads: How many read ahead; 0: none, some small batches are read together when the first of them is asked
                for. Never changes what is read.
            cache_dir: Where shards of a remote output are kept on the local disk; None: nowhere, each row group is
                fetched when it is needed. An output on a local disk is read where it is.
            cache_limit: Bytes, or a text like "20GB", that the cache may take; None: no limit.
            balance: Deal the packs of each global batch to ranks by attention cost.
            storage_options: For fsspec.
            unit: What shares are shares of: "loss_tokens", "tokens" or "packs".
            check: "touch" compares a shard with the manifest before its first batch, "all" does so at opening.

        Raises:
            ConfigError: An argument makes no sense, or no step is left in an epoch.
            FormatError: An output is missing, unfinished, foreign, contradicts itself, or has another tokenizer.
            DamageError: With `check="all"`: a shard is not what the manifest says.
        """
        super().__init__()
        self._device = open_device(device)
        limit = size_in_bytes("cache_limit", cache_limit)
        cache = None if cache_dir is None else CacheSettings(folder=os.fspath(cache_dir), limit_bytes=limit)
        self._outputs = open_outputs(out, split=split, storage_options=storage_options, cache=cache)
        if tokenizer is not None:
            check_tokenizer(self._outputs, tokenizer)
        self.rank, self.world_size = rank_and_world(rank, world_size)
        self.batch_packs = whole_number("batch_packs", batch_packs, least=1)
        self.seed = whole_number("seed", seed, least=0)
        self.shuffle = bool(shuffle)
        self._threads = whole_number("threads", threads, least=0)
        self._unit = choice(Unit, "unit", unit)
        self._shape = self._row_shape(choice(Layout, "layout", layout), whole_number("align", align, least=1))
        self._balance = bool(balance)
        self._mixture = self._mix()
        num_packs = len(self._mixture) if self._mixture else self._outputs[0].num_packs
        self._steps = Steps(
            num_packs=num_packs,
            global_batch=self.batch_packs * self.world_size,
            remainder=choice(Remainder, "remainder", remainder),
        )
        self._refuse_empty()
        self._binding = Binding(
            plan_ids=tuple(output.manifest.plan_id for output in self._outputs),
            digests=tuple(output.manifest.digest for output in self._outputs),
            split=split,
            shuffle=self.shuffle,
            seed=self.seed,
            shares=tuple(output.share for output in self._outputs if output.share is not None),
            unit=str(self._unit),
        )
        self._epoch = whole_number("epoch", epoch, least=0)
        self._position = 0
        self._begun = False
        """Whether an iteration of this epoch has begun, so that the next one starts another."""
        self._just_loaded = False
        self._handed_out = [0] * len(self._outputs)
        self._turn = 0
        """Counts iterations; an older one that goes on would hand out packs twice."""
        self._closed = False
        self._worker_pass: _Pass | None = None
        self._board = PassBoard()
        self._maker: BatchMaker | None = None
        self._pid = os.getpid()
        self._announce(new_pass=True)
        if choice(Check, "check", check) is Check.ALL:
            self._open_maker().touch_all()

    # --- what a loop needs -----------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Steps in an epoch, the same on every rank, wherever one stands."""
        return len(self._steps)

    def __iter__(self) -> Iterator[PackedBatch]:
        """The batches from here to the end of the epoch; of the next epoch where this one was begun before.

        An epoch counts as begun when its first batch is asked for.
        """
        if get_worker_info() is not None:
            self._board.take_pass()
            if self._worker_pass is not None and self._worker_pass.worker is not None:
                self._worker_pass = None  # of the pass before, in a worker that lives on
        return self._iterate()

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch. Right after `load_state_dict` of that same epoch its position stays."""
        number = whole_number("epoch", epoch, least=0)
        self._refuse_closed()
        if self._just_loaded and number == self._epoch and not self._board.in_workers:
            return
        self._epoch, self._position, self._begun, self._just_loaded = number, 0, False, False
        self._turn += 1
        self._announce(new_pass=True)

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands after the last batch handed out, as plain JSON values.

        Raises:
            StateError: DataLoader workers read the stream, so that this process does not know.
        """
        if get_worker_info() is not None:
            return self._worker_state()
        self._refuse_if_in_workers("state_dict")
        epoch, position = self._epoch, self._position
        if position >= len(self._steps) * self._steps.global_batch:
            epoch, position = epoch + 1, 0
        return write_state(self._binding, self._at(epoch, position))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; the next iteration starts with the batch after it.

        Raises:
            StateError: The state is of other data or another order, or its position falls inside a global batch.
        """
        self._refuse_closed()
        size = self._steps.global_batch
        found = read_state(state, self._binding, global_batch=size, world_size=self.world_size)
        self._handed_out = list(found.handed_out) or [0] * len(self._outputs)
        if (info := get_worker_info()) is not None:
            self._load_in_worker(found, (info.id, info.num_workers))
            return
        if found.worker is not None:
            raise StateError(
                f"the state is that of DataLoader worker {found.worker[0]} of {found.worker[1]}; "
                "give it back to the StatefulDataLoader that it came from"
            )
        epoch, position = found.epoch, found.position
        if position >= len(self._steps) * size:
            epoch, position = epoch + 1, 0
        self._epoch, self._position, self._begun, self._just_loaded = epoch, position, False, True
        self._turn += 1
        self._announce(new_pass=True)

    def close(self) -> None:
        """Stop reading ahead and let go of all files. The stream cannot be read afterwards."""
        self._closed = True
        self._turn += 1
        maker, self._maker = self._maker, None
        if maker is not None and self._pid == os.getpid():
            maker.close()

    def __enter__(self) -> PackStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- what a log needs ------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch being read, or the one that comes first."""
        return self._epoch

    @property
    def global_batch(self) -> int:
        """Packs that all ranks together take at a step."""
        return self._steps.global_batch

    @property
    def num_packs(self) -> int:
        """Packs in the order of an epoch, those that no step takes included."""
        return self._steps.num_packs

    @property
    def num_dropped_packs(self) -> int:
        """Packs of each epoch's order that no step takes (`remainder="drop"`)."""
        return self._steps.num_dropped

    @property
    def num_repeated_packs(self) -> int:
        """Packs repeated without loss in each epoch's last global batch (`remainder="pad"`)."""
        return self._steps.num_repeated

    def shares(self) -> dict[str, float]:
        """Each output's achieved share of what all ranks were handed so far, in the stream's unit; 0 before that."""
        self._refuse_if_in_workers("shares")
        total = sum(self._handed_out) or 1
        return {output.name: n / total for output, n in zip(self._outputs, self._handed_out, strict=True)}

    # --- opening ---------------------------------------------------------------------------------------------------

    def _row_shape(self, layout: Layout, align: int) -> RowShape:
        manifest = self._outputs[0].manifest
        if layout is Layout.PADDED and manifest.align % align:
            raise ConfigError(
                f'layout="padded" with align={align}: the job reserved room for align {manifest.align} only, so padded '
                f'segments may not fit in seq_len {manifest.seq_len}; use layout="trimmed", or pack with '
                f"--set packing.align={align}"
            )
        return RowShape(layout=layout, align=align, seq_len=manifest.seq_len, pad_id=manifest.tokenizer.pad_id)

    def _mix(self) -> Mixture | None:
        if self._outputs[0].share is None:
            return None
        parts = []
        for output in self._outputs:
            mean = output.mean_per_pack(self._unit)
            if mean == 0:
                raise ConfigError(f"{output.name}: its packs have no {self._unit}, so it can have no share of them")
            parts.append((output.share or 0.0) / mean)
        return Mixture(parts, [output.num_packs for output in self._outputs])

    def _refuse_empty(self) -> None:
        if len(self._steps) == 0:
            raise ConfigError(
                f"no step is left: {self._steps.num_packs} packs do not fill one global batch of "
                f"{self._steps.global_batch} (batch_packs {self.batch_packs} x world_size {self.world_size}), and "
                'remainder="drop" leaves out what fills none; use a smaller batch or remainder="pad"'
            )

    # --- iterating -------------------------------------------------------------------------------------------------

    def _iterate(self) -> Generator[PackedBatch, None, None]:
        this = self._begin()
        turn, pid = self._turn, os.getpid()
        with closing(self._read(this)) as batches:
            while True:
                self._refuse_stale(turn, pid)
                made = next(batches, None)
                if made is None:
                    return
                self._hand_out(this, made)
                yield made.batch

    def _begin(self) -> _Pass:
        """Start the pass that is due, and count it as begun."""
        self._refuse_closed()
        if get_worker_info() is not None:
            this = self._worker_start(check=True)
            self._worker_pass = this
            self._turn += 1
            return this
        self._refuse_if_in_workers("iter")
        if self._begun:
            self._epoch, self._position = self._epoch + 1, 0
        self._begun, self._just_loaded = True, False
        self._turn += 1
        self._announce(new_pass=False)
        return _Pass(epoch=self._epoch, step=self._position // self._steps.global_batch)

    def _read(self, this: _Pass) -> Generator[Made, None, None]:
        """Batches of a pass, made ahead by threads and brought to the device."""
        maker = self._open_maker()
        epoch = self._order(this.epoch)
        steps = range(this.step, len(self._steps), this.stride)
        together = runs(steps, step_tokens=self.batch_packs * self._shape.seq_len)

        def make(picks: Picks) -> Run:
            return stage(maker.make(picks), self._device)

        with closing(prefetch(make, map(epoch.picks, together), threads=self._threads)) as made:
            yield from deliver(in_order(made), self._device)

    def _order(self, epoch: int) -> Epoch:
        orders = [
            PackOrder(
                output.first_packs, output.sizes, seed=self.seed, epoch=epoch, shuffle=self.shuffle, stream=number
            )
            for number, output in enumerate(self._outputs)
        ]
        return Epoch(orders, self._mixture, self._steps)

    def _hand_out(self, this: _Pass, made: Made) -> None:
        """From here on the batch counts as read."""
        self._handed_out = [a + b for a, b in zip(self._handed_out, made.units, strict=True)]
        if this.worker is None:
            self._position = (made.step + 1) * self._steps.global_batch
            return
        self._board.serve(this.worker)
        this.step = made.step + this.stride

    def _open_maker(self) -> BatchMaker:
        """Readers of this process: file handles and locks do not survive a fork."""
        if self._maker is None or self._pid != os.getpid():
            self._pid = os.getpid()
            self._maker = BatchMaker(
                self._outputs,
                rank=self.rank,
                world_size=self.world_size,
                balanced=self._balance,
                shape=self._shape,
                unit=self._unit,
            )
        return self._maker

    def _refuse_stale(self, turn: int, pid: int) -> None:
        if pid != os.getpid():
            raise StateError(
                f"this iteration was begun in process {pid} and goes on in its fork {os.getpid()}, where its threads "
                "do not exist; begin a new one with iter(stream) in this process"
            )
        self._refuse_closed()
        if turn != self._turn:
            raise StateError("a later iter, set_epoch or load_state_dict has moved the stream; go on with a new iter")

    def _refuse_closed(self) -> None:
        if self._closed:
            raise StateError("the stream is closed; open a new PackStream")

    # --- under DataLoader workers ----------------------------------------------------------------------------------

    def _worker_start(self, *, check: bool) -> _Pass:
        """Worker k of n takes the steps k, k + n, ... from the first one on: the order of the plain loop."""
        info = get_worker_info()
        assert info is not None
        if self._device.type != "cpu":
            raise ConfigError("under DataLoader workers batches stay on the CPU: open the stream without device")
        resumed, turn = self._worker_pass, info.id
        if resumed is not None and resumed.worker is None:
            if not self._is_overtaken(resumed):
                return _Pass(epoch=resumed.epoch, step=resumed.step, stride=info.num_workers, worker=info.id)
            # The loader goes on with the worker whose turn it was.
            turn = resumed.step - len(self._steps)
        if check:
            self._board.check_new_pass(info.id)
        epoch, position = self._board.start
        step = position // self._steps.global_batch + turn
        return _Pass(epoch=epoch, step=step, stride=info.num_workers, worker=info.id)

    def _is_overtaken(self, resumed: _Pass) -> bool:
        """Whether the pass of a state is over for this worker, and `set_epoch` has gone on to a later one.

        Raises:
            StateError: `set_epoch` was called with another epoch than that of the state, which has batches left.
        """
        epoch, _ = self._board.start
        if not self._board.is_set or epoch == resumed.epoch:
            return False
        if epoch > resumed.epoch and resumed.step >= len(self._steps):
            return True
        raise StateError(
            f"the state stands inside epoch {resumed.epoch}, and set_epoch({epoch}) was called: call "
            f"set_epoch({resumed.epoch}) to go on from the state, or leave the state out"
        )

    def _worker_state(self) -> dict[str, Any]:
        this = self._worker_pass
        if this is None or this.worker is None:
            this = self._worker_start(check=False)
        at = self._at(this.epoch, this.step * self._steps.global_batch, worker=(this.worker or 0, this.stride))
        return write_state(self._binding, at)

    def _load_in_worker(self, found: Position, here: tuple[int, int]) -> None:
        if found.worker is None:
            raise StateError(
                "the state is that of a loop without workers; load it into the stream before the DataLoader"
            )
        if found.worker != here:
            raise StateError(
                f"the state is that of worker {found.worker[0]} of {found.worker[1]}, this is worker {here[0]} of "
                f"{here[1]}; resume with num_workers={found.worker[1]}"
            )
        # worker=None marks a pass that is due but not begun.
        self._worker_pass = _Pass(epoch=found.epoch, step=found.position // self._steps.global_batch)
        self._board.resume(found.epoch)

    def _refuse_if_in_workers(self, what: str) -> None:
        if self._board.in_workers:
            raise StateError(
                f"{what}: DataLoader workers are reading this stream, so this process does not know how far they are. "
                "Take the state from torchdata's StatefulDataLoader, and call set_epoch before another pass"
            )

    # --- bookkeeping -----------------------------------------------------------------------------------------------

    def _at(self, epoch: int, position: int, *, worker: tuple[int, int] | None = None) -> Position:
        return Position(
            epoch=epoch,
            position=position,
            global_batch=self._steps.global_batch,
            handed_out=tuple(self._handed_out) if self._mixture else (),
            worker=worker,
        )

    def _announce(self, *, new_pass: bool) -> None:
        """Tell workers to come where the next pass starts."""
        if self._board.owner != os.getpid():
            self._board = PassBoard()  # a fork has a life of its own
        begun = self._begun
        self._board.announce(self._epoch + begun, 0 if begun else self._position, new_pass=new_pass)

    def __getstate__(self) -> dict[str, Any]:
        # Open files and threads belong to one process; a copy opens its own.
        return {**self.__dict__, "_maker": None}
