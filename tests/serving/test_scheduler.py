"""The scheduler alone: order, bounds, and invariants over random traces."""

import dataclasses
import random

import pytest

from tpuspec.serving.scheduler import QueueFull, Scheduler


@dataclasses.dataclass(eq=False)
class Job:
    deadline: float | None = None
    rank: float = 0.0
    tokens: int = 1


def submitted(scheduler: Scheduler, count: int) -> list[Job]:
    jobs = [Job() for _ in range(count)]
    for job in jobs:
        scheduler.submit(job)
    return jobs


def test_requests_enter_free_slots_in_order_of_arrival():
    scheduler: Scheduler[Job] = Scheduler(slots=2, queue_limit=5)
    a, b, c, d = submitted(scheduler, 4)
    assert scheduler.plan(0.0).admitted == ((0, a), (1, b))
    assert scheduler.plan(0.0).admitted == ()
    scheduler.finish(1, b)
    assert scheduler.plan(0.0).admitted == ((1, c),)
    scheduler.finish(0, a)
    assert scheduler.plan(0.0).admitted == ((0, d),)


def test_queue_has_an_end():
    scheduler: Scheduler[Job] = Scheduler(slots=2, queue_limit=3)
    submitted(scheduler, 5)  # two of them go straight into the slots
    with pytest.raises(QueueFull, match="5 requests wait, the limit is 3"):
        scheduler.submit(Job())
    scheduler.plan(0.0)
    assert len(scheduler.waiting) == 3
    with pytest.raises(QueueFull):
        scheduler.submit(Job())


def test_queue_of_no_length_still_fills_the_slots():
    scheduler: Scheduler[Job] = Scheduler(slots=1, queue_limit=0)
    scheduler.submit(Job())
    with pytest.raises(QueueFull):
        scheduler.submit(Job())


def test_queue_has_an_end_in_tokens_beside_that_in_requests():
    scheduler: Scheduler[Job] = Scheduler(slots=1, queue_limit=9, queue_tokens=100)
    huge = Job(tokens=1000)
    scheduler.submit(huge)  # goes straight into the slot
    scheduler.submit(Job(tokens=60))
    with pytest.raises(QueueFull, match="101 tokens would wait, the limit is 100"):
        scheduler.submit(Job(tokens=41))
    scheduler.submit(Job(tokens=40))
    assert len(scheduler.waiting) == 3
    scheduler.plan(0.0)
    with pytest.raises(QueueFull, match="101 tokens"):
        scheduler.submit(Job(tokens=1))
    scheduler.finish(0, huge)
    scheduler.submit(Job(tokens=60))  # the slot takes the first that wait


def test_several_enter_the_queue_together_or_not_at_all():
    scheduler: Scheduler[Job] = Scheduler(slots=2, queue_limit=3)
    together = [Job() for _ in range(5)]
    scheduler.submit(*together[:4])
    with pytest.raises(QueueFull, match="4 requests wait, 2 more came, the limit is 3"):
        scheduler.submit(Job(), Job())
    assert scheduler.waiting == tuple(together[:4])
    scheduler.submit(together[4])
    assert [job for _, job in scheduler.plan(0.0).admitted] == together[:2]


def test_lower_ranks_leave_the_queue_first_and_equal_ones_in_order_of_arrival():
    scheduler: Scheduler[Job] = Scheduler(slots=1, queue_limit=9)
    jobs = [Job(rank=rank) for rank in (5.0, 1.0, 5.0, 0.0, 1.0)]
    for job in jobs:
        scheduler.submit(job)
    order = []
    while scheduler.has_work:
        (slot, job), = scheduler.plan(0.0).admitted
        order.append(jobs.index(job))
        scheduler.finish(slot, job)
    assert order == [3, 1, 4, 0, 2]


def test_cancelled_request_leaves_the_queue_at_once_and_its_slot_with_the_next_plan():
    scheduler: Scheduler[Job] = Scheduler(slots=1, queue_limit=2)
    a, b, c = submitted(scheduler, 3)
    scheduler.plan(0.0)
    assert scheduler.cancel(b) and scheduler.waiting == (c,)
    assert scheduler.cancel(a) and scheduler.running == {0: a}
    plan = scheduler.plan(0.0)
    assert plan.released == ((0, a),) and plan.admitted == ((0, c),)
    assert not scheduler.cancel(a) and not scheduler.cancel(b)


def test_late_result_of_a_gone_request_does_not_free_its_successors_slot():
    scheduler: Scheduler[Job] = Scheduler(slots=1, queue_limit=1)
    a, b = submitted(scheduler, 2)
    scheduler.plan(0.0)
    scheduler.cancel(a)
    scheduler.plan(0.0)
    scheduler.finish(0, a)
    assert scheduler.running == {0: b}


def test_deadlines_end_waiting_and_running_requests():
    scheduler: Scheduler[Job] = Scheduler(slots=1, queue_limit=2)
    running, waiting, patient = Job(5.0), Job(1.0), Job()
    for job in (running, waiting, patient):
        scheduler.submit(job)
    assert scheduler.plan(0.5).admitted == ((0, running),)
    assert scheduler.plan(1.0).expired == (waiting,)
    plan = scheduler.plan(5.0)
    assert plan.released == ((0, running),) and plan.admitted == ((0, patient),)


@pytest.mark.parametrize("seed", range(20))
def test_random_traces_lose_no_request_and_no_slot(seed):
    rng = random.Random(seed)
    slots, limit = rng.randint(1, 4), rng.randint(0, 5)
    scheduler: Scheduler[Job] = Scheduler(slots=slots, queue_limit=limit)
    live: list[Job] = []  # accepted and not gone, in order of arrival
    holder: dict[int, Job] = {}
    for now in range(400):
        match rng.choice(["submit", "submit", "cancel", "finish", "plan", "plan"]):
            case "submit":
                job = Job(None if rng.random() < 0.7 else now + rng.randint(1, 40),
                          rank=rng.choice([0.0, 1.0, float(now)]))
                try:
                    scheduler.submit(job)
                    live.append(job)
                except QueueFull:
                    assert len(scheduler.waiting) >= limit
            case "cancel" if live:
                job = rng.choice(live)
                assert scheduler.cancel(job)
                if job not in holder.values():
                    live.remove(job)
            case "finish" if holder:
                slot = rng.choice(list(holder))
                live.remove(holder[slot])
                scheduler.finish(slot, holder.pop(slot))
            case "plan":
                plan = scheduler.plan(float(now))
                for job in plan.expired:
                    assert job.deadline is not None and job.deadline <= now
                    live.remove(job)
                for slot, job in plan.released:
                    assert holder.pop(slot) is job
                    live.remove(job)
                for slot, job in plan.admitted:
                    assert slot not in holder
                    holder[slot] = job
                admitted = [job for _, job in plan.admitted]
                by_rank = sorted(live, key=lambda job: job.rank)
                assert admitted == [job for job in by_rank if job in admitted]
                assert all(job in holder.values() or job.rank >= last.rank
                           for last in admitted[-1:] for job in live)
                # A plan leaves no slot free while somebody waits.
                assert not scheduler.waiting or len(holder) == slots
        assert scheduler.running == holder
        assert len(scheduler.waiting) <= limit + slots
        # Accepted requests wait or run; none is lost, none is in two places.
        assert sorted(map(id, (*scheduler.waiting, *holder.values()))) == sorted(map(id, live))
    assert sorted(map(id, scheduler.clear())) == sorted(map(id, live))
    assert not scheduler.has_work
