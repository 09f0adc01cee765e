"""A comparison as a page of its own: the picture, and the figures of each policy and each job."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from jitney_worker.simulate.picture import svg
from jitney_worker.simulate.run import Comparison
from jitney_worker.simulate.table import POLICY_COLUMNS, policy_rows, verdict

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2330; --faint: #5f6673; --rule: #d9dde4; --page: #f7f8fa; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ef; --faint: #9aa3b2; --rule: #363d4a; --page: #14171d; }
}
body { margin: 0 auto; padding: 2.5rem 1.25rem 4rem; max-width: 1000px; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", Helvetica, Arial, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 1.25rem; }
h2 { font-size: 1.05rem; margin: 2.25rem 0 .5rem; }
p { margin: .5rem 0; max-width: 46rem; }
svg { max-width: 100%; height: auto; border: 1px solid var(--rule); border-radius: 8px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; width: 100%; }
th, td { padding: .35rem .75rem; text-align: right; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
th { color: var(--faint); font-weight: 500; }
"""


def page(comparison: Comparison) -> str:
    """A page with the picture, the figures of each policy and of each job. Needs nothing from anywhere."""
    name = escape(comparison.scenario.name)
    sentences = "\n".join(f"<p>{escape(sentence)}</p>" for sentence in verdict(comparison))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>jitney simulate: {name}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{name}: static against continuous batching</h1>
{svg(comparison)}
{sentences}
<h2>Policies</h2>
{_html_table(POLICY_COLUMNS, policy_rows(comparison))}
<h2>Jobs</h2>
<p>Steps completed before its first and at its end; seconds from arrival to the last token.</p>
{_html_table(_job_columns(comparison), _job_rows(comparison))}
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


def _html_table(columns: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>'
