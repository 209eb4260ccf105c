"""The page itself: headline, figures and tables as one HTML document."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from mimose.report.page.headline import Headline, facts, verdict
from mimose.report.page.looks import Figure
from mimose.report.page.tables import Cell, Table

_LONG = 60

# The first line: not even a mistake on this page can load anything.
_HEAD = """\
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; \
script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">"""

_STYLE = """\
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff;
  max-width: 1180px; margin: 0 auto; padding: 24px 20px 60px; }
h1 { font-size: 26px; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 19px; margin: 44px 0 2px; }
p { margin: 4px 0 10px; max-width: 900px; }
.verdict { font-size: 18px; padding: 10px 14px; margin: 14px 0; max-width: none;
  border-left: 6px solid #0072B2; background: #f3f8fc; }
.verdict.over { border-color: #D55E00; background: #fdf4ee; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(205px, 1fr));
  gap: 10px; margin: 16px 0; padding: 0; }
.cards div { border: 1px solid #ddd; border-radius: 6px; padding: 8px 12px; }
.cards dt { font-size: 13px; color: #555; }
.cards dd { margin: 0; font-size: 21px; }
.cards dd small { display: block; font-size: 13px; color: #555; }
.caption { color: #444; }
.picture { overflow-x: auto; }
.picture svg { display: block; width: 100%; min-width: 640px; }
.picture text { font: 13px system-ui, sans-serif; paint-order: stroke;
  stroke: #fff; stroke-width: 3px; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 18px; margin: 8px 0 4px;
  padding: 0; list-style: none; font-size: 14px; }
.legend button { all: unset; cursor: pointer; }
.legend button:focus-visible { outline: 2px solid #0072B2; outline-offset: 2px; }
.legend button[aria-pressed=false] { opacity: 0.4; text-decoration: line-through; }
.legend svg { vertical-align: -2px; overflow: visible; }
.scroll { max-height: 460px; overflow: auto; border: 1px solid #ddd; }
table { border-collapse: collapse; font-size: 13px; width: 100%; }
th { position: sticky; top: 0; background: #f4f4f4; text-align: left; padding: 0; }
th button { all: unset; box-sizing: border-box; cursor: pointer; padding: 6px 10px;
  width: 100%; font-weight: 600; white-space: nowrap; }
th button:focus-visible { outline: 2px solid #0072B2; outline-offset: -2px; }
th button::after { content: " \\2195"; color: #888; }
th[aria-sort=ascending] button::after { content: " \\2191"; color: #000; }
th[aria-sort=descending] button::after { content: " \\2193"; color: #000; }
td { padding: 4px 10px; border-top: 1px solid #eee; vertical-align: top;
  white-space: nowrap; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
td.long { white-space: normal; min-width: 340px; }
th.number { text-align: right; }
footer { margin-top: 50px; color: #666; font-size: 13px; }"""

# A click on a legend's entry hides what it names, and back. One on a column's head
# sorts by it, and back; so does a link that ends in #sort=TABLE.COLUMN.asc or .desc,
# the first column being 0.
_SCRIPT = """\
function value(row, column) {
  const cell = row.cells[column];
  return "number" in cell.dataset ? Number(cell.dataset.number) : cell.textContent;
}
function sortTable(name, column, order) {
  const table = document.getElementById(name);
  const heads = table ? table.tHead.rows[0].cells : [];
  if (!(column in heads)) return;
  const sign = order === "desc" ? -1 : 1;
  const rows = [...table.tBodies[0].rows];
  rows.sort((one, other) => {
    const a = value(one, column), b = value(other, column);
    return sign * (a < b ? -1 : a > b ? 1 : 0);
  });
  table.tBodies[0].append(...rows);
  for (const head of heads) head.removeAttribute("aria-sort");
  heads[column].setAttribute("aria-sort", sign < 0 ? "descending" : "ascending");
}
function sortAsAddressed() {
  const said = location.hash.match(/^#sort=(\\w+)\\.(\\d+)\\.(asc|desc)$/);
  if (said) sortTable(said[1], Number(said[2]), said[3]);
}
function hide(button) {
  const isShown = button.getAttribute("aria-pressed") === "false";
  button.setAttribute("aria-pressed", isShown);
  for (const part of button.closest("section").querySelectorAll("g[data-key]")) {
    if (part.dataset.key === button.dataset.key) {
      part.style.display = isShown ? "" : "none";
    }
  }
}
document.addEventListener("click", event => {
  const button = event.target.closest("button[data-key]");
  if (button) hide(button);
  const head = event.target.closest("th");
  if (!head) return;
  const order = head.getAttribute("aria-sort") === "descending" ? "asc" : "desc";
  const table = head.closest("table").id;
  location.replace(`#sort=${table}.${head.cellIndex}.${order}`);
});
window.addEventListener("hashchange", sortAsAddressed);
sortAsAddressed();"""


def document(
    title: str,
    introduction: Iterable[str],
    figures: Sequence[Figure],
    tables: Sequence[Table],
    drawn_from: str,
    closing: Iterable[str] = (),
) -> str:
    """Write the page.

    Args:
        title: Stands at the top.
        introduction: HTML below the title.
        figures: In the order of the page.
        tables: Stand behind the figures.
        drawn_from: What the page was made from, for its last line.
        closing: HTML below the tables.
    """
    lines = [
        f'<!doctype html>\n<html lang="en">\n<head>\n{_HEAD}',
        f"<title>{escape(title)}</title>\n<style>\n{_STYLE}\n</style>\n</head>\n<body>",
        f"<h1>{escape(title)}</h1>",
        *introduction,
        *map(_figure, figures),
        *map(_table, tables),
        *closing,
        f"<footer>Drawn by mimose from {escape(drawn_from)}. The page loads nothing. "
        "Marks say more under the mouse, a click on a legend hides what it names, and "
        "one on a column's head sorts.</footer>",
        f"<script>\n{_SCRIPT}\n</script>\n</body>\n</html>",
    ]
    return "\n".join(lines) + "\n"


def introduction(headline: Headline) -> Iterator[str]:
    """Write what stands below the title of a run's page.

    Args:
        headline: The run in numbers.
    """
    yield (
        "<p>mimose trains within a memory budget: before each step it chooses, for the "
        "shape of that batch, which layers keep their activations for backward and "
        "which compute them a second time. Gradients are the same either way.</p>"
    )
    over = " over" if headline.steps_over else ""
    yield f'<p class="verdict{over}">{escape(verdict(headline))}</p>'
    yield '<dl class="cards">'
    for name, number, detail in facts(headline):
        small = f"<small>{escape(detail)}</small>"
        yield f"<div><dt>{escape(name)}</dt><dd>{escape(number)}{small}</dd></div>"
    yield "</dl>"


def _figure(figure: Figure) -> str:
    return (
        f'<section id="{figure.name}">\n<h2>{escape(figure.title)}</h2>\n'
        f'<p class="caption">{escape(figure.caption)}</p>\n{figure.picture}\n'
        f"</section>"
    )


def _table(table: Table) -> str:
    head = (
        f"<section>\n<h2>{escape(table.title)}</h2>\n"
        f'<p class="caption">{escape(table.caption)}</p>\n'
    )
    if not table.rows:
        return f"{head}</section>"
    columns = "".join(
        f'<th{_css(cell)} scope="col"><button>{escape(name)}</button></th>'
        for name, cell in zip(table.columns, table.rows[0], strict=True)
    )
    rows = "\n".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in table.rows)
    return (
        f'{head}<div class="scroll"><table id="{table.name}">\n'
        f"<thead><tr>{columns}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n"
        f"</table></div>\n</section>"
    )


def _css(cell: Cell) -> str:
    """Say how a cell looks: a number, a long text, or neither."""
    text, value = cell
    if not isinstance(value, str) and "=" not in text:
        return ' class="number"'
    return ' class="long"' if len(text) > _LONG else ""


def _cell(cell: Cell) -> str:
    text, value = cell
    number = "" if isinstance(value, str) else f' data-number="{value!r}"'
    return f"<td{_css(cell)}{number}>{escape(text)}</td>"
