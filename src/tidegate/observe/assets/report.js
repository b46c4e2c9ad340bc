/* The charts, and the table of worst requests. Data come as JSON in the element "data"; text is only ever set as text. */
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const style = getComputedStyle(document.documentElement);
  const token = (name) => style.getPropertyValue(name).trim();
  const font = "12px system-ui, sans-serif";
  const charts = [];

  /* Three digits that matter, without an exponent. */
  function short(value) {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    if (size >= 1e6) return `${+(value / 1e6).toPrecision(3)}M`;
    if (size >= 1e4) return `${+(value / 1e3).toPrecision(3)}k`;
    return String(size >= 100 ? Math.round(value) : +value.toPrecision(3));
  }

  function withUnit(value, unit) {
    return unit ? `${short(value)} ${unit}` : short(value);
  }

  /* Ticks of a logarithmic axis: 1, 2, 5 of each decade, fewer where there are many decades. */
  function decades(u, at, min, max) {
    const steps = max / min > 2000 ? [1] : max / min > 30 ? [1, 3] : [1, 2, 5];
    const found = [];
    for (let power = Math.floor(Math.log10(min)); power <= Math.ceil(Math.log10(max)); power++) {
      for (const step of steps) {
        const tick = +(step * 10 ** power).toPrecision(2);
        if (tick >= min && tick <= max) found.push(tick);
      }
    }
    return found.length > 1 ? found : [min, max];
  }

  function logarithmic(axis) {
    return { ...axis, splits: decades, filter: (u, splits) => splits };
  }

  function axis(side, scale, label) {
    return {
      scale, side, label, font, labelFont: font, labelSize: 22, labelGap: 0,
      size: side === 3 ? 46 : 30, gap: 4, space: side === 3 ? 34 : 48,
      stroke: () => token("--soft"),
      grid: { stroke: () => token("--line"), width: 1 },
      ticks: { stroke: () => token("--line"), width: 1, size: 4 },
      values: (u, splits) => splits.map((v) => (v === null ? "" : short(v))),
    };
  }

  /* A dashed upright line where the promise is. */
  function drawPromise(u, at) {
    const { ctx, bbox } = u;
    if (at < u.scales.x.min || at > u.scales.x.max) return;
    const x = Math.round(u.valToPos(at, "x", true)) + 0.5;
    const px = uPlot.pxRatio;
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = token("--text");
    ctx.lineWidth = 1.25 * px;
    ctx.setLineDash([2 * px, 3 * px]);
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    ctx.font = `${11 * px}px system-ui, sans-serif`;
    const left = x > bbox.left + bbox.width * 0.7;
    ctx.textAlign = left ? "right" : "left";
    ctx.fillText("promise", x + (left ? -4 : 4) * px, bbox.top + bbox.height - 6 * px);
    ctx.restore();
  }

  /* A place below the chart for what one run's curve says. */
  function said(series, readout) {
    const made = document.createElement("span");
    made.className = `dot c${series.colour}${series.dash ? " measured" : ""}`;
    made.textContent = `${series.run}: ${series.rest}`;
    readout.append(made);
    return made;
  }

  function options(chart, place, readout) {
    const lines = chart.series.map((s) => said(s, readout));
    const when = lines.length ? document.createElement("span") : null;
    readout.prepend(when);
    const tell = (u) => {
      const at = u.cursor.idx;
      const resting = at === null || at === undefined;
      when.textContent = resting ? "" : withUnit(chart.x.values[at], chart.x.unit);
      chart.series.forEach((s, i) => {
        lines[i].textContent = `${s.run}: ${resting ? s.rest : withUnit(s.y[at], chart.y.unit)}`;
      });
    };
    const top = chart.y.max ?? Math.max(1, ...chart.series.flatMap((s) => s.y.map((v) => v ?? 0))) * 1.06;
    return {
      width: Math.max(200, place.clientWidth),
      height: place.clientHeight,
      padding: [10, 18, 0, 0],
      legend: { show: false },
      scales: {
        x: { time: false, distr: chart.x.log ? 3 : 1, range: (u, min, max) => [min, max] },
        y: { range: () => [0, top] },
      },
      axes: [chart.x.log ? logarithmic(axis(2, "x", chart.x.label)) : axis(2, "x", chart.x.label), axis(3, "y", chart.y.label)],
      series: [
        {},
        ...chart.series.map((s) => ({
          label: s.run,
          stroke: () => token(`--c${s.colour}`),
          width: 2,
          dash: s.dash ? [7, 5] : undefined,
          points: { show: false },
        })),
      ],
      cursor: { y: false, drag: { x: true, y: false }, points: { size: 7 }, sync: chart.x.log ? undefined : { key: "time" } },
      hooks: {
        setCursor: [tell],
        draw: chart.promise === null ? [] : [(u) => drawPromise(u, chart.promise)],
      },
    };
  }

  function draw(place) {
    const chart = data.charts[place.id];
    const readout = place.parentElement.querySelector(".readout");
    const plot = new uPlot(
      options(chart, place, readout),
      [chart.x.values, ...chart.series.map((s) => s.y)],
      place,
    );
    place.dataset.drawn = chart.series.length;
    charts.push({ chart, plot });
    new ResizeObserver(() => {
      const width = Math.max(200, place.clientWidth);
      if (width !== plot.width) plot.setSize({ width, height: place.clientHeight });
    }).observe(place);
  }

  function toggle(button) {
    const run = data.runs[+button.dataset.run];
    const shown = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", String(shown));
    for (const { chart, plot } of charts) {
      chart.series.forEach((s, i) => {
        if (s.run === run.name) plot.setSeries(i + 1, { show: shown });
      });
    }
  }

  /* The table ---------------------------------------------------------------------------------------- */

  const number = true;
  const columns = [
    { name: "Run" }, { name: "Class" }, { name: "Request" }, { name: "Tenant" },
    { name: "TTFT (s)", number }, { name: "TPOT (s)", number }, { name: "Widest gap (s)", number },
    { name: "E2E (s)", number }, { name: "Promise", told: (kept) => (kept ? "kept" : "broken") }, { name: "End" },
    { name: "Prompt", number }, { name: "Output", number }, { name: "Cached", number },
    { name: "Preempted", number }, { name: "Recomputed", number }, { name: "Arrival (s)", number },
    { name: "Priority", number },
  ];
  const TTFT = 4, KEPT = 8, END = 9;
  const view = { by: TTFT, down: true };
  const find = (id) => document.getElementById(id);

  function chosen() {
    const run = find("worst-run").value, kind = find("worst-class").value;
    const text = find("worst-text").value.toLowerCase(), missed = find("worst-missed").checked;
    return data.worst.filter(
      (row) =>
        (!run || row[0] === run) && (!kind || row[1] === kind) && (!missed || !row[KEPT]) &&
        (!text || [row[2], row[3], row[END]].some((cell) => cell.toLowerCase().includes(text))),
    );
  }

  function compare(a, b) {
    const [x, y] = [a[view.by], b[view.by]];
    if (x === y) return 0;
    if (x === null || y === null) return x === null ? 1 : -1;
    return (x < y ? -1 : 1) * (view.down ? -1 : 1);
  }

  function cell(kind, text, right) {
    const made = document.createElement(kind);
    made.className = right ? "n" : "t";
    made.textContent = text;
    return made;
  }

  function line(row) {
    const made = document.createElement("tr");
    columns.forEach((column, i) => {
      const value = row[i];
      const text = column.told ? column.told(value) : column.number ? short(value) : value;
      const made_cell = cell("td", text, column.number);
      if (i === 0) {
        const run = data.runs.find((r) => r.name === value);
        made_cell.classList.add("dot", `c${run.colour}`, run.dash ? "measured" : "simulated");
      }
      if (i === KEPT && !value) made_cell.classList.add("broken");
      made.append(made_cell);
    });
    return made;
  }

  function fill() {
    const rows = chosen().sort(compare);
    find("worst-table").tBodies[0].replaceChildren(...rows.map(line));
    find("worst-count").textContent = `${rows.length} of ${data.worst.length}`;
  }

  function order(by) {
    view.down = view.by === by ? !view.down : Boolean(columns[by].number);
    view.by = by;
    marks();
    fill();
  }

  function marks() {
    [...find("worst-table").tHead.rows[0].cells].forEach((head, i) => {
      head.setAttribute("aria-sort", i !== view.by ? "none" : view.down ? "descending" : "ascending");
    });
  }

  function build() {
    const table = find("worst-table");
    const head = table.createTHead().insertRow();
    columns.forEach((column, i) => {
      const made = cell("th", "", column.number);
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = column.name;
      button.addEventListener("click", () => order(i));
      made.scope = "col";
      made.append(button);
      head.append(made);
    });
    table.createTBody();
    for (const [id, at] of [["worst-run", 0], ["worst-class", 1]]) {
      for (const name of new Set(data.worst.map((row) => row[at]))) find(id).append(new Option(name, name));
    }
    for (const id of ["worst-run", "worst-class", "worst-text", "worst-missed"]) find(id).addEventListener("input", fill);
    marks();
    fill();
  }

  document.querySelector(".filters").addEventListener("submit", (event) => event.preventDefault());
  document.querySelectorAll(".plot").forEach(draw);
  document.querySelectorAll("button.run").forEach((b) => b.addEventListener("click", () => toggle(b)));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => charts.forEach(({ plot }) => plot.redraw()));
  build();
  document.documentElement.dataset.ready = "true";
})();
