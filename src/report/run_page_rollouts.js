'use strict';
// The rollouts: a table to choose from, and the tokens of the selected one.

(function () {
  const {runs, by_id, element, add, button, is_number, number, fixed, is_shown, kDash} = page;

  const list = (value) => (Array.isArray(value) ? value : []);
  const rollouts = runs.flatMap((run) => list(run.rollouts).map((rollout) => {
    let trained = 0;
    let dropped = 0;
    for (const sample of list(rollout.samples)) {
      list(sample.loss_mask).forEach((mask, k) => {
        if (!mask) return;
        ++trained;
        if (list(sample.kept)[k] === 0) ++dropped;
      });
    }
    return {...rollout, run, trained, dropped};
  }));
  if (rollouts.length === 0) return;
  by_id('rollouts-section').hidden = false;

  const files = runs.reduce((sum, run) => sum + list(run.rollout_steps).length, 0);
  const read = new Set(rollouts.map((rollout) => rollout.run.index + ':' + rollout.step)).size;
  by_id('rollouts-note').textContent = rollouts.length + ' samples from ' + read +
      (read < files ? ' of ' + files : '') + (files === 1 ? ' file' : ' files') + ' in rollouts/';

  // ---- The table.

  const kColumns = [
    ...(runs.length > 1 ? [{title: 'Run', value: (r) => r.run.name, node: (r) => page.named(r.run)}]
                        : []),
    {title: 'Step', value: (r) => r.step, right: true},
    {title: 'Group', value: (r) => r.group, right: true},
    {title: 'Environment', value: (r) => r.environment},
    {title: 'Reward', value: (r) => r.reward, text: (value) => fixed(value, 2), right: true},
    {title: 'Advantage', value: (r) => r.advantage, text: (value) => fixed(value, 2), right: true},
    {title: 'Finish', value: (r) => r.finish},
    {title: 'Tokens', value: (r) => r.trained, text: number, right: true},
    {title: 'Dropped', value: (r) => r.dropped, text: number, right: true},
  ];
  const sorting = {column: kColumns.findIndex((each) => each.title === 'Step'), sign: -1};
  let chosen = null;

  function in_order(a, b) {
    const value = kColumns[sorting.column].value;
    const left = value(a);
    const right = value(b);
    // Missing values sort last in both directions.
    const has = (each) => each !== null && each !== undefined;
    if (has(left) !== has(right)) return has(left) ? -1 : 1;
    if (left === right || !has(left)) return 0;
    return sorting.sign * (left < right ? -1 : 1);
  }
  function is_listed(rollout) {
    const chosen_env = by_id('rollout-env').value;
    const chosen_step = by_id('rollout-step').value;
    const bound = (id) => (by_id(id).value === '' ? null : Number(by_id(id).value));
    const from = bound('reward-from');
    const to = bound('reward-to');
    return is_shown(rollout.run) && (chosen_env === '' || rollout.environment === chosen_env) &&
           (chosen_step === '' || String(rollout.step) === chosen_step) &&
           (from === null || rollout.reward >= from) && (to === null || rollout.reward <= to);
  }
  function fill_table() {
    const head = element('tr');
    kColumns.forEach((each, index) => {
      const cell = element('th', each.right ? 'right' : '');
      cell.scope = 'col';
      if (index === sorting.column) {
        cell.setAttribute('aria-sort', sorting.sign > 0 ? 'ascending' : 'descending');
      }
      add(head, add(cell, button('', each.title, () => {
        sorting.sign = index === sorting.column ? -sorting.sign : 1;
        sorting.column = index;
        fill_table();
        by_id('rollouts').querySelectorAll('th button')[index].focus();
      })));
    });
    const body = element('tbody');
    const shown = rollouts.filter(is_listed).sort(in_order);
    if (!shown.includes(chosen)) chosen = shown.length > 0 ? shown[0] : null;
    for (const rollout of shown) {
      const row = element('tr');
      row.tabIndex = rollout === chosen ? 0 : -1;
      row.setAttribute('aria-selected', String(rollout === chosen));
      for (const each of kColumns) {
        const cell = element('td', each.right ? 'right' : '');
        const value = each.value(rollout);
        if (each.node) add(cell, each.node(rollout));
        else cell.textContent = each.text ? each.text(value) : String(value ?? kDash);
        add(row, cell);
      }
      const choose = () => {
        chosen = rollout;
        for (const other of body.children) {
          other.setAttribute('aria-selected', String(other === row));
          other.tabIndex = other === row ? 0 : -1;
        }
        show_chosen();
      };
      row.addEventListener('click', choose);
      row.addEventListener('keydown', (event) => {
        const next = event.key === 'ArrowDown' ? row.nextElementSibling
            : event.key === 'ArrowUp' ? row.previousElementSibling : null;
        if (next) {
          next.focus();
          next.click();
        } else if (event.key === 'Enter' || event.key === ' ') {
          choose();
        } else {
          return;
        }
        event.preventDefault();
      });
      add(body, row);
    }
    by_id('rollouts').replaceChildren(add(element('thead'), head), body);
    by_id('rollout-count').textContent = shown.length + ' of ' + rollouts.length;
    show_chosen();
  }

  // ---- Tokens.

  const difference = (sample, k) => {
    const pi = list(sample.pi)[k];
    const rollout = list(sample.rollout)[k];
    return is_number(pi) && is_number(rollout) ? pi - rollout : null;
  };

  // Full colour is reached at a round number that 95% of the page's trained tokens stay below, so
  // that a colour means the same in every rollout.
  const full_colour = (function () {
    const sizes = [];
    for (const rollout of rollouts) {
      for (const sample of list(rollout.samples)) {
        list(sample.loss_mask).forEach((mask, k) => {
          const value = mask ? difference(sample, k) : null;
          if (value !== null) sizes.push(Math.abs(value));
        });
      }
    }
    sizes.sort((a, b) => a - b);
    const size = sizes.length > 0 ? sizes[Math.floor(0.95 * (sizes.length - 1))] : 0;
    if (size === 0) return 0.01;
    const power = 10 ** Math.floor(Math.log10(size));
    const digit = [1, 2, 5, 10].find((each) => each * power >= size * 0.999999);
    return Number((digit * power).toPrecision(1));
  })();
  function shade(value) {
    const depth = Math.min(1, Math.abs(value) / full_colour).toFixed(3);
    return 'rgba(var(' + (value > 0 ? '--above' : '--below') + '), calc(var(--deepest) * ' + depth +
           '))';
  }

  // Visible signs for white space. A line break is drawn and kept.
  const kSigns = {'\n': '\u21b5', '\r': '\u240d', '\t': '\u21e5'};
  function fill_token(node, text) {
    if (text === '') {
      add(node, element('span', 'sign', '\u2205'));
      return;
    }
    for (const part of text.split(/([\n\r\t])/)) {
      if (part === '') continue;
      if (kSigns[part] === undefined) {
        node.append(part);
      } else {
        add(node, element('span', 'sign', kSigns[part]));
        if (part !== '\r') node.append(part);
      }
    }
  }

  const tip = by_id('tip');
  function show_tip(node, sample, k) {
    const rows = [
      ['token', JSON.stringify(list(sample.tokens)[k])],
      ['id', String(list(sample.ids)[k] ?? kDash)],
      ['position', String(k)],
    ];
    if (list(sample.loss_mask)[k]) {
      const value = difference(sample, k);
      rows.push(['log rollout', fixed(list(sample.rollout)[k], 4)],
                ['log pi', fixed(list(sample.pi)[k], 4)],
                ['pi \u2212 rollout', (value > 0 ? '+' : '') + fixed(value, 4)],
                ['version', number(list(sample.versions)[k])]);
      if (list(sample.kept)[k] === 0) rows.push(['loss', 'dropped or clipped']);
    } else {
      rows.push(['', 'not trained']);
    }
    const table = element('dl');
    for (const [name, text] of rows) add(table, element('dt', '', name), element('dd', '', text));
    tip.replaceChildren(table);
    tip.hidden = false;
    const box = node.getClientRects()[0] || node.getBoundingClientRect();
    const left = Math.min(window.innerWidth - tip.offsetWidth - 8, Math.max(8, box.left));
    const below = box.bottom + 6;
    const fits = below + tip.offsetHeight < window.innerHeight - 4;
    tip.style.left = left + 'px';
    tip.style.top = (fits ? below : Math.max(4, box.top - tip.offsetHeight - 6)) + 'px';
  }
  const hide_tip = () => { tip.hidden = true; };

  function token_block(sample) {
    const block = element('div', 'tokens');
    block.setAttribute('role', 'group');
    block.setAttribute('aria-label', 'Tokens; arrow keys go through them');
    list(sample.tokens).forEach((text, k) => {
      const node = element('span', 'token');
      const is_trained = Boolean(list(sample.loss_mask)[k]);
      fill_token(node, String(text));
      if (!is_trained) {
        node.classList.add('prompt');
      } else {
        node.classList.add('trained');
        const value = difference(sample, k);
        if (value !== null && value !== 0) node.style.backgroundColor = shade(value);
        if (list(sample.kept)[k] === 0) node.classList.add('dropped');
      }
      node.dataset.at = k;
      node.tabIndex = k === 0 ? 0 : -1;
      add(block, node);
    });
    const token_at = (event) => event.target.closest('.token');
    const show = (event) => {
      const node = token_at(event);
      if (node) show_tip(node, sample, Number(node.dataset.at));
      else hide_tip();
    };
    block.addEventListener('mouseover', show);
    block.addEventListener('mouseleave', hide_tip);
    block.addEventListener('focusin', show);
    block.addEventListener('focusout', hide_tip);
    block.addEventListener('keydown', (event) => {
      const node = token_at(event);
      const next = !node ? null : event.key === 'ArrowRight' ? node.nextElementSibling
          : event.key === 'ArrowLeft' ? node.previousElementSibling : null;
      if (event.key === 'Escape') hide_tip();
      if (!next) return;
      node.tabIndex = -1;
      next.tabIndex = 0;
      next.focus();
      event.preventDefault();
    });
    return block;
  }

  function legend() {
    const ramp = element('span', 'ramp');
    const stops = [-1, -0.5, 0, 0.5, 1].map((part) => shade(part * full_colour));
    ramp.style.background = 'linear-gradient(90deg, ' + stops.join(', ') + ')';
    const scale = add(element('span'), 'log pi \u2212 log rollout: ' + number(-full_colour, 2),
                      ramp, '+' + number(full_colour, 2));
    const key = (class_name, text, name) => add(element('span'),
        element('span', 'token mark ' + class_name, text), ' ' + name);
    return add(element('div', 'scale'), scale, key('dropped', 'abc', 'dropped by the loss'),
               key('prompt', 'abc', 'not trained'));
  }

  function show_chosen() {
    const detail = by_id('detail');
    hide_tip();
    detail.replaceChildren();
    if (!chosen) {
      add(detail, element('p', 'note', 'No rollout matches.'));
      return;
    }
    const where = 'Step ' + chosen.step + ', group ' + (chosen.group ?? kDash) + ', rollout ' +
                  (chosen.rollout ?? kDash);
    add(detail, element('h3', '', where));
    const facts = element('p', 'facts');
    const fact = (name, value) => add(facts,
        add(element('span', '', name + ' '), element('b', '', value)));
    if (runs.length > 1) fact('run', chosen.run.name);
    fact('environment', String(chosen.environment ?? kDash));
    const joined = (values) => Object.entries(values || {})
        .map(([name, value]) => name + ' ' + number(value)).join(', ');
    const parts = joined(chosen.rewards);
    fact('reward', number(chosen.reward) + (parts ? ' (' + parts + ')' : ''));
    const turn_rewards = list(chosen.turn_rewards);
    if (turn_rewards.length > 0) {
      fact('of turns', turn_rewards.map((value) => (is_number(value) ? number(value) : kDash))
          .join(', '));
    }
    if (joined(chosen.env_metrics)) fact('metrics', joined(chosen.env_metrics));
    fact('advantage', number(chosen.advantage));
    fact('finish', String(chosen.finish ?? kDash));
    if (is_number(chosen.turns)) fact('turns', number(chosen.turns));
    fact('trained tokens', number(chosen.trained) + ', ' + number(chosen.dropped) + ' dropped');
    add(detail, facts, legend());
    const samples = list(chosen.samples);
    samples.forEach((sample, index) => {
      if (samples.length > 1) {
        const title = 'Sample ' + (index + 1) + ' of ' + samples.length;
        add(detail, element('p', 'sample-title', title));
      }
      add(detail, token_block(sample));
    });
  }

  // ---- Filters.

  const distinct = (values) => [...new Set(values)];
  page.options(by_id('rollout-env'), [['', 'all'], ...distinct(rollouts.map(
      (rollout) => String(rollout.environment ?? ''))).filter(Boolean).sort()
      .map((name) => [name, name])], '');
  page.options(by_id('rollout-step'), [['', 'all'], ...distinct(rollouts.map(
      (rollout) => rollout.step)).sort((a, b) => a - b)
      .map((step) => [String(step), String(step)])], '');
  for (const id of ['rollout-env', 'rollout-step', 'reward-from', 'reward-to']) {
    by_id(id).addEventListener('input', fill_table);
  }
  window.addEventListener('scroll', hide_tip, {passive: true, capture: true});
  page.on_change((what) => {
    if (what === 'runs') fill_table();
  });
  fill_table();
})();
