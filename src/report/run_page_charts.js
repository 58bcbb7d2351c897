'use strict';
// The charts: what each shows, smoothing and downsampling of series, zoom, and the charts that the
// reader adds. Charts are redrawn on every change, since a canvas does not follow CSS.

(function () {
  const {runs, state, by_id, element, add, button, is_number, number, percent, rate, column, steps,
         is_shown, css, colour} = page;

  // ---- Chart definitions. {env} is the environment selected in the toolbar.

  const kCharts = [
    {title: 'Reward', wide: true, evals: 'eval/{env}/reward',
     lines: [{metric: 'reward/{env}/mean', name: 'training batch'}]},
    {title: 'Mismatch KL', about: 'k3 of log pi \u2212 log rollout', log: true, is_log: true,
     lines: [{metric: 'mismatch_kl/all/mean', name: 'mean'},
             {metric: 'mismatch_kl/all/max', name: 'largest token'}]},
    {title: 'Masked tokens', about: 'share of trained tokens', format: percent, from_zero: true,
     lines: [{metric: 'is_masked', name: 'all'}, {metric: 'is_masked_low', name: 'low'},
             {metric: 'is_masked_high', name: 'high'}]},
    {title: 'Staleness', about: 'weight versions', from_zero: true,
     lines: [{metric: 'off_policy_level/{env}/mean', name: 'mean'},
             {metric: 'off_policy_level/{env}/max', name: 'max'}]},
    {title: 'Effective sample size', about: 'share of the batch',
     lines: [{metric: 'effective_sample_size', name: 'share'}]},
    {title: 'Entropy', about: 'nats per token', log: true,
     lines: [{metric: 'entropy', name: 'entropy'}]},
    {title: 'Gradient norm', about: 'before clipping', log: true,
     lines: [{metric: 'grad_norm', name: 'norm'},
             {metric: 'learning_rate', name: 'learning rate (right)', is_raw: true, right: true}]},
    {title: 'Response length', about: 'sampled tokens of a rollout', from_zero: true, log: true,
     lines: [{metric: 'decode_len/all/mean', name: 'mean'},
             {metric: 'decode_len/all/max', name: 'max'}]},
    {title: 'Throughput', about: 'tokens per second', from_zero: true, log: true, format: rate,
     lines: [{metric: 'perf/sampled_tokens_per_second', name: 'sampled'},
             {metric: 'perf/trained_tokens_per_second', name: 'trained'}]},
    {title: 'Busy', about: 'share of wall time', format: percent, from_zero: true, up_to: 1,
     lines: [{metric: 'perf/sampler_busy', name: 'sampler'},
             {metric: 'perf/trainer_busy', name: 'trainer'}]},
    {title: 'Failures', about: 'since the last step', from_zero: true,
     lines: [{metric: 'errored_rollouts/{env}', name: 'errored'},
             {metric: 'errored_rollouts/{env}/rate', name: 'errored, share (right)', is_raw: true,
              right: true},
             {metric: 'empty_rollouts/{env}', name: 'empty'},
             {metric: 'dropped_groups/{env}', name: 'groups dropped'},
             {metric: 'cancelled_rollouts/all', name: 'cancelled'}]},
  ];
  // Of runs with several ranks alone.
  const kRankCharts = [
    {title: 'Balance of ranks', about: 'most of a rank over the mean: 1 is even',
     lines: [{metric: 'ranks/train_imbalance', name: 'training time'},
             {metric: 'ranks/sampling_imbalance', name: 'sampled tokens'}]},
    {title: 'Time between ranks', about: 'seconds of a step', from_zero: true, log: true,
     lines: [{metric: 'time/ranks_collectives', name: 'sums and weights'},
             {metric: 'time/ranks_wait', name: 'rank 0 waits'}]},
  ];
  const kWarmStart = {
    title: 'Warm start', about: 'supervised steps before step 1', table: 'sft', log: true,
    lines: [{metric: 'loss', name: 'loss'},
            {metric: 'reward', name: 'reward (right)', is_raw: true, right: true}],
  };
  Chart.defaults.font.family = getComputedStyle(document.body).fontFamily;
  const kDashes = [[], [6, 3], [2, 2], [9, 3, 2, 3]];
  const kMostPoints = 900;  // per line; more than the pixels of a card

  // ---- Series.

  const metric_of = (line) => line.metric.replace('{env}', state.env);

  // An exponential moving average with decay `weight`, corrected for its bias towards zero at the
  // start.
  function smoothed(values, weight) {
    if (weight === 0) return values;
    const known = smoothed_before.get(values);
    if (known && known.weight === weight) return known.result;
    const result = smooth(values, weight);
    smoothed_before.set(values, {weight, result});
    return result;
  }
  const smoothed_before = new Map();
  // The slider covers the same share of the visible range for 200 steps and for 20,000.
  function smoothing_weight(card) {
    const shown = Math.max(...runs.map((run) => {
      const [first, end] = visible_part(steps(run, card.table), range_of(card));
      return end - first;
    }));
    return state.smoothing ** Math.min(1, 200 / Math.max(1, shown));
  }
  const range_of = (card) => (card.table === 'metrics' ? state.range : null);
  function smooth(values, weight) {
    let sum = 0;
    let total = 0;
    return values.map((value) => {
      if (!is_number(value)) return null;
      sum = sum * weight + value * (1 - weight);
      total = total * weight + (1 - weight);
      return sum / total;
    });
  }

  // First and one-past-last index to draw: the range plus a point on either side.
  function visible_part(at, range) {
    if (!range) return [0, at.length];
    let first = at.findIndex((step) => step >= range[0]);
    if (first < 0) first = at.length;
    let end = first;
    while (end < at.length && at[end] <= range[1]) ++end;
    return [Math.max(0, first - 1), Math.min(at.length, end + 1)];
  }

  // The minimum and maximum of each of equally long parts, in their order, so that peaks survive.
  function thinned(points) {
    if (points.length <= kMostPoints) return points;
    const parts = kMostPoints / 2;
    const kept = [];
    for (let part = 0; part < parts; ++part) {
      const begin = Math.floor((part * points.length) / parts);
      const end = Math.floor(((part + 1) * points.length) / parts);
      let least = -1;
      let most = -1;
      for (let k = begin; k < end; ++k) {
        if (points[k].y === null) continue;
        if (least < 0 || points[k].y < points[least].y) least = k;
        if (most < 0 || points[k].y > points[most].y) most = k;
      }
      if (least < 0) {
        kept.push(points[begin]);
      } else {
        kept.push(points[Math.min(least, most)]);
        if (least !== most) kept.push(points[Math.max(least, most)]);
      }
    }
    return kept;
  }

  function points_of(at, values, raw, card) {
    const [first, end] = visible_part(at, range_of(card));
    const points = [];
    for (let k = first; k < end; ++k) {
      const is_drawn = is_number(values[k]) && !(card.is_log && values[k] <= 0);
      points.push({x: at[k], y: is_drawn ? values[k] : null, raw: raw[k]});
    }
    return thinned(points);
  }

  // A value between two gaps is on no line, so it gets a dot.
  function radii(points) {
    const is_gap = (k) => k < 0 || k >= points.length || points[k].y === null;
    return points.map((point, k) => (is_gap(k - 1) && is_gap(k + 1) ? 2.5 : 0));
  }

  function line_style(run, line_index) {
    // A single run has a colour per line; several runs have a colour each, and lines differ by
    // dashes.
    return runs.length === 1 ? {stroke: colour(line_index), dash: []}
                             : {stroke: colour(run.index), dash: kDashes[line_index % 4]};
  }

  function line_sets(card) {
    const sets = [];
    const shown = runs.filter(is_shown);
    const lines_drawn = shown.length * card.lines.length;
    for (const run of shown) {
      card.lines.forEach((line, line_index) => {
        const values = column(run, card.table, metric_of(line));
        if (!values || !values.some(is_number)) return;
        const at = steps(run, card.table);
        const style = line_style(run, line_index);
        const weight = line.is_raw ? 0 : smoothing_weight(card);
        const name = (runs.length > 1 ? run.name + ': ' : '') + line.name;
        const common = {
          borderColor: style.stroke, borderDash: style.dash, backgroundColor: style.stroke,
          yAxisID: line.right ? 'right' : 'y', pointHoverRadius: 3, pointHitRadius: 0,
          spanGaps: values.filter(is_number).length < values.length / 2, borderJoinStyle: 'round',
        };
        if (weight > 0 && lines_drawn <= 4) {
          const data = points_of(at, values, values, card);
          sets.push({...common, label: '', is_ghost: true, data, borderColor: style.stroke + '40',
                     borderDash: [], borderWidth: 1, pointRadius: 0, pointHoverRadius: 0});
        }
        const data = points_of(at, smoothed(values, weight), values, card);
        sets.push({...common, label: name, data, borderWidth: 1.6, pointRadius: radii(data),
                   pointBackgroundColor: style.stroke, is_smoothed: weight > 0,
                   // A single dot lies on the edge of the chart.
                   ...(data.length === 1 ? {clip: 6} : {})});
      });
    }
    return sets;
  }

  function eval_sets(card) {
    const name = card.evals && card.evals.replace('{env}', state.env);
    if (!name) return [];
    // The reward has its mean next to the bounds; other evaluations are values themselves.
    const value_name = column_of_any('eval', name + '/mean') ? name + '/mean' : name;
    return runs.filter(is_shown).flatMap((run) => {
      const values = column(run, 'eval', value_name);
      if (!values) return [];
      const low = column(run, 'eval', name + '/low') || [];
      const high = column(run, 'eval', name + '/high') || [];
      const at = steps(run, 'eval');
      const stroke = runs.length === 1 ? colour(1) : colour(run.index);
      const data = at.map((x, k) => ({x, y: is_number(values[k]) ? values[k] : null, raw: values[k],
                                      low: low[k], high: high[k]}));
      return [{label: (runs.length > 1 ? run.name + ': ' : '') + 'evaluation', data, is_eval: true,
               showLine: false, borderColor: stroke, backgroundColor: css('--card'),
               pointBackgroundColor: css('--card'), pointBorderColor: stroke, pointBorderWidth: 2,
               pointRadius: 3.5, pointHoverRadius: 5, yAxisID: 'y', order: -1, clip: 6}];
    });
  }
  const column_of_any = (table, name) => runs.some((run) => column(run, table, name));

  // The confidence intervals of evaluations, drawn below their points.
  const intervals = {
    id: 'intervals',
    beforeDatasetsDraw(chart) {
      const {ctx, chartArea: area, scales} = chart;
      ctx.save();
      ctx.beginPath();
      ctx.rect(area.left - 6, area.top, area.width + 12, area.height);
      ctx.clip();
      for (const set of chart.data.datasets.filter((each) => each.is_eval)) {
        ctx.strokeStyle = set.borderColor;
        ctx.lineWidth = 1.4;
        for (const point of set.data) {
          if (!is_number(point.low) || !is_number(point.high)) continue;
          const x = scales.x.getPixelForValue(point.x);
          const low = scales.y.getPixelForValue(point.low);
          const high = scales.y.getPixelForValue(point.high);
          ctx.beginPath();
          ctx.moveTo(x, low);
          ctx.lineTo(x, high);
          ctx.moveTo(x - 3, low);
          ctx.lineTo(x + 3, low);
          ctx.moveTo(x - 3, high);
          ctx.lineTo(x + 3, high);
          ctx.stroke();
        }
      }
      ctx.restore();
    },
  };

  // ---- Tooltips: for every line, the point nearest to the pointer's step.

  Chart.Interaction.modes.step = function (chart, event) {
    const {x} = Chart.helpers.getRelativePosition(event, chart);
    const near = [];
    chart.data.datasets.forEach((set, datasetIndex) => {
      const elements = chart.getDatasetMeta(datasetIndex).data;
      if (set.is_ghost || elements.length === 0) return;
      let begin = 0;
      let end = elements.length - 1;
      while (begin < end) {
        const middle = (begin + end) >> 1;
        if (elements[middle].x < x) begin = middle + 1;
        else end = middle;
      }
      let best = null;
      for (let k = Math.max(0, begin - 3); k < Math.min(elements.length, begin + 3); ++k) {
        if (set.data[k].y === null) continue;
        const distance = Math.abs(elements[k].x - x);
        if (best === null || distance < best.distance) {
          best = {element: elements[k], datasetIndex, index: k, distance, at: elements[k].x};
        }
      }
      if (best) near.push(best);
    });
    const closest = near.reduce((a, b) => (a === null || b.distance < a.distance ? b : a), null);
    return near.filter((item) => Math.abs(item.at - closest.at) <= 4);
  };

  function value_text(item, card) {
    const format = item.dataset.yAxisID === 'y' && card.format ? card.format : number;
    const point = item.raw;
    let text = item.dataset.label + '  ' + format(point.y);
    if (item.dataset.is_smoothed) text += '  (raw ' + format(point.raw) + ')';
    if (is_number(point.low)) text += '  [' + format(point.low) + ', ' + format(point.high) + ']';
    return text;
  }

  // ---- Axes.

  function whole_range(table) {
    let least = Infinity;
    let most = -Infinity;
    const tables = table === 'metrics' ? ['metrics', 'eval'] : [table];
    for (const run of runs) {
      for (const name of tables) {
        const at = steps(run, name);
        if (at.length === 0) continue;
        least = Math.min(least, at[0]);
        most = Math.max(most, at[at.length - 1]);
      }
    }
    if (least > most) return [0, 1];
    return least === most ? [least - 1, most + 1] : [least, most];
  }

  function round_step(size) {
    const power = 10 ** Math.floor(Math.log10(size));
    return [1, 2, 5, 10].map((digit) => digit * power).find((step) => step >= size * 0.8);
  }
  const tick_style = () => ({color: css('--muted'), font: {size: 11}, maxRotation: 0});
  function value_axis(card, sets, right) {
    const format = card.format && !right ? card.format : number;
    const is_log = card.is_log && !right;
    const values = sets.filter((set) => (set.yAxisID === 'right') === right).flatMap(
        (set) => set.data.flatMap((point) => [point.y, point.low, point.high]).filter(is_number));
    const axis = {
      type: is_log ? 'logarithmic' : 'linear', position: right ? 'right' : 'left',
      // Fixed width, so that the steps of stacked charts line up.
      afterFit: (scale) => { if (!right) scale.width = 52; },
      grid: {color: css('--soft'), borderColor: css('--line'), drawTicks: false,
             drawOnChartArea: !right},
      ticks: {...tick_style(), padding: 5, maxTicksLimit: 6, callback: (value) => format(value)},
    };
    if (is_log) {
      axis.afterBuildTicks = (scale) => {
        const decades = Math.log10(scale.max / scale.min);
        const parts = decades > 1.6 ? [1] : [1, 2, 5];
        const every = Math.max(1, Math.ceil(decades / 6));
        scale.ticks = [];
        const last = Math.log10(scale.max);
        for (let power = Math.floor(Math.log10(scale.min)); power <= last; ++power) {
          for (const part of power % every === 0 ? parts : []) {
            const value = part * 10 ** power;
            if (value >= scale.min * 0.999 && value <= scale.max * 1.001) scale.ticks.push({value});
          }
        }
      };
    } else {
      // The values fill the height; ticks are round numbers within it.
      let least = values.reduce((a, b) => Math.min(a, b), Infinity);
      let most = values.reduce((a, b) => Math.max(a, b), -Infinity);
      if (values.length === 0) [least, most] = [0, 1];
      if (card.from_zero && !right) least = Math.min(0, least);
      if (is_number(card.up_to) && !right) most = Math.max(card.up_to, most);
      const pad = 0.06 * (most - least) || Math.abs(most) * 0.1 || 1;
      axis.min = least === 0 ? 0 : least - pad;
      // A metric that is never negative needs no space below zero.
      if (least > 0 && axis.min < 0) axis.min = 0;
      axis.max = most + (most === card.up_to ? 0 : pad);
      axis.afterBuildTicks = (scale) => {
        const step = round_step((scale.max - scale.min) / 4.5);
        scale.ticks = [];
        for (let k = Math.ceil(scale.min / step - 1e-6); k * step <= scale.max * 1.000001; ++k) {
          scale.ticks.push({value: Number((k * step).toPrecision(12))});
        }
      };
    }
    return axis;
  }

  function chart_options(card, sets) {
    const range = range_of(card) || whole_range(card.table);
    const has_right = sets.some((set) => set.yAxisID === 'right');
    return {
      responsive: true, maintainAspectRatio: false, animation: false, parsing: false,
      normalized: true, interaction: {mode: 'step'}, hover: {mode: 'step'},
      layout: {padding: {top: 6, right: has_right ? 0 : 10}},
      scales: {
        x: {type: 'linear', min: range[0], max: range[1],
            grid: {display: false, borderColor: css('--line')},
            // The ends of a zoomed range are not round numbers and would crowd their neighbours.
            ticks: {...tick_style(), precision: 0, includeBounds: false, maxTicksLimit: 9,
                    callback: (value) => value.toLocaleString('en-US')}},
        y: value_axis(card, sets, false),
        ...(has_right ? {right: value_axis(card, sets, true)} : {}),
      },
      plugins: {
        legend: {display: false},
        tooltip: {
          backgroundColor: css('--card'), titleColor: css('--text'), bodyColor: css('--text'),
          borderColor: css('--line'), borderWidth: 1, padding: 8, cornerRadius: 6, boxWidth: 8,
          boxHeight: 8, boxPadding: 4, caretSize: 0, caretPadding: 10, bodyFont: {size: 11},
          titleFont: {size: 11},
          callbacks: {
            title: (items) => (items.length > 0 ? 'step ' + number(items[0].raw.x) : ''),
            label: (item) => value_text(item, card),
            labelColor: (item) => ({borderColor: item.dataset.borderColor,
                                    backgroundColor: item.dataset.borderColor}),
          },
        },
      },
    };
  }

  // ---- Cards.

  const cards = [];

  function line_key(stroke, dash) {
    const sample = element('i');
    const length = dash.reduce((sum, part) => sum + part, 0);
    if (length === 0) {
      sample.style.background = stroke;
    } else {
      const stops = [];
      let at = 0;
      dash.forEach((part, k) => {
        stops.push((k % 2 === 0 ? stroke : 'transparent') + ' ' + at + 'px ' + (at + part) + 'px');
        at += part;
      });
      sample.style.background = 'repeating-linear-gradient(90deg, ' + stops.join(', ') + ')';
    }
    return sample;
  }
  function fill_keys(card, sets) {
    card.keys.replaceChildren();
    const names = card.lines.map((line, k) => ({line, k})).filter(({line}) =>
        runs.some((run) => column(run, card.table, metric_of(line))));
    if (names.length > 1 || sets.some((set) => set.is_eval)) {
      for (const {line, k} of names) {
        const style = runs.length === 1 ? line_style(runs[0], k)
                                        : {stroke: css('--muted'), dash: kDashes[k % 4]};
        add(card.keys, add(element('span'), line_key(style.stroke, style.dash), line.name));
      }
    }
    if (sets.some((set) => set.is_eval)) {
      const point = element('i', 'point');
      point.style.borderColor = runs.length === 1 ? colour(1) : css('--muted');
      add(card.keys, add(element('span'), point, 'evaluation, 95% interval'));
    }
  }

  function draw(card) {
    const sets = [...line_sets(card), ...eval_sets(card)];
    fill_keys(card, sets);
    const options = chart_options(card, sets);
    if (card.chart) {
      card.chart.data.datasets = sets;
      card.chart.options = options;
      card.chart.update('none');
    } else {
      card.chart = new Chart(card.canvas, {type: 'line', data: {datasets: sets}, options,
                                           plugins: [intervals]});
    }
    const last_values = sets.filter((set) => !set.is_ghost && set.data.length > 0)
        .map((set) => set.label + ' ' + number(set.data[set.data.length - 1].y));
    card.canvas.setAttribute('aria-label',
                             'Chart of ' + card.title + '. Last values: ' + last_values.join('; '));
  }

  function make_card(parent, definition, head_parts) {
    const card = {table: 'metrics', ...definition, chart: null};
    card.node = element('div', 'card chart-card' + (card.wide ? ' wide' : ''));
    const head = add(element('div', 'chart-head'), ...head_parts);
    if (card.log) {
      const toggle = button('plain', 'log', () => {
        card.is_log = !card.is_log;
        toggle.setAttribute('aria-pressed', String(card.is_log));
        draw(card);
      });
      toggle.title = 'Logarithmic axis';
      toggle.setAttribute('aria-pressed', String(Boolean(card.is_log)));
      add(head, toggle);
    }
    card.keys = element('div', 'keys');
    card.canvas = element('canvas');
    card.canvas.setAttribute('role', 'img');
    card.crosshair = element('div', 'crosshair');
    card.selection = element('div', 'selection');
    card.plot = add(element('div', 'plot'), card.canvas, card.crosshair, card.selection);
    add(parent, add(card.node, head, card.keys, card.plot));
    cards.push(card);
    follow_pointer(card);
    draw(card);
    return card;
  }

  // ---- Zoom and the line under the pointer, shared by all charts over the run's steps.

  const shares_steps = (card) => card.table === 'metrics';
  function place(node, card, left, width) {
    const area = card.chart.chartArea;
    node.style.display = 'block';
    node.style.left = left + 'px';
    node.style.width = width + 'px';
    node.style.top = area.top + 'px';
    node.style.height = area.bottom - area.top + 'px';
  }
  function show_crosshair(step) {
    for (const card of cards.filter(shares_steps)) {
      const scale = card.chart.scales.x;
      if (step === null || step < scale.min || step > scale.max) {
        card.crosshair.style.display = 'none';
      } else {
        place(card.crosshair, card, scale.getPixelForValue(step), 1);
      }
    }
  }
  function follow_pointer(card) {
    let start = null;
    const inside = (event) => {
      const area = card.chart.chartArea;
      const x = event.clientX - card.plot.getBoundingClientRect().left;
      return Math.min(area.right, Math.max(area.left, x));
    };
    if (!shares_steps(card)) return;
    card.plot.addEventListener('pointerdown', (event) => {
      if (event.button !== 0 || event.pointerType === 'touch') return;
      start = inside(event);
      card.plot.setPointerCapture(event.pointerId);
      event.preventDefault();
    });
    card.plot.addEventListener('pointermove', (event) => {
      const x = inside(event);
      show_crosshair(card.chart.scales.x.getValueForPixel(x));
      if (start !== null) place(card.selection, card, Math.min(start, x), Math.abs(x - start));
    });
    card.plot.addEventListener('pointerleave', () => show_crosshair(null));
    const finish = (event) => {
      if (start === null) return;
      const ends = [start, inside(event)].sort((a, b) => a - b);
      start = null;
      card.selection.style.display = 'none';
      if (event.type === 'pointerup' && ends[1] - ends[0] >= 6) {
        const scale = card.chart.scales.x;
        set_range(Math.floor(scale.getValueForPixel(ends[0])),
                  Math.ceil(scale.getValueForPixel(ends[1])));
      }
    };
    card.plot.addEventListener('pointerup', finish);
    card.plot.addEventListener('pointercancel', finish);
    card.plot.addEventListener('dblclick', () => set_range(null, null));
  }
  function set_range(from, to) {
    const whole = whole_range('metrics');
    const first = Math.max(whole[0], from === null ? whole[0] : from);
    const end = Math.min(whole[1], to === null ? whole[1] : to);
    const is_whole = !(first < end) || (first === whole[0] && end === whole[1]);
    state.range = is_whole ? null : [first, end];
    page.changed('range');
  }
  function show_range() {
    const range = state.range || whole_range('metrics');
    by_id('from').value = Math.max(0, range[0]);
    by_id('to').value = range[1];
    by_id('reset').disabled = state.range === null;
  }
  for (const id of ['from', 'to']) {
    by_id(id).addEventListener('change', () => {
      const value = (name) => (by_id(name).value === '' ? null : Number(by_id(name).value));
      set_range(value('from'), value('to'));
    });
  }
  by_id('reset').addEventListener('click', () => set_range(null, null));

  // ---- Built-in charts.

  function has_values(definition) {
    const table = definition.table || 'metrics';
    // Metrics for {env} = all exist whenever those of an environment do.
    const is_there = (name, where) => runs.some(
        (run) => (column(run, where, name.replace('{env}', 'all')) || []).some(is_number));
    return definition.lines.some((line) => is_there(line.metric, table)) ||
           Boolean(definition.evals && is_there(definition.evals + '/mean', 'eval'));
  }
  const make_own_card = (parent, definition) => make_card(parent, definition, [
    element('h3', '', definition.title), element('span', 'note', definition.about || '')]);
  const missing = [];
  for (const definition of kCharts) {
    if (!has_values(definition)) {
      missing.push(definition.title.toLowerCase());
      continue;
    }
    make_own_card(by_id('charts'), definition);
  }
  const rank_charts = kRankCharts.filter(has_values);
  rank_charts.forEach((definition) => make_own_card(by_id('charts'), definition));
  if (missing.length > 0) {
    by_id('charts-note').textContent = 'Without a value so far: ' + missing.join(', ') + '.';
  }

  // ---- Charts that the reader adds.

  const shown_names = new Set([...kCharts, ...rank_charts].flatMap((each) => each.lines.map(
      (line) => line.metric.replace('{env}', 'all'))));
  const has_bounds = (name) => column_of_any('eval', name + '/low');
  const choices = [
    ...page.metric_names('metrics').filter((name) => !shown_names.has(name))
        .map((name) => ({name, lines: [{metric: name, name}]})),
    ...page.metric_names('eval').filter((name) => !/\/(low|high)$/.test(name))
        .map((name) => {
          const stem = name.replace(/\/mean$/, '');
          return {name, lines: [], evals: has_bounds(stem) ? stem : name};
        }),
  ];
  function add_chosen(first) {
    const select = element('select');
    select.setAttribute('aria-label', 'Metric of this chart');
    page.options(select, choices.map((choice, k) => [String(k), choice.name]), String(first));
    const remove = button('plain', '\u00d7', () => {
      cards.splice(cards.indexOf(card), 1);
      card.chart.destroy();
      card.node.remove();
    });
    remove.setAttribute('aria-label', 'Remove this chart');
    const define = () => {
      const choice = choices[Number(select.value)];
      return {title: choice.name, lines: choice.lines, evals: choice.evals || null};
    };
    const card = make_card(by_id('more-charts'), {...define(), log: true}, [select, remove]);
    select.addEventListener('change', () => {
      Object.assign(card, define());
      draw(card);
    });
  }
  const has_warm_start = has_values(kWarmStart);
  if (has_warm_start) make_own_card(by_id('more-charts'), kWarmStart);
  // Enough charts to fill the row.
  const wanted = ['loss', 'is_truncated/all', 'time/step'].slice(0, has_warm_start ? 2 : 3);
  const found = wanted.map((name) => choices.findIndex((choice) => choice.name === name))
      .filter((index) => index >= 0);
  if (found.length === 0 && choices.length > 0) found.push(0);
  found.forEach(add_chosen);
  by_id('more').hidden = choices.length === 0 && !has_warm_start;
  by_id('more-add').hidden = choices.length === 0;
  by_id('more-add').addEventListener('click', () => add_chosen(0));

  show_range();
  page.on_change((what) => {
    if (what === 'range') show_range();
    cards.forEach(draw);
  });
})();
