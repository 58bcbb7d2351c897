'use strict';
// Shared by the parts of the page: the data, number formatting, and the current selection. Then the
// header and the settings. Values from the data reach the page only through textContent.

const page = (function () {
  const by_id = (id) => document.getElementById(id);

  let runs = [];
  try {
    const data = JSON.parse(by_id('runs-data').textContent);
    runs = data.runs.map((run, index) => ({...run, index}));
  } catch (error) {
    by_id('trouble').textContent = 'The data of this page cannot be read: ' + error.message;
    by_id('trouble').hidden = false;
  }

  // ---- Elements.

  function element(tag, class_name, text) {
    const node = document.createElement(tag);
    if (class_name) node.className = class_name;
    if (text !== undefined && text !== null) node.textContent = String(text);
    return node;
  }
  function add(parent, ...children) {
    parent.append(...children);
    return parent;
  }
  function button(class_name, text, action) {
    const node = element('button', class_name, text);
    node.type = 'button';
    node.addEventListener('click', action);
    return node;
  }
  function options(select, values, chosen) {
    select.replaceChildren(...values.map(([value, text]) => {
      const option = element('option', '', text);
      option.value = value;
      option.selected = value === chosen;
      return option;
    }));
  }

  const notes = runs.flatMap((run) => run.notes || []);
  by_id('notes').replaceChildren(...notes.map((note) => element('li', '', note)));
  by_id('notes').hidden = notes.length === 0;

  // ---- Formatting numbers.

  const kDash = '\u2013';
  const is_number = (value) => typeof value === 'number' && Number.isFinite(value);
  const with_minus = (text) => text.replace(/-/g, '\u2212');
  function number(value, digits = 3) {
    if (!is_number(value)) return kDash;
    if (value === 0) return '0';
    const size = Math.abs(value);
    const text = size >= 1e6 || size < 1e-3 ? value.toExponential(digits - 1).replace(/\.?0+e/, 'e')
        : Number.isInteger(value) ? value.toLocaleString('en-US')
        : String(Number(value.toPrecision(digits)));
    return with_minus(text);
  }
  function fixed(value, digits = 3) {
    return is_number(value) ? with_minus(value.toFixed(digits)) : kDash;
  }
  function percent(value, digits = 1) {
    if (!is_number(value)) return kDash;
    if (value !== 0 && Math.abs(value) < 0.001) return number(value * 100, 2) + '%';
    return with_minus(String(Number((value * 100).toFixed(digits)))) + '%';
  }
  function rate(value) {
    if (!is_number(value)) return kDash;
    const scales = [[1e9, 'G'], [1e6, 'M'], [1e3, 'k']];
    const scale = scales.find(([size]) => Math.abs(value) >= size) || [1, ''];
    return String(Number((value / scale[0]).toPrecision(3))) + scale[1];
  }
  function duration(seconds) {
    if (!is_number(seconds)) return kDash;
    if (seconds < 60) return number(seconds, 3) + ' s';
    const minutes = Math.round(seconds / 60);
    if (minutes < 60) return minutes + ' min';
    return Math.floor(minutes / 60) + ' h ' + String(minutes % 60).padStart(2, '0') + ' min';
  }

  // ---- Lookup.

  const column = (run, table, name) => (run[table] && run[table].columns[name]) || null;
  const steps = (run, table = 'metrics') => (run[table] ? run[table].step : []);
  // The median of a column, so that one step in which a side idles does not represent the run.
  function median(run, name) {
    const values = (run.metrics.columns[name] || []).filter(Number.isFinite).sort((a, b) => a - b);
    return values.length > 0 ? values[Math.floor(values.length / 2)] : null;
  }

  // The last value of a metric and its step, skipping steps without a value.
  function last(run, name, table = 'metrics') {
    const values = column(run, table, name) || [];
    for (let at = values.length - 1; at >= 0; --at) {
      if (is_number(values[at])) return {value: values[at], step: steps(run, table)[at], at};
    }
    return {value: null, step: null, at: -1};
  }
  function setting(run, key) {
    const entry = run.config_entries.find((each) => each.key === key);
    return entry ? entry.value.replace(/^"(.*)"$/, '$1') : '';
  }
  function metric_names(table) {
    const names = new Set();
    for (const run of runs) for (const name of Object.keys(run[table].columns)) names.add(name);
    return [...names].sort();
  }

  // ---- Current selection. `changed` notifies the parts of the page.

  const state = {hidden: new Set(), env: 'all', smoothing: 0.6, range: null};
  const listeners = [];
  const on_change = (listener) => listeners.push(listener);
  const changed = (what) => listeners.forEach((listener) => listener(what));
  const is_shown = (run) => !state.hidden.has(run.index);
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const kColours = 8;
  const colour = (index) => css('--run-' + (index % kColours));
  function swatch(run) {
    const node = element('i', 'swatch');
    node.style.background = 'var(--run-' + (run.index % kColours) + ')';
    return node;
  }
  const named = (run) => add(element('span', 'named'), swatch(run), element('span', '', run.name));

  // ---- Header.

  function progress(run) {
    const done = steps(run).length > 0 ? steps(run)[steps(run).length - 1] : 0;
    const most = Number(setting(run, 'trainer.max_steps'));
    return number(done) + (most > 0 ? ' of ' + number(most) : '');
  }
  function interval(run, name) {
    const low = last(run, name + '/low', 'eval').value;
    const high = last(run, name + '/high', 'eval').value;
    return is_number(low) && is_number(high) ? fixed(low) + ' to ' + fixed(high) : '';
  }
  // Each headline has a name, a value and a short description for a tile, and for a table what
  // follows the value and what is below the name.
  function headlines(run) {
    const value = (name) => last(run, name).value;
    const evaluated = last(run, 'eval/all/reward/mean', 'eval');
    const between = interval(run, 'eval/all/reward');
    const trained = rate(median(run, 'perf/trained_tokens_per_second'));
    const trainer = percent(median(run, 'perf/trainer_busy'), 0);
    return [
      {name: 'Steps', value: progress(run), about: is_number(value('time/elapsed'))
          ? duration(value('time/elapsed')) + ' in all' : ''},
      {name: 'Reward', value: fixed(value('reward/all/mean')), about: 'mean of the last batch',
       below: 'last batch'},
      {name: 'Evaluation', value: fixed(evaluated.value),
       about: evaluated.step === null ? 'none so far'
           : (between ? '95% ' + between + ', ' : '') + 'step ' + number(evaluated.step),
       behind: between ? '[' + between + ']' : '', below: '95% interval'},
      {name: 'Mismatch KL', value: number(value('mismatch_kl/all/mean')),
       about: 'largest ' + number(value('mismatch_kl/all/max')), below: 'mean'},
      {name: 'Masked', value: percent(value('is_masked'), 2),
       about: 'low ' + percent(value('is_masked_low'), 2) + ', high ' +
              percent(value('is_masked_high'), 2), below: 'of trained tokens'},
      {name: 'Staleness', value: number(value('off_policy_level/all/mean')),
       about: 'versions; most ' + number(value('off_policy_level/all/max')), below: 'versions'},
      {name: 'Tokens/s', value: rate(median(run, 'perf/sampled_tokens_per_second')),
       about: 'sampled; trained ' + trained, behind: '/ ' + trained, below: 'sampled / trained'},
      {name: 'Busy', value: percent(median(run, 'perf/sampler_busy'), 0),
       about: 'sampler; trainer ' + trainer, behind: '/ ' + trainer, below: 'sampler / trainer'},
    ];
  }
  function environments_of(run) {
    const names = [];
    for (let k = 0; setting(run, 'environment[' + k + '].name'); ++k) {
      names.push(setting(run, 'environment[' + k + '].id') ||
                 setting(run, 'environment[' + k + '].name'));
    }
    return names.join(', ');
  }
  // Why each run ended, or that it is still going.
  function fill_ends() {
    for (const run of runs) {
      const end = run.end;
      const after = end ? ' after ' + number(end.steps) + (end.steps === 1 ? ' step' : ' steps') : '';
      const how = !end ? 'No end is recorded: the run is still going, or was killed'
          : end.end === 'gave_up' ? 'The run gave up' + after
          : end.end === 'stopped' ? 'The run was stopped' + after : 'The run finished' + after;
      const line = element('p', end && end.end === 'finished' ? 'note' : '',
          how + (end && end.reason ? ': ' + end.reason : ''));
      if (runs.length > 1) line.prepend(named(run), ' ');
      add(by_id('ends'), line);
    }
    by_id('ends').hidden = runs.length === 0;
  }
  function fill_header() {
    const fact = (name, value) => {
      if (value) add(by_id('facts'), add(element('span', '', name + ' '), element('b', '', value)));
    };
    if (runs.length === 1) {
      const run = runs[0];
      by_id('title').textContent = run.name;
      fact('preset', setting(run, 'trainer.loss.preset'));
      fact('model', setting(run, 'model.path'));
      fact('environment', environments_of(run));
      fact('staleness limit', setting(run, 'orchestrator.max_off_policy_steps'));
      fact('precision', setting(run, 'rollout.precision'));
      fact('seed', setting(run, 'seed'));
      fact('folder', run.path);
      by_id('tiles').hidden = false;
      for (const {name, value, about} of headlines(run)) {
        add(by_id('tiles'), add(element('div', 'tile'), element('div', 'name', name),
            element('div', 'value', value), element('div', 'about', about)));
      }
    } else if (runs.length > 1) {
      by_id('title').textContent = runs.length + ' runs';
      fact('presets', [...new Set(runs.map(
          (run) => setting(run, 'trainer.loss.preset')))].filter(Boolean).join(', '));
      fact('environments', [...new Set(runs.map(environments_of))].filter(Boolean).join('; '));
      by_id('summary-card').hidden = false;
      const head = add(element('tr'), element('th', '', 'Run'), element('th', '', 'Preset'),
          ...headlines(runs[0]).map(({name, below}) => add(element('th', 'right', name),
              element('small', '', below || '\u00a0'))));
      const rows = runs.map((run) => {
        const row = add(element('tr'), add(element('th'), named(run)),
                        element('td', '', setting(run, 'trainer.loss.preset') || kDash));
        for (const {value, about, behind} of headlines(run)) {
          const cell = element('td', 'right', value);
          cell.title = about;
          if (behind) add(cell, element('small', '', ' ' + behind));
          add(row, cell);
        }
        return row;
      });
      add(by_id('summary'), add(element('thead'), head), add(element('tbody'), ...rows));
    }
    document.title = 'Leeway: ' + by_id('title').textContent;
  }

  // ---- Toolbar.

  function fill_toolbar() {
    // A single run needs no legend: its name is the title.
    for (const run of runs.length > 1 ? runs : []) {
      const chip = button('chip', '', () => {
        if (is_shown(run)) state.hidden.add(run.index);
        else state.hidden.delete(run.index);
        chip.setAttribute('aria-pressed', String(is_shown(run)));
        changed('runs');
      });
      chip.setAttribute('aria-pressed', 'true');
      chip.title = run.path;
      add(by_id('run-keys'), add(chip, swatch(run), element('span', '', run.name)));
    }
    const environments = new Set();
    for (const name of metric_names('metrics')) {
      const match = /^reward\/(.+)\/mean$/.exec(name);
      if (match && match[1] !== 'all') environments.add(match[1]);
    }
    if (environments.size > 1) {
      by_id('env-box').hidden = false;
      options(by_id('env'), ['all', ...environments].map((name) => [name, name]), 'all');
      by_id('env').addEventListener('change', () => {
        state.env = by_id('env').value;
        changed('env');
      });
    }
    const show_smoothing = () => {
      state.smoothing = Number(by_id('smoothing').value);
      by_id('smoothing-value').textContent =
          state.smoothing === 0 ? 'off' : state.smoothing.toFixed(2);
    };
    show_smoothing();
    by_id('smoothing').addEventListener('input', () => {
      show_smoothing();
      changed('smoothing');
    });
  }

  // ---- Objective and configuration.

  function text_block(title, about, text, is_open) {
    const block = element('details', 'card');
    block.open = is_open;
    const head = element('summary', '', title);
    if (about) add(head, element('span', 'note', about));
    return add(block, head, element('pre', '', text));
  }
  // Runs with the same text share a block.
  function text_blocks(parent, key, title, is_open) {
    const by_text = new Map();
    for (const run of runs) {
      if (run[key]) by_text.set(run[key], [...(by_text.get(run[key]) || []), run.name]);
    }
    for (const [text, names] of by_text) {
      add(parent, text_block(title, runs.length > 1 ? names.join(', ') : '', text, is_open));
    }
    return by_text.size > 0;
  }
  function fill_differences() {
    const keys = new Map();
    for (const run of runs) {
      for (const entry of run.config_entries) {
        if (!keys.has(entry.key)) keys.set(entry.key, new Array(runs.length).fill(null));
        keys.get(entry.key)[run.index] = entry.value;
      }
    }
    // The output folder always differs and is not informative.
    keys.delete('output_dir');
    const rows = [...keys].filter(([, values]) => values.some((value) => value !== values[0]));
    if (runs.length < 2 || !runs.some((run) => run.config_entries.length > 0)) return;
    by_id('differences-card').hidden = false;
    if (rows.length === 0) {
      by_id('differences').replaceWith(element('p', 'note', 'None: all settings are equal.'));
      return;
    }
    const head = add(element('tr'), element('th', '', 'Key'),
        ...runs.map((run) => add(element('th'), named(run))));
    const body = rows.map(([key, values]) => add(element('tr'), element('th', 'mono', key),
        ...values.map((value) => element('td', 'mono', value === null ? kDash : value))));
    add(by_id('differences'), add(element('thead'), head), add(element('tbody'), ...body));
  }
  function fill_settings() {
    const has_objective = text_blocks(by_id('objectives'), 'objective', 'Objective',
                                      runs.length === 1);
    fill_differences();
    const has_config = text_blocks(by_id('configs'), 'config', 'Configuration', false);
    by_id('settings').hidden = !has_objective && !has_config;
  }

  // ---- Light and dark.

  const prefers_dark = window.matchMedia('(prefers-color-scheme: dark)');
  function set_theme(name) {
    document.documentElement.dataset.theme = name;
    by_id('theme').textContent = name === 'dark' ? 'Light' : 'Dark';
    by_id('theme').setAttribute('aria-label',
                                'Switch to ' + (name === 'dark' ? 'light' : 'dark') + ' colours');
  }
  set_theme(prefers_dark.matches ? 'dark' : 'light');
  by_id('theme').addEventListener('click', () => {
    set_theme(document.documentElement.dataset.theme === 'dark' ? 'light' : 'dark');
    changed('theme');
  });
  prefers_dark.addEventListener('change', () => {
    set_theme(prefers_dark.matches ? 'dark' : 'light');
    changed('theme');
  });

  fill_ends();
  fill_header();
  fill_toolbar();
  fill_settings();

  return {runs, state, by_id, element, add, button, options, is_number, number, fixed, percent,
          rate, column, steps, metric_names, on_change, changed, is_shown, css, colour, swatch,
          named, kDash};
})();
