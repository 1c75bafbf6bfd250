"""The frame of a report: style and script, inside the page, which loads nothing."""

import json
from typing import Any

from tpuspec.serving.report_svg import escape

STYLE = """
:root { color-scheme: light dark; --paper: #fcfbf8; --ink: #1d1c1a; --quiet: #5d5a54;
  --rule: #dcd8cf; --panel: #f3f1eb; --s1: #1f5fb4; --s2: #a84e00; --s3: #157351; --s4: #7442ac; }
@media (prefers-color-scheme: dark) { :root { --paper: #171614; --ink: #edeae3; --quiet: #aba69c;
  --rule: #3d3a35; --panel: #211f1c; --s1: #82b2ff; --s2: #f0a35f; --s3: #62cfa1; --s4: #c6a6f4; } }
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 52rem; background: var(--paper);
  color: var(--ink); font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.2; } h2 { font-size: 1.2rem; margin: 2.5rem 0 .5rem; }
.note, figcaption { color: var(--quiet); font-size: .9rem; }
svg { display: block; width: 100%; min-width: 32rem; height: auto; margin: .5rem 0; }
.bars svg { min-width: 0; }
svg text { fill: var(--ink); font-size: 12px; } svg .tick { fill: var(--quiet); font-size: 11px; }
.middle { text-anchor: middle; } .end { text-anchor: end; }
.grid { stroke: var(--rule); fill: none; } .line { fill: none; stroke-width: 2; }
.s1 { --on: var(--s1); } .s2 { --on: var(--s2); } .s3 { --on: var(--s3); } .s4 { --on: var(--s4); }
.ink { --on: var(--ink); } .quiet { --on: var(--quiet); }
.line, .mark { stroke: var(--on); } .mark, .bar { fill: var(--on); }
svg .label.s1, svg .label.s2, svg .label.s3, svg .label.s4, svg .label.quiet { fill: var(--on); }
.line.s2 { stroke-dasharray: 7 4; } .line.s3 { stroke-dasharray: 2 3; }
.line.s4 { stroke-dasharray: 9 3 2 3; } .line.quiet { stroke-width: 1; stroke-dasharray: 4 4; }
.line.ink { stroke-width: 1.2; } .line.thin { stroke-width: .8; }
.line.whisker { stroke-width: 1.3; stroke-dasharray: none; }
.mark { stroke-width: 1.5; } .mark.hollow { fill: var(--paper); }
.mark.ring { fill: none; stroke-width: 2.5; }
.bar { fill-opacity: .55; } .bar.outline { fill: none; stroke: var(--s2); stroke-width: 1.5; }
.seen { stroke: var(--ink); stroke-width: 3; }
.bars { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 22rem), 1fr)); }
.source { margin: 1rem 0 0; } .strip { margin: .2rem 0; }
.run { display: inline-flex; flex-wrap: wrap; border: 1px solid var(--rule);
  border-radius: .4rem; padding: .2rem .15rem; margin: .1rem 0; background: var(--panel);
  align-items: center; line-height: 1.5; vertical-align: top; }
.t { border: 1.5px solid var(--on); border-radius: .25rem; padding: .05rem .25rem;
  margin: 0 .1rem; white-space: nowrap; }
.t i { font-style: normal; font-size: .75em; margin-right: .2em; color: var(--on); }
.t.accepted_draft { --on: var(--s3); } .t.correction { --on: var(--s2); border-style: dashed; }
.t.bonus { --on: var(--s1); border-style: double; border-width: 3px; }
.t.plain { --on: var(--quiet); } .t.rejected { --on: var(--quiet); border-style: dotted; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .15rem .7rem .15rem 0; border-bottom: 1px solid var(--rule);
  vertical-align: top; } tbody th { font-weight: normal; }
.scroll { overflow-x: auto; } summary { cursor: pointer; color: var(--quiet); }
fieldset { border: 1px solid var(--rule); border-radius: .5rem; background: var(--panel);
  display: grid; grid-template-columns: repeat(auto-fit, minmax(15rem, 1fr)); gap: .3rem 1.5rem; }
fieldset label { display: block; } input[type=range] { width: 100%; accent-color: var(--s1); }
fieldset button { justify-self: start; align-self: end; padding: .3rem 1rem; }
fieldset output { font-variant-numeric: tabular-nums; }
:focus-visible { outline: 3px solid var(--s1); outline-offset: 2px; }
"""

# What tpuspec/theory.py computes, for the sliders; see the tests that compare the two.
SCRIPT = """
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const form = document.getElementById("settings"), get = id => document.getElementById(id);
const expected = (alpha, gamma) => {
  let sum = 0;
  for (let i = 0; i <= gamma; i++) sum += alpha ** i;
  return sum;
};
const width = (state, gamma) =>
  state.measured ? data.widening[gamma] : 1 + state.slope * gamma;
const speedup = (state, gamma) =>
  expected(state.alpha, gamma) / (gamma * state.c + width(state, gamma));
const operations = (state, gamma) =>
  (gamma * ((data.c_hat ?? state.c) + 1) + 1) / expected(state.alpha, gamma);
const best = state => {
  let found = 0;
  for (let g = 1; g <= data.longest; g++) if (speedup(state, g) > speedup(state, found)) found = g;
  return found;
};
const begin = () => ({alpha: data.alpha, gamma: data.gamma, c: data.c, slope: data.slope,
  measured: data.widening !== null});

function place(svg, x, y) {
  const [left, right, bottom, top, x0, x1, y0, y1, log] =
    svg.dataset.plot.split(" ").map(Number);
  const within = (value, low, high) => Math.min(Math.max(value, low), high);
  y = within(y, y0, y1);
  const up = log ? Math.log(y / y0) / Math.log(y1 / y0) : (y - y0) / (y1 - y0);
  return [left + (within(x, x0, x1) - x0) / (x1 - x0) * (right - left),
          bottom - up * (bottom - top)];
}
const line = (svg, id, points) => get(id).setAttribute("points",
  points.map(([x, y]) => place(svg, x, y).map(v => v.toFixed(1)).join(",")).join(" "));
const move = (svg, id, x, y) => get(id).setAttribute("transform",
  `translate(${place(svg, x, y).map(v => v.toFixed(1)).join(" ")})`);
const cell = (row, at, text) => { row.cells[at].textContent = text; };

function draw(state) {
  const {alpha, gamma} = state, tokens = get("tokens"), runs = get("runs"), gain = get("gain");
  if (tokens) {
    const steps = Array.from({length: 51}, (_, i) => i / 50);
    line(tokens, "tokens-chosen", steps.map(a => [a, expected(a, gamma)]));
    move(tokens, "tokens-at", alpha, expected(alpha, gamma));
    [...get("runs-table").tBodies[0].rows].forEach((row, i) => {
      const k = i + 1, bar = get("runs-k" + k);
      const share = k > gamma + 1 ? 0 : alpha ** i * (k <= gamma ? 1 - alpha : 1);
      const [, y] = place(runs, k, share), [, floor] = place(runs, k, 0);
      bar.setAttribute("y", y.toFixed(1));
      bar.setAttribute("height", (floor - y).toFixed(1));
      cell(row, 1, share.toFixed(3));
    });
  }
  let said = `${expected(alpha, gamma).toFixed(2)} tokens a target run with γ = ${gamma}`;
  if (gain) {
    const lengths = Array.from({length: data.longest + 1}, (_, g) => g), g = best(state);
    line(gain, "gain-speed", lengths.map(g => [g, speedup(state, g)]));
    line(gain, "gain-operations", lengths.map(g => [g, operations(state, g)]));
    for (const [name, of] of [["speed-up", speedup], ["operations", operations]])
      get(`gain-${name}-label`).setAttribute("y",
        place(gain, data.longest, of(state, data.longest))[1] + 4);
    move(gain, "gain-best", g, speedup(state, g));
    [...get("gain-table").tBodies[0].rows].forEach((row, g) => {
      [expected(alpha, g), width(state, g), speedup(state, g), operations(state, g)]
        .forEach((value, i) => cell(row, i + 1, value.toFixed(2)));
    });
    said += `; the best γ is ${g}: ${speedup(state, g).toFixed(2)}x for ` +
      `${operations(state, g).toFixed(2)}x the operations`;
  }
  get("said").textContent = said + ".";
}

if (form) {
  let state = begin();
  const show = () => {
    for (const input of form.querySelectorAll("input")) {
      if (input.type === "checkbox") input.checked = state[input.name];
      else {
        input.value = state[input.name];
        get("of-" + input.name).textContent = Number(state[input.name].toFixed(3));
      }
    }
    draw(state);
  };
  form.disabled = false;
  form.addEventListener("input", event => {
    const {name, type, checked, value} = event.target;
    state[name] = type === "checkbox" ? checked : Number(value);
    if (name === "slope") state.measured = false;
    show();
  });
  get("again").addEventListener("click", () => { state = begin(); show(); });
  show();
}
"""


def settings(start: dict[str, Any] | None, said: str, most: int, *, cost: bool) -> str:
    """The sliders of figures 4 and 5: of native inputs, which work by keyboard.

    Args:
      start: what the script is given; None is no sliders.
      said: where it comes from.
      most: the largest γ.
      cost: whether c and the widening are known, which figure 5 takes.
    """
    if start is None:
        return ""
    sliders = [("alpha", "α, acceptance rate", 0, 1, 0.005),
               ("gamma", "γ of figure 4", 1, most, 1)]
    if cost:
        sliders += [("c", "c, a draft pass over a target pass", 0, max(1.0, start["c"]), 0.005),
                    ("slope", "widening: what each draft adds to a verify pass", 0,
                     max(0.5, start["slope"]), 0.005)]
    parts = [f'<label>{title}: <output id="of-{name}">{start[name]:.3g}</output><input '
             f'type="range" name="{name}" min="{low}" max="{high}" step="{step}" '
             f'value="{start[name]}"></label>' for name, title, low, high, step in sliders]
    if cost and start["widening"] is not None:
        parts.append('<label><input type="checkbox" name="measured" checked> the measured '
                     "widening</label>")
    return (f'<h2>Settings of figures 4 and 5</h2><p>They begin with {escape(said)}.</p>'
            f'<fieldset id="settings" disabled><legend>What if</legend>{"".join(parts)}'
            '<button type="button" id="again">As measured</button></fieldset>'
            '<p><output id="said" aria-live="polite"></output></p>')


def page(title: str, body: str, data: dict[str, Any] | None) -> str:
    """The whole document. ``data`` is for the script."""
    embedded = json.dumps(data).replace("<", "\\u003c")
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'; script-src 'unsafe-inline'\">"
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body><main>"
        f"<h1>{escape(title)}</h1>{body}</main>\n"
        f'<script type="application/json" id="data">{embedded}</script>'
        f"<script>{SCRIPT}</script></body></html>\n")
