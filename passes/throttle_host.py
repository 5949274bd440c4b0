"""`throttle-host`: where the host waits for the device."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from interlace.ir import Program
from interlace.passes.base import Context, Pass, register
from interlace.scheduler.host_waits.throttle import (
    HostSyncs,
    jobs_with_side_work,
    plan_host_syncs,
    sync_at_job_ends,
    sync_at_outputs,
    with_host_syncs,
)


@register
class ThrottleHost(Pass, frozen=True, kw_only=True):
    """Let the host wait for the device where running ahead would raise the peak of memory too much.

    Contract: needs a schedule; keeps every value, operation, order and event; adds waits of the host to jobs with work on side
    streams. They matter only where the host runs ahead and memory is allocated at issue (GPUs).

    Before / After:
        job forward_0: 3@0 4@0                          job forward_0: 3@0 4@0 (after 4@0 the host waits for 3@0)

    Options:
        syncs: Where the host waits for the device. When: `job-ends` if measured memory exceeds the prediction; it costs some time in each
            job. `outputs` to compare with Paddle's baseline. Details: `auto` waits as rarely as the peak of memory allows, under a
            `memory_budget` also right before the budget would be exceeded, or at the ends of jobs if that gives a faster simulated step.
            `job-ends` waits at the end of every job with work on side streams. `outputs` waits at the end of every job that computes an
            output, as Paddle does, which fetches each loss there; other plans collect outputs at the end of the step.
        run_ahead_bytes: How much a host that runs ahead may add to the peak of device memory before `auto` makes it wait. When: lower it
            if memory is short, raise it if the device idles between jobs.

    Source: docs/decisions/006.
    """

    name = "throttle-host"
    needs = frozenset({"scheduled"})
    gives = frozenset({"throttled"})
    after = ("insert-events",)
    is_default = True
    decides = "host-waits"

    syncs: Literal["auto", "job-ends", "outputs"] = "auto"
    run_ahead_bytes: Annotated[int, msgspec.Meta(ge=0)] = 256 << 20

    def run(self, program: Program, context: Context) -> Program:
        if self.syncs == "outputs":
            waits = sync_at_outputs(program)
            if waits:
                context.applied("waits-for-outputs", waits=len(waits), jobs=len(program.jobs))
            else:
                context.declined("no-outputs")
            return with_host_syncs(program, waits)
        if self.syncs == "job-ends":
            waits = sync_at_job_ends(program, jobs_with_side_work(program))
            if waits:
                context.applied("waits-at-job-ends", waits=len(waits), jobs=len(program.jobs))
            else:
                context.declined("no-side-work")
            return with_host_syncs(program, waits)
        plan = plan_host_syncs(program, context.cost, self.run_ahead_bytes, context.memory_limit)
        self._report(plan, context)
        return with_host_syncs(program, plan.waits)

    def _report(self, plan: HostSyncs, context: Context) -> None:
        """Report whether the host waits, and why."""
        peaks = {"serial_bytes": plan.serial_bytes, "free_bytes": plan.free_bytes, "throttled_bytes": plan.throttled_bytes}
        if plan.reason == "not-simulated":
            context.applied("waits-not-simulated", waits=plan.count, error=plan.error)
        elif plan.reason == "no-side-work":
            context.declined("no-side-work")
        elif plan.reason == "few-side-bytes":
            context.declined("few-side-bytes", side_bytes=plan.side_bytes, run_ahead_bytes=self.run_ahead_bytes)
        elif plan.reason == "run-ahead-allowed":
            context.declined("run-ahead-allowed", run_ahead_bytes=self.run_ahead_bytes, **peaks)
        elif plan.count:
            context.applied("waits-inside-jobs", waits=plan.count, **peaks)
        else:
            context.declined("no-wait-helps", **peaks)
