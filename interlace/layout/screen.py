"""The answer as text for one screen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from interlace.layout.answer import OURS, PADDLES, Answer, Figures, Row
from interlace.units import Unit, ms_figure, size

MOST_ROWS = 10
MOST_REASONS = 5
MOST_UNEVEN = 3
WIDTH = 11


def screen_text(answer: Answer) -> str:
    """The layouts with Paddle's and our plan, the recommendation and the reason for it, and what was not built and why."""
    known = [row for row in answer.rows if row.is_known]
    tokens = f", {answer.tokens:,} tokens a step" if answer.tokens else ""
    head = f"{answer.gpus} GPUs, {answer.gpus_a_host} a host, {size(answer.memory_bytes)} each, profile {answer.device}{tokens}; simulated"
    lines = [head, *([answer.network] if answer.network else []), _counts(answer), *_table(known, bool(answer.tokens))]
    best = next((row for row in known if row.best()), None)
    lines += _recommended(best) if best else ["no layout that was built keeps the memory; the least that is known:", *_nearest(known)]
    lines += [f"runner-up: {answer.decides}"] if answer.decides else []
    lines += _uneven(known, best)
    lines += _frontier(answer)
    return "\n".join([*lines, *_not_built(answer)])


def _counts(answer: Answer) -> str:
    count = answer.counts
    told = [f"{count[state]} {state}" for state in ("excluded", "refused") if count[state]]
    simulated = count["drafted"] + count["planned"]
    told += [f"{simulated} simulated, of these {count['planned']} planned in full"]
    told += [f"{count['waiting']} not built"] if count["waiting"] else []
    return f"{count['layouts']} layouts: {', '.join(told)} ({count['programs built']} programs built now)"


def _table(rows: Sequence[Row], has_tokens: bool) -> list[str]:
    shown = rows[:MOST_ROWS]
    width = max([len(row.layout) for row in shown] + [6])
    unit = _unit(each.peak_bytes for row in shown for each in (row.paddles, row.ours) if each)
    names = ("step ms", *(("tokens/s",) if has_tokens else ()), f"peak {unit.name}")
    columns = "".join(f"{name:>{WIDTH}}" for name in names)
    lines = [f"{'':{width}}  {PADDLES:>{len(columns)}}  {OURS:>{len(columns)}}   error", f"{'layout':{width}}  {columns}  {columns}"]
    for row in shown:
        best = row.best()
        told = best[1] if best else row.paddles or row.ours
        cells = (_cells(each, has_tokens, unit) for each in (row.paddles, row.ours))
        lines.append(f"{row.layout:{width}}  {'  '.join(cells)}{told.rel_error if told else 0:>8.0%}")
    if len(rows) > len(shown):
        lines.append(f"and {len(rows) - len(shown)} slower ones")
    if any(each and not each.fits for row in shown for each in (row.paddles, row.ours)):
        lines.append("* more than the memory that is given")
    return lines


def _cells(figures: Figures | None, has_tokens: bool, unit: Unit) -> str:
    if figures is None:
        return "-".rjust(WIDTH) * (3 if has_tokens else 2)
    rate = f"{figures.tokens_per_s:>{WIDTH},.0f}" if has_tokens else ""
    peak = unit.figure(figures.peak_bytes) + ("" if figures.fits else "*")
    return f"{ms_figure(figures.step_ns):>{WIDTH}}{rate}{peak:>{WIDTH}}"


def _unit(sizes: Iterable[float]) -> Unit:
    """The unit for a column of sizes, so that they need at most two decimals."""
    unit = Unit.of(sizes)
    return unit._replace(decimals=min(2, unit.decimals))


def _recommended(best: Row) -> list[str]:
    found = best.best()
    whose = found[0] if found else ""
    lines = [f"recommended: {best.layout}, {whose}", f"  {best.command}"]
    if best.plans and whose == OURS:
        lines.append(f"  its plans, and the configuration schedule.yaml that makes them again: {best.plans}")
    if best.across_hosts:
        lines.append(f"  {best.across_hosts:.0%} of its device time crosses hosts and is estimated, not measured")
    return [*lines, *([f"  {best.imbalance}"] if best.imbalance else [])]


def _uneven(rows: Sequence[Row], best: Row | None) -> list[str]:
    """Layouts, besides the recommended one, that would gain from another split of the layers; those that would be fastest come first."""
    uneven = sorted((row for row in rows if row.even_ns and row is not best), key=lambda row: row.even_ns)
    found = best.best() if best else None
    lines = []
    for row in uneven[:MOST_UNEVEN]:
        ahead = "; less than the recommended layout" if found and row.even_ns < found[1].step_ns else ""
        lines.append(f"  {row.layout}: {row.imbalance.removesuffix('.')}{ahead}")
    more = [f"  and {len(uneven) - MOST_UNEVEN} more"] if len(uneven) > MOST_UNEVEN else []
    return [*(["another split of the layers over the stages would help:"] if lines else []), *lines, *more]


def _nearest(rows: Sequence[Row]) -> list[str]:
    least = sorted(rows, key=lambda row: min(each.peak_bytes for each in (row.paddles, row.ours) if each))[:3]
    return [
        f"  {row.layout}: {size(min(each.peak_bytes for each in (row.paddles, row.ours) if each))}; {row.why}".rstrip("; ") for row in least
    ]


def _frontier(answer: Answer) -> list[str]:
    if len(answer.frontier) < 2:
        return []
    told = (f"  {size(each.peak_bytes)}: {ms_figure(each.step_ns)} ms, {each.layout}, {each.whose}" for each in answer.frontier)
    return ["time against memory, plans that no other beats in both:", *told]


def _not_built(answer: Answer) -> list[str]:
    rows = answer.rows
    lines = [
        *_reasons("excluded by a bound", [(row, row.why) for row in rows if row.state == "excluded"]),
        *_reasons("refused", [(row, row.why) for row in rows if row.state == "refused"]),
        *_reasons("without a plan of Paddle's", [(row, row.refusal) for row in rows if row.refusal]),
    ]
    unplanned = sum(row.state == "drafted" and bool(row.refusal) for row in rows)
    lines += [f"  {unplanned} of them are not planned: only finalists are (--finalists N)"] if unplanned else []
    lines += [f"not planned: {row.layout}: {row.why}" for row in answer.rows if row.state == "drafted" and row.why]
    if answer.counts["waiting"]:
        gap = (
            f"one of them may take up to {answer.gap:.0%} less, as far as bounds tell" if answer.gap else "bounds tell that none is faster"
        )
        lines.append(f"not built: {answer.counts['waiting']} less promising; {gap}. More with --layouts N; what is built is kept")
    return lines


def _reasons(told: str, found: Sequence[tuple[Row, str]]) -> list[str]:
    """The most frequent reasons, each with the first layout to which it applies."""
    count, first = Counter(_kind_of(why) for _, why in found), {_kind_of(why): (row.layout, why) for row, why in reversed(found)}
    most = count.most_common(MOST_REASONS)
    lines = [f"{told}: {n} such as {first[kind][0]}: {first[kind][1]}" for kind, n in most]
    rest = len(found) - sum(n for _, n in most)
    return [*lines, *([f"{told}: {rest} more for other reasons"] if rest else [])]


def _kind_of(why: str) -> str:
    """A reason without its figures, so that similar ones are reported once."""
    return "".join(" " if each.isdigit() or each == "." else each for each in why)[:60]
