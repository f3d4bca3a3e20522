"""What benchmarks of several plans side by side share: a row for each, and one that fails without the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from benchmarks import arguments as given
from benchmarks import gpu, table
from benchmarks.plans import SideBySide, what_ran
from benchmarks.results import FLOORS, FP8, PEERS, Row
from benchmarks.sustained import Burst, sustained

Bursts = dict[str, Callable[[], Burst]]


class Plans:
    """Rows of one benchmark of one model at one size and batch, by plan; the floors are among them."""

    def __init__(self, benchmark: str, model: str, size: given.Size, batch: int, plans: Iterable[str]) -> None:
        name = f"{size[0]}x{size[1]}"
        plans = list(plans)
        floors = FLOORS if any(plan in FP8 for plan in plans) else FLOORS[:1]
        self.rows = {plan: Row(benchmark, model, name, batch, plan) for plan in (*plans, *floors)}

    def failed(self, plan: str, error: Exception) -> None:
        self.rows[plan].error = table.why(error)

    def attempt(self, plan: str, action: Callable[[], None]) -> None:
        """Where an action of one plan fails, that plan's row says so and the others go on."""
        try:
            action()
        except Exception as error:
            self.failed(plan, error)
        gpu.free()

    def time(self, bursts: Bursts, seconds: float, bench: SideBySide) -> None:
        """All plans in turn until each ran for so long; then the bursts, which hold what they run, are emptied."""
        for plan, figures in sustained(bursts, seconds, self.failed).items():
            row = self.rows[plan]
            row.ms, row.spread, row.joules = figures
        bursts.clear()
        for plan, handle in bench.handles.items():
            self.rows[plan].more |= what_ran(handle)

    def hold_against_floor(self) -> None:
        for row in self.rows.values():
            row.floor_ms = self.rows["fp8-floor" if row.plan in (*FP8, "fp8-floor") else "floor"].ms


def judge(rows: Mapping[str, Row], errors: Mapping[str, float | None], stock: float | None) -> None:
    """Set errors and verdicts; the plans in fp8 are held against the peer as people run it, else against the eager one.

    Args:
        rows: by plan.
        errors: of the plans that were checked.
        stock: error of stock.
    """
    peer = next((errors[plan] for plan in PEERS if errors.get(plan) is not None), None)
    for plan, error in errors.items():
        yardstick = error if plan in PEERS else peer
        rows[plan].judge(error, stock, yardstick if plan in FP8 else None)


def calls(run: Callable[[], object], number: int, warm: int) -> Burst:
    """So many calls with a mark of the GPU's clock behind each; the first `warm` do not count as times."""
    marks = gpu.Marks()
    marks()
    for _ in range(number):
        run()
        marks()
    return Burst(marks.gaps()[warm:], number)
