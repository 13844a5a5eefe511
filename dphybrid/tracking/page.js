"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const colours = data.colours;
const at = (id) => document.getElementById(id);
const runOf = Object.fromEntries(data.runs.map((run) => [run.id, run]));
const hidden = new Set();
let group = data.param;
let sorting = null;

// Plotly reads a little HTML in names; what people call their runs is text.
const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
const short = (name) => (name.startsWith("train.") || name.startsWith("model.") ? name.slice(6) : name);
const together = () => group !== data.seed && data.differing.includes(data.seed) && at("bands").checked;
const own = (run) => run.members ?? [run];
const isHidden = (run) => own(run).every((member) => hidden.has(member.id));
const shown = () => rows().filter((run) => !isHidden(run));
const values = () => [...new Set(data.orders[group].map((id) => runOf[id].params[group]))];
// Runs that all have the same value differ in colour all the same: else no curve could be told from another.
const colour = (run) => colours[(values().length > 1 ? values().indexOf(run.params[group]) : data.orders[group].indexOf(own(run)[0].id)) % colours.length];
const format = (value) =>
  value === null || value === undefined ? "" : Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(4)));

/* What the page has a line for: runs, or those that differ in their seed alone as one, with their means. */
function rows() {
  const runs = data.orders[group].map((id) => runOf[id]);
  if (!together()) return runs;
  const names = data.differing.filter((name) => name !== data.seed), alike = new Map();
  for (const run of runs) {
    const key = JSON.stringify(names.map((name) => run.params[name]));
    if (!alike.has(key)) alike.set(key, []);
    alike.get(key).push(run);
  }
  return [...alike.values()].map((members) => (members.length < 2 ? members[0] : merged(members, names)));
}

const labelOf = (run) => (run.members ? run.name : `${run.params[group]} · ${run.name}`);
const mean = (numbers) => numbers.reduce((a, b) => a + b) / numbers.length;
const median = (numbers) => { const all = numbers.toSorted((a, b) => a - b), half = all.length >> 1; return all.length % 2 ? all[half] : (all[half - 1] + all[half]) / 2; };
const deviation = (numbers) => Math.sqrt(numbers.reduce((sum, x) => sum + (x - mean(numbers)) ** 2, 0) / (numbers.length - 1));

function merged(members, names) {
  const run = { ...members[0], members, id: members.map((member) => member.id).join(), url: "", metrics: {}, spread: {}, stages: {} };
  run.name = [...names.map((name) => members[0].params[name]), `${members.length} seeds`].join(" · ");
  run.params = { ...run.params, [data.seed]: `${members.length} seeds` };
  for (const name of new Set(members.flatMap((member) => Object.keys(member.metrics)))) {
    const numbers = members.map((member) => member.metrics[name]).filter((value) => typeof value === "number");
    if (!numbers.length) continue;
    run.metrics[name] = name.startsWith("summary/") ? median(numbers) : mean(numbers);
    if (numbers.length > 1) run.spread[name] = deviation(numbers);
  }
  for (const stage of new Set(members.flatMap((member) => Object.keys(member.stages))))
    run.stages[stage] = mean(members.map((member) => member.stages[stage] ?? 0));
  return run;
}

/* A run's speed against its baseline; of several seeds the median, undefined where none is known. */
function speedOf(run, what) {
  const known = own(run).map((member) => data.speeds[group][member.id]?.[what]).filter((value) => typeof value === "number");
  return known.length ? median(known) : undefined;
}

function element(name, parent, text, style) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (style) made.className = style;
  parent.append(made);
  return made;
}

function draw(place, traces, layout) {
  const base = { margin: { l: 55, r: 15, t: 35, b: 45 }, font: { size: 13 }, hovermode: "closest", legend: { orientation: "h", y: -0.25 } };
  Plotly.react(place, traces, { ...base, ...layout }, { displaylogo: false, responsive: true, modeBarButtonsToRemove: ["select2d", "lasso2d"] });
}

/* The table: what differs comes first, then what came of it. best: which end of a column is the good one. */
function columns() {
  const made = data.differing.map((name) => ({ title: short(name), of: (run) => run.params[name], text: true }));
  for (const name of data.finals)
    made.push({ title: name.slice(6), of: (run) => run.metrics[name], spread: (run) => run.spread?.[name], best: /loss|mse|mae|perplexity|rank|error|deviance/.test(name) ? "least" : "most" });
  const summary = (title, name, best) => made.push({ title, of: (run) => run.metrics[`summary/${name}`], spread: (run) => run.spread?.[`summary/${name}`], best });
  summary("samples/s", "samples_per_s_median", "most");
  made.push({ title: "speed-up", of: (run) => speedOf(run, "ratio"), show: (value) => value.toFixed(2), none: "-" });
  made.push({ title: "efficiency", of: (run) => speedOf(run, "efficiency"), show: (value) => `${Math.round(100 * value)}%` });
  summary("step p50, ms", "step_ms_p50", "least");
  summary("step p95, ms", "step_ms_p95");
  summary("training, s", "train_s");
  made.push({ title: "started", of: (run) => run.started, text: true }, { title: "status", of: (run) => run.status, text: true });
  return made.filter((column) => data.runs.some((run) => ![undefined, null].includes(column.of(run)) || (column.none && "summary/samples_per_s_median" in run.metrics)));
}

function sorted(runs, column) {
  if (!column) return runs;
  const key = (run) => {
    const value = column.of(run);
    return column.text && value !== "" && !isNaN(value) ? Number(value) : value;
  };
  const order = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true }));
  const known = (run) => ![undefined, null].includes(key(run));
  return runs.toSorted((a, b) => (known(a) && known(b) ? sorting.sign * order(key(a), key(b)) : known(b) - known(a)));
}

function drawTable() {
  const table = at("runs"), all = columns();
  table.replaceChildren();
  const head = element("tr", element("thead", table));
  element("th", head, "run").onclick = () => { sorting = null; drawTable(); };
  for (const column of all) {
    const title = element("th", head, column.title, column.text ? "" : "number");
    if (sorting?.title === column.title) title.setAttribute("aria-sort", sorting.sign > 0 ? "ascending" : "descending");
    title.onclick = () => {
      sorting = { title: column.title, sign: sorting?.title === column.title ? -sorting.sign : column.best === "most" ? -1 : 1 };
      drawTable();
    };
  }
  const body = element("tbody", table), visible = shown();
  for (const run of sorted(rows(), sorting && all.find((column) => column.title === sorting.title))) {
    const row = element("tr", body, undefined, isHidden(run) ? "hidden" : "");
    const first = element("td", row);
    const box = element("input", first);
    box.type = "checkbox";
    box.checked = !isHidden(run);
    box.setAttribute("aria-label", `show ${run.name}`);
    box.onchange = () => {
      for (const { id } of own(run)) box.checked ? hidden.delete(id) : hidden.add(id);
      drawAll();
    };
    element("span", first, "", "dot").style.background = colour(run);
    const link = element("a", first, run.name);
    link.title = own(run).map((member) => member.name).join(", ");
    if (/^https?:/.test(run.url)) Object.assign(link, { href: run.url, target: "_blank", rel: "noopener" });
    for (const column of all) {
      const value = column.of(run), empty = [undefined, null].includes(value);
      const cell = element("td", row, empty ? column.none ?? "" : column.text ? value : (column.show ?? format)(value), column.text ? "" : "number");
      const spread = column.spread?.(run);
      if (spread !== undefined) element("small", cell, ` ±${format(Number(spread.toPrecision(2)))}`);
      const others = visible.map(column.of).filter((other) => typeof other === "number");
      const best = column.best === "most" ? Math.max(...others) : column.best === "least" ? Math.min(...others) : null;
      if (!empty && value === best && others.length > 1) cell.classList.add("best");
    }
  }
  const means = "Means over the seeds (medians of times and speeds), ± their standard deviation; untick \u201cseeds as one\u201d for each run.";
  at("same").textContent = !data.differing.length ? "Nothing differs in the configs of these runs." : rows().some((run) => run.members) ? means : "";
}

function drawSpeed() {
  const speed = data.speeds[group], runs = shown().filter((run) => speedOf(run, "ratio") !== undefined);
  const places = new Set(runs.map((run) => run.params[group]));
  at("speed-section").hidden = places.size < 2;
  if (places.size < 2) return;
  const scaling = group === data.devices, series = new Map();
  const of = (run) => own(run).map((member) => speed[member.id]).find(Boolean);
  for (const run of runs) {
    const among = of(run).among || "measured";
    if (!series.has(among)) series.set(among, []);
    series.get(among).push(run);
  }
  const x = (run) => (scaling ? run.replicas : plain(run.params[group]));
  const traces = [...series].map(([among, members], number) => ({
    name: plain(among),
    x: members.map(x),
    y: members.map((run) => speedOf(run, "ratio")),
    customdata: members.map((run) => [plain(run.name), format(run.metrics["summary/samples_per_s_median"]), plain(of(run).against)]),
    hovertemplate: "%{customdata[0]}<br>%{y:.2f} times %{customdata[2]}<br>%{customdata[1]} samples/s<extra></extra>",
    mode: scaling ? "lines+markers" : "markers",
    marker: { size: 10 },
    line: { color: colours[number % colours.length] },
  }));
  if (scaling) {
    const counts = [...new Set(runs.map((run) => run.replicas))].sort((a, b) => a - b);
    traces.unshift({ name: "ideal", x: counts, y: counts.map((count) => count / counts[0]), mode: "lines", line: { dash: "dash", color: "#999" }, hoverinfo: "skip" });
  }
  const axis = scaling ? { title: { text: "devices" }, tickvals: [...new Set(runs.map((run) => run.replicas))] } : { title: { text: plain(short(group)) }, type: "category" };
  draw("speed", traces, { yaxis: { title: { text: "speed-up" }, rangemode: "tozero" }, xaxis: axis, showlegend: true, legend: { orientation: "h", y: -0.4 } });
  const virtual = data.virtual && scaling ? " Virtual devices share their hardware: they show what splitting costs, not what more GPUs bring." : "";
  at("speed-note").textContent = `Speed-up relative to the first value of ${short(group)}, for runs equal in all else but the seed.${virtual}`;
}

function drawStages() {
  const runs = shown().filter((run) => Object.keys(run.stages).length).reverse();
  at("stages-section").hidden = !runs.length;
  if (!runs.length) return;
  const totals = {};
  for (const run of runs) for (const [stage, ms] of Object.entries(run.stages)) totals[stage] = (totals[stage] ?? 0) + ms;
  const stages = Object.keys(totals).filter((stage) => totals[stage] > 0).sort((a, b) => totals[b] - totals[a]);
  const letters = window.innerWidth < 640 ? 16 : 36;
  const label = (run) => plain(labelOf(run).slice(0, letters));
  const traces = stages.map((stage, number) => ({
    type: "bar", orientation: "h", name: plain(stage), marker: { color: colours[number % colours.length] },
    y: runs.map((run) => run.id), x: runs.map((run) => run.stages[stage] ?? 0), customdata: runs.map(label),
    hovertemplate: `%{customdata}<br>${plain(stage)}: %{x:.3f} ms<extra></extra>`,
  }));
  const height = (window.innerWidth < 640 ? 440 : 220) + 34 * runs.length; // the legend is long on a phone
  at("stages").style.height = `${height}px`;
  draw("stages", traces, {
    height, // Plotly measures a place once, and this one shrinks when a run is hidden
    barmode: "stack", showlegend: true, legend: { orientation: "h", traceorder: "normal", maxheight: 400, y: -40 / (100 + 34 * runs.length) },
    yaxis: { tickvals: runs.map((run) => run.id), ticktext: runs.map(label), automargin: true },
  });
}

/* Several seeds are one band: their mean, and from the least to the most, at the places that all have. */
function band(run, axis, key) {
  const known = own(run).filter((member) => member[axis][key]).map((member) => new Map(member[axis][key]));
  if (known.length < 2) return { run, points: own(run).map((member) => member[axis][key]).find(Boolean) };
  const steps = [...known[0].keys()].filter((step) => known.every((points) => points.has(step) && points.get(step) !== null));
  const found = steps.map((step) => known.map((points) => points.get(step)));
  return {
    run, points: steps.map((step, place) => [step, mean(found[place])]),
    low: found.map((row) => Math.min(...row)), high: found.map((row) => Math.max(...row)),
  };
}

function drawCurves() {
  const axis = at("axis").value;
  const runs = axis === "steps" ? shown() : shown().flatMap(own); // no two runs have equal times
  const keys = [...new Set(data.runs.flatMap((run) => Object.keys(run[axis])))].sort().reverse();
  at("curves-section").hidden = !keys.length;
  const places = keys.map((key) => at(`curve-${key}`) ?? Object.assign(element("div", at("curves"), undefined, "chart"), { id: `curve-${key}` }));
  for (const [number, key] of keys.entries()) {
    const lines = runs.filter((run) => own(run).some((member) => member[axis][key])).map((run) => band(run, axis, key));
    const traces = lines.flatMap(({ run, points, low, high }) => {
      const x = points.map((point) => point[0]), line = { color: colour(run), width: 2 };
      const around = low ? [{ x: [...x, ...x.toReversed()], y: [...high, ...low.toReversed()], mode: "lines", fill: "toself", fillcolor: `${colour(run)}33`, line: { width: 0 }, hoverinfo: "skip", showlegend: false }] : [];
      const label = plain(labelOf(run));
      return [...around, { x, y: points.map((point) => point[1]), name: label, line, marker: { color: colour(run) }, mode: points.length < 30 ? "lines+markers" : "lines", hovertemplate: `${label}<br>%{x}: %{y:.5g}<extra></extra>` }];
    });
    draw(places[number], traces, {
      title: { text: plain(key), x: 0.02, font: { size: 14 } }, showlegend: false,
      xaxis: { title: { text: axis === "steps" ? "step" : "seconds" } }, yaxis: { type: at("log").checked ? "log" : "linear" },
    });
  }
}

function drawSweep() {
  const runs = shown(), names = data.differing.filter((name) => new Set(runs.map((run) => run.params[name])).size > 1);
  at("sweep-section").hidden = runs.length < 3 || names.length < 2;
  if (at("sweep-section").hidden) return;
  const categories = (name) => [...new Set(runs.map((run) => run.params[name]))].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
  const dimensions = names.map((name) => {
    const found = categories(name);
    return { label: short(name), values: runs.map((run) => found.indexOf(run.params[name])), tickvals: found.map((_, place) => place), ticktext: found };
  });
  for (const [name, label] of [...data.finals.map((name) => [name, name.slice(6)]), ["summary/samples_per_s_median", "samples/s"]]) {
    const numbers = runs.map((run) => run.metrics[name]);
    if (numbers.every((value) => typeof value === "number")) dimensions.push({ label, values: numbers });
  }
  const found = values();
  at("sweep").style.minWidth = `${110 * dimensions.length}px`;
  draw("sweep", [{
    type: "parcoords", dimensions,
    line: { color: runs.map((run) => found.indexOf(run.params[group])), colorscale: found.map((_, place) => [found.length < 2 ? 0 : place / (found.length - 1), colours[place % colours.length]]).concat(found.length < 2 ? [[1, colours[0]]] : []) },
  }], { margin: { l: 70, r: 60, t: 70, b: 20 } });
}

function drawAll() {
  drawTable();
  drawSpeed();
  drawStages();
  drawSweep();
  drawCurves();
}

for (const name of data.params) element("option", at("group"), short(name)).value = name;
at("group").value = group;
at("group").onchange = () => { group = at("group").value; drawAll(); };
for (const id of ["axis", "log"]) at(id).onchange = drawCurves;
at("bands").onchange = drawAll;
at("seeds").hidden = !data.differing.includes(data.seed);
drawAll();
document.body.dataset.drawn = "yes";
