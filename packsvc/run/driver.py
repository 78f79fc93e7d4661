"""The driver: make or find the plan, run what is not committed yet, write the manifest.

Started again it resumes: groups whose commit stands, with all files that it names, are skipped. An output of
another job is never touched. The driver holds the plan and one small record a shard; truth is in storage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from packsvc.config import PackJob
from packsvc.encode import Encoder, load_encoder
from packsvc.errors import ClusterError, FormatError, GroupError, LimitError, PacksvcError, StateError, WorldError
from packsvc.run.executors import Executor, InProcess, Outcome, make_executor, memory_for
from packsvc.run.finish import MANIFEST_NAME, read_commits, write_manifest
from packsvc.run.group import check_limits, commit_name
from packsvc.run.metrics import GroupCounters
from packsvc.run.planfile import PLAN_NAME, Plan, canonical_json, differences, identity, shaping_versions
from packsvc.run.planning import (
    check_changed,
    cut_counted,
    inputs_with_recut,
    list_all_inputs,
    make_plan,
    make_trial_plan,
    piece_rows,
    recognise_all,
)
from packsvc.run.progress import Event, Progress, Reporter, Watch
from packsvc.run.tails import tail_groups
from packsvc.run.tasks import Where, count_task, group_task, recut_task, slim, tail_task
from packsvc.shards import Manifest
from packsvc.sources import InputCount
from packsvc.storage import Store
from packsvc.types import Counts, InputFile, Piece

ATTEMPTS = 3
T = TypeVar("T")


def pack(
    job: PackJob,
    *,
    workers: int | None = None,
    address: str | None = None,
    limit: int | None = None,
    watch: Watch | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Manifest:
    """Run a job to its manifest; resumes what an earlier run left.

    Args:
        job: What to do.
        workers: CPUs of the embedded local Ray; None: all cores; 0: in this process, without Ray.
        address: A Ray cluster to run on instead.
        limit: A trial run of at most this many rows of each source, into `<output>-limit-<N>`.
        watch: Called with every event.
        storage_options: For fsspec.

    Raises:
        PacksvcError: See the tree in `packsvc.errors`; the output can be resumed or is complete.
    """
    if limit is not None:
        job = job.model_copy(update={"output": f"{job.output.rstrip('/')}-limit-{limit}"})
    return Run(job, workers, address, limit, watch, dict(storage_options or {})).run()


class Run:
    """One run of a job; stores arguments, `run` works."""

    def __init__(
        self,
        job: PackJob,
        workers: int | None,
        address: str | None,
        limit: int | None,
        watch: Watch | None,
        storage_options: dict[str, Any],
    ) -> None:
        self.job = job
        self.workers = workers
        self.address = address
        self.limit = limit
        self.options = storage_options
        self.store = Store(job.output_url, storage_options=storage_options)
        self.reporter = Reporter(self.store, watch)
        self.watch = watch
        self._executor: Executor | None = None

    def run(self) -> Manifest:
        try:
            return self._work(self.make_plan())
        finally:
            if self._executor is not None:
                self._executor.close()

    @property
    def executor(self) -> Executor:
        """Started when first needed: an output that is complete needs no cluster."""
        if self._executor is None:
            if self.workers != 0 and self.address is None:
                self.reporter.say("starting a local Ray")
            self._executor = make_executor(workers=self.workers, address=self.address, say=self.reporter.warn)
        return self._executor

    # ---- the plan

    def make_plan(self) -> Plan:
        """The plan that stands in the output if it is this job's, else a new one."""
        encoder = load_encoder(self.job)
        for line in encoder.audit_lines:
            self.reporter.say(line)
        found = list_all_inputs(self.job, storage_options=self.options)
        try:
            return self._resume(
                Plan.loads(self.store.read(PLAN_NAME), where=self.store.describe(PLAN_NAME)), found, encoder
            )
        except FileNotFoundError:
            pass
        if self.store.info(MANIFEST_NAME) is not None:
            raise FormatError(f"{self.store.url}: there is a manifest but no plan; choose another output")
        readings = recognise_all(self.job, found, storage_options=self.options)
        for name, reading in readings.items():
            self.reporter.say(f"source {name}: {reading.why}")
        settings = encoder.settings
        if self.limit is not None:
            plan = make_trial_plan(
                job=self.job,
                inputs=found,
                readings=readings,
                encoder=settings,
                limit=self.limit,
                storage_options=self.options,
            )
        else:
            cut = partial(cut_counted, group_examples=self.job.packing.group_examples, storage_options=self.options)
            cuts = self._count(found, lambda place, count: cut(place, found[place], count))
            plan = make_plan(job=self.job, cuts=cuts, readings=readings, encoder=settings)
        if plan.num_rows == 0:
            raise LimitError(
                f"{self.store.url}: nothing to pack: the inputs hold no rows ({', '.join(f.path for f in found[:5])})"
            )
        if not self.store.put_if_absent(PLAN_NAME, plan.dumps()):
            other = Plan.loads(self.store.read(PLAN_NAME), where=self.store.describe(PLAN_NAME))
            return self._resume(other, found, encoder)
        return plan

    def _resume(self, plan: Plan, found: Sequence[InputFile], encoder: Encoder) -> Plan:
        """The plan that stands, if this job is the one it was made for."""
        inputs = check_changed(plan.inputs, found, self._counts, trial=plan.limit is not None)
        facts = encoder.settings["facts"]
        new = identity(job=self.job, inputs=inputs, tokenizer=facts, limit=self.limit)
        old = identity(job=plan.job, inputs=plan.inputs, tokenizer=plan.encoder["facts"], limit=plan.limit)
        changed = differences(old, new)
        for name, version in shaping_versions().items():
            if plan.versions.get(name) != version:
                changed.append(f"library {name}: {plan.versions.get(name)} -> {version}")
        if changed:
            raise StateError(
                f"{self.store.url}: holds the output of another job or of other inputs; it was not touched. "
                f"Changed: {'; '.join(changed)}. Choose another output, or put things back as they were to resume."
            )
        return plan

    def _counts(self, files: Sequence[InputFile]) -> list[InputCount]:
        return self._count(files, lambda place, count: count)

    def _count(self, files: Sequence[InputFile], use: Callable[[int, InputCount], T]) -> list[T]:
        """What `use` makes of each file's place and count; a count itself grows with the rows and is let go."""
        if not files:
            return []
        self.reporter.say(f"counting {len(files)} input{'s' if len(files) != 1 else ''}")
        small = sum(f.size_bytes for f in files) < 64_000_000
        executor = InProcess() if small else self.executor
        used: dict[int, T] = {}
        max_rows = piece_rows(self.job.packing.group_examples)
        for outcome in executor.run(count_task, [(file, self.options, max_rows) for file in files]):
            if outcome is not None:
                _raise(outcome)
                used[outcome.task] = use(outcome.task, outcome.value)
        return [used[place] for place in range(len(files))]

    # ---- the work

    def _work(self, plan: Plan) -> Manifest:
        progress = Progress(plan=plan, groups_total=len(plan.groups))
        files = {f.name: f.size_bytes for f in self.store.list()}
        done, total, sent = set[int](), Counts(), dict[int, int]()
        for group, record in self._committed(plan, range(len(plan.groups)), files):
            done.add(group)
            self._note(progress, total, sent, group, record, found=True)
        todo = [g for g in range(len(plan.groups)) if g not in done]
        if done and todo:
            self.reporter.say(f"resuming: {len(done)} of {len(plan.groups)} groups are done")
        self._recut(plan, todo, files)
        memory = memory_for(plan.groups.size_bytes)

        def finished(group: int, record: Mapping[str, Any]) -> None:
            self._note(progress, total, sent, group, record, found=False)
            check_limits(self.job.limits, total, seq_len=self.job.seq_len, num_rows=plan.num_rows, where="so far")

        limits = self.job.limits.model_dump()
        self._run_groups(plan, progress, group_task, {g: (g, limits) for g in todo}, finished, memory)
        if progress.segments == 0:
            raise LimitError(f"{self.store.url}: nothing was packed, no manifest is written: {_where_rows_went(total)}")
        tails = tail_groups(
            [sent.get(g, 0) for g in range(len(plan.groups))],
            first=len(plan.groups),
            group_examples=self.job.packing.group_examples,
        )
        progress.groups_total += len(tails)
        found = set[int]()
        for group, record in self._committed(plan, [g for g, _ in tails], files):
            found.add(group)
            progress.add(record, found=True)
        last = {g: (g, senders) for g, senders in tails if g not in found}
        self._run_groups(plan, progress, tail_task, last, lambda g, r: progress.add(r), memory)
        groups = [*range(len(plan.groups)), *(g for g, _ in tails)]
        worked = bool(todo or last) or MANIFEST_NAME not in files
        if worked:
            progress.stage = "finishing"
            self.reporter.beat(progress, force=True)
        manifest = self._finish(plan, groups, files)
        if worked:
            self._remove_recut(plan)
            progress.stage = "done"
            self.reporter.beat(progress, force=True)
        if self.watch is not None:
            self.watch(Event(kind="done", progress=progress))
        return manifest

    def _finish(self, plan: Plan, groups: Sequence[int], files: Mapping[str, int]) -> Manifest:
        if self.store.info(MANIFEST_NAME) is not None:
            manifest = Manifest.load(self.store)
            if manifest.plan_id != plan.plan_id:
                raise StateError(
                    f"{self.store.url}: its manifest is of plan {manifest.plan_id[:12]}, not {plan.plan_id[:12]}"
                )
            if all(files.get(t.path) == t.size_bytes for t in manifest.tables.values()):
                return manifest
            self.reporter.warn("a table that the manifest names is gone or cut; the tables are made again")
        return write_manifest(plan, groups, self.store)

    def _note(
        self,
        progress: Progress,
        total: Counts,
        sent: dict[int, int],
        group: int,
        record: Mapping[str, Any],
        *,
        found: bool,
    ) -> None:
        progress.add(record, found=found)
        for source in record["sources"].values():
            total.add(Counts(**{key: source[key] for key in Counts.__dataclass_fields__}))
        if record["tails"]:
            sent[group] = record["tails"]["num_segments"]

    def _committed(
        self, plan: Plan, groups: Iterable[int], files: Mapping[str, int]
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """The commits that stand and whose files are all there; one whose file is gone is made again."""
        names = [g for g in groups if commit_name(g) in files]
        for group, record in zip(names, read_commits(self.store, names), strict=True):
            if record["plan_id"] != plan.plan_id:
                raise StateError(
                    f"{self.store.describe(commit_name(group))}: of another plan ({record['plan_id'][:12]})"
                )
            named = [*record["shards"], *(e for e in (record["rejects"], record["tails"]) if e)]
            if all(files.get(e["path"]) == e["size_bytes"] for e in named):
                yield group, slim(record)
            else:
                self.reporter.warn(
                    f"group {group}: a file that its commit names is gone or cut; the group is made again"
                )

    def _recut(self, plan: Plan, todo: Sequence[int], files: Mapping[str, int]) -> None:
        wanted = inputs_with_recut(plan, todo)
        tasks = [
            (self.store.url, self.options, index, plan.inputs[index], missing)
            for index, pieces in wanted.items()
            if (missing := [p for p in pieces if p.path not in files])
        ]
        if tasks:
            self.reporter.say(f"recutting {len(tasks)} compressed input{'s' if len(tasks) != 1 else ''}")
            for outcome in self.executor.run(recut_task, tasks):
                if outcome is not None:
                    _raise(outcome)

    def _remove_recut(self, plan: Plan) -> None:
        """Recut inputs are needed until the manifest stands."""
        for pieces in inputs_with_recut(plan, range(len(plan.groups))).values():
            for piece in pieces:
                if piece.path is not None:
                    self.store.remove(piece.path)

    def _run_groups(
        self,
        plan: Plan,
        progress: Progress,
        function: Callable[..., Any],
        todo: Mapping[int, tuple[Any, ...]],
        finished: Callable[[int, Mapping[str, Any]], None],
        memory: int,
    ) -> None:
        """Run groups; one that fails is tried again after the others, the rest goes on.

        Raises:
            GroupError: Some groups failed on every try.
        """
        if not todo:
            return
        self.reporter.beat(progress, force=True)
        counters = GroupCounters(job=self.job.name, on_ray=not isinstance(self.executor, InProcess))
        failed: dict[int, Outcome] = {}
        for attempt in range(1, ATTEMPTS + 1):
            groups = list(failed or todo)
            failed = {}
            where = Where(url=self.store.url, options=self.options, plan_id=plan.plan_id, base=self.job.base)
            tasks = [(where, *todo[g]) for g in groups]
            for outcome in self.executor.run(function, tasks, memory_bytes=memory):
                progress.groups_running = min(len(groups), progress.groups_total - progress.groups_done)
                if outcome is None:
                    self.reporter.beat(progress)
                    continue
                group = groups[outcome.task]
                if outcome.error is None:
                    counters.add(outcome.value)
                    finished(group, outcome.value)
                    self.reporter.beat(progress)
                    continue
                self._record_failure(plan, group, attempt, outcome)
                if _is_final(outcome):
                    raise outcome.error
                failed[group] = outcome
                self.reporter.warn(f"group {group}, try {attempt} of {ATTEMPTS}: {outcome.error}")
            if not failed:
                return
        lines = "; ".join(f"group {g}: {o.error}" for g, o in sorted(failed.items())[:5])
        raise GroupError(
            f"{len(failed)} of {progress.groups_total} groups failed on each of {ATTEMPTS} tries ({lines}). The others "
            f"are committed; see {self.store.describe('failures')}, mend the cause and run the same command again."
        )

    def _record_failure(self, plan: Plan, group: int, attempt: int, outcome: Outcome) -> None:
        pieces: Sequence[Piece] = plan.groups[group] if group < len(plan.groups) else ()
        record = {
            "group": group,
            "attempt": attempt,
            "error": f"{type(outcome.error).__name__}: {outcome.error}",
            "traceback": outcome.trace,
            "node": outcome.node,
            "splits": [
                {
                    "path": _place(plan, p),
                    "kind": p.kind,
                    "start": p.start,
                    "stop": p.stop,
                    "first_row": p.first_row,
                }
                for p in pieces
            ],
        }
        try:
            self.store.publish(f"failures/{group:06d}-{attempt}.json", canonical_json(record) + b"\n")
        except WorldError as error:
            self.reporter.warn(f"the failure of group {group} could not be written down: {error}")


def _place(plan: Plan, piece: Piece) -> str:
    """Where a piece is from: a file, or a shard of the output that is packed again."""
    if plan.repacked is not None:
        return f"{plan.repacked['url']}, shard {piece.file}"
    return plan.inputs[piece.file].path


def _is_final(outcome: Outcome) -> bool:
    """Whether trying again is pointless: the job, its inputs or its storage are at fault, not this group."""
    return isinstance(outcome.error, PacksvcError) and not outcome.lost and not isinstance(outcome.error, ClusterError)


def _raise(outcome: Outcome) -> None:
    if isinstance(outcome.error, PacksvcError):
        raise outcome.error
    if outcome.error is not None:
        raise GroupError(f"{outcome.error}\n{outcome.trace}") from outcome.error


def _where_rows_went(total: Counts) -> str:
    reasons = ", ".join(f"{r} {n}" for r, n in sorted(total.rejected_by_reason.items()))
    return (
        f"of {total.rows} rows {total.rejected} were rejected{f' ({reasons})' if reasons else ''}, "
        f"{total.filtered} filtered by `where`, {total.left_out} left out by `weight`"
    )
