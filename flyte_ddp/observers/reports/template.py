"""The HTML of all reports: the style sheet, and one Jinja template. Each report fills the parts
that it has.

A Python module and not an HTML file, because a fast registration may ship Python modules only.
Every style rule is under the class `training-report`, so it does not change the rest of Flyte's
console. A script of a few lines sorts the tables; on pages that forbid scripts they keep their
order.
"""

STYLE = """
.training-report {
  --ink: #1f2328; --soft: #59636e; --page: #f6f8fa; --card: #ffffff; --rule: #d8dee4;
  --good: #1a7f37; --bad: #c5221f; --wait: #0969da; --warn: #9a6700;
  color-scheme: light dark; color: var(--ink); background: var(--page);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif;
  padding: 1.5rem clamp(.75rem, 3vw, 2.5rem) 3rem; text-align: left; overflow-wrap: anywhere;
}
@media (prefers-color-scheme: dark) {
  .training-report {
    --ink: #e6edf3; --soft: #9aa4af; --page: #0d1117; --card: #000000; --rule: #30363d;
    --good: #3fb950; --bad: #ff7b72; --wait: #58a6ff; --warn: #d29922;
  }
}
.training-report *, .training-report *::before { box-sizing: border-box; }
.training-report .inner { max-width: 1240px; margin: 0 auto; }
.training-report header { display: flex; flex-wrap: wrap; align-items: center; gap: .35rem .9rem; }
.training-report h1 { font-size: 1.7rem; line-height: 1.2; margin: 0; font-weight: 700; letter-spacing: -.01em; }
.training-report h2 { font-size: 1.05rem; margin: 0 0 .75rem; font-weight: 650; }
.training-report a { color: var(--wait); }
.training-report .lead { color: var(--soft); margin: .4rem 0 0; }
.training-report .links { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; margin: .3rem 0 0; }
.training-report .status {
  font-size: .82rem; font-weight: 650; padding: .12rem .65rem; border-radius: 99px; border: 1px solid currentColor;
}
.training-report .status::before { content: "\\25cf"; margin-right: .4em; }
.training-report .running { color: var(--wait); } .training-report .finished { color: var(--good); }
.training-report .failed { color: var(--bad); } .training-report .interrupted { color: var(--warn); }
.training-report .bar { height: 6px; border-radius: 3px; background: var(--rule); margin: 1rem 0 0; overflow: hidden; }
.training-report .bar div { height: 100%; background: var(--wait); }
.training-report .grid { display: grid; gap: 1rem; margin-top: 1rem; grid-template-columns: minmax(0, 1fr); }
.training-report .card {
  background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: 1rem 1.1rem; min-width: 0;
}
.training-report .tiles { grid-template-columns: repeat(var(--columns), minmax(0, 1fr)); gap: .7rem; --columns: 2; }
.training-report .tiles .card:last-child:nth-child(odd) { grid-column: 1 / -1; }
.training-report .tiles .card { padding: .65rem .85rem; }
.training-report .tile-name { color: var(--soft); font-size: .8rem; }
.training-report .tile-value {
  font-size: clamp(1.15rem, 5vw, 1.4rem); line-height: 1.3; font-weight: 650; font-variant-numeric: tabular-nums;
  white-space: nowrap; letter-spacing: -.02em;
}
.training-report .tile-note { color: var(--soft); font-size: .8rem; }
.training-report .panels .card { padding: .7rem .6rem .4rem; }
.training-report .panels img { display: block; min-width: 40%; max-width: 100%; margin: 0 auto .4rem; background: #fff; border-radius: 6px; }
.training-report svg.panel { display: block; width: 100%; height: auto; }
.training-report svg.panel * { pointer-events: none; }
.training-report svg.panel .value path { pointer-events: all; }
.training-report svg.panel .value:hover path[style$="opacity: 0"] { fill: var(--soft) !important; opacity: .16 !important; }
@media (min-width: 820px) {
  .training-report .panels { grid-template-columns: repeat(2, minmax(0, 1fr)); }
  .training-report .facts { columns: 2; }
  .training-report .tiles { --columns: var(--medium); }
  .training-report .tiles .card:last-child:nth-child(odd) { grid-column: auto; }
  .training-report .pairs:not(.long) th { width: 42%; padding-right: 1rem; }
}
@media (min-width: 1100px) {
  .training-report .panels { grid-template-columns: repeat(3, minmax(0, 1fr)); }
  .training-report .tiles { --columns: var(--wide); }
}
.training-report .facts { column-gap: 1rem; margin-top: 1rem; }
.training-report .facts .card { break-inside: avoid; margin-bottom: 1rem; }
.training-report .error { border-left: 4px solid var(--bad); }
.training-report .interrupted-error { border-left-color: var(--warn); }
.training-report .notice { border-left: 4px solid var(--warn); }
.training-report pre {
  font: .8rem/1.45 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  white-space: pre-wrap; margin: 0; max-height: 30rem; overflow: auto; color: inherit; background: none;
}
.training-report .scroll { overflow-x: auto; max-height: 26rem; overflow-y: auto; overflow-wrap: normal; }
.training-report table {
  border-collapse: collapse; width: 100%; font-size: .87rem; font-variant-numeric: tabular-nums;
}
.training-report th { color: var(--soft); font-weight: 500; text-align: left; vertical-align: top; }
.training-report thead th { position: sticky; top: 0; background: var(--card); white-space: nowrap; }
.training-report th, .training-report td { padding: .28rem .9rem .28rem 0; border-bottom: 1px solid var(--rule); }
.training-report td { color: var(--ink); vertical-align: top; }
.training-report tr:last-child > * { border-bottom: 0; }
.training-report .numbers th, .training-report .numbers td { text-align: right; white-space: nowrap; }
.training-report .numbers th:first-child, .training-report .numbers td:first-child { text-align: left; }
.training-report tr.best td { font-weight: 650; color: var(--good); }
.training-report .pairs th { width: 58%; padding-right: .6rem; }
.training-report .pairs.long th { width: 30%; }
.training-report tr.changed td { font-weight: 650; }
.training-report small { color: var(--soft); font-weight: 400; font-size: .82rem; }
.training-report summary { cursor: pointer; color: var(--soft); padding: .6rem 0 .2rem; }
.training-report .samples { display: grid; gap: .55rem; grid-template-columns: repeat(auto-fill, minmax(3.8rem, 1fr)); }
.training-report .samples.texts { grid-template-columns: repeat(auto-fill, minmax(9.5rem, 1fr)); }
.training-report .samples.masks { grid-template-columns: repeat(auto-fill, minmax(12rem, 1fr)); }
.training-report .samples figure { margin: 0; font-size: .78rem; line-height: 1.35; min-width: 0; }
.training-report .samples img {
  display: block; width: 100%; aspect-ratio: 1; object-fit: contain; image-rendering: pixelated;
  background: #000; border-radius: 6px; border: 2px solid transparent;
}
.training-report .samples.masks img { aspect-ratio: auto; }
.training-report .samples .text {
  padding: .4rem .55rem; border: 2px solid var(--rule); border-radius: 6px; font-family: ui-monospace, monospace;
}
.training-report .samples .wrong img, .training-report .samples .wrong .text { border-color: var(--bad); }
.training-report .samples figcaption { padding-top: .2rem; }
.training-report .samples .right figcaption span { color: var(--good); }
.training-report .samples .wrong figcaption span { color: var(--bad); font-weight: 650; }
.training-report .table th button {
  font: inherit; color: inherit; background: none; border: 0; padding: 0; cursor: pointer;
}
.training-report .table th[aria-sort] button { color: var(--ink); font-weight: 650; }
.training-report .table th[aria-sort="ascending"] button::after { content: " \\25b2"; }
.training-report .table th[aria-sort="descending"] button::after { content: " \\25bc"; }
.training-report .table .note { text-align: left !important; }
.training-report .table td.note { white-space: normal; min-width: 16rem; color: var(--bad); }
.training-report .table td.words { white-space: normal; min-width: 6rem; }
.training-report .table .stopped-early { color: var(--warn); }
.training-report .charts > h2 { margin: 1.4rem 0 .6rem; }
.training-report footer { color: var(--soft); font-size: .8rem; margin-top: 1.2rem; }
"""  # noqa: E501

FRAGMENT = """
{%- macro pairs(rows, has_long_values=false) %}
<table class="pairs{% if has_long_values %} long{% endif %}"><tbody>
{%- for row in rows %}
<tr{% if row.marked %} class="changed"{% endif %}><th scope="row">{{ row.name }}</th>
<td>{{ row.value }}{% if row.note %} <small>{{ row.note }}</small>{% endif %}</td></tr>
{%- endfor %}
</tbody></table>
{%- endmacro %}

{%- macro heading(title, note) %}<h2>{{ title }}{% if note %} <small>{{ note }}</small>{% endif %}</h2>{% endmacro %}

{%- macro texts(cards) %}
{%- for card in cards %}
<div class="grid"><section class="card">{{ heading(card.title, card.note) }}
{%- if card.text %}<pre>{{ card.text }}</pre>{% endif %}
{%- for name, text in card.more %}<details><summary>{{ name }}</summary><pre>{{ text }}</pre></details>{% endfor %}
</section></div>
{%- endfor %}
{%- endmacro %}

{%- macro samples(shown) %}
<div class="samples{% if not shown[0].image %} texts{% elif not shown[0].kind %} masks{% endif %}">
{%- for sample in shown %}
<figure class="{{ sample.kind }}" title="{{ sample.scores }}">
{%- if sample.image %}<img alt="{{ sample.words }}" src="data:image/png;base64,{{ sample.image }}">
{%- elif sample.text %}<div class="text">{{ sample.text }}</div>{% endif -%}
<figcaption>
{%- if not sample.kind %}<span>{{ sample.guess }}</span>{% if sample.truth %} (is {{ sample.truth }}){% endif %}
{%- elif sample.kind == "right" %}<span>&#10003; {{ sample.guess }}</span>
{%- else %}<span>&#10007; {{ sample.guess }}</span> (is {{ sample.truth }}){% endif -%}
</figcaption></figure>
{%- endfor %}
</div>
{%- endmacro -%}

<style>{{ style }}</style>
<div class="training-report"><div class="inner">
<header><h1>{{ title }}</h1><span class="status {{ status }}">{{ status }}</span></header>
<p class="lead">{{ lead }}</p>
{%- if links %}
<p class="links">{% for link in links %}
{%- if link.is_safe %}<a href="{{ link.url }}" target="_blank" rel="noopener noreferrer">{{ link.name }}</a>
{%- else %}<span>{{ link.name }}: {{ link.url }}</span>{% endif %}
{%- endfor %}</p>
{%- endif %}
{%- if status == "running" %}
<div class="bar" role="progressbar" aria-label="{{ progress_label }}" aria-valuemin="0" aria-valuemax="100"
 aria-valuenow="{{ percent_done }}"><div style="width: {{ percent_done }}%"></div></div>
{%- endif %}
{%- if error %}
<div class="grid"><section class="card error {{ status }}-error"><h2>{{ error.title }}</h2><pre>{{ error.text }}</pre>
</section></div>
{%- endif %}
{%- if tiles %}
<div class="grid tiles" style="--medium: {{ tiles | fill_rows(5) }}; --wide: {{ tiles | fill_rows(6) }}">
{%- for tile in tiles %}
<div class="card"><div class="tile-name">{{ tile.name }}</div><div class="tile-value">{{ tile.value }}</div>
<div class="tile-note">{{ tile.note | keep_units }}</div></div>
{%- endfor %}
</div>
{%- endif %}
{%- if notices %}
<div class="grid">{% for notice in notices %}<section class="card notice">{{ notice }}</section>{% endfor %}</div>
{%- endif %}
{{- texts(first_cards) }}
{%- for title, note, drawn in charts %}
<div class="charts">{% if title %}{{ heading(title, note) }}{% endif %}
<div class="grid panels">{% for panel in drawn %}<div class="card">{{ panel }}</div>{% endfor %}</div></div>
{%- endfor %}
{%- for table in tables %}
<div class="grid"><section class="card">{{ heading(table.title, table.note) }}
<div class="scroll table"><table class="numbers"><thead><tr>
{%- for head in table.rows[0][1] %}<th scope="col"><button type="button">{{ head }}</button></th>{% endfor %}</tr>
</thead><tbody>
{%- for is_marked, cells in table.rows %}
<tr{% if is_marked %} class="best"{% endif %}>
{%- for cell in cells.values() %}<td data-key="{{ cell.key }}" class="{{ cell.class }}">{{ cell.text }}</td>{% endfor %}</tr>
{%- endfor %}
</tbody></table></div></section></div>
{%- endfor %}
{%- if predictions %}
<div class="grid"><section class="card">{{ heading("Test predictions", predictions.note) }}
{%- if predictions.first %}{{ samples(predictions.first) }}{% endif %}
{%- if predictions.rest %}
<details><summary>{{ predictions.rest | length }} more</summary>{{ samples(predictions.rest) }}</details>
{%- endif %}
</section></div>
{%- endif %}
{{- texts(cards) }}
{%- if sections %}
<div class="facts">
{%- for section in sections %}
<section class="card">{{ heading(section.title, section.note) }}
<div{% if section.rows | length > 30 %} class="scroll"{% endif %}>
{{- pairs(section.rows, section.has_long_values) }}</div></section>
{%- endfor %}
</div>
{%- endif %}
<footer>{{ footer }}</footer>
</div></div>
{%- if tables %}
<script>
for (const table of document.querySelectorAll(".training-report .table table")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => head.addEventListener("click", () => {
    const falls = head.getAttribute("aria-sort") === "ascending";
    heads.forEach(each => each.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", falls ? "descending" : "ascending");
    const key = row => row.cells[column].dataset.key;
    const compare = (a, b) => isNaN(a) || isNaN(b) ? a.localeCompare(b) : a - b;
    const rows = [...table.tBodies[0].rows].sort((a, b) =>
      (key(a) === "") - (key(b) === "") || (falls ? compare(key(b), key(a)) : compare(key(a), key(b))));
    table.tBodies[0].append(...rows);
  }));
}
</script>
{%- endif %}
"""  # noqa: E501

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{{ title }}</title>
<style>
body { margin: 0; background: #f6f8fa; }
@media (prefers-color-scheme: dark) { body { background: #0d1117; } }
</style>
</head>
<body>
{{ fragment }}
</body>
</html>
"""
