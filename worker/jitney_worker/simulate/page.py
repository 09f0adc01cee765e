"""A page of its own: the animation, the picture, and the figures. Needs nothing from anywhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape

from jitney_worker.record.reading import RecordedRun
from jitney_worker.record.telling import tell_run
from jitney_worker.simulate.animation import element, script, style
from jitney_worker.simulate.picture import draw
from jitney_worker.simulate.run import Comparison
from jitney_worker.simulate.table import POLICY_COLUMNS, policy_rows, verdict
from jitney_worker.simulate.timeline import Timeline, of_comparison

_STYLE = """
:root { color-scheme: light dark; --page: light-dark(#f7f8fa, #14171d); }
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 1000px; background: var(--page);
  color: light-dark(#1d2330, #e6e9ef);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", Helvetica, Arial, sans-serif; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 .5rem; }
h2 { font-size: 1.05rem; margin: 2.25rem 0 .5rem; }
p { margin: .5rem 0; max-width: 46rem; }
.facts { color: light-dark(#566071, #a3acba); margin: 0 0 .5rem; }
.scroll { overflow-x: auto; }
.picture svg { display: block; min-width: 680px; max-width: 100%; height: auto; border-radius: 8px;
  border: 1px solid light-dark(#d9dde4, #363d4a); box-sizing: border-box; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; width: 100%; }
th, td { padding: .35rem .75rem; text-align: right; white-space: nowrap;
  border-bottom: 1px solid light-dark(#d9dde4, #363d4a); }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
th { color: light-dark(#566071, #a3acba); font-weight: 500; }
@media (max-width: 600px) { body { padding: 1rem .75rem 3rem; } h1 { font-size: 1.25rem; } }
"""


def page(comparison: Comparison) -> str:
    """A comparison as an animation and a picture, with the figures of each policy and of each job."""
    sentences = "\n".join(f"<p>{escape(sentence)}</p>" for sentence in verdict(comparison))
    return _page(
        f"{comparison.scenario.name}: static against continuous batching",
        of_comparison(comparison),
        f"""{sentences}
<h2>Policies</h2>
{_html_table(POLICY_COLUMNS, policy_rows(comparison))}
<h2>Jobs</h2>
<p>Steps completed before its first and at its end; seconds from arrival to the last token.</p>
{_html_table(_job_columns(comparison), _job_rows(comparison))}""",
    )


def record_page(run: RecordedRun, timeline: Timeline) -> str:
    """A recorded run as an animation and a picture."""
    return _page(timeline.title, timeline, "\n".join(f"<p>{escape(sentence)}</p>" for sentence in tell_run(run)))


def _page(title: str, timeline: Timeline, rest: str) -> str:
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>jitney simulate: {escape(title)}</title>
<style>{_STYLE}{style()}</style>
</head>
<body>
<main>
<h1>{escape(title)}</h1>
<p class="facts">{escape(timeline.facts)}</p>
{element(timeline)}
<noscript><p>Without scripts nothing moves: the picture below shows the same.</p></noscript>
<h2>All of it</h2>
<div class="scroll picture" tabindex="0" role="region" aria-label="picture of the whole run">
{draw(timeline)}
</div>
{rest}
</main>
<script>{script()}</script>
</body>
</html>
"""


def _job_columns(comparison: Comparison) -> tuple[str, ...]:
    return ("job", "tokens", "arrives", *(f"{run.policy}{unit}" for run in comparison.runs for unit in ("", ", s")))


def _job_rows(comparison: Comparison) -> Iterator[tuple[str, ...]]:
    for runs in zip(*(run.jobs for run in comparison.runs), strict=True):
        job = runs[0].job
        cells = [cell for run in runs for cell in (f"{run.start_step:,}–{run.end_step:,}", f"{run.completion_s:,.2f}")]
        yield (job.name, f"{job.num_output_tokens:,}", f"{job.arrival_s:,.2f} s", *cells)


def _html_table(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in columns)
    body = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    table = f"<table><thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table>"
    return f'<div class="scroll" tabindex="0" role="region" aria-label="table">{table}</div>'
