"""The report's page: its HTML, its looks, and the few lines that draw the figures."""

# ruff: noqa: E501 - a style sheet is easier to read with a rule a line

STYLE = """
:root { color-scheme: light dark; --bg: #fbfbfc; --card: #ffffff; --fg: #1c2430; --dim: #5c6878; --line: #dde2ea; --accent: #1f6fd6; --good: #11804a; --bad: #bf2f3c; --grid: #e4e8ee; }
@media (prefers-color-scheme: dark) {
  :root { --bg: #12161c; --card: #1a2029; --fg: #e4e9f0; --dim: #98a4b5; --line: #2d3643; --accent: #6ea8f7; --good: #4cc38a; --bad: #f0717c; --grid: #2b3440; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--bg); color: var(--fg); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 20px 16px 60px; }
h1 { font-size: 1.5rem; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 34px 0 10px; }
h3 { font-size: .9rem; margin: 0 0 4px; color: var(--dim); font-weight: 600; }
p, ul { margin: 6px 0; max-width: 80ch; }
ul { padding-left: 20px; }
.dim, caption { color: var(--dim); font-size: .87rem; }
.headline { font-size: 1.12rem; border-left: 4px solid var(--accent); padding: 2px 0 2px 12px; margin: 14px 0; }
.warning { border-left-color: var(--bad); }
.grid { display: grid; gap: 14px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); }
.small { grid-template-columns: repeat(auto-fit, minmax(min(100%, 320px), 1fr)); }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 12px; min-width: 0; }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 10px; background: var(--card); }
.narrow { max-width: 720px; }
.tall { max-height: 560px; overflow-y: auto; }
table { border-collapse: collapse; width: 100%; font-size: .87rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 5px 10px; border-bottom: 1px solid var(--line); vertical-align: top; }
tr:last-child td { border-bottom: 0; }
thead th { position: sticky; top: 0; background: var(--card); color: var(--dim); font-weight: 600; white-space: nowrap; }
.trials td { white-space: nowrap; }
.trials td.text { white-space: normal; min-width: 26ch; }
td.number, th.number { text-align: right; }
tr.best td { background: color-mix(in srgb, var(--good) 14%, transparent); }
tr.baseline td { background: color-mix(in srgb, #e58a1f 14%, transparent); }
.good { color: var(--good); } .bad { color: var(--bad); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 14px; margin: 10px 0; font-size: .92rem; }
dt { color: var(--dim); } dd { margin: 0; overflow-wrap: anywhere; }
pre { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 12px; overflow-x: auto; font-size: .84rem; }
code { font-size: .92em; overflow-wrap: anywhere; }
.figure { width: 100%; }
.figure svg text { fill: var(--fg) !important; }
.figure .hoverlayer text, .figure .hoverlayer tspan { fill: #ffffff !important; }
.figure .gridlayer path { stroke: var(--grid) !important; }
@media print { .narrow { max-width: 720px; }
.tall { max-height: none; } }
"""

SCRIPT = """
for (const place of document.querySelectorAll(".figure")) {
  const figure = JSON.parse(document.getElementById(place.dataset.from).textContent);
  Plotly.newPlot(place, figure.data, figure.layout, { responsive: true, displayModeBar: false });
}
"""

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{{ policy }}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>{{ view.name|clean }} - vllm-sweep</title>
<style>{{ style }}</style>
</head>
<body>
<main>
<h1>{{ view.name|clean }}</h1>
<p class="dim">{{ view.model|clean }}, revision {{ (view.revision or "not pinned")|clean }}. {{ view.device|clean }}, vLLM {{ (view.vllm_version or "version unknown")|clean }}.</p>
{% if not view.complete %}<p class="headline warning">Unfinished: the study was stopped early or is still running.</p>{% endif %}
<p class="headline{% if view.best is none %} warning{% endif %}">{{ headline }}</p>
<dl>
<dt>Workload</dt><dd>{{ view.workload }}</dd>
<dt>Objective</dt><dd>{{ view.direction }} {{ view.objective|clean }}</dd>
<dt>SLOs</dt><dd>{{ view.slo_words or "none" }}</dd>
<dt>Trials</dt><dd>{{ counts }}</dd>
<dt>Time</dt><dd>{{ view.started_at|clean }} to {{ (view.ended_at or "now")|clean }}</dd>
</dl>

{% if comparison %}
<h2>{{ "Next best" if view.beside != view.shown else "Best" if view.best is not none else "Nearest miss" }} beside the baseline</h2>
<div class="scroll narrow"><table>
<thead><tr><th></th><th class="number">baseline</th><th class="number">{{ beside }}</th><th class="number">change</th></tr></thead>
<tbody>
{% for row in flags %}<tr><td>{{ row[0] }}</td><td class="number">{{ row[1] }}</td><td class="number">{{ row[2] }}</td><td></td></tr>
{% endfor %}
{% for row in comparison %}<tr><td>{{ row.label }}</td><td class="number">{{ row.baseline }}</td><td class="number">{{ row.shown }}</td><td class="number{% if row.improved is not none %} {{ "good" if row.improved else "bad" }}{% endif %}">{{ row.change }}</td></tr>
{% endfor %}
</tbody></table></div>
<p class="dim">{{ caution }}</p>
{% endif %}

{% if config %}
<h2>The configuration</h2>
<pre>{{ config }}</pre>
{% endif %}

{% if limits %}
<h2>What limited the server</h2>
<ul>{% for line in limits %}<li>{{ line }}</li>{% endfor %}</ul>
{% endif %}

{% macro figure(plot, heading) %}
<div class="card">{% if heading %}<h3>{{ heading }}</h3>{% endif %}<div class="figure" data-from="{{ plot.name }}"></div>
<script type="application/json" id="{{ plot.name }}">{{ plot.json }}</script></div>
{% endmacro %}
{% if history %}
<h2>Trial by trial</h2>
<p class="dim">Crosses at the foot gave no result; point at one for its reason. The dotted line is the baseline.</p>
{{ figure(history, "") }}
{% endif %}
{% if tradeoffs %}
<h2>Throughput and latency</h2>
<p class="dim">A mark is one load level of one trial. Up and to the left is better.</p>
<div class="grid">{% for plot in tradeoffs %}{{ figure(plot, "") }}{% endfor %}</div>
{% endif %}
{% if parameters %}
<h2>Flag by flag</h2>
<p class="dim">Every trial by the value of one flag, whatever the others were.</p>
<div class="grid small">{% for plot in parameters %}{{ figure(plot, "") }}{% endfor %}</div>
{% endif %}
{% if history or tradeoffs or parameters %}<noscript><p>The figures need JavaScript; the tables do not.</p></noscript>{% endif %}

{% if failures %}
<h2>What failed</h2>
<div class="scroll"><table>
<thead><tr><th>failure</th><th>trials</th><th>advice</th><th>decisive line of the first</th></tr></thead>
<tbody>
{% for group in failures %}<tr><td>{{ words[group.kind] }}</td><td>{{ group.trials|join(" ") }}</td><td>{{ group.advice|clean }}</td><td><code>{{ group.evidence|clean|truncate(300) }}</code></td></tr>
{% endfor %}
</tbody></table></div>
{% endif %}

<h2>All trials</h2>
{% if rows %}
<div class="scroll tall"><table class="trials">
<thead><tr>{% for column in columns %}<th>{{ column }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in rows %}<tr{% if row.mark %} class="{{ row.mark }}"{% endif %}>{% for cell in row.figures %}<td>{{ cell }}</td>{% endfor %}<td class="text">{{ row.remarks }}</td>{% for cell in row.flags %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</tbody></table></div>
<p class="dim">All columns are in trials.csv, all load levels in levels.csv.</p>
{% else %}
<p>No trial has finished.</p>
{% endif %}

{% if view.notes %}
<h2>Notes</h2>
<ul>{% for note in view.notes %}<li>{{ note|clean }}</li>{% endfor %}</ul>
{% endif %}

{% if environment %}
<h2>Environment</h2>
<dl>{% for name, value in environment %}<dt>{{ name|clean }}</dt><dd>{{ value|clean }}</dd>{% endfor %}</dl>
{% endif %}
</main>
{% if history or tradeoffs or parameters %}
<script>{{ plotly }}</script>
<script>{{ script }}</script>
{% endif %}
</body>
</html>
"""
