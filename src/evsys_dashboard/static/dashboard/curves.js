// Curves of a run or an experiment, drawn by uPlot from the columns that the server sends.
// An element `[data-curves=<url>]` gets a chart per chosen metric; with `data-by-arm` the runs of an arm are one line,
// the mean of its seeds, in a band from the lowest to the highest seed. Zooming asks the server for finer points.
// The raw line stays visible below a smoothed one; NaN and infinities are marks at the edge of the plot.
const COLOURS = 10;
const HEIGHT = 220;
// `light-dark()` is resolved by the browser only where a property is computed: a probe gives what a canvas can use.
const probe = document.createElement("span");
probe.hidden = true;
document.body.append(probe);
const resolved = (variable) => {
  probe.style.color = `var(${variable})`;
  return getComputedStyle(probe).color;
};
const faded = (text, share) => {
  const found = text.match(/[\d.]+/g);
  return found && found.length >= 3 ? `rgba(${found[0]}, ${found[1]}, ${found[2]}, ${share})` : text;
};
const number = (value) => (typeof value === "number" ? value : Number(value));
const shown = (value) => {
  if (value == null) return "-";
  if (!Number.isFinite(value)) return String(value);
  return value === 0 || Math.abs(value) >= 0.001 ? String(+value.toPrecision(5)) : value.toExponential(2);
};

// Value of a curve at a step, between its neighbours; null outside of its range.
const at = (steps, values, step) => {
  let low = 0;
  let high = steps.length - 1;
  if (high < 0 || step < steps[0] || step > steps[high]) return null;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] < step) low = middle + 1;
    else high = middle;
  }
  if (steps[low] === step) return values[low];
  const share = (step - steps[low - 1]) / (steps[low] - steps[low - 1]);
  return values[low - 1] + share * (values[low] - values[low - 1]);
};

const finite = (series) => {
  const steps = [];
  const values = [];
  const odd = [];
  series.step.forEach((step, index) => {
    const value = number(series.value[index]);
    if (Number.isFinite(value)) {
      steps.push(step);
      values.push(value);
    } else odd.push({ step, value });
  });
  return { steps, values, odd };
};

// One line per run, or per arm the mean over its seeds with the lowest and the highest.
const linesOf = (series, byArm) => {
  const groups = new Map();
  for (const one of series) {
    const name = byArm ? one.arm : one.seed == null ? one.name : `${one.name}`;
    if (!groups.has(name)) groups.set(name, []);
    groups.get(name).push({ ...finite(one), low: one.low, high: one.high, whole: one });
  }
  return [...groups].map(([name, seeds]) => {
    const odd = seeds.flatMap((seed) => seed.odd);
    const filled = seeds.filter((seed) => seed.steps.length);
    if (filled.length < 2) {
      const only = filled[0] ?? { steps: [], values: [] };
      const marks = only.whole?.low?.some((value) => value != null) ? only.whole : null;
      return { name, n: seeds.length, steps: only.steps, mean: only.values, low: null, high: null, odd, interval: marks };
    }
    // As far as all seeds go: a mean over other seeds would look like a jump.
    const begin = Math.max(...filled.map((seed) => seed.steps[0]));
    const end = Math.min(...filled.map((seed) => seed.steps.at(-1)));
    const all = [...new Set(filled.flatMap((seed) => seed.steps))].filter((step) => step >= begin && step <= end);
    all.sort((one, other) => one - other);
    const columns = all.map((step) => filled.map((seed) => at(seed.steps, seed.values, step)));
    return {
      name,
      n: filled.length,
      steps: all,
      mean: columns.map((column) => column.reduce((sum, value) => sum + value, 0) / column.length),
      low: columns.map((column) => Math.min(...column)),
      high: columns.map((column) => Math.max(...column)),
      odd,
      interval: null,
    };
  });
};

// Exponential moving average, corrected for its start.
const smoothed = (values, weight) => {
  let sum = 0;
  let total = 0;
  return values.map((value) => {
    if (value == null) return null;
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
};

const start = (root) => {
  const panel = root.closest("section");
  const url = root.dataset.curves;
  const byArm = "byArm" in root.dataset;
  const most = Number(root.dataset.byArm) || COLOURS;
  const legend = panel.querySelector("[data-curves-legend]");
  const note = panel.querySelector("[data-curves-note]");
  const charts = new Map();
  const order = [];
  const hidden = new Set();
  const state = { log: false, smooth: 0 };
  let leftOut = 0; // curves that the server did not send, since one answer has a limit

  const ask = async (metrics, range) => {
    const query = new URLSearchParams(metrics.map((name) => ["metric", name]));
    const width = Math.max(100, Math.round(root.clientWidth / (metrics.length > 1 ? 2 : 1)));
    query.set("width", String(width));
    if (range) {
      query.set("from", String(Math.floor(range[0])));
      query.set("to", String(Math.ceil(range[1])));
    }
    // theme.js has asked for the first curves already, while this module was on its way.
    const early = window.firstCurves;
    window.firstCurves = null;
    const isSame = early && !range && width <= early.width && String(early.metrics) === String(metrics);
    const answer = await (isSame ? early.answer : fetch(`${url}?${query}`, { headers: { Accept: "application/json" } }));
    if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
    const found = await answer.json();
    leftOut = found.left_out ?? 0;
    return found.series;
  };

  const chosen = () => [...panel.querySelectorAll("[data-metric]:checked")].map((box) => box.value);

  const oddMarks = (lines) => ({
    hooks: {
      draw: [
        (plot) => {
          const { ctx, bbox } = plot;
          ctx.save();
          ctx.font = `${11 * devicePixelRatio}px sans-serif`;
          ctx.textAlign = "center";
          for (const line of lines) {
            ctx.fillStyle = ctx.strokeStyle = line.colour;
            for (const { step, value } of line.odd) {
              const x = plot.valToPos(step, "x", true);
              if (x < bbox.left || x > bbox.left + bbox.width) continue;
              const isTop = value === Infinity;
              const y = isTop ? bbox.top + 10 * devicePixelRatio : bbox.top + bbox.height - 4 * devicePixelRatio;
              ctx.fillText(Number.isNaN(value) ? "×" : isTop ? "▲" : "▼", x, y);
            }
            if (line.interval) {
              line.interval.step.forEach((step, index) => {
                const low = line.interval.low[index];
                const high = line.interval.high[index];
                if (low == null || high == null) return;
                const x = plot.valToPos(step, "x", true);
                ctx.globalAlpha = 0.6;
                ctx.beginPath();
                ctx.moveTo(x, plot.valToPos(low, "y", true));
                ctx.lineTo(x, plot.valToPos(high, "y", true));
                ctx.stroke();
                ctx.globalAlpha = 1;
              });
            }
          }
          ctx.restore();
        },
      ],
    },
  });

  const draw = (chart) => {
    const lines = linesOf(chart.series, byArm);
    for (const line of lines) if (!order.includes(line.name)) order.push(line.name);
    const visible = lines.filter((line) => !hidden.has(line.name) && order.indexOf(line.name) < most);
    for (const line of visible) line.colour = resolved(`--c${(order.indexOf(line.name) % COLOURS) + 1}`);
    const xs = [...new Set(visible.flatMap((line) => [...line.steps, ...line.odd.map((one) => one.step)]))];
    xs.sort((one, other) => one - other);
    const place = new Map(xs.map((step, index) => [step, index]));
    const column = (steps, values) => {
      const found = Array(xs.length).fill(undefined);
      steps.forEach((step, index) => {
        const value = values[index];
        found[place.get(step)] = state.log && !(value > 0) ? null : value;
      });
      return found;
    };
    const data = [xs];
    const series = [{ label: "step" }];
    const bands = [];
    const few = xs.length <= 40;
    for (const line of visible) {
      if (line.low) {
        data.push(column(line.steps, line.high), column(line.steps, line.low));
        const edge = { stroke: faded(line.colour, 0.25), width: 0.5, points: { show: false }, spanGaps: true };
        series.push({ ...edge, label: `${line.name} highest` }, { ...edge, label: `${line.name} lowest` });
        bands.push({ series: [series.length - 2, series.length - 1], fill: faded(line.colour, 0.16) });
      }
      data.push(column(line.steps, line.mean));
      series.push({
        label: line.name, stroke: state.smooth ? faded(line.colour, 0.3) : line.colour, width: state.smooth ? 1 : 1.6,
        spanGaps: true, points: { show: few, size: 5, fill: line.colour },
      });
      if (state.smooth) {
        data.push(column(line.steps, smoothed(line.mean, state.smooth)));
        series.push({ label: `${line.name} smoothed`, stroke: line.colour, width: 2, spanGaps: true, points: { show: false } });
      }
    }
    chart.plot?.destroy();
    chart.values.textContent = visible.length ? "" : "no points";
    if (!visible.length) return;
    const text = resolved("--muted");
    const axis = {
      stroke: text, grid: { stroke: resolved("--line"), width: 1 }, ticks: { stroke: resolved("--line"), width: 1 },
      font: "11px system-ui, sans-serif",
    };
    const range = chart.range;
    chart.plot = new window.uPlot(
      {
        width: chart.box.clientWidth, height: HEIGHT,
        scales: {
          x: { time: false, ...(range ? { range } : {}) },
          y: {
            distr: state.log ? 3 : 1,
            // One value on all steps, or only marks: a plot still needs a range.
            range: (plot, low, high) => {
              if (low == null || high == null) return state.log ? [0.1, 1] : [0, 1];
              for (const line of visible) {
                for (const end of [...(line.interval?.low ?? []), ...(line.interval?.high ?? [])]) {
                  if (end != null && !state.log) [low, high] = [Math.min(low, end), Math.max(high, end)];
                }
              }
              if (state.log) return [low / 1.2, high * 1.2];
              const margin = (high - low) * 0.06 || Math.abs(high) * 0.1 || 0.1;
              return [low - margin, high + margin];
            },
          },
        },
        axes: [{ ...axis, values: (_, ticks) => ticks.map((tick) => (Number.isInteger(tick) ? tick.toLocaleString("en") : "")) },
               { ...axis, size: (_, labels) => Math.max(56, ...(labels ?? []).map((label) => 18 + 6.5 * label.length)), values: (_, ticks) => ticks.map((tick) => (tick == null ? "" : shown(tick))) }],
        series, bands, legend: { show: false },
        cursor: { drag: { x: true, y: false, setScale: false }, points: { size: 6 } },
        plugins: [oddMarks(visible)],
        hooks: {
          setSelect: [
            (plot) => {
              if (plot.select.width < 5) return;
              const ends = [plot.select.left, plot.select.left + plot.select.width].map((x) => plot.posToVal(x, "x"));
              plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
              zoom(chart, ends[1] - ends[0] < 1 ? [Math.floor(ends[0]), Math.ceil(ends[1]) + 1] : ends);
            },
          ],
          setCursor: [
            (plot) => {
              const index = plot.cursor.idx;
              if (index == null) {
                chart.values.textContent = "";
                return;
              }
              const step = xs[index];
              const told = visible.map((line) => {
                const odd = line.odd.find((one) => one.step === step);
                const where = line.steps.indexOf(step);
                return `${line.name} ${shown(odd ? odd.value : where < 0 ? null : line.mean[where])}`;
              });
              chart.values.textContent = `step ${step}: ${told.slice(0, 6).join(", ")}`;
            },
          ],
        },
      },
      data,
      chart.box,
    );
    chart.plot.over.addEventListener("dblclick", () => zoom(chart, null));
    root.dataset.drawn = String([...charts.values()].filter((one) => one.plot).length);
  };

  const zoom = async (chart, range) => {
    chart.range = range;
    try {
      chart.series = await ask([chart.metric], range);
      draw(chart);
      chart.element.dataset.range = range ? range.map(Math.round).join("-") : "";
    } catch (error) {
      note.textContent = `Curves could not be read: ${error.message}.`;
    }
  };

  const drawLegend = () => {
    legend.replaceChildren(
      ...order.slice(0, most).map((name, index) => {
        const item = document.createElement("li");
        const button = document.createElement("button");
        button.type = "button";
        button.setAttribute("aria-pressed", String(!hidden.has(name)));
        const swatch = document.createElement("span");
        swatch.className = "swatch";
        swatch.style.background = `var(--c${(index % COLOURS) + 1})`;
        button.append(swatch, name);
        button.addEventListener("click", () => {
          if (!hidden.delete(name)) hidden.add(name);
          for (const chart of charts.values()) draw(chart);
          drawLegend();
        });
        item.append(button);
        return item;
      }),
    );
    const left = order.length - most;
    const about = left > 0 ? `${left} more arms are in the table; at most ${most} are drawn.` : byArm ? "line: mean of the seeds; band: lowest to highest seed" : "";
    note.textContent = leftOut ? `${leftOut} more curves of single runs are not sent and not drawn: choose fewer metrics. ${about}` : about;
  };

  const load = async () => {
    const wanted = chosen();
    for (const [name, chart] of charts) {
      if (wanted.includes(name)) continue;
      chart.plot?.destroy();
      chart.element.remove();
      charts.delete(name);
    }
    for (const name of wanted) {
      if (charts.has(name)) continue;
      const element = document.createElement("div");
      element.className = "curve";
      element.dataset.metricName = name;
      const title = document.createElement("h3");
      const choice = [...panel.querySelectorAll("[data-metric]")].find((one) => one.value === name);
      title.textContent = choice.closest("label").textContent.trim(); // the name with its control characters as text
      const box = document.createElement("div");
      box.className = "plot";
      box.setAttribute("role", "img");
      box.setAttribute("aria-label", `Curve of ${name} over steps`);
      const values = document.createElement("div");
      values.className = "values";
      const header = document.createElement("header");
      header.append(title, values);
      element.append(header, box);
      root.append(element);
      charts.set(name, { metric: name, element, box, values, series: [], range: null, plot: null });
    }
    root.classList.toggle("one", wanted.length === 1);
    if (!wanted.length) return;
    try {
      const whole = wanted.filter((name) => !charts.get(name).range);
      const series = whole.length ? await ask(whole, null) : [];
      for (const name of whole) charts.get(name).series = series.filter((one) => one.metric === name);
      for (const name of wanted.filter((one) => charts.get(one)?.range)) {
        charts.get(name).series = await ask([name], charts.get(name).range);
      }
      let drawn = 0;
      for (const chart of charts.values()) {
        draw(chart);
        drawn += 1;
        // The first chart is shown before the others are drawn.
        if (drawn === 1) await new Promise((resolve) => setTimeout(resolve));
      }
      drawLegend();
    } catch (error) {
      note.textContent = `Curves could not be read: ${error.message}.`;
    }
  };

  panel.addEventListener("change", (event) => {
    if (event.target.matches("[data-metric]")) load();
    if (event.target.matches("[data-log]")) {
      state.log = event.target.checked;
      for (const chart of charts.values()) draw(chart);
    }
  });
  panel.querySelector("[data-smooth]")?.addEventListener("input", (event) => {
    state.smooth = Number(event.target.value);
    panel.querySelector("[data-smooth-value]").textContent = state.smooth ? state.smooth.toFixed(2) : "off";
    for (const chart of charts.values()) draw(chart);
  });
  const redraw = () => {
    for (const chart of charts.values()) if (chart.series.length) draw(chart);
  };
  document.addEventListener("evsys-theme", redraw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  let width = 0;
  new ResizeObserver(() => {
    if (Math.abs(root.clientWidth - width) < 2) return;
    width = root.clientWidth;
    for (const chart of charts.values()) chart.plot?.setSize({ width: chart.box.clientWidth, height: HEIGHT });
  }).observe(root);
  document.addEventListener("evsys-changed", load);
  load();
};

for (const root of document.querySelectorAll("[data-curves]")) start(root);
